"""The step loop: from a job and its ranks to a trained model in a run folder."""

import os
import re
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from hpctrain.checkpoint.folder import locate_checkpoint
from hpctrain.checkpoint.index import Index
from hpctrain.checkpoint.live import LiveState
from hpctrain.checkpoint.saving import Saver
from hpctrain.checkpoint.state import load, load_weights
from hpctrain.comm.accelerators.base import Accelerator, describe_overflow
from hpctrain.comm.world import World
from hpctrain.config.errors import CheckpointError, CommError, CorruptionError, MemoryOverflowError, TrainingError
from hpctrain.config.job import Job
from hpctrain.data.order import AnySequences, Batch
from hpctrain.engine.requests import NO_REQUESTS, EarlyEnd, Requests, StepRequests
from hpctrain.engine.saves import CheckpointSchedule
from hpctrain.engine.step import loss_scale
from hpctrain.engine.step.expert_load import LoadFigures
from hpctrain.engine.step.layout import Layout, make_layout
from hpctrain.engine.step.loss_scale import LossScale
from hpctrain.engine.step.optimizer import Optimizer
from hpctrain.engine.step.phases import phases_of
from hpctrain.engine.step.pipeline import Pipeline
from hpctrain.engine.step.replicas import Replicas, describe_odd
from hpctrain.model.stage import initialise
from hpctrain.observe.folder.schema import SavedMetrics
from hpctrain.plan.tiling import Plan

LOOK_AT = (
    "let `hpctrain align` compare the operators with float64 on each family, and look at the losses of the steps before"
    " (hpctrain report)"
)
"""Advice after a loss or gradient that is not finite, where the weights are finite."""
MOST_DRAWING_THREADS = 8
"""Most threads with which a rank with a device draws its weights: its other cores are idle then, but other ranks of its
host draw too."""


REQUESTED = re.compile(r"allocate ([\d.]+) (bytes|KiB|MiB|GiB)|(\d+) bytes more than")
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def requested_bytes(message: str) -> int:
    """Return the bytes of a failed allocation, by the message of torch or a pretended device; 0 if it does not say."""
    match = REQUESTED.search(message)
    if not match:
        return 0
    return int(match[3]) if match[3] else int(float(match[1]) * UNITS[match[2]])


