"""One run of a job on all ranks, in its folder: a sequence of legs, each with its trainer and its observers."""

import gc
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint.copies import copies_name, find_copy, forget_copies
from hpctrain.checkpoint.folder import complete_checkpoints, latest_checkpoint, locate_checkpoint, step_of, tidy
from hpctrain.checkpoint.format import KEPT
from hpctrain.checkpoint.index import Index
from hpctrain.checkpoint.live import LiveState
from hpctrain.checkpoint.resume import choose_checkpoint
from hpctrain.checkpoint.saving import Saver
from hpctrain.comm.bind import bind_accelerator
from hpctrain.comm.probe.machine import note_overflow
from hpctrain.comm.progress.instruments import UNTRACED
from hpctrain.comm.start.launcher import end_of_batch_job
from hpctrain.comm.start.process import StopSignals, process_start, take_losses
from hpctrain.comm.watchdog.flight import FOLDER as FLIGHT
from hpctrain.comm.world import World
from hpctrain.config.clusters.cluster import MemoryOverflow
from hpctrain.config.clusters.cluster_file import dump_cluster
from hpctrain.config.errors import CorruptionError, DamagedCheckpointError, HpctrainError
from hpctrain.config.job import Job
from hpctrain.engine.copies import choose_copies, copy_roots
from hpctrain.engine.requests import EarlyEnd, Requests, refuse_if_interrupted
from hpctrain.engine.routes import describe_routes
from hpctrain.engine.saves import CheckpointSchedule
from hpctrain.engine.start.facts import WHY, MachineDescription, Prepared, with_values
from hpctrain.engine.start.replan import Unbalanced, predict_compute, replan
from hpctrain.engine.start.resolve import prepare_run
from hpctrain.engine.trainer import Trainer
from hpctrain.observe.anomalies import Jump, JumpWatch
from hpctrain.observe.console import Console
from hpctrain.observe.exports import make_writers
from hpctrain.observe.folder.lock import RunLock
from hpctrain.observe.folder.run_folder import (
    CORRUPTION,
    JUMP,
    LOST,
    RunFolder,
    default_run_folder,
    note_failure,
    refuse_missing_checkpoints,
)
from hpctrain.observe.folder.schema import SavedMetrics
from hpctrain.observe.folder.spans import Observed, Observer, StepRecorder
from hpctrain.observe.live import LiveMetrics
from hpctrain.observe.metrics import RunMetrics, add_shares
from hpctrain.observe.overrun import OverrunWatch
from hpctrain.observe.prediction_check import PredictionTracker
from hpctrain.observe.sample import StepSample
from hpctrain.observe.speeds import SpeedWatch
from hpctrain.observe.torch_profile import TorchProfile
from hpctrain.observe.trace import RunTrace
from hpctrain.plan.tiling import counted
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.setup import Setup
from hpctrain.planner.yardstick import format_yardstick, keep_families, sum_of_families, yardstick
from hpctrain.sharding.parameters import count_parameters

LARGEST_SAMPLED_MODEL = 200_000_000  # parameters: the sample is made by one rank while the others wait

STEPS_BETWEEN_REBALANCES = 50
"""A plan by measured speeds is searched for at most once in so many steps."""


