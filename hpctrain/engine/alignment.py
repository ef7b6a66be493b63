"""Compares every operator of a model on this rank's device with float64 on the host, forward and backward.

An error is the largest difference of a result, divided by the largest number of the float64 result. Its bound follows
from the dtype, whose u is half the distance from 1 to the next number (2^-8 in bf16, 2^-11 in fp16, 2^-24 in fp32):

    bound = 2 * (rounds * u(dtype) + sqrt(length) * u(fp32)) + the smallest number of the dtype / the largest result

`rounds` is how many times values are rounded to the dtype, `length` how many terms the longest sum has, in fp32.
Rounding errors of sums grow with the root of the number of terms, but for rare cases (Higham and Mary 2019); 2 is for
these. An operator that is pinned to another dtype is rounded to the family's twice at most. Bounds are for inputs of a
standard deviation of 1 at most: larger ones only show where results overflow.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.bind import DTYPES
from hpctrain.comm.groups.offline_world import OfflineWorld
from hpctrain.comm.transports.transport import as_bytes
from hpctrain.comm.world import World
from hpctrain.config.errors import TopologyError
from hpctrain.config.job import Job
from hpctrain.data.order import open_datasets
from hpctrain.engine.start.facts import with_values
from hpctrain.engine.start.resolve_kernels import resolve_kernels
from hpctrain.engine.step.layout import make_kernels
from hpctrain.engine.trainer import Trainer
from hpctrain.model.operators.cases import Operator, Rounding, operators
from hpctrain.model.storage.units import Weight
from hpctrain.plan.tiling import even_plan
from hpctrain.sharding.grid import TensorGrid

SAFETY = 2.0
REFERENCE_DTYPE = "fp32"
"""What pinned operators are to compute in, and whose losses others are compared with."""
SMALLEST_INPUT = 2.0**-14
"""Inputs are numbers of bf16 that fp16 has too, so that all families get the same; smaller ones are zeros."""


class Overflow(NamedTuple):
    """The place where a result is not finite although it is in float64."""

    count: int
    at: tuple[int, ...]
    """Of the first."""
    expected: float


class OperatorError(NamedTuple):
    """One result of an operator, in one dtype on one device."""

    operator: str
    result: str
    """`output`, or `d NAME`."""
    dtype: str
    error: float
    bound: float
    overflow: Overflow | None
    repeats: bool
    """Whether a second time gave the same bits."""
    mended_error: float | None = None
    """Of what is beyond its bound: the error where the operator computes in fp32; None: not tried."""
    override: str | None = None
    """The setting that mends it."""

    @property
    def is_beyond(self) -> bool:
        return self.overflow is not None or not self.error <= self.bound


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def error_bound(rounding: Rounding, dtype: torch.dtype, largest: float) -> float:
    """Return the largest error of a result whose largest number is `largest` that rounding explains."""
    share = rounding.rounds * unit_roundoff(dtype) + math.sqrt(rounding.length) * unit_roundoff(torch.float32)
    underflow = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / largest if largest else 0.0
    return SAFETY * share + (underflow if rounding.rounds else 0.0)


def draw(operator: str, name: str, shape: Sequence[int], deviation: float) -> torch.Tensor:
    """Return numbers that depend on the names alone, in fp32: the same on every host and in every dtype."""
    seed = zlib.crc32(f"{operator}/{name}".encode())
    values = np.asarray(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)) * np.float32(deviation)
    rounded = torch.from_numpy(np.asarray(values)).to(torch.bfloat16).float()
    return rounded.masked_fill_(rounded.abs() < SMALLEST_INPUT, 0)


class Case:
    """An operator with its inputs, and what float64 makes of them."""

    def __init__(self, operator: Operator, deviation: float = 1.0):
        """Values have so large a standard deviation; weights what gives outputs as large as inputs."""
        self.operator, self.deviation, name = operator, deviation, operator.name
        self.values = {each: draw(name, each, shape, deviation) for each, shape in operator.values.items()}
        self.weights = {
            each: draw(name, each, shape, shape[-1] ** -0.5 if len(shape) > 1 else 1.0)
            for each, shape in operator.weights.items()
        }
        self.ids = {
            each: torch.from_numpy(np.random.default_rng(7).integers(0, limit, shape))
            for each, (shape, limit) in operator.ids.items()
        }
        values, weights = ({k: v.double().requires_grad_() for k, v in m.items()} for m in (self.values, self.weights))
        output = operator.reference(**values, **weights, **self.ids)
        self.gradient = draw(name, "gradient", output.shape, 1.0)
        if not output.dim():
            self.gradient.fill_(1.0)
        output.backward(self.gradient.double())
        self.expected = {"output": output.detach()}
        for each, tensor in (values | weights).items():
            assert tensor.grad is not None, "every input has a gradient"
            self.expected[f"d {each}"] = tensor.grad

    def digest(self) -> int:
        """Return a number that differs where inputs do."""
        every = (*self.values.values(), *self.weights.values(), *self.ids.values(), self.gradient)
        return zlib.crc32(b"".join(tensor.contiguous().numpy().tobytes() for tensor in every))

    def inputs(self, device: torch.device, dtype: torch.dtype) -> "CaseInputs":
        """Return the inputs on a device. Weights are of `dtype` and their gradients of fp32, as in training."""
        weights = {name: Weight(name) for name in self.weights}
        for name, weight in weights.items():
            weight.data = self.weights[name].to(device, dtype)
            weight.grad = torch.zeros(weight.data.shape, device=device)
        values = {k: v.to(device, dtype, copy=True).requires_grad_() for k, v in self.values.items()}
        ids = {k: v.to(device) for k, v in self.ids.items()}
        gradient = self.gradient.to(device, dtype if self.gradient.dim() else torch.float64)  # of a loss, which is fp64
        return CaseInputs(values, weights, ids, gradient)

    def compute(self, inputs: "CaseInputs", pinned: torch.dtype | None = None) -> torch.Tensor:
        """Run the model's own operator forward and backward; return its output. Pinned ones compute in another dtype.

        Gradients are added to those of the inputs.
        """
        values = inputs.values
        given = {k: v.to(pinned) for k, v in values.items()} if pinned else values
        output = self.operator.compute(**given, **inputs.weights, **inputs.ids).to(inputs.gradient.dtype)
        output.backward(inputs.gradient)
        return output.detach()

    def results(self, device: torch.device, dtype: torch.dtype, pinned: torch.dtype | None) -> dict[str, torch.Tensor]:
        """Return what the model's own operator makes of the inputs: its output and all gradients, on the host."""
        inputs = self.inputs(device, dtype)
        result = {"output": self.compute(inputs, pinned)}
        for name, given in (*inputs.values.items(), *inputs.weights.items()):
            assert given.grad is not None, "every input has a gradient"
            result[f"d {name}"] = given.grad
        return {name: tensor.cpu() for name, tensor in result.items()}


