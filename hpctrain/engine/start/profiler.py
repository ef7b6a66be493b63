"""The profiler of heterogeneous ZeRO (Poplar, arXiv 2408.12596): how many rows fit on a device, and what they take.

Every rank runs its part of the job alone, by the engine itself (`hpctrain.comm.groups.offline_world`): the weights,
shards, moments and activations of a replica of the whole model among as many as there are ranks, and no messages. So a
rank whose device overflows holds nobody up, and what is measured has no waiting in it.

How many rows fit is tried on the whole model, by real training steps and real overflows. What rows take is measured
on one item of each kind (embedding, block, head), since blocks are equal: any cut of the model is a sum of these.
Each is measured with more rows than fit for the whole model, as stages of a pipeline have.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from hpctrain.comm.accelerators.base import Accelerator, describe_overflow
from hpctrain.comm.bind import DTYPES
from hpctrain.comm.groups.offline_world import OfflineWorld
from hpctrain.comm.world import World
from hpctrain.config.clusters.cluster import Profile, RowTimes
from hpctrain.config.errors import TrainingError
from hpctrain.config.job import Job
from hpctrain.config.kernels import KernelChoice
from hpctrain.data.order import Batch, Sequences
from hpctrain.data.tokens import TokenSource
from hpctrain.engine.start.facts import with_values
from hpctrain.engine.start.resolve_kernels import resolve_kernels
from hpctrain.engine.step.layout import Layout, make_kernels, make_layout
from hpctrain.engine.step.optimizer import Optimizer
from hpctrain.engine.step.pipeline import Pipeline
from hpctrain.model.stage import Stage
from hpctrain.model.transformer import LayerContext
from hpctrain.plan.tiling import Plan, Tile, counted
from hpctrain.planner.prices.curves import PROFILED_ZEROS, describe_work
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import layers

SEARCH_SHARE = 0.6  # largest share of the time for the search of how many rows fit
ROUNDS, SHORT_ROUNDS = 3, 2  # the best counts, since what others do on the machine only adds
LEAST_TOP_ROWS = 8  # curves reach at least so many rows where the job has as many
MOST_ROUNDS, SETTLED_SECONDS = 10, 0.05  # short passes are measured for so long: the first ones load kernels
DIGITS = 4  # significant digits of measured figures; more would only be noise


LIMITED_BY = {
    "job": "all that the job has for one replica",
    "time": "there was no time to try more",
    "memory": "no more fit",
}
"""Explanation in a comment, for each reason of a `Limit`."""


class Limit(NamedTuple):
    """The number of rows that fit on one rank's device."""

    rows: int
    reason: Literal["job", "time", "memory"]
    """Which of `job`, `time` and `memory` allows no more rows."""
    update_seconds: float | None


def largest_that_fits(fits: Callable[[int], bool], most: int, estimate: int = 1) -> int:
    """Return the largest number up to `most` that fits, 0 if none does. Numbers below one that fits must fit too.

    It moves away from the estimate, with doubled distances, until one number is known to fit and one not to. Then it
    bisects.
    """
    fitting, too_many, step = 0, most + 1, 1
    at = min(max(estimate, 1), most)
    while too_many - fitting > 1:
        if fits(at):
            fitting = at
        else:
            too_many = at
        if fitting and too_many <= most:
            at = (fitting + too_many) // 2
            continue
        at = min(at + step, most) if fitting else max(at - step, 1)
        step *= 2
    return fitting


