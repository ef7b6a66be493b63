"""What a run shows a person: its choices, a progress bar, and where everything is at the end."""

import sys
from pathlib import Path

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hpctrain.config.job import Job
from hpctrain.observe.run import RESOLVED
from hpctrain.plan.tiling import Plan
from hpctrain.sharding.parameters import count_parameters

# Of a rehearsal: up to the first its ratios are quoted, beyond the second it means nothing.
QUOTED_OVERRUN, UNTRUSTED_OVERRUN = 0.01, 0.05
SHOWN = {
    "planned again": "planned again",
    "before": "before",
    "machine": "machine",
    "train.dtype": "dtype",
    "plan": "search",
    "runner-up": "runner-up",
    "prediction": "prediction",
}
"""The choices whose reasons a start shows, and what it calls them; the others are in the run folder."""
PLAIN_LINES = 20  # without a terminal: that many lines of progress in a run


def trust(overrun: float) -> str:
    """Say what a rehearsal's times are worth, of which ranks were late by a share."""
    if overrun > UNTRUSTED_OVERRUN:
        return "not to be trusted: this machine is too slow for it, or busy; raise truth.time_scale"
    return "good for ratios" if overrun <= QUOTED_OVERRUN else "too much for ratios to be quoted"


class Console:
    """Prints on one rank; on all others every method does nothing."""

    def __init__(self, speaks: bool, on_stderr: bool = False, bar: bool | None = None):
        """`bar`: whether to draw a progress bar; None: if this process has a terminal, which mpirun hides from it."""
        self._speaks = speaks
        file = sys.stderr if on_stderr else sys.stdout
        self._rich = RichConsole(file=file, highlight=False, markup=False, force_terminal=bar)
        self._progress: Progress | None = None
        self._smooth_speed = 0.0

    def say(self, text: str) -> None:
        if self._speaks:
            self._rich.print(text, soft_wrap=not self._rich.is_terminal)  # files keep whole lines

    def start(
        self, job: Job, plan: Plan, reasons: dict[str, str], source, steps_done: int, checkpoint, run: Path
    ) -> None:
        """Print what is trained, the main choices, and what it continues from."""
        model = job.model
        self.say(
            f"{job.name}: {model.architecture} {model.num_layers} layers x {model.hidden_size} hidden,"
            f" {count_parameters(model) / 1e6:.1f} M parameters, on {source.num_tokens / 1e6:.1f} M tokens"
        )
        self.say(f"plan: {plan.describe()}; {len(plan.ranks)} ranks, {job.train.dtype}")
        for key, label in SHOWN.items():
            if key in reasons:
                self.say(f"{label}: {reasons[key]}")
        self.say(f"every choice and its reason: {run / RESOLVED}")
        if checkpoint:
            self.say(f"continuing after step {steps_done}, from {checkpoint}")

    def step(self, metrics: dict, until: int) -> None:
        """Show one step's metrics."""
        if not self._speaks:
            return
        done = metrics["step"]
        speed = metrics["tokens_per_second"]
        self._smooth_speed = speed if not self._smooth_speed else 0.9 * self._smooth_speed + 0.1 * speed
        text = f"loss {metrics['loss']:.4f}  {self._smooth_speed:,.0f} tokens/s"
        if "validation_loss" in metrics:
            text += f"  validation loss {metrics['validation_loss']:.4f}"
        if self._rich.is_terminal:
            self._bar(done, until, text)
            if "validation_loss" in metrics:
                self.say(f"step {done}: {text}")
        elif "validation_loss" in metrics or done == until or done % max(1, until // PLAIN_LINES) == 0:
            self.say(f"step {done}/{until}  {text}")

    def _bar(self, done: int, until: int, text: str) -> None:
        if self._progress is None:
            columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._progress = Progress(*columns, console=self._rich, auto_refresh=False)
            self._progress.start()
            self._progress.add_task(text, total=until)
        self._progress.update(self._progress.task_ids[0], completed=done, description=text, refresh=True)

    def finish(
        self, last: dict, path, checkpoint, source, stopped_by: str | None, overrun: float | None = None
    ) -> dict:
        """Say how it ended and where things are; return the same as a plain dictionary.

        `overrun` is that of a rehearsal.
        """
        if not self._speaks:
            return {}
        if self._progress:
            self._progress.stop()
        entropy = source.unigram_entropy()
        summary = {
            "run": str(path),
            "checkpoint": str(checkpoint) if checkpoint else None,
            "stopped_by": stopped_by,
            "unigram_entropy": entropy,
            **last,
        }
        if overrun is not None:
            summary["overrun"] = overrun
            self.say(f"rehearsed: times are the pretended devices'; overrun {overrun:.1%}, {trust(overrun)}")
        if stopped_by:
            self.say(f"stopped by {stopped_by}; start the same command with --run {path} to go on")
        if last:
            self.say(f"loss {last['loss']:.4f} after {last['step']} steps, {self._smooth_speed:,.0f} tokens/s")
        if "validation_loss" in last:
            share = last["validation_loss"] / entropy - 1
            self.say(
                f"validation loss {last['validation_loss']:.4f} nats, {share:+.0%} against the corpus's unigram"
                f" entropy of {entropy:.4f}"
            )
        self.say(f"run folder {path}\ncheckpoint {checkpoint}")
        return summary