class CaseInputs(NamedTuple):
    """The inputs of an operator on a device, and the gradient of its output."""

    values: Mapping[str, torch.Tensor]
    weights: Mapping[str, Weight]
    ids: Mapping[str, torch.Tensor]
    gradient: torch.Tensor


def compare(case: Case, accelerator: Accelerator, dtype_name: str, pinned: Mapping[str, str]) -> list[OperatorError]:
    """Return how far each result of an operator on a device is from float64."""
    operator, dtype = case.operator, DTYPES[dtype_name]
    higher = DTYPES.get(pinned.get(operator.pin or "", ""))
    with accelerator.running():
        first, again = (case.results(accelerator.device, dtype, higher) for _ in range(2))
    compared = []
    for name, expected in case.expected.items():
        rounding = operator.roundings[name]
        if higher not in (None, dtype):  # computed in the other one, rounded once at each end
            rounding = Rounding(min(rounding.rounds, 2), rounding.length)
        result, largest = first[name].double(), expected.abs().max().item()
        wrong = ~result.isfinite()
        overflow, error = None, 0.0
        if wrong.any():
            place = tuple(int(index) for index in wrong.nonzero()[0])
            overflow, error = Overflow(int(wrong.sum()), place, expected[place].item()), math.inf
        else:
            difference = (result - expected).abs().max().item()
            error = difference / largest if largest else difference
        compared.append(
            OperatorError(
                operator.name,
                name,
                dtype_name,
                error,
                error_bound(rounding, dtype, largest) if case.deviation <= 1 else math.inf,
                overflow,
                torch.equal(as_bytes(first[name]), as_bytes(again[name])),
            )
        )
    return compared