class Run:
    """A job that trains from the latest checkpoint of its folder to a step. All ranks create one and call the same.

    It has what outlives a leg: path, lock, folder, console, signals, data and job.
    """

    def __init__(
        self,
        world: World,
        job: Job,
        path: Path | None = None,
        described: MachineDescription | None = None,
        *,
        signals: StopSignals | None = None,
        fresh_probe: bool = False,
        on_stderr: bool = False,
        bar: bool | None = None,
    ):
        """Open or make the folder `path`, make what is to be trained, and say what it is.

        `signals` are those that end the run in order, from now on.

        `described` is what the ranks run on, where that is given; with `fresh_probe` what is known of this machine is
        measured anew; a progress bar as in `Console`. Raises JobError,
        DataError, PlanError, LaunchError and CheckpointError before weights are made, TrainingError where they do not
        fit.
        """
        self.signals, self.requested = signals or StopSignals(), job
        self.rebalanced_at: int | None = None
        """The step after which a plan by measured speeds was searched for last; on rank 0."""
        self.seconds = {"started": time.time() - process_start()}
        """Seconds of the parts of this start, as a change of plans has them."""
        since = time.monotonic()
        self.path: Path = world.broadcast_object(path or default_run_folder(job.name))
        with world.all_or_none():
            self.lock = RunLock(self.path) if world.rank == 0 else None
            if self.lock:
                tidy(self.path)
        try:
            news = self._choose_checkpoint(world, job)
            self.seconds["read"] = time.monotonic() - since
            begins_from = self.copy or self.checkpoint
            prepared = prepare_run(world, job, begins_from, described, fresh_probe, self.signals)
        except HpctrainError:
            if self.lock:
                self.lock.release(is_done=False)
            raise
        with world.all_or_none():
            if self.lock:
                note_failure(self.path, self.path / FLIGHT)
        world.keep_records(self.path / FLIGHT)

        self.console = Console(world.rank == 0, on_stderr, bar)
        self.folder = RunFolder(self.path, self.console.say)
        self.hear(news)
        self.jumps = JumpWatch(job.watch.jump)
        is_first = world.rank == 0
        folder, end_time = (self.path, end_of_batch_job()) if is_first else (None, None)
        self.requests = Requests(self.signals, folder, end_time, lambda: self.leg.is_unbalanced())
        self.seconds["searched"] = time.monotonic() - since - self.seconds["read"]
        self.begin_leg(world, prepared)

    def begin_leg(self, world: World, prepared: Prepared, change: "PlanChange | None" = None) -> None:
        """Begin to train by a plan. The leg before it is closed. All ranks must call.

        After a `change` of plans it begins from the state that the last leg left in memory.
        """
        self.job, self.source = prepared.job, prepared.source
        self.leg = Leg(self, world, prepared, change)

    def _go_on(self, change: "PlanChange") -> None:
        """End the leg, and begin the next one by another plan. All ranks must call."""
        leg, world, since = self.leg, change.prepared.world, time.monotonic()
        change.state = leg.live_state()
        change.seconds["moved"] = time.monotonic() - since
        leg.close()
        gc.collect()  # weights and gradients are in cycles of references
        bind_accelerator(world).release()
        bind_accelerator(world).forget_peak()
        self.console.forget_speed()  # of the last plan; and the change takes longer than a step
        self.begin_leg(world, change.prepared, change)
        change.seconds["made"] = time.monotonic() - since - change.seconds["moved"]
        self.leg.stall_seconds = change.seconds["moved"] + change.seconds["made"]

    def _choose_checkpoint(self, world: World, job: Job) -> Sequence[str]:
        """Choose what all ranks continue from: a copy in the memory of hosts, or a checkpoint; return messages about
        the choice.

        The choice does not depend on a rank's view of the file system.
        """
        self.copy, self.state, news = None, None, []
        name, latest, after = world.on_first_rank(lambda: self._newest(job.checkpoint.resume))
        if name:
            folders = [root / name / world.hosts[world.rank] for root in copy_roots(job.recovery)]
            whole, news = find_copy(world, folders, after)
            if whole:
                self.copy, self.state = whole
                self.checkpoint = latest
                return news
        self.checkpoint, more = choose_checkpoint(world, self.path, job.checkpoint.resume)
        with world.all_or_none():
            if self.lock and self.checkpoint is None:
                refuse_missing_checkpoints(self.path)
        return [*news, *more]

    def _newest(self, resume: str) -> tuple[str | None, Path | None, int]:
        """Return the name of the run's copies, where the job may continue from one, the latest checkpoint, and the step
        that a copy has to be newer than."""
        newest = None
        try:
            latest = newest = latest_checkpoint(self.path)
        except DamagedCheckpointError:
            latest, newest = None, next(iter(complete_checkpoints(self.path)[::-1]), None)
        name = copies_name(self.path) if resume in ("auto", "latest") else None
        return name, latest, step_of(newest) if newest else 0

    def train(self, stop_after: int | None = None) -> tuple[dict, EarlyEnd | None]:
        """Train to the job's last step, or to an earlier one.

        Returns what is known at the end (on rank 0; empty on others), and why it ended early, if it did.
        """
        until = min(self.job.train.steps, stop_after or self.job.train.steps)
        while True:
            try:
                last, ended = self.leg.train(until)
                if self.leg.change is None:
                    break
                self._go_on(self.leg.change)
            except BaseException:
                self.abandon()
                raise
        self.leg.close(is_last=True)
        by, overrun = ended and ended.by, self.leg.overrun
        summary = self.console.finish(last, self.path, self.checkpoint, self.source, by, overrun)
        if self.lock:
            self.leg.note_end(last, ended, summary)
        self.close()
        return summary, ended

    def close(self) -> None:
        """Let others use the folder, which is complete."""
        if self.lock:
            self.lock.release()

    def abandon(self) -> None:
        """Leave after a failure, without asking another rank. The folder is locked until this process ends."""
        self.leg.abandon()

    def hear(self, lines: Iterable[str | None]) -> None:
        """Print those of the lines that are not None or empty."""
        for text in lines:
            if text:
                self.console.say(text)

    def show_sample(self, num_tokens: int) -> None:
        """Say some text by the latest checkpoint, if its tokens are text; for one rank to call."""
        if not (self.checkpoint and self.source.tokenizer_json):
            return
        from hpctrain.engine.decode import Generator, Sampling

        if count_parameters(self.job.model) > LARGEST_SAMPLED_MODEL:
            try_this = f'hpctrain generate {self.checkpoint} --prompt "..."'
            self.console.say(f"no sample of a model this large; try: {try_this}")
        else:
            sampling = Sampling(seed=self.job.train.seed, ignores_end=True)
            text = Generator(self.checkpoint).text("", num_tokens, sampling)
            self.console.say(f"sample:\n{text}")


