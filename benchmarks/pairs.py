"""Which of two ways to train a step is faster, by pairs of steps: what else a machine does meets both alike."""

import gc
import math
import random
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hpctrain.comm.world import World
    from hpctrain.config.job import Job
    from hpctrain.engine.start.facts import Prepared

WARMUP = 2  # steps of each before those that count: the first allocates, the second finds it
RESAMPLES, CONFIDENCE = 2000, 0.95


class Ratio(NamedTuple):
    """A ratio and what it may really be."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} ({self.low:.3f} to {self.high:.3f})"


class Paired(NamedTuple):
    """Steps of two ways of training in turn, in seconds of the slowest rank, by pair."""

    first: list[float]
    second: list[float]
    same_bits: bool
    """Of losses and norms of gradients, step by step."""

    @property
    def ratio(self) -> Ratio:
        """The second's time over the first's."""
        return ratio_of([b / a for a, b in zip(self.first, self.second, strict=True)])


def ratio_of(ratios: Sequence[float]) -> Ratio:
    """Return the median of ratios with its 95 % confidence interval, by the bootstrap (Efron 1979). Pure."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    outside = math.floor(RESAMPLES * (1 - CONFIDENCE) / 2)
    return Ratio(median(ratios), medians[outside], medians[-1 - outside])


def measure_pairs(world: "World", prepared: "Prepared", jobs: Mapping[str, "Job"], pairs: int) -> dict[str, Paired]:
    """Train the prepared job beside each of the given ones, a step of the one and a step of the other in turn.

    Both have their weights and groups at the same time, and go through the same batches. Who is first changes from
    pair to pair. All ranks must call.
    """
    from hpctrain.comm.bind import bind_accelerator
    from hpctrain.engine.step.phases import phases_of
    from hpctrain.engine.trainer import Trainer

    accelerator = bind_accelerator(world)
    world.enter(phases_of(prepared.job.observe).first_step)
    result = {}
    for name, job in jobs.items():
        with world.freeing():
            trainers = [Trainer(world, accelerator, each, prepared.plan) for each in (prepared.job, job)]
            seconds: tuple[list[float], list[float]] = [], []
            numbers: tuple[list[tuple], list[tuple]] = [], []
            for trainer in trainers:
                trainer.initialise()
            for pair in range(WARMUP + pairs):
                for which in (0, 1) if pair % 2 else (1, 0):
                    metrics = trainers[which].step(prepared.training)[0]
                    seconds[which].append(world.largest(metrics["step_seconds"]))
                    numbers[which].append((metrics["loss"], metrics["grad_norm"]))
            for trainer in trainers:
                trainer.layout.store.await_weights()
            result[name] = Paired(seconds[0][WARMUP:], seconds[1][WARMUP:], numbers[0] == numbers[1])
            del trainers, trainer
        gc.collect()  # weights are in cycles of graphs and handles
    return result
