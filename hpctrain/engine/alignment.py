"""Compares every operator of a model on this rank's device with float64 on the host, forward and backward.

The reference is the model's own function in float64 (`InFloat64`), by torch's kernels on the host. An error is the
largest difference of a result, divided by the largest number of the float64 result. Its bound follows from the dtype,
whose roundoff u is half the distance from 1 to the next number (2^-8 in bf16, 2^-11 in fp16, 2^-24 in fp32):

    bound = 2 * ((1 + sensitivity) * u + sqrt(length) * u(fp32)) + the smallest number of the dtype / the largest result

`sensitivity` says how much larger than u an error of the float64 result is whose inputs have errors of at most u; it is
measured. `length` is how many terms the longest sum has, in fp32: rounding errors of sums grow with the root of the
number of terms, but for rare cases (Higham and Mary 2019). u is that of fp32 for a result in fp32, such as the gradient
of a weight, unless the operator rounds on its way. Bounds are for inputs of a standard deviation of 1 at most: larger
ones only show where results overflow.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
from hpctrain.model.operators.cases import Operator, operators
from hpctrain.model.storage.units import Weight
from hpctrain.plan.tiling import even_plan
from hpctrain.sharding.grid import TensorGrid

SAFETY = 2.0
REFERENCE_DTYPE = "fp32"
"""Dtype of the reference: that of pinned operators, and of the losses that others are compared with."""
SMALLEST_INPUT = 2.0**-14
"""Inputs are numbers of both bf16 and fp16, so that all families get the same; smaller ones become zeros."""
INPUT_ERROR = 2.0**-20
"""Relative error of inputs by which sensitivity is measured: small, and far above the roundoff of float64."""


class OperatorError(NamedTuple):
    """One result of an operator, in one dtype on one device."""

    operator: str
    result: str
    """Name of the result: `output`, or `d NAME` for a gradient."""
    dtype: str
    error: float
    bound: float
    overflow: dict | None
    """How many results are not finite although they are in float64 (`count`), where the first is (`at`), and what it
    is in float64 (`expected`)."""
    repeats: bool
    """Whether a repetition gave the same bits."""
    mended_error: float | None = None
    """Error of the operator in fp32, which is tried where `error` is beyond its bound."""
    override: str | None = None
    """The setting that makes the operator compute in fp32, where that mends the error."""

    @property
    def is_beyond(self) -> bool:
        return self.overflow is not None or not self.error <= self.bound


class InFloat64(TorchDispatchMode):
    """Runs functions as they are written, with float64 wherever they ask for fp32."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})


def roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def draw(operator: str, name: str, shape: Sequence[int], deviation: float) -> torch.Tensor:
    """Return fp32 numbers that depend on the names alone: the same on every host and in every dtype."""
    seed = zlib.crc32(f"{operator}/{name}".encode())
    values = np.asarray(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)) * np.float32(deviation)
    rounded = torch.from_numpy(np.asarray(values)).to(torch.bfloat16).float()
    return rounded.masked_fill_(rounded.abs() < SMALLEST_INPUT, 0)