class DeviceProfiler:
    """Trials of the job on one rank's device, when it is alone."""

    def __init__(
        self,
        world: World,
        accelerator: Accelerator,
        job: Job,
        deadline: float,
        rounds: int = ROUNDS,
        kernels: KernelChoice | None = None,
    ):
        """`job` is resolved, its kernels too. Of so many rounds the best counts. `kernels` are those of measured times,
        by default the job's.

        No more than a row is tried where that would end after `deadline` (of time.monotonic)."""
        self._solo, self._rank = OfflineWorld(world.rank, world.size, world.settings.rehearsal), world.rank
        self._families = [place.family for place in world.topology.places]
        self._accelerator = accelerator
        self._job = job
        self._deadline = deadline
        self._rounds = rounds
        self._kernels = kernels or job.kernels
        self._round_seconds = 0.0
        """Seconds of one round of passes with the last number of rows, without compiling or loading kernels."""
        self._is_warm = False
        self._seconds_per_row = 0.0
        self._bound = sys.maxsize
        """Rows above which nothing is tried: a process that takes too much of its host's memory is killed without an
        error."""
        total = accelerator.memory().total - accelerator.reserved_bytes()
        self._share = total // world.topology.ranks_on_host(world.rank) if accelerator.shares_memory else total

    def limit(self, zero: int, most: int, estimate: int | None = None) -> Limit:
        """Return how many rows of the whole model fit, up to `most`, in a ZeRO stage.

        Without an `estimate` it starts from what the second row takes: the first stage to be asked for has none.
        """
        known: dict[int, bool] = {}
        updates: list[float] = []
        too_long = False

        def fits(rows: int) -> bool:
            nonlocal too_long
            if rows not in known:
                if rows > 1 and time.monotonic() + rows * self._seconds_per_row > self._deadline:
                    too_long = True
                    return False
                known[rows] = self._fits(zero, rows, updates)
            return known[rows]

        if estimate is None:
            estimate = self._estimate(fits, most)
            if self._accelerator.shares_memory:
                self._bound = estimate
        rows = largest_that_fits(fits, min(most, self._bound), estimate)
        reason = "job" if rows == most else "time" if too_long else "memory"
        return Limit(rows, reason, min(updates, default=None))

    def _estimate(self, fits: Callable[[int], bool], most: int) -> int:
        """Return how many rows should fit, from the additional memory of the second row."""
        peaks = []
        for rows in (1, 2):
            if rows > most or not fits(rows):
                return max(1, rows - 1)
            peaks.append(self._accelerator.memory().peak)
        each = peaks[1] - peaks[0]
        return most if each <= 0 else max(2, min(most, 1 + (self._share - peaks[0]) // each))

    def _fits(self, zero: int, rows: int, updates: list[float]) -> bool:
        start = time.monotonic()
        try:
            updates.append(self._train(zero, rows))
            self._seconds_per_row = (time.monotonic() - start) / rows if self._is_warm else 0.0
            self._is_warm = True
            return True
        except RuntimeError as error:
            if not describe_overflow(error, self._accelerator):
                raise
            return False
        finally:
            self._clean()

    def _clean(self) -> None:
        gc.collect()  # weights are in cycles of graphs and handles
        self._accelerator.release()

    def _train(self, zero: int, rows: int) -> float:
        """Run a training step with a replica's only micro-batch; return the seconds of the update."""
        job, accelerator = self._job, self._accelerator
        length = job.data.sequence_length
        with accelerator.running():
            layout = self._layout(job, zero, rows)
            optimizer = Optimizer(layout, job.train)
            optimizer.load_masters()
            Pipeline(layout, optimizer).train(_noise(job, rows), 0, rows * length)
            taken = accelerator.compute_stopwatch()
            optimizer.squared_norm()
            optimizer.update(1, 0.0)
            return taken()

    def _layout(self, job: Job, zero: int, rows: int) -> Layout:
        """Make this rank's part of a plan with one replica of the whole model for each rank."""
        items = Interval(0, job.model.num_items)
        tiles = tuple(
            Tile(items, Interval(rank * rows, (rank + 1) * rows), (rank,), family=family, zero=zero)
            for rank, family in enumerate(self._families)
        )
        plan = Plan(tiles, 1, rows * len(tiles))
        layout = make_layout(self._solo, job, plan, self._accelerator)
        for group in layout.store.groups:  # some devices multiply zeros faster
            group.weights.normal_(0.0, job.model.init_std)
        return layout

    def times(self, zero: int, top: int, deadline: float, likely: int = 0) -> list[RowTimes]:
        """Return what 1, 2, 4, ... rows and `top` rows take, but for those that do not fit.

        `likely` rows, those that a rank computes at once by an even plan, come second, or as many as there is time for
        when they have no kernels to compile: few rows take longer each, and say little of many. Others are left out
        where they would end after `deadline`.
        Raises TrainingError where one row of one block does not fit.
        """
        result: dict[int, RowTimes] = {}
        ascending = [*(1 << power for power in range((top - 1).bit_length())), top]
        pass_seconds: dict[int, float] = {}
        budget = deadline - time.monotonic()
        waiting, other_seconds = [1], 0.0  # seconds of making layers and compiling kernels

        def expected(rows: int) -> float:
            nearest = min(pass_seconds, key=lambda each: abs(each - rows))
            return pass_seconds[nearest] * rows / nearest

        while waiting:
            rows, start = waiting.pop(0), time.monotonic()
            if rows > top or rows in result:
                continue
            if len(result) > 1 and start + other_seconds + expected(rows) > deadline:
                continue
            try:
                self._round_seconds = 0.0
                with self._accelerator.running():
                    result[rows] = self._item_times(zero, rows)
                pass_seconds[rows] = self._rounds * self._round_seconds
            except RuntimeError as error:
                if not (what := describe_overflow(error, self._accelerator)):
                    raise
                if result:
                    top = rows - 1
                    waiting[:0] = [rows // 2]
                    continue
                raise TrainingError(
                    f"rank {self._rank} ({self._families[self._rank]}) has no memory for the embedding, one block and"
                    f" the head with one row, in ZeRO stage {zero} of {len(self._families)} ranks:"
                    f" {what}; lower data.sequence_length, or start more ranks"
                ) from None
            finally:
                self._clean()
            if rows == 1:
                time_for = max(2, budget / max(pass_seconds[1], 1e-9))
                waiting = [int(min(likely or 2, time_for)), *ascending]
            else:
                other_seconds = time.monotonic() - start - pass_seconds[rows]
        return [result[rows] for rows in sorted(result)]

    def _item_times(self, zero: int, rows: int) -> RowTimes:
        job, device, dtype = self._job, self._accelerator.device, DTYPES[self._job.dtype_of(self._families[self._rank])]
        small = with_values(job, "model", num_layers=1, dense_layers=0)
        layout = self._layout(small, zero, rows)
        kernels = make_kernels(self._kernels, self._accelerator.family)
        context = LayerContext(small.model, layout.axes, layout.store, kernels)
        shape = (rows, job.data.sequence_length)
        tokens = torch.randint(job.model.num_ids, shape, device=device)
        hidden = torch.randn(*shape, job.model.hidden_size, dtype=dtype, device=device)
        of_loss = torch.full((), 1.0 / tokens.numel(), dtype=torch.float64, device=device)
        embedding, block, head = (
            Stage(replace(layout.tiles[0], items=items), context)
            for items in layers(Interval(0, small.model.num_items))
        )
        return RowTimes(
            rows=rows,
            embedding_seconds=self._pass_seconds(embedding, tokens, None, hidden),
            block_seconds=self._pass_seconds(block, hidden, None, hidden),
            head_seconds=self._pass_seconds(head, hidden, tokens, of_loss),
        )

    def _pass_seconds(self, stage: Stage, value, targets, gradient) -> tuple[float, float]:
        """Return the seconds of a stage's forward and backward passes."""
        result: list[tuple[float, float]] = []
        start = time.monotonic()
        while len(result) < self._rounds or (len(result) < MOST_ROUNDS and time.monotonic() - start < SETTLED_SECONDS):
            began, taken = time.monotonic(), self._accelerator.compute_stopwatch()
            _, saved = stage.forward(value, targets, training=True)
            forward = taken()
            taken = self._accelerator.compute_stopwatch()
            stage.backward(saved, gradient)
            stage.store.traffic.collect()
            result.append((forward, taken()))
        self._round_seconds += time.monotonic() - began
        forward, backward = (float(f"{min(of_pass):.{DIGITS}g}") for of_pass in zip(*result, strict=True))
        return forward, backward


def _noise(job: Job, rows: int) -> Batch:
    """Return a batch of arbitrary tokens, in which so many rows repeat."""
    length, vocabulary = job.data.sequence_length, job.model.num_ids
    tokens = np.random.default_rng(0).integers(vocabulary, size=rows * length + 1)
    source = TokenSource(Path("noise"), tokens, np.zeros(1, np.int64), vocabulary)
    return Batch(Sequences(source, Interval(0, tokens.size), length, shuffle=False), 0, sys.maxsize)


def _with_kernels(world: World, accelerator: Accelerator, job: Job) -> tuple[Job, KernelChoice]:
    """Return the job with separate kernels, and the kernels that it has otherwise.

    Fused kernels would be compiled for each of the many sizes of the trials. All ranks must call. Raises JobError where
    a rank does not have the attention kernel that the job asks for, or cannot compile its fused kernels.
    """
    own = resolve_kernels(world, accelerator, job, range(world.size))[0].kernels
    return job.model_copy(update={"kernels": own.model_copy(update={"fused": False, "fused_by_family": {}})}), own


def profile(world: World, accelerator: Accelerator, job: Job, seconds: float) -> tuple[list[Profile], list[str]] | None:
    """Measure for about so many seconds; return a profile of each family and ZeRO stage, and a comment on each.

    `job` is resolved: its vocabulary size, dtype and overlap are values. All ranks must call; rank 0 gets the result,
    others None. Of ranks of one family the median time counts, and the fewest rows. Raises TrainingError on all of
    them where one cannot hold a single block, JobError where one lacks the job's attention kernel.
    """
    (job, kernels), start = _with_kernels(world, accelerator, job), time.monotonic()
    most = max(1, job.train.global_batch - world.size + 1)  # the other replicas have a row each
    trials = DeviceProfiler(world, accelerator, job, start + SEARCH_SHARE * seconds, kernels=kernels)
    limits: list[list[Limit]] = []  # by stage and rank
    own = None
    for zero in PROFILED_ZEROS:
        with world.all_or_none():
            own = trials.limit(zero, most, own and own.rows)
        limits.append(world.all_objects(own))
    families = [place.family for place in world.topology.places]
    measured = []
    for number, zero in enumerate(PROFILED_ZEROS):
        fewest = min(
            of.rows for of, family in zip(limits[number], families, strict=True) if family == world.place.family
        )
        left = start + seconds - time.monotonic()
        deadline = time.monotonic() + left / (len(PROFILED_ZEROS) - number)
        with world.all_or_none():
            top = max(fewest, min(LEAST_TOP_ROWS, most))
            times = trials.times(zero, top, deadline, top)
        measured.append(world.all_objects(times))
    return _profiles(world, job, kernels, list(zip(PROFILED_ZEROS, limits, measured, strict=True)))


def short_profile(
    world: World, accelerator: Accelerator, job: Job, seconds: float
) -> tuple[list[Profile], list[str]] | None:
    """Measure passes over the items alone, in ZeRO stage 1, for about so many seconds; else as `profile`.

    Good for the predictor. How many rows fit, and what an update takes, is not measured.
    """
    job, kernels = _with_kernels(world, accelerator, job)
    trials = DeviceProfiler(world, accelerator, job, time.monotonic(), SHORT_ROUNDS, kernels)
    with world.all_or_none():
        trials.times(1, 1, time.monotonic())  # loads and compiles kernels, however long that takes
        likely = -(-job.train.global_batch // world.size)
        times = trials.times(1, job.train.global_batch, time.monotonic() + seconds, likely)
    return _profiles(world, job, kernels, [(1, None, world.all_objects(times))])


def _profiles(
    world: World,
    job: Job,
    kernels: KernelChoice,
    stages: Sequence[tuple[int, Sequence[Limit] | None, Sequence[Sequence[RowTimes]]]],
) -> tuple[list[Profile], list[str]] | None:
    """Return on rank 0 the profiles of each family, with comments, by what all ranks measured in each ZeRO stage."""
    if world.rank:
        return None
    families = [place.family for place in world.topology.places]
    work = describe_work(job.model_copy(update={"kernels": kernels}), job.train.resolved_dtype)
    profiles, comments = [], []
    for family in dict.fromkeys(families):
        ranks = [rank for rank, of in enumerate(families) if of == family]
        for zero, limits, times in stages:
            fitting, comment = {}, f"Times of items alone, the median of {len(ranks)} ranks'."
            if limits:
                own = [limits[rank] for rank in ranks]
                rows, reason, _ = min(own, key=lambda limit: (limit.rows, limit.reason))
                updates = [limit.update_seconds for limit in own if limit.update_seconds is not None]
                update = _median(updates) if len(updates) == len(ranks) else None
                fitting = {"largest_rows": rows, "limited_by": reason, "update_seconds": update}
                comment = (
                    f"{counted(len(ranks), 'rank')}; times are the median rank's. {counted(rows, 'row')} at once:"
                    f" {LIMITED_BY[reason]}."
                )
            profiles.append(
                Profile(
                    origin="measured",
                    family=family,
                    work=work,
                    zero=zero,
                    replicas=world.size,
                    times=_median_times([times[rank] for rank in ranks]),
                    **fitting,
                )
            )
            comments.append(comment)
    return profiles, comments


def _median(values: Sequence[float]) -> float:
    return float(f"{statistics.median(values):.{DIGITS}g}")


def _median_times(of_ranks: Sequence[Sequence[RowTimes]]) -> tuple[RowTimes, ...]:
    """Return the medians over ranks, for the row counts that all of them have."""
    by_rows = [{times.rows: times for times in each} for each in of_ranks]
    result = []
    for rows in sorted(set.intersection(*map(set, by_rows))):
        items = {
            name: tuple(_median(values) for values in zip(*(getattr(of[rows], name) for of in by_rows), strict=True))
            for name in RowTimes.model_fields
            if name != "rows"
        }
        result.append(RowTimes.model_validate({"rows": rows, **items}))
    return tuple(result)