@dataclass
class PlanChange:
    """A change of plans, from one leg to the next."""

    prepared: Prepared
    """The run by the next plan."""
    reason: str
    seconds: dict[str, float]
    """Seconds in which it was `searched`, its state `moved`, all else `made`, and of its `first_step`."""
    predicted_stall: float
    """Seconds that moving and making were predicted to take."""
    state: LiveState | None = None
    """The state on its way, in host memory."""


class Leg:
    """A part of a run by one plan on one world, with layout, trainer and observers. All ranks create one and call the
    same.

    It starts from the state that another leg left in memory, else from the newest checkpoint that its run knows, or
    from the start.
    """

    def __init__(self, run: Run, world: World, prepared: Prepared, change: PlanChange | None = None):
        """Make weights and observers, and say what is trained. Raises TrainingError where they do not fit."""
        self._run, self._world, self._prepared = run, world, prepared
        self._since = since = time.monotonic()
        self.job, self._described = prepared.job, prepared.described
        self._num_before = world.num_made
        """Number of the world's groups and channels that do not belong to this leg."""
        self._begun_by = change
        self._saver: Saver | None = None
        self.change: PlanChange | None = None
        """The change by which this leg ends, once there is one."""
        self._accelerator = accelerator = bind_accelerator(world)
        self._observers = self._make_observers(accelerator)
        with world.all_or_none():
            writers = make_writers(self.job, run.path) if run.lock else []
            self._speeds = self._watch_speeds() if run.lock else None
        self._live = LiveMetrics(run.folder, prepared.plan, writers, self._speeds)
        self._metrics = RunMetrics(self._observed, self._live.write_step)
        noting = None if self.job.plan else self._note_overflow
        self._trainer = Trainer(world, accelerator, self.job, prepared.plan, noting)
        moving_since = time.monotonic()
        if state := change.state if change else run.state:
            self._trainer.take(state)
            state.close()
            run.state = None
        if change:
            change.state = None
        elif state:
            pass
        elif run.checkpoint:
            self._trainer.resume(run.checkpoint)
        else:
            self._trainer.initialise()
        seconds = change.seconds if change else run.seconds
        seconds["moved"] = seconds.get("moved", 0.0) + time.monotonic() - moving_since
        self._first_step = self._trainer.steps_done + 1
        self.overrun: float | None = None
        """Largest share of time by which a rank lagged behind its device, in a closed rehearsal."""
        if not change:  # later legs look for signals at each step, and save
            refuse_if_interrupted(world, run.signals)
        self._saver = self._trainer.saver(run.path, self._about())
        step_seconds = prepared.prediction.step_seconds if prepared.prediction else None
        counts, done = self._saver.counts, self._trainer.steps_done
        asked = run.requested.recovery
        if not state:
            forget_copies(world, run.path, copy_roots(asked))
        self._copying, why = choose_copies(world, asked, run.path, counts, done, step_seconds)
        self.job = with_values(self.job, "recovery", copies=self._copying.every if self._copying else 0)
        self._prepared = prepared.but({"recovery.copies": why})
        self._introduce()
        self.stall_seconds = time.monotonic() - since
        """What a change of plans takes, as far as it is known: the last one, or what the first leg took to be made."""

    def _watch_speeds(self) -> SpeedWatch | None:
        """Return an object that finds devices with other speeds, where the run may get a plan by these; on rank 0.

        Host times of processors are noise of shared cores, and those of real devices are not known: only the times of
        pretended devices tell.
        """
        prepared, rebalance = self._prepared, self.job.recovery.rebalance == "auto" and self.job.plan is None
        rebalance &= prepared.speeds is not None and self._described.is_rehearsed
        if not (rebalance and prepared.prediction):
            return None
        return SpeedWatch(predict_compute(prepared), self._world.topology.places)

    def _make_observers(self, accelerator) -> list[Observer]:
        self._recorder, described = StepRecorder(accelerator), self._described
        self._world.configure(tracer=self._recorder)
        plan, is_continued = self._prepared.plan, self._begun_by is not None
        self._observed = Observed(self._world, accelerator, self._recorder, plan, self._run.folder, is_continued)
        self._tracker = PredictionTracker(self._observed, self._prepared.prediction, described.name, described.doubt)
        self._overrun = None
        observers: list[Observer] = [StepSample(self._observed, lambda: self._first_step), self._tracker]
        if self.job.observe.trace:
            observers.insert(0, RunTrace(self._observed, self.job.observe.trace_steps))
        if self.job.observe.torch_profile_steps:
            observers.append(TorchProfile(self._observed, self.job, described.is_rehearsed))
        if described.is_rehearsed:
            self._overrun = OverrunWatch(self._world, accelerator, self._leave_steps_out)
            observers.append(self._overrun)
        return observers

    def _introduce(self) -> None:
        run, prepared, done = self._run, self._prepared, self._trainer.steps_done
        routes = describe_routes(self._world, self._trainer.layout)
        more = {"routes": routes, "rehearsal": self._described.scale}
        reasons = {**prepared.reasons, **{key: reason for key, reason in more.items() if reason}}
        with self._world.all_or_none():
            if run.lock:
                cluster, predicted = self._described.cluster, prepared.prediction
                run.folder.describe(self.job, prepared.plan, reasons, cluster)
                damage = None if self._begun_by else run.folder.rewind_metrics(done)
                self._families = keep_families(run.path, self.job, cluster)
                mfu_seconds = predicted.mfu * predicted.step_seconds if predicted else None
                self._full_speed = mfu_seconds, sum_of_families(self._families)
                if self._begun_by:
                    run.console.say(f"from step {done + 1} by another plan, as {reasons['plan']}")
                else:
                    is_rehearsed, seconds = self._described.is_rehearsed, run.seconds
                    seconds["made"] = time.monotonic() - self._since - seconds["moved"]
                    origin = f"memory, {run.copy}" if run.copy else run.checkpoint
                    self._live.note_start(done, origin, reasons, cluster, is_rehearsed, predicted, seconds)
                    run.console.start(self.job, prepared.plan, reasons, run.source, done, origin, run.path)
                run.hear([damage])

    def train(self, until: int) -> tuple[dict, EarlyEnd | None]:
        """Train to a step; return the metrics of the last one, and why it ended early, if it did."""
        run, trainer, prepared = self._run, self._trainer, self._prepared
        self._until = until
        if trainer.steps_done >= until:
            run.console.say(f"{run.path}: nothing to do, {counted(trainer.steps_done, 'step')} done")
        last: dict = {}

        def report(metrics: SavedMetrics) -> None:
            if run.lock:
                run.hear([run.lock.check()])
            last.clear()
            last.update(metrics)
            due = (metrics["step"] - 1) % self.job.observe.log_every == 0 or "validation_loss" in metrics
            if run.lock:
                add_shares(metrics, *self._full_speed)
            if due:
                experts = trainer.load.saved(metrics["step"]) if run.lock and trainer.load else None
                self._metrics.record(metrics, experts)
            if self._overrun and (overrun := self._overrun.look(metrics["step"] == until)) is not None:
                metrics["overrun"] = overrun
            run.console.step(metrics, self._metrics.latest, until, due)
            if run.lock:
                self._note_findings(metrics["step"], run.jumps.look(metrics))
            if run.lock and self._begun_by and metrics["step"] == self._first_step:
                self._begun_by.seconds["first_step"] = metrics["step_seconds"]
                begun_by, predicted = self._begun_by, prepared.prediction
                stall = begun_by.predicted_stall
                self._live.note_leg(self._first_step - 1, begun_by.reason, begun_by.seconds, stall, predicted)
            run.hear(observer.step_is_done(metrics["step_seconds"]) for observer in self._observers)
            self._recorder.begin_step()

        run.hear(observer.start(trainer.steps_done) for observer in self._observers)
        self._recorder.begin_step()
        assert self._saver, "a leg that is not closed"
        saves = CheckpointSchedule(
            self._saver,
            self.job.checkpoint,
            run.console.say,
            run.checkpoint,
            trainer.steps_done,
            self._copying,
            begins=self._metrics.flush,  # a run that continues from it has the metrics of all its steps
            ends=self._live.note_save if run.lock else lambda step, checkpoint, seconds: None,
        )
        try:
            sets = prepared.training, prepared.validation
            ended = trainer.fit(*sets, until, saves, report, run.requests, self._replan)
        except CorruptionError as error:  # on all ranks
            self._end_steps()
            if run.lock:
                run.folder.note(CORRUPTION, trainer.steps_done, str(error))
            raise
        run.checkpoint = saves.latest
        if self._copying and run.lock and saves.copy_seconds:
            self._live.note_copies(trainer.steps_done, saves.copy_seconds, self._copying.predicted_seconds)
        return last, None if self.change else ended

    def is_unbalanced(self) -> bool:
        """Say whether devices have other speeds, and no plan was searched for that in the last steps; on rank 0."""
        last, done = self._run.rebalanced_at, self._trainer.steps_done
        is_early = last is not None and done < last + STEPS_BETWEEN_REBALANCES
        return self._speeds is not None and self._speeds.has_news and not is_early

    def _replan(self) -> bool:
        """Choose the plan that was asked for; say whether the leg ends for it. All ranks must call."""
        run, since = self._run, time.monotonic()
        unbalanced = self._take_speeds if self.is_unbalanced() else None
        chosen = replan(self._prepared, run.requested, run.path if run.lock else None, unbalanced)
        if isinstance(chosen, str):
            run.console.say(f"no other plan: {chosen}; training continues by the same one")
        else:
            seconds = {"searched": time.monotonic() - since}
            self.change = PlanChange(chosen, chosen.reasons[WHY], seconds, self.stall_seconds)
        return self.change is not None

    def _take_speeds(self) -> Unbalanced:
        assert self._speeds is not None, "of rank 0"
        self._run.rebalanced_at = steps = self._trainer.steps_done
        stall = self.stall_seconds / self._accelerator.time_scale
        return Unbalanced(self._speeds.take_factors(), self._speeds.text, self._until - steps, stall)

    def live_state(self) -> LiveState:
        """Return the state after the last step in host memory, which outlives the leg. All ranks must call."""
        assert self._saver, "a leg that has trained"
        return self._saver.live_state(self._trainer.steps_done)

    def close(self, is_last: bool = False) -> None:
        """End after the last step: write measurements, let observers report, free groups, weights and moments.

        The `is_last` leg removes its copies, if there is a checkpoint of its last step.
        """
        self._end_steps()
        texts = [observer.finish() for observer in self._observers]
        if not self.change:  # a run says once how it went
            self._run.hear(texts)
        self.overrun = self._trainer.overrun()
        if self._run.lock and self.change:
            self._live.close()
        if self._copying:
            saved = self._run.checkpoint
            is_saved = saved is not None and step_of(saved) >= self._trainer.steps_done
            self._copying.copies.close(forget=is_last and is_saved)
        self._release(alone=False)

    def abandon(self) -> None:
        """Leave after a failure without the other ranks: abandon groups, free weights and moments."""
        self._run.console.close_line()
        self._release(alone=True)

    def _release(self, alone: bool) -> None:
        self._world.free(self._num_before, alone)
        self._trainer.close()
        self._saver = None  # it has weights and moments
        self._world.configure(tracer=UNTRACED)

    def _end_steps(self) -> None:
        self._run.console.close_line()
        self._metrics.flush()

    def note_end(self, last: dict, ended: EarlyEnd | None, summary: dict) -> None:
        """Compare a complete run with its families alone, add that to its summary, and keep it; for rank 0."""
        if last and not ended and self._families:
            summary["yardstick"] = yardstick(self._families, last["tokens_per_second"])
            self._run.console.say(format_yardstick(summary["yardstick"]))
        self._live.note_end(self._trainer.steps_done, self.job.train.steps, summary)

    def _note_findings(self, step: int, jumps: Sequence[Jump]) -> None:
        """Report and record the findings of a step, and lost output; for rank 0."""
        for jump in jumps:
            self._run.console.say(str(jump))
            self._run.folder.note(JUMP, text=str(jump), **jump._asdict())
        for text in take_losses():
            self._run.folder.note(LOST, step, text)

    def _leave_steps_out(self, why: str) -> None:
        """Record that the figures of the steps so far are not valid."""
        self._tracker.forget()
        self._run.console.forget_speed()
        if self._run.lock:
            self._live.note_slower(why)

    def _note_overflow(self, needed_bytes: int) -> str:
        """Record the bytes that this rank's device would have needed, if its plan was predicted to fit.

        Returns a message about that.
        """
        cluster, rank = self._described.cluster, self._world.rank
        stages = Predictor(Setup.of_job(self.job), self._prepared.plan, cluster).memory
        stage = next(stage for stage in stages if rank in stage.ranks)
        if not stage.fits:
            return ""
        tile, predicted = stage.tile, stage.memory.total
        rows = tile.rank_rows
        overflow = MemoryOverflow(items=tile.items, rows=rows, bytes=needed_bytes, predicted_bytes=predicted)
        more = f"it was predicted to need {predicted / 2**20:,.1f} MiB"
        return f"{more}; {note_overflow(cluster, cluster.devices[rank].family, overflow)}"

    def _about(self) -> dict[str, str]:
        """Return the texts that checkpoints keep of the run, in addition to its job and its plan. All ranks must
        call."""
        links_of = self._prepared.links_of
        assert links_of is not None, "a prepared run has them"
        return {
            KEPT: self._world.on_first_rank(self._kept),
            "tokenizer": self._run.source.tokenizer_json or "",
            "data": self._prepared.training.identity,
            "cluster": dump_cluster(links_of),
            "asked_plan": self._prepared.reasons[WHY] if self._prepared.speeds is None else "",
        }

    def _kept(self) -> str:
        """Return the Hugging Face files that the run's first checkpoint keeps."""
        start = self.job.train.start_from
        begun = (
            (None if self._begun_by else self._run.copy)
            or self._run.checkpoint
            or (locate_checkpoint(start) if start else None)
        )
        if begun is None:
            return ""
        with Index(begun) as index:
            return index.about[KEPT]