class CaseInputs(NamedTuple):
    """The inputs of an operator on a device."""

    values: Mapping[str, torch.Tensor]
    weights: Mapping[str, Weight]
    ids: Mapping[str, torch.Tensor]

    def results(self, output: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the output and all gradients, on the host."""
        gradients = {f"d {name}": tensor.grad for name, tensor in (*self.values.items(), *self.weights.items())}
        return {name: tensor.cpu() for name, tensor in {"output": output.detach(), **gradients}.items()}


class Case:
    """The inputs of an operator, and its results in float64."""

    def __init__(self, operator: Operator, deviation: float = 1.0):
        """`operator` computes by torch's own kernels.

        Values have the standard deviation `deviation`. Weights are scaled so that outputs are as large as inputs.
        """
        self.operator, self.deviation, name = operator, deviation, operator.name
        self.values = {key: draw(name, key, shape, deviation) for key, shape in operator.values.items()}
        self.weights = {
            key: draw(name, key, shape, shape[-1] ** -0.5 if len(shape) > 1 else 1.0)
            for key, shape in operator.weights.items()
        }
        self.ids = {
            key: torch.from_numpy(np.random.default_rng(7).integers(0, limit, shape))
            for key, (shape, limit) in operator.ids.items()
        }
        host = torch.device("cpu")
        with InFloat64():
            exact, rounded = (self.inputs(host, torch.float64, error) for error in (0.0, INPUT_ERROR))
            output = _forward(operator, exact)
            self.gradient = draw(name, "gradient", output.shape, 1.0) if output.dim() else torch.ones(())
            output.backward(self.gradient.double())
            self.expected = exact.results(output)
            output = _forward(operator, rounded)
            output.backward(_with_error(self.gradient.double(), INPUT_ERROR if output.dim() else 0.0))
        self.sensitivity = {
            key: _error(result, self.expected[key]) / INPUT_ERROR for key, result in rounded.results(output).items()
        }
        """For each result, the ratio of its relative error to that of the inputs."""

    def digest(self) -> int:
        """Return a number that differs where inputs do."""
        inputs = (*self.values.values(), *self.weights.values(), *self.ids.values(), self.gradient)
        return zlib.crc32(b"".join(tensor.contiguous().numpy().tobytes() for tensor in inputs))

    def inputs(self, device: torch.device, dtype: torch.dtype, error: float = 0.0) -> CaseInputs:
        """Return the inputs on a device. Weights are of `dtype` and their gradients of fp32, as in training."""
        weights = {name: Weight(name) for name in self.weights}
        for name, weight in weights.items():
            weight.data = _with_error(self.weights[name].to(device, dtype), error)
            weight.grad = torch.zeros(weight.data.shape, dtype=torch.float32, device=device)
        values = {
            name: _with_error(value.to(device, dtype, copy=True), error).requires_grad_()
            for name, value in self.values.items()
        }
        return CaseInputs(values, weights, {name: ids.to(device) for name, ids in self.ids.items()})

    def compute(
        self, operator: Operator, inputs: CaseInputs, gradient: torch.Tensor, pinned: torch.dtype | None = None
    ) -> torch.Tensor:
        """Run an operator forward and backward; return its output. Pinned ones compute in another dtype.

        Gradients are added to those of the inputs.
        """
        output = _forward(operator, inputs, pinned).to(gradient.dtype)
        output.backward(gradient)
        return output.detach()

    def error_bound(self, name: str, result: torch.Tensor, dtype: torch.dtype) -> float:
        """Return the largest error of a result that rounding can explain."""
        fp32, largest = roundoff(torch.float32), self.expected[name].abs().max().item()
        rounds = result.dtype == dtype or self.operator.rounds_inside
        unit = roundoff(dtype) if rounds else fp32
        underflow = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / largest if rounds and largest else 0.0
        share = (1 + self.sensitivity[name]) * unit + math.sqrt(self.operator.longest_sum) * fp32
        return SAFETY * share + underflow


def _with_error(tensor: torch.Tensor, error: float) -> torch.Tensor:
    """Return numbers with relative errors of at most `error`, the same each time."""
    if not error:
        return tensor
    return tensor * (1 + error * (2 * torch.rand(tensor.shape, generator=torch.Generator().manual_seed(1)) - 1))


def _forward(operator: Operator, inputs: CaseInputs, pinned: torch.dtype | None = None) -> torch.Tensor:
    values = {name: value.to(pinned or value.dtype) for name, value in inputs.values.items()}
    return operator.compute(**values, **inputs.weights, **inputs.ids)


def _error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, divided by the largest expected number."""
    largest, difference = expected.abs().max().item(), (result.double() - expected).abs().max().item()
    return difference / largest if largest else difference


def compare(
    operator: Operator, case: Case, accelerator: Accelerator, dtype_name: str, pinned: Mapping[str, str]
) -> list[OperatorError]:
    """Return how far each result of an operator on a device is from float64."""
    device, dtype = accelerator.device, DTYPES[dtype_name]
    pinned_dtype = DTYPES.get(pinned.get(operator.pin or "", ""))
    gradient = case.gradient.to(device, dtype if case.gradient.dim() else torch.float64)  # a loss is in float64

    def results() -> dict[str, torch.Tensor]:
        inputs = case.inputs(device, dtype)
        return inputs.results(case.compute(operator, inputs, gradient, pinned_dtype))

    with accelerator.running():
        first, second = results(), results()
    errors = []
    for name, expected in case.expected.items():
        error, overflow, wrong = _error(first[name], expected), None, ~first[name].isfinite()
        if wrong.any():
            place = tuple(int(index) for index in wrong.nonzero()[0])
            error = math.inf
            overflow = {"count": int(wrong.sum()), "at": place, "expected": expected[place].item()}
        bound = case.error_bound(name, first[name], dtype) if case.deviation <= 1 else math.inf
        repeats = torch.equal(as_bytes(first[name]), as_bytes(second[name]))
        errors.append(OperatorError(operator.name, name, dtype_name, error, bound, overflow, repeats))
    return errors


@dataclass(frozen=True)
class RankAlignment:
    """The findings of one rank on its device."""

    rank: int
    host: str
    family: str
    model: str
    digests: Mapping[str, int]
    """Digest of the inputs of each operator, by operator."""
    compared: Sequence[OperatorError]
    losses: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Losses of the first steps, by dtype."""


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
    of_job, of_torch = (
        operators(job.model, rows, positions, make_kernels(choice, accelerator.family))
        for choice in (job.kernels, with_values(job, "kernels", attention="torch", attention_by_family={}).kernels)
    )
    references = operators(job.model, rows, positions)
    for operator, by_torch, reference in zip(of_job, of_torch, references, strict=True):
        case = Case(reference, deviation)
        digests[operator.name] = case.digest()
        for dtype in dtypes:
            errors = compare(operator, case, accelerator, dtype, job.precision.overrides)
            if operator.pin and dtype != REFERENCE_DTYPE and any(error.is_beyond for error in errors):
                override = f"precision.overrides.{operator.pin}={REFERENCE_DTYPE}"
                mended = compare(by_torch, case, accelerator, dtype, {operator.pin: REFERENCE_DTYPE})
                errors = [
                    error._replace(mended_error=other.error, override=None if other.is_beyond else override)
                    if error.is_beyond
                    else error
                    for error, other in zip(errors, mended, strict=True)
                ]
            compared += errors
    return RankAlignment(rank, host, accelerator.family, accelerator.model, digests, compared)


def first_losses(accelerator: Accelerator, job: Job, dtype: str, steps: int) -> list[float]:
    """Return the losses of the first steps of a job, trained by this rank alone in a dtype. Involves no other rank."""
    job = with_values(with_values(job, "train", dtype=dtype), "precision", by_family={})
    _, training, _ = open_datasets(job.data, job.train.seed)
    rows = 1 if job.train.global_batch > 8 else job.train.global_batch
    plan = even_plan(job.model.num_items, TensorGrid(), 1, 1, job.train.global_batch // rows, rows)
    trainer = Trainer(OfflineWorld(0, 1), accelerator, job, plan)  # pyright: ignore[reportArgumentType] - a world of one
    trainer.initialise()
    return [trainer.step(training)[0].get("loss", 0.0) for _ in range(steps)]


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
    """Compare all operators on every rank's device, and train the first steps on one of each family.

    Returns the findings of all ranks. `dtypes` are this rank's. All ranks must call. Raises TopologyError where inputs
    differ between hosts, JobError where a rank does not have the kernels that the job asks for.
    """
    job, _ = resolve_kernels(world, accelerator, job, range(world.size), dtypes)
    findings = align_rank(accelerator, job, dtypes, rows, positions, deviation, world.rank, world.place.host)
    places = world.topology.places
    first_of_family = min(r for r, place in enumerate(places) if place.family == accelerator.family)
    if steps and world.rank == first_of_family:
        of_torch = with_values(job, "kernels", attention="torch", attention_by_family={})
        trained = dict.fromkeys((*dtypes, REFERENCE_DTYPE) if world.rank == 0 else dtypes)
        losses = {
            dtype: first_losses(accelerator, job if dtype in dtypes else of_torch, dtype, steps) for dtype in trained
        }
        findings = replace(findings, losses=losses)
    alignments = world.all_objects(findings)
    for other in alignments:
        for name, digest in alignments[0].digests.items():
            if other.digests.get(name) != digest:
                raise TopologyError(
                    f"rank {other.rank} on {other.host} draws other inputs of {name} than rank 0 on"
                    f" {alignments[0].host}; install the same version of numpy on both"
                )
    return alignments
