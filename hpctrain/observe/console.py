"""Prints a run for people: its choices, its progress, and where everything is at the end."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from hpctrain.config.job import Job, Model
from hpctrain.config.terminal import drawing, printable
from hpctrain.observe.folder.run_folder import RESOLVED
from hpctrain.observe.folder.schema import SavedFigures, SavedMetrics, SavedSlowest
from hpctrain.observe.overrun import QUOTED_OVERRUN, UNTRUSTED_OVERRUN
from hpctrain.plan.tiling import Plan, counted
from hpctrain.sharding.parameters import count_parameters

SHOWN = {
    "of an older version": "of an older version",
    "changed": "changed",
    "planned again": "planned again",
    "before": "before",
    "machine": "machine",
    "cores": "cores",
    "experts": "experts",
    "routes": "routes",
    "messages between families": "messages between families",
    "profile": "profile",
    "overflows": "memory",
    "train.dtype": "dtype",
    "plan": "search",
    "runner-up": "runner-up",
    "prediction": "prediction",
}
"""The choices whose reasons a start shows, and what it calls them; the others are in the run folder."""
SMOOTHING = 0.9
"""The weight of earlier steps in the moving averages of seconds and speeds."""
GAP = "  "


def describe_overrun(overrun: float) -> str:
    """Say what times of a rehearsal are worth, given the share of time by which its ranks were late."""
    if overrun > UNTRUSTED_OVERRUN:
        return "not to be trusted: this machine is too slow for it, or busy; raise --time-scale"
    return "good for ratios" if overrun <= QUOTED_OVERRUN else "too much for ratios to be quoted"


def describe_model(model: Model) -> str:
    """Say in half a line which model is trained."""
    million = count_parameters(model) / 1e6
    layers = counted(model.num_layers, "layer")
    return f"{model.architecture}, {layers} x {model.hidden_size} hidden, {million:,.1f} M parameters"


class Console:
    """Prints on one rank; on all others every method does nothing."""

    def __init__(self, speaks: bool, on_stderr: bool = False, bar: bool | None = None):
        """`bar` says whether one line is kept up to date; None: where this process has a terminal, which mpirun
        hides."""
        self._speaks = speaks
        file = drawing(sys.stderr if on_stderr else sys.stdout)
        self._rich = RichConsole(file=file, highlight=False, markup=False, force_terminal=bar)
        self._live: Live | None = None
        self._smooth_speed = self._smooth_seconds = 0.0
        self._since: float | None = None
        self._num_steps = 0

    def say(self, text: str) -> None:
        text = printable(text)
        if self._speaks and self._rich.is_terminal:
            self._rich.print(text)
        elif self._speaks:
            print(text, file=self._rich.file, flush=True)  # files keep whole lines

    def start(
        self, job: Job, plan: Plan, reasons: dict[str, str], source, steps_done: int, checkpoint, run: Path
    ) -> None:
        """Print what is trained, the main choices, and what it continues from."""
        self.say(f"{job.name}: {describe_model(job.model)}, on {source.num_tokens / 1e6:.1f} M tokens")
        self.say(f"plan: {plan.describe()}; {counted(len(plan.ranks), 'rank')}, {job.train.dtype}")
        for key, label in SHOWN.items():
            if key in reasons:
                self.say(f"{label}: {reasons[key]}")
        self.say(f"every choice and its reason: {run / RESOLVED}")
        if checkpoint:
            self.say(f"continuing after step {steps_done}, from {checkpoint}")

    def step(self, metrics: SavedMetrics, ranks: SavedFigures, until: int, is_logged: bool = True) -> None:
        """Show one step's metrics; a file gets a line of those that are logged.

        `ranks` are the metrics of the latest step of which the figures of all ranks are there.
        """
        if not self._speaks:
            return
        self._num_steps += 1
        if self._num_steps == 2:
            self._smooth_speed = 0.0  # the first step compiles, and creates what later ones reuse
        self._smooth_speed = _smooth(self._smooth_speed, metrics["tokens_per_second"])
        now = time.monotonic()
        if self._since is not None:  # the time of a first step is not known: it begins before the console is asked
            self._smooth_seconds = _smooth(self._smooth_seconds, now - self._since)
        self._since = now
        left = (until - metrics["step"]) * self._smooth_seconds
        parts = progress_parts(metrics, ranks, until, self._smooth_speed, left)
        if self._rich.is_terminal:
            if "validation_loss" in metrics:
                self.say(GAP.join([f"step {metrics['step']}", *parts[1:3]]))
            if self._live is None:
                self._live = Live(console=self._rich, auto_refresh=False)
                self._live.start()
            lines = "\n".join(wrap(parts, self._rich.width - 1))
            self._live.update(Text(lines, no_wrap=True, overflow="crop"), refresh=True)
        elif is_logged or metrics["step"] == until:
            self.say(GAP.join(parts))

    def forget_speed(self) -> None:
        """Start the moving averages of seconds and speeds anew, with what follows the next step."""
        self._smooth_speed = self._smooth_seconds = 0.0
        self._num_steps, self._since = 0, None

    def close_line(self) -> None:
        """End the line that is kept up to date, so that others can be printed after it."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def finish(
        self, last: dict, path, checkpoint, source, stopped_by: str | None, overrun: float | None = None
    ) -> dict:
        """Say how it ended and where things are; return the same as a plain dictionary.

        `overrun` is that of a rehearsal.
        """
        if not self._speaks:
            return {}
        self.close_line()
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
            self.say(f"rehearsed: times are the pretended devices'; overrun {overrun:.1%}, {describe_overrun(overrun)}")
        if stopped_by:
            self.say(f"stopped by {stopped_by}; start the same command with --run {path} to continue")
        if last:
            self.say(f"{describe_loss(last)} after {counted(last['step'], 'step')}, {self._smooth_speed:,.0f} tokens/s")
        if "validation_loss" in last:
            share = last["validation_loss"] / entropy - 1
            self.say(
                f"validation loss {last['validation_loss']:.4f} nats, {share:+.0%} against the corpus's unigram"
                f" entropy of {entropy:.4f}"
            )
        self.say(f"run folder {path}\ncheckpoint {checkpoint}")
        return summary