@dataclass(frozen=True)
class RankAlignment:
    """The findings of one rank on its device."""

    rank: int
    host: str
    family: str
    model: str
    digests: Mapping[str, int]
    """Of inputs, by operator."""
    compared: Sequence[OperatorError]
    losses: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By dtype."""


def align_rank(
    accelerator: Accelerator,
    job: Job,
    dtypes: Sequence[str],
    rows: int,
    positions: int,
    deviation: float = 1.0,
    rank: int = 0,
    host: str = "",
) -> RankAlignment:
    """Compare all operators of a job on this rank's device. Involves no other rank.

    The kernel that the job names for attention computes in `dtypes` alone: not every kernel has the reference's dtype.
    """
    digests, compared = {}, []
    named, free = (
        operators(job.model, rows, positions, make_kernels(choice, accelerator.family))
        for choice in (job.kernels, with_values(job, "kernels", attention="torch", attention_by_family={}).kernels)
    )
    for operator, free_operator in zip(named, free, strict=True):
        case = Case(operator, deviation)
        digests[operator.name] = case.digest()
        for dtype in dtypes:
            results = compare(case, accelerator, dtype, job.precision.overrides)
            if operator.pin and dtype != REFERENCE_DTYPE and any(each.is_beyond for each in results):
                again = compare(Case(free_operator, deviation), accelerator, dtype, {operator.pin: REFERENCE_DTYPE})
                results = [_mended(*pair, operator.pin) for pair in zip(results, again, strict=True)]
            compared += results
    return RankAlignment(rank, host, accelerator.family, accelerator.model, digests, compared)


def _mended(result: OperatorError, again: OperatorError, pin: str) -> OperatorError:
    """Return a result with what it is in fp32, where it is beyond its bound."""
    override = None if again.is_beyond else f"precision.overrides.{pin}={REFERENCE_DTYPE}"
    return result._replace(mended_error=again.error, override=override) if result.is_beyond else result


def first_losses(accelerator: Accelerator, job: Job, dtype: str, steps: int) -> list[float]:
    """Return the losses of the first steps of a job, trained by this rank alone in a dtype. Involves no other rank."""
    job = with_values(with_values(job, "train", dtype=dtype), "precision", by_family={})
    _, training, _ = open_datasets(job.data, job.train.seed)
    rows = 1 if job.train.global_batch > 8 else job.train.global_batch
    plan = even_plan(job.model.num_items, TensorGrid(), 1, 1, job.train.global_batch // rows, rows)
    trainer = Trainer(OfflineWorld(0, 1), accelerator, job, plan)  # pyright: ignore[reportArgumentType] - a world of one
    trainer.initialise()
    return [trainer.step(training)[0].get("loss", 0.0) for _ in range(steps)]


def mean_relative_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the mean over steps of how far a loss is from another's; infinite where one is no number."""
    differences = [
        abs(a - b) / abs(b) if math.isfinite(a) and b else math.inf for a, b in zip(losses, others, strict=True)
    ]
    return sum(differences) / len(differences)


def align(
    world: World,
    accelerator: Accelerator,
    job: Job,
    dtypes: Sequence[str],
    rows: int,
    positions: int,
    deviation: float = 1.0,
    steps: int = 0,
) -> list[RankAlignment]:
    """Compare all operators on every rank's device, and train the first steps on one of each family; return what all
    ranks saw. `dtypes` are this rank's. All ranks must call. Raises TopologyError where inputs differ between hosts,
    JobError where a rank does not have the kernels that the job asks for.
    """
    job, _ = resolve_kernels(world, accelerator, job, range(world.size), dtypes)
    own = align_rank(accelerator, job, dtypes, rows, positions, deviation, world.rank, world.place.host)
    places = world.topology.places
    first_of_family = min(r for r, place in enumerate(places) if place.family == accelerator.family)
    if steps and world.rank == first_of_family:
        trained = dict.fromkeys((*dtypes, REFERENCE_DTYPE) if world.rank == 0 else dtypes)
        jobs = {
            dtype: job if dtype in dtypes else with_values(job, "kernels", attention="torch", attention_by_family={})
            for dtype in trained
        }
        losses = {dtype: first_losses(accelerator, each, dtype, steps) for dtype, each in jobs.items()}
        own = replace(own, losses=losses)
    every = world.all_objects(own)
    for each in every:
        if each.digests != every[0].digests:
            different = next(name for name, digest in every[0].digests.items() if each.digests.get(name) != digest)
            raise TopologyError(
                f"rank {each.rank} on {each.host} draws other inputs of {different} than rank 0 on {every[0].host};"
                " install the same version of numpy on both"
            )
    return every