class Trainer:
    """One rank's part in training. All methods must be called by all ranks of the plan."""

    def __init__(
        self,
        world: World,
        accelerator: Accelerator,
        job: Job,
        plan: Plan,
        on_overflow: Callable[[int], str] | None = None,
    ):
        """`job` is resolved: its vocabulary size and dtype are values.

        `on_overflow` takes the fewest bytes that a device would have needed. It records them for the next start, and
        returns a message, or "" without a record.
        """
        self._on_overflow = on_overflow
        self.world, self.accelerator, self.job, self.plan = world, accelerator, job, plan
        with self._running("making weights and moments"):
            self.layout: Layout = make_layout(world, job, plan, accelerator)
            scale = LossScale(job.precision.loss_scale, job.precision.loss_scale_window)
            has_fp16 = any(job.dtype_of(tile.family) == "fp16" for tile in plan.tiles)
            self.optimizer = Optimizer(self.layout, job.train, scale if has_fp16 else None)
            self.pipeline = Pipeline(self.layout, self.optimizer)
        self._is_warm = False
        """Whether this process has completed a step, and so has loaded all kernels."""
        self.tokens_per_step = job.train.global_batch * job.data.sequence_length
        self.steps_done = 0
        self.load: LoadFigures | None = None
        """The load of experts in the last step, where there are any."""

    @contextmanager
    def _running(self, what: str):
        """Wrap computation on the device. Raises TrainingError where its memory does not suffice.

        It is a MemoryOverflowError where the overflow was recorded for the next start.
        """
        try:
            with self.accelerator.running():
                yield
        except (RuntimeError, CommError) as error:
            overflow = describe_overflow(error, self.accelerator)
            if not overflow:
                raise
            memory, tiles = self.accelerator.memory(), self.plan.tiles_of(self.world.rank)
            items = " and ".join(str(list(tile.items)) for tile in tiles)
            requested = requested_bytes(str(error))
            needed = memory.used + requested if requested else memory.total + 1
            noted = self._on_overflow(needed) if self._on_overflow else ""
            text = (
                f"rank {self.world.rank} ({tiles[0].family}, items {items}, rows {list(tiles[0].rows)}) is out of"
                f" memory in {what}: {memory.used / 2**20:,.1f} of {memory.total / 2**20:,.1f} MiB are in use, and"
                f" {overflow}; give its tile fewer rows or items, set plan.recompute to"
                ' "selective" or "full" or plan.offload to "optimizer", plan.microbatch lower, or start more ranks'
            )
            raise (MemoryOverflowError(f"{text}; {noted}") if noted else TrainingError(text)) from error

    def close(self) -> None:
        """Release weights, moments and buffers, also after a failure. No other rank is involved, and no other method
        may be called."""
        for name in ("layout", "optimizer", "pipeline"):
            vars(self).pop(name, None)

    def initialise(self) -> None:
        """Start from initial weights, or from those of the checkpoint that the job names."""
        if self.job.train.start_from:
            self.layout.store.await_weights()
            start = locate_checkpoint(self.job.train.start_from)
            load_weights(self.world, start, self.job.model, self.optimizer.shards)
        else:
            cores = 1 if self.accelerator.kind == "cpu" else len(os.sched_getaffinity(0)) // 2
            initialise(self.layout.store, self.job.model, self.job.train.seed, min(cores, MOST_DRAWING_THREADS))
            self.optimizer.load_masters()
        self.layout.store.refresh()

    def resume(self, checkpoint: Path) -> None:
        """Start from a checkpoint of any layout."""
        self.layout.store.await_weights()
        self.steps_done = load(self.world, checkpoint, self.optimizer.shards)
        if scale := self.optimizer.loss_scale:
            with Index(checkpoint) as index:
                scale.restore(index.about.get(loss_scale.KEY))
        self.layout.store.refresh()

    def take(self, state: LiveState) -> None:
        """Start from the state of another plan, which the ranks have in memory."""
        self.layout.store.await_weights()
        self.steps_done = state.step
        state.fill(self.optimizer.shards)
        for shard in self.optimizer.shards:
            if not shard.has_master_in_use:
                shard.group.weights_at(shard.updated).copy_(shard.master)
        self.optimizer.gather_updated()
        if scale := self.optimizer.loss_scale:
            scale.restore(state.texts.get(loss_scale.KEY))

    def step(self, sequences: AnySequences, asked: StepRequests = NO_REQUESTS) -> tuple[SavedMetrics, StepRequests]:
        """Train one step; return its metrics, and the requests of all ranks."""
        step = self.steps_done
        batch = Batch.of_step(sequences, step, self.job.train.global_batch)
        num_targets = batch.num_targets()
        with self._running(f"step {step + 1}"):
            taken, since = self.accelerator.step_stopwatch(step + 1), self.world.tracer.now()
            self.accelerator.launches.blocks = not self._is_warm
            totals = self.pipeline.train(batch, step, max(1, num_targets), asked)
            self.accelerator.launches.blocks, self._is_warm = False, True
            self.world.tracer.computed(f"step {step + 1}", since)
            seconds = taken()
        self.steps_done += 1
        metrics: SavedMetrics = {
            "step": self.steps_done,
            "loss": totals.loss / max(1, num_targets),
            "grad_norm": totals.norm,
            "learning_rate": self.job.train.rate(step),
            "step_seconds": seconds,
            "tokens_per_second": self.tokens_per_step / seconds,
        }
        self.load = totals.load
        if load := totals.load:
            metrics["expert_load"], metrics["expert_load_layer"] = load.ratio, load.layer
            metrics["expert_spread"] = load.spread
            if self.job.train.balance_loss:
                metrics["balance_loss"] = load.balance_loss
        if not num_targets:
            del metrics["loss"]
        if scale := self.optimizer.loss_scale:
            metrics["loss_scale"], metrics["skipped"] = scale.value, totals.skipped
        return metrics, StepRequests(*totals.flags)

    def overrun(self) -> float | None:
        """Return the largest share of time by which a rank was behind its pretended device; None without a rehearsal.

        All ranks must call.
        """
        return None if self.accelerator.overrun is None else self.world.largest(self.accelerator.overrun)

    def validate(self, sequences: AnySequences) -> float:
        """Return the mean loss over the first `train.validation_sequences` of a set, the same for every layout."""
        count = min(self.job.train.validation_sequences, sequences.num_sequences)
        at_once = self.plan.microbatches * self.plan.rows
        with self._running("validation"):
            batches = [Batch(sequences, first, count) for first in range(0, count, at_once)]
            total = sum(self.pipeline.evaluate(batch).loss for batch in batches)
        return total / Batch(sequences, 0, count).num_targets()

    def saver(self, folder: Path, about: dict[str, str]) -> Saver:
        """Return what writes checkpoints of the run folder; `about` is what is known of tokenizer and data."""
        what = self.optimizer.shards, self.job, self.plan, about, self._state
        return Saver(self.world, self.accelerator, folder, *what)

    def _state(self) -> dict[str, str]:
        """Return what a checkpoint has in addition to weights and moments."""
        scale = self.optimizer.loss_scale
        return {loss_scale.KEY: scale.dump()} if scale else {}

    def save(self, folder: Path, about: dict[str, str]) -> Path | None:
        """Write a checkpoint of the run folder and wait for it; return its path."""
        saver = self.saver(folder, about)
        saver.start(self.steps_done)
        return saver.finish()

    def fit(
        self,
        training: AnySequences,
        validation: AnySequences | None,
        until: int,
        saves: CheckpointSchedule,
        report: Callable[[SavedMetrics], None],
        requests: Requests,
        replan: Callable[[], bool] = lambda: False,
    ) -> EarlyEnd | None:
        """Train up to step `until`, validating and saving on the job's intervals; return why it ended early, if it did.

        Raises CorruptionError, with where to continue, where numbers are not finite or replicas differ.

        `report` gets the metrics of each step (with `validation_loss` where there was one), on every rank. A checkpoint
        is due on its interval, when it is asked for, and at the end. Where another plan is asked for, all ranks call
        `replan`; if it returns True the leg ends.
        """
        every, validate_every = self.job.checkpoint.every, self.job.train.validate_every
        phases, enter = phases_of(self.job.observe), self.world.enter
        replicas = self._replicas()
        enter(phases.first_step)
        begun = time.monotonic()
        while self.steps_done < until:
            try:
                metrics, asked = self.step(training, requests.check()._replace(writing=saves.saver.is_writing))
            except CorruptionError as error:
                enter(phases.saving)
                raise CorruptionError(self._end_before(error, saves)) from None
            done = self.steps_done
            last = done == until or asked.ends
            due = validate_every and done % validate_every == 0
            if validation is not None and (due or done == self.job.train.steps):
                enter(phases.validation)
                metrics["validation_loss"] = self.validate(validation)
            report(metrics)
            requests.longest_step = max(requests.longest_step, time.monotonic() - begun)
            kept = done == self.job.train.kept_step
            saved = last or asked.save or kept or bool(every and done % every == 0)
            keeps = saved or saves.may_copy(done)
            due = replicas and (keeps or done % self.job.watch.replicas_every == 0)
            if replicas and due and (odd := replicas.differing()):
                enter(phases.saving)
                raise CorruptionError(describe_odd(done, odd, saves.end()))
            if saved:
                enter(phases.saving)
            saves.step_is_done(metrics, saved, last, asked.writing)
            requests.longest_save = max(requests.longest_save, saves.saver.longest_seconds)
            enter(phases.end if last else phases.step)
            requests.fulfilled(asked)
            if asked.ends and done < until:
                return EarlyEnd(requests.reason(asked, self.world), continues=not asked.stop)
            if asked.moves and not last:
                enter(phases.start)
                if replan():
                    saves.complete()
                    return EarlyEnd("another plan", continues=True)
                enter(phases.step)
            begun = time.monotonic()
        return None

    def _replicas(self) -> Replicas | None:
        """Return an object that compares weights held by several ranks, where there are any and the job asks for it."""
        if not self.job.watch.replicas_every:
            return None
        holders = [group.ranks for group in self.layout.holding.shard_groups]
        replicas = Replicas(self.world, self.layout.store, self.optimizer.shards, holders)
        return replicas if replicas.exist else None

    def _end_before(self, error: CorruptionError, saves: CheckpointSchedule) -> str:
        """Save the state before an incomplete step, if it is sound; return a message about it.

        All ranks must call.
        """
        if not self.steps_done:
            return f"{error}, and no step is done that could be saved; {LOOK_AT}"
        try:
            saved = saves.end(self.steps_done)
        except CorruptionError as damage:
            return f"{error}; {damage}"
        except CheckpointError as failure:
            return f"{error}; the state before it could not be saved: {failure}"
        return (
            f"{error}; the state before it is saved as {saved}. Start the same command again: a passing fault of a"
            f" device does not come back. Where the same step fails again, {LOOK_AT}"
        )