def progress_parts(
    metrics: SavedMetrics, ranks: SavedFigures, until: int, tokens_per_second: float, seconds_left: float
) -> list[str]:
    """Return the parts of a line of progress, the most important ones first."""
    parts = [f"step {metrics['step']}/{until}", describe_loss(metrics)]
    if "validation_loss" in metrics:
        parts.append(f"validation loss {metrics['validation_loss']:.4f}")
    parts.append(f"{tokens_per_second:,.0f} tokens/s")
    if seconds_left:
        parts.append(f"{format_duration(seconds_left)} left")
    if "overrun" in metrics:
        parts.append(f"overrun {metrics['overrun']:.1%}")
    if "expert_load" in metrics:
        parts.append(f"expert load {metrics['expert_load']:.2f}")
    if "balance_loss" in metrics:
        parts.append(f"balance loss {metrics['balance_loss']:.4f}")
    if "fraction_of_sum" in metrics:
        parts.append(f"{metrics['fraction_of_sum']:.2f} of the families' sum")
    elif "mfu" in metrics:
        parts.append(f"MFU {metrics['mfu']:.1%}")
    if fullest := ranks.get("memory_share"):
        parts.append(f"memory {fullest['max']:.0%} (rank {fullest['max_rank']})")
    if slowest := ranks.get("slowest"):
        parts.append(f"slowest rank {slowest['rank']}: {describe_slowest(slowest)}")
    return parts


def describe_loss(metrics: Mapping) -> str:
    """Return the loss of a step, or that it had no token to learn."""
    return f"loss {metrics['loss']:.4f}" if "loss" in metrics else "no targets: all tokens are of prompts"


def describe_slowest(slowest: SavedSlowest) -> str:
    """Return what the slowest rank did for most of a step, such as `computing 80%`."""
    own, waiting = slowest["computing_seconds"], slowest["waiting_seconds"]
    total = own + waiting
    if own >= waiting:
        return f"computing {own / total:.0%}" if total else "idle"
    return f"waiting {waiting / total:.0%} ({slowest['waits_for']})"


def format_duration(seconds: float) -> str:
    """Return seconds as `12 s`, `3 min` or `1:05 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60:,}:{minutes % 60:02} h"


def wrap(parts: Sequence[str], width: float, gap: str = GAP, size: Callable[[str], float] = len) -> list[str]:
    """Return lines of whole parts, none wider than `width` by `size` unless a single part is."""
    lines = [parts[0]]
    for part in parts[1:]:
        joined = lines[-1] + gap + part
        if size(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(part)
    return lines


def _smooth(mean: float, value: float) -> float:
    return SMOOTHING * mean + (1 - SMOOTHING) * value if mean else value
