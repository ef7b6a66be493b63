"""Compares a launch line of other software with other layouts of it, and with what our own engine would do. Pure."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpctrain.config.errors import PlanError
from hpctrain.planner.prediction.predictor import Prediction
from hpctrain.planner.prices.setup import HPCTRAIN_FUSED, Setup
from hpctrain.planner.search.search import Limits, search
from hpctrain.software.launched import LaunchedRun
from hpctrain.software.run import BUCKET_BYTES, DescribedRun

MICROBATCHES = (1, 2, 4, 8)
MOST_PREDICTED = 16
"""The most layouts of which a step is simulated: those with the fewest operations and the shortest bubble that fit."""
LEAST_GAIN = 0.02
"""The least share of a step by which other flags must be faster to be named."""


@dataclass(frozen=True)
class Advice:
    """The fastest of several layouts, and the flags in which it differs."""

    flags: str
    prediction: Prediction


def _changed_flags(old: LaunchedRun, new: LaunchedRun) -> str:
    before, after = old.words(), new.words()
    changed = [f"--{name} {value}".rstrip() for name, value in after.items() if before.get(name) != value]
    return " ".join(changed + [f"(without --{name})" for name in before if name not in after])


def _layouts(own: LaunchedRun) -> Iterator[LaunchedRun]:
    """Yield the even layouts of the same model and batch on the same devices, with gradients overlapped."""
    run = own.run
    assert run.machine is not None
    devices = run.num_devices
    in_node = min(sum(nodes.devices.values()) for nodes in run.machine.nodes)
    heads = run.kv_heads or run.heads
    tensors = [n for n in range(1, in_node + 1) if not (in_node % n or heads % n)]
    pipelines = [n for n in range(1, run.layers + 1) if run.layers % n == 0]
    options = itertools.product(tensors, pipelines, MICROBATCHES, own.virtual_stages, own.recomputing)
    for tensor, pipeline, microbatch, virtual, recompute in options:
        data, rest = divmod(devices, tensor * pipeline * run.context)
        experts = run.expert_parallel * run.expert_tensor
        if run.num_experts and (experts % tensor or devices // pipeline % experts):
            continue
        if rest or run.global_batch % (data * microbatch):
            continue
        microbatches = run.global_batch // data // microbatch
        if virtual > 1 and (pipeline == 1 or run.layers % (pipeline * virtual) or microbatches % pipeline):
            continue
        layout = replace(
            run,
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            microbatch=microbatch,
            interleave=virtual,
            recompute=recompute,
            stages=(),
        )
        yield own.with_layout(layout)


def _promise(run: DescribedRun) -> tuple[float, int, int]:
    """Return about how long a step takes, for an order: operations and bubble, then ranks that must wait often."""
    microbatches = run.global_batch // run.data // run.microbatch
    bubble = 1 + (run.pipeline - 1) / (microbatches * run.interleave)
    return bubble * (4 / 3 if run.recompute == "full" else 1), run.tensor, -run.microbatch


def better_flags(own: LaunchedRun, prediction: Prediction) -> Advice | None:
    """Return the flags by which a step is predicted to be the shortest, where they gain something or fit at last."""
    best, predicted = None, 0
    for layout in sorted(_layouts(own), key=lambda layout: _promise(layout.run)):
        try:
            if not all(stage.fits for stage in layout.run.memory(layout.software)):
                continue
            other = layout.run.predict(layout.software)
        except PlanError:  # a layout that the model cannot have
            continue
        if best is None or other.step_seconds < best.prediction.step_seconds:
            best = Advice(_changed_flags(own, layout), other)
        predicted += 1
        if predicted == MOST_PREDICTED:
            break
    if best and prediction.fits and best.prediction.step_seconds > (1 - LEAST_GAIN) * prediction.step_seconds:
        return None
    return best


def own_engine(run: DescribedRun, seconds: float) -> Advice:
    """Return the best plan of our own engine for the same model, batch and devices.

    The search takes at most so many seconds. Raises PlanError where no plan fits.
    """
    setup = Setup(
        run.model,
        run.positions,
        run.dtype,
        HPCTRAIN_FUSED,
        frozenset(("tensor", "z")),
        bucket_bytes=BUCKET_BYTES,
        tensor_parts=None,
    )
    best = search(setup, run.global_batch, run.own_cluster, limits=Limits(seconds=seconds)).best
    in_half = f", products in {run.dtype}, as it has no {run.linear_dtype}" if run.linear_dtype else ""
    return Advice(best.plan.describe() + in_half, best.prediction)
