"""One run of a job on all ranks: its folder, its trainer, and who watches its steps."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.comm.launcher import end_of_batch_job
from hpctrain.comm.process import StopSignals, take_losses
from hpctrain.config.cluster_file import dump_cluster
from hpctrain.config.errors import CorruptionError, HpctrainError
from hpctrain.config.job import Job
from hpctrain.engine.facts import Described
from hpctrain.engine.requests import EarlyEnd, Requests, refuse_if_interrupted
from hpctrain.engine.resolve import prepare_run
from hpctrain.engine.yardstick import format_yardstick, keep_families, sum_of_families, yardstick

if TYPE_CHECKING:
    from hpctrain.comm.world import World
    from hpctrain.observe.anomalies import Jump
    from hpctrain.observe.metrics import RunMetrics
    from hpctrain.observe.schema import SavedMetrics
    from hpctrain.observe.spans import Observer


LARGEST_SAMPLED_MODEL = 200_000_000  # parameters: the sample is made by one rank while the others wait


class TrainingRun:
    """A job that trains from the latest checkpoint of its folder to a step. All ranks create one and call the same."""

    def __init__(
        self,
        world: "World",
        job: Job,
        path: Path | None = None,
        described: Described | None = None,
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
        from hpctrain.checkpoint.folder import tidy
        from hpctrain.checkpoint.resume import choose_checkpoint
        from hpctrain.comm.watchdog.flight import FOLDER as FLIGHT
        from hpctrain.observe.lock import RunLock
        from hpctrain.observe.run_folder import RunFolder, default_run_folder, note_failure, refuse_missing_checkpoints

        self._world = world
        self._signals = signals or StopSignals()
        self.path: Path = world.broadcast_object(path or default_run_folder(job.name))
        with world.all_or_none():
            self._lock = RunLock(self.path) if world.rank == 0 else None
            if self._lock:
                tidy(self.path)
        # All continue from the same one, whatever their view of the file system.
        try:
            choice = choose_checkpoint(world, self.path, job.checkpoint.resume)
            self.checkpoint: Path | None = choice.checkpoint
            with world.all_or_none():
                if self._lock and choice.checkpoint is None:
                    refuse_missing_checkpoints(self.path)
            self._prepared = prepare_run(world, job, self.checkpoint, described, fresh_probe, self._signals)
        except HpctrainError:
            if self._lock:
                self._lock.release(is_done=False)
            raise
        self.job, self._described = self._prepared.job, self._prepared.described
        with world.all_or_none():
            if self._lock:
                note_failure(self.path, self.path / FLIGHT)
        world.keep_records(self.path / FLIGHT)

        from hpctrain.comm.accelerators.bind import bind_accelerator
        from hpctrain.engine.trainer import Trainer
        from hpctrain.observe.console import Console

        accelerator = bind_accelerator(world)
        self._console = Console(world.rank == 0, on_stderr, bar)
        self._folder = RunFolder(self.path, self._console.say)
        self._hear(choice.lines)
        self._observers = self._make_observers(accelerator)
        self._metrics = self._make_metrics()
        noting = None if self.job.plan else self._note_overflow
        self._trainer = Trainer(world, accelerator, self.job, self._prepared.plan, noting)
        if self.checkpoint:
            self._trainer.resume(self.checkpoint)
        else:
            self._trainer.initialise()
        refuse_if_interrupted(world, self._signals)
        self._introduce()

    def _make_observers(self, accelerator) -> "list[Observer]":
        from hpctrain.observe.prediction_check import PredictionTracker
        from hpctrain.observe.sample import StepSample
        from hpctrain.observe.spans import Observed, Observer, StepRecorder
        from hpctrain.observe.trace import RunTrace

        self._recorder, described = StepRecorder(accelerator), self._described
        self._world.configure(tracer=self._recorder)
        self._observed = Observed(self._world, accelerator, self._recorder, self._prepared.plan, self._folder)
        self._tracker = PredictionTracker(self._observed, self._prepared.prediction, described.name, described.doubt)
        self._overrun = None
        observers: list[Observer] = [StepSample(self._observed, lambda: self._steps_before + 1), self._tracker]
        if self.job.observe.trace:
            observers.insert(0, RunTrace(self._observed, self.job.observe.trace_steps))
        if described.is_rehearsed:
            from hpctrain.observe.overrun import OverrunWatch

            self._overrun = OverrunWatch(self._world, accelerator, self._leave_steps_out)
            observers.append(self._overrun)
        return observers

    def _make_metrics(self) -> "RunMetrics":
        from hpctrain.observe.exports import make_writers
        from hpctrain.observe.live import LiveMetrics
        from hpctrain.observe.metrics import RunMetrics

        with self._world.all_or_none():
            writers = make_writers(self.job, self.path) if self._lock else []
        self._live = LiveMetrics(self._folder, self._prepared.plan, writers)
        return RunMetrics(self._observed, self._live.take)

    def _introduce(self) -> None:
        from hpctrain.engine.routes import describe_routes
        from hpctrain.observe.metrics import Rates

        prepared, done = self._prepared, self._trainer.steps_done
        self._steps_before = done
        routes = describe_routes(self._world, self._trainer.layout)
        more = {"routes": routes, "rehearsal": self._described.scale}
        reasons = prepared.reasons | {key: reason for key, reason in more.items() if reason}
        with self._world.all_or_none():
            if self._lock:
                self._folder.describe(self.job, prepared.plan, reasons, self._described.cluster)
                damage = self._folder.rewind_metrics(done)
                self._families = keep_families(self.path, self.job, self._described)
                predicted = prepared.prediction
                mfu_seconds = predicted.mfu * predicted.step_seconds if predicted else None
                self._rates = Rates(mfu_seconds, sum_of_families(self._families))
                cluster, is_rehearsed = self._described.cluster, self._described.is_rehearsed
                what = reasons, cluster, is_rehearsed, prepared.prediction
                self._live.note_start(done, self.checkpoint, *what)
                what = self.job, prepared.plan, reasons, prepared.source, done, self.checkpoint, self.path
                self._console.start(*what)
                if damage:
                    self._console.say(damage)

    def train(self, stop_after: int | None = None) -> tuple[dict, EarlyEnd | None]:
        """Train to the job's last step, or to an earlier one.

        Returns what is known at the end (on rank 0; empty on others), and why it ended early, if it did.
        """
        trainer, prepared = self._trainer, self._prepared
        until = min(self.job.train.steps, stop_after or self.job.train.steps)
        if trainer.steps_done >= until:
            self._console.say(f"{self.path}: nothing to do, {trainer.steps_done} steps are done")
        last: dict = {}

        def report(metrics: "SavedMetrics") -> None:
            if self._lock:
                self._hear([self._lock.check()])
            last.clear()
            last.update(metrics)
            due = (metrics["step"] - 1) % self.job.observe.log_every == 0 or "validation_loss" in metrics
            if self._lock:
                self._rates.add_shares(metrics)
            if due:
                self._metrics.record(metrics)
            if self._overrun and (overrun := self._overrun.look(metrics["step"] == until)) is not None:
                metrics["overrun"] = overrun
            self._console.step(metrics, self._metrics.latest, until, due)
            if self._lock:
                self._note_findings(metrics["step"], jumps.look(metrics))
            self._hear(observer.step_is_done(metrics["step_seconds"]) for observer in self._observers)
            self._recorder.begin_step()

        from hpctrain.engine.saves import Saves
        from hpctrain.observe.anomalies import JumpWatch
        from hpctrain.observe.run_folder import CORRUPTION

        self._hear([self._tracker.start()])
        self._recorder.begin_step()
        is_first, jumps = self._world.rank == 0, JumpWatch(self.job.watch.jump)
        requests = Requests(self._signals, self.path if is_first else None, end_of_batch_job() if is_first else None)
        live = self._live if self._lock else None
        saves = Saves(
            trainer.saver(self.path, self._about()),
            self.job.checkpoint,
            self._console.say,
            self.checkpoint,
            begins=self._metrics.flush,  # what continues from it has the metrics of all its steps
            ends=live.note_save if live else lambda step, checkpoint, seconds: None,
        )
        try:
            ended = trainer.fit(prepared.training, prepared.validation, until, saves, report, requests)
        except CorruptionError as error:
            self._console.close_line()
            self._metrics.flush()
            if self._lock:
                self._folder.note(CORRUPTION, trainer.steps_done, str(error))
            raise
        self.checkpoint = saves.latest
        self._console.close_line()
        self._metrics.flush()
        self._hear(observer.finish() for observer in self._observers)
        overrun = trainer.overrun()
        summary = self._console.finish(last, self.path, self.checkpoint, prepared.source, ended and ended.by, overrun)
        if self._lock:
            self._lock.release()
        if self._world.rank == 0 and last and not ended:
            summary |= self._yardstick(last["tokens_per_second"])
        if self._lock:
            self._live.note_end(trainer.steps_done, self.job.train.steps, summary)
        return summary, ended

    def _note_findings(self, step: int, jumps: Sequence["Jump"]) -> None:
        """Say and note what was found in a step, and that output was lost; for rank 0."""
        from hpctrain.observe.run_folder import JUMP, LOST

        for jump in jumps:
            self._console.say(str(jump))
            self._folder.note(JUMP, text=str(jump), **jump._asdict())
        for text in take_losses():
            self._folder.note(LOST, step, text)

    def _leave_steps_out(self, why: str) -> None:
        """Take note that figures of the steps so far mean nothing."""
        self._tracker.forget()
        self._console.forget_speed()
        if self._lock:
            self._live.note_slower(why)

    def _note_overflow(self, needed_bytes: int) -> str:
        """Note what this rank's device would have needed, if its plan was predicted to fit; return what is said."""
        from hpctrain.comm.probe.machine import note_overflow
        from hpctrain.config.cluster import MemoryOverflow
        from hpctrain.planner.predictor import Predictor
        from hpctrain.planner.setup import Setup

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

    def _hear(self, lines: Iterable[str | None]) -> None:
        for text in lines:
            if text:
                self._console.say(text)

    def _about(self) -> dict[str, str]:
        from hpctrain.checkpoint.format import KEPT

        network = self._world.settings.network
        assert network is not None, "a prepared run has one"
        tokenizer = self._prepared.source.tokenizer_json or ""
        kept = {KEPT: self._world.on_first_rank(self._kept)}
        return kept | {
            "tokenizer": tokenizer,
            "data": self._prepared.data_identity,
            "cluster": dump_cluster(network.cluster),
        }

    def _kept(self) -> str:
        """Return what the checkpoint that the run began with keeps of a model of Hugging Face."""
        from hpctrain.checkpoint.folder import locate_checkpoint
        from hpctrain.checkpoint.format import KEPT
        from hpctrain.checkpoint.index import Index

        start = self.job.train.start_from
        begun = self.checkpoint or (locate_checkpoint(start) if start else None)
        if begun is None:
            return ""
        with Index(begun) as index:
            return index.about[KEPT]

    def _yardstick(self, tokens_per_second: float) -> dict:
        """Say what share of its families alone a mixed run is; return it as what the summary has of it."""
        if not self._families:
            return {}
        summary = yardstick(self._families, tokens_per_second)
        self._console.say(format_yardstick(summary))
        return {"yardstick": summary}

    def show_sample(self, num_tokens: int) -> None:
        """Say some text by the latest checkpoint, if its tokens are text; for one rank to call."""
        if not (self.checkpoint and self._prepared.source.tokenizer_json):
            return
        from hpctrain.engine.decode import Generator, Sampling
        from hpctrain.sharding.parameters import count_parameters

        if count_parameters(self.job.model) > LARGEST_SAMPLED_MODEL:
            try_this = f'hpctrain generate {self.checkpoint} --prompt "..."'
            self._console.say(f"no sample of a model this large; try: {try_this}")
        else:
            sampling = Sampling(seed=self.job.train.seed, ignores_end=True)
            text = Generator(self.checkpoint).text("", num_tokens, sampling)
            self._console.say(f"sample:\n{text}")
