"""One run of a job on all ranks: its folder, its trainer, and who watches its steps."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hpctrain.comm.launcher import end_of_batch_job
from hpctrain.comm.signals import StopSignals
from hpctrain.config.cluster import Cluster
from hpctrain.config.cluster_file import dump_cluster
from hpctrain.config.errors import HpctrainError, PlanError
from hpctrain.config.job import Job
from hpctrain.engine.facts import Described
from hpctrain.engine.requests import EarlyEnd, Requests, refuse_if_interrupted
from hpctrain.engine.resolve import prepare_run
from hpctrain.planner.cost import Setup
from hpctrain.planner.predictor import DATASHEET_ERROR
from hpctrain.planner.search import EVERY_PLAN, Limits, search
from hpctrain.planner.space import Space, even_space

if TYPE_CHECKING:
    from hpctrain.comm.world import World
    from hpctrain.observe.metrics import RunMetrics


LARGEST_SAMPLED_MODEL = 200_000_000  # parameters: the sample is made by one rank while the others wait


class Observer(Protocol):
    """Watches the steps of a run. All ranks call each method; rank 0 prints what they return."""

    def step_is_done(self, seconds: float) -> str | None:
        """Take note of a step and its seconds, in a rehearsal those of the pretended devices."""

    def finish(self) -> str | None:
        """End, after the last step. Raises TrainingError where something cannot be written."""


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
        from hpctrain.checkpoint.choose import choose_checkpoint
        from hpctrain.checkpoint.folder import tidy
        from hpctrain.comm.watchdog.flight import FOLDER as FLIGHT
        from hpctrain.observe.lock import RunLock
        from hpctrain.observe.run import RunFolder, default_run_folder, note_failure, refuse_missing_checkpoints

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
            self._folder = RunFolder(self.path) if world.rank == 0 else None
            if self._folder:
                note_failure(self.path, self.path / FLIGHT)
        world.keep_records(self.path / FLIGHT)

        from hpctrain.comm.accelerators.bind import bind_accelerator
        from hpctrain.engine.trainer import Trainer
        from hpctrain.observe.console import Console

        accelerator = bind_accelerator(world)
        self._console = Console(world.rank == 0, on_stderr, bar)
        self._hear(choice.lines)
        self._observers = self._make_observers(accelerator)
        self._metrics = self._make_metrics(accelerator)
        self._trainer = Trainer(world, accelerator, self.job, self._prepared.plan)
        if self.checkpoint:
            self._trainer.resume(self.checkpoint)
        else:
            self._trainer.initialise()
        refuse_if_interrupted(world, self._signals)
        self._introduce()

    def _make_observers(self, accelerator) -> list[Observer]:
        from hpctrain.observe.drift import Expectation
        from hpctrain.observe.recorder import StepRecorder
        from hpctrain.observe.sample import StepSample
        from hpctrain.observe.trace import RunTrace

        self._recorder = StepRecorder(accelerator)
        self._world.configure(tracer=self._recorder)
        seen, plan = (self._world, accelerator, self._recorder), self._prepared.plan
        made: list[Observer] = []
        if self.job.observe.trace:
            made.append(RunTrace(*seen, self.path, self.job.observe.trace_steps))
        made.append(StepSample(*seen, plan, self.path, lambda: self._steps_before + 1))
        what = self._prepared.prediction, plan, self._described.name, self.path
        self._expectation = Expectation(*seen, *what)
        return [*made, self._expectation]

    def _make_metrics(self, accelerator) -> "RunMetrics":
        from hpctrain.observe.exports import make_writers
        from hpctrain.observe.live import LiveMetrics
        from hpctrain.observe.metrics import RunMetrics

        world, plan = self._world, self._prepared.plan
        used = [rank for tile in plan.first_tiles for rank in tile.ranks]
        with world.all_or_none():
            writers = make_writers(self.job, self.path) if self._folder else []
        self._live = LiveMetrics(self.path, plan, writers)
        return RunMetrics(world, accelerator, self._recorder, used, self._live.take)

    def _introduce(self) -> None:
        from hpctrain.observe.metrics import Rates

        prepared, done = self._prepared, self._trainer.steps_done
        self._steps_before = done
        with self._world.all_or_none():
            if self._folder:
                self._folder.describe(self.job, prepared.plan, prepared.reasons, self._described.cluster)
                damage = self._folder.rewind_metrics(done)
                self._families = predict_families(self.job, self._described)
                predicted = prepared.prediction
                mfu_seconds = predicted.mfu * predicted.step_seconds if predicted else None
                self._rates = Rates(mfu_seconds, sum_of_families(self._families))
                cluster, is_rehearsed = self._described.cluster, self._described.is_rehearsed
                what = prepared.reasons, cluster, is_rehearsed, prepared.prediction
                self._live.note_start(done, self.checkpoint, *what)
                what = self.job, prepared.plan, prepared.reasons, prepared.source, done, self.checkpoint, self.path
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

        def report(metrics: dict) -> None:
            if self._lock:
                self._hear([self._lock.check()])
            last.clear()
            last.update(metrics)
            due = (metrics["step"] - 1) % self.job.observe.log_every == 0 or "validation_loss" in metrics
            if self._folder:
                metrics |= self._rates.of_step(metrics["step_seconds"], metrics["tokens_per_second"])
            if due:
                self._metrics.record(metrics)
            self._console.step(metrics, self._metrics.latest, until, due)
            self._hear(observer.step_is_done(metrics["step_seconds"]) for observer in self._observers)
            self._recorder.begin_step()

        self._hear([self._expectation.start()])
        self._recorder.begin_step()
        is_first = self._world.rank == 0
        requests = Requests(self._signals, self.path if is_first else None, end_of_batch_job() if is_first else None)
        from hpctrain.engine.saves import Saves

        live = self._live if self._folder else None
        saves = Saves(
            trainer.saver(self.path, self._about()),
            self.job.checkpoint,
            self._console.say,
            self.checkpoint,
            begins=self._metrics.flush,  # what continues from it has the metrics of all its steps
            ends=live.note_save if live else lambda step, checkpoint, seconds: None,
        )
        ended = trainer.fit(prepared.training, prepared.validation, until, saves, report, requests)
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
        if self._folder:
            self._live.note_end(trainer.steps_done, self.job.train.steps, summary)
        return summary, ended

    def _hear(self, lines: Iterable[str | None]) -> None:
        for text in lines:
            if text:
                self._console.say(text)

    def _about(self) -> dict[str, str]:
        from hpctrain.checkpoint.format import KEPT

        network = self._world.preferences.network
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
        lines = self._families and yardstick(self.job, self._described, tokens_per_second, self._families)
        if not lines:
            return {}
        self._console.say(format_yardstick(lines, self._described))
        return {"yardstick": lines}

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


def predict_families(job: Job, described: Described) -> dict | None:
    """Return the tokens/s that families are predicted to do alone (None: cannot hold the model), and those of the job
    cut evenly; None where there is one family. `job` is resolved."""
    cluster, limits = described.cluster, EVERY_PLAN if described.is_rehearsed else Limits()
    families = list(dict.fromkeys(device.family for device in cluster.devices))
    if len(families) < 2:
        return None
    predicted: dict = {"predicted_alone": {name: _predicted(job, cluster, [name], limits) for name in families}}
    if even := _predicted(job, cluster, families, limits, even_space()):
        predicted["predicted_even"] = even
    return predicted


def sum_of_families(predicted: dict | None) -> float | None:
    """Return the tokens/s of all families alone, together; None where there is one, or one cannot hold the model."""
    speeds = list(predicted["predicted_alone"].values()) if predicted else []
    return sum(speeds) if speeds and all(speeds) else None


def yardstick(job: Job, described: Described, tokens_per_second: float, predicted: dict | None = None) -> dict | None:
    """Return the tokens/s that families are predicted to do alone, and a run's ratios to their sum, to the best of them
    and to the job cut evenly; None where there is one family. `job` is resolved.

    `predicted` is of `predict_families`, where that is known. No ratio where a family alone cannot hold the model
    (`no_ratio` says which).
    """
    summary = dict(predicted or predict_families(job, described) or {})
    if not summary:
        return None
    if even := summary.get("predicted_even"):
        summary["speedup_over_even"] = tokens_per_second / even
    alone = summary["predicted_alone"]
    if without := [family for family, speed in alone.items() if speed is None]:
        return summary | {"no_ratio": f"{', '.join(without)} alone cannot hold the model"}
    ratios = {
        "fraction_of_sum": tokens_per_second / sum(alone.values()),
        "speedup_over_best_family": tokens_per_second / max(alone.values()),
    }
    return summary | ratios


def _predicted(
    job: Job, cluster: Cluster, families: Sequence[str], limits: Limits, space: Space | None = None
) -> float | None:
    """Return the tokens/s of the best plan on some families; None where no plan fits."""
    try:
        result = search(Setup.of_job(job), job.train.global_batch, cluster, families, space, limits)
    except PlanError:
        return None
    return result.best.prediction.tokens_per_second


def format_yardstick(summary: dict, described: Described) -> str:
    """Say it in a sentence or two."""
    speeds = ", ".join(f"{family} {speed:,.0f}" for family, speed in summary["predicted_alone"].items() if speed)
    if "no_ratio" in summary:
        ratio = f"no ratio: {summary['no_ratio']}"
    else:
        ratio = (
            f"this run is {summary['fraction_of_sum']:.2f} of their sum,"
            f" {summary['speedup_over_best_family']:.2f} times the best of them"
        )
    cut = (
        f"{summary['speedup_over_even']:.2f} times the job cut evenly"
        if "speedup_over_even" in summary
        else "cut evenly the job does not fit"
    )
    measured = f"; measured by `hpctrain bench mixed {described.name}`" if described.is_rehearsed else ""
    return (
        f"yardstick: families alone, each by its best plan, are predicted to do {speeds} tokens/s"
        f" (within {DATASHEET_ERROR:.0%}); {ratio}, {cut}{measured}"
    )
