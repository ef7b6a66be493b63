"""Curves over steps: loss and throughput of one or several runs."""

import math
from collections.abc import Sequence

from markupsafe import Markup

from hpctrain.observe.folder.run_folder import LEG, START, STRAGGLER
from hpctrain.observe.folder.schema import DRIFT, EVENTS, METRICS
from hpctrain.observe.report.record import RunRecord
from hpctrain.observe.report.svg import (
    Panel,
    PixelScale,
    Svg,
    clip,
    show_count,
    show_seconds,
    show_whole,
    sourced,
    text_width,
)
from hpctrain.plan.tiling import counted

LEFT, HEIGHT = 58, 176
MAX_POINTS = 600
"""Points of one curve, about one for each pixel."""
MAX_MARKS = 60
"""Marks for the validations of one run; of more every second one is shown, or every third, and so on."""


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most `MAX_POINTS` of the points: of each stretch of steps the lowest and the highest, in order."""
    if len(points) <= MAX_POINTS:
        return list(points)
    size = -(-len(points) // (MAX_POINTS // 2 - 1))
    kept = [points[0]]
    for first in range(1, len(points) - 1, size):
        part = points[first : min(first + size, len(points) - 1)]
        least, most = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])
        kept += sorted({least, most})
    return [*kept, points[-1]]


def loss_panel(runs: Sequence[RunRecord]) -> Panel:
    """Return training and validation losses by step."""
    run, title = runs[0], "Losses of the runs, by step"
    losses = [line["loss"] for line in run.metrics if "loss" in line]
    if len(runs) == 1 and losses:
        first, last = losses[0], losses[-1]
        shown = [sourced(loss, f"{loss:.3f}", f"{run.name}/{METRICS.name}:loss") for loss in (first, last)]
        fell = "fell" if last < first else "did not fall: it went"
        title = Markup("The loss {} from {} to {} nats").format(fell, *shown)
    elif not any(run.metrics for run in runs):
        title = "No step was logged"
    return Panel(title, lambda width: draw_curves(runs, width, "loss", "loss (nats)", "training"))


def speed_panel(runs: Sequence[RunRecord]) -> Panel:
    """Return the throughput of each step, with what each start predicted."""
    run, title = runs[0], "Tokens per second, by step"
    if len(runs) == 1 and run.drift:
        seconds = [("measured_seconds",), ("interval_seconds", 0), ("interval_seconds", 1)]
        shown = [run.figure(show_seconds, DRIFT.name, *keys) for keys in seconds]
        title = Markup("A step takes {}, and was predicted to take {} to {}").format(*shown)
    note = "The first step of a start also allocates memory, and takes longer."
    return Panel(title, lambda width: draw_curves(runs, width, "tokens_per_second", "tokens/s", "measured"), note)


def draw_curves(runs: Sequence[RunRecord], width: int, key: str, title: str, single_name: str) -> Svg | None:
    """Draw one key of the metrics; `single_name` is that of a single curve. Return None where no step was logged."""
    is_loss = key == "loss"
    curves = [_points(run, key) for run in runs]
    values = [value for curve in curves for _, value in curve]
    if not values:
        return None
    marks = [_points(run, "validation_loss") if is_loss else [] for run in runs]
    predicted = [_predictions(run) if key == "tokens_per_second" else [] for run in runs]
    values += [value for points in marks for _, value in points]
    values += [value for spans in predicted for _, _, value in spans]
    steps = [step for curve in curves for step, _ in curve]
    names = [run.name for run in runs] if len(runs) > 1 else [single_name]
    entries = [(f"f{number % 8}", clip(name, width - 40)) for number, name in enumerate(names)]
    entries += [("dot", "validation")] if any(marks) else []
    entries += [("dashkey", "predicted by its start")] if any(predicted) else []
    low, high = min(values) if is_loss else 0.0, max(values)
    pad = 0.06 * (high - low or abs(high) or 1)
    svg = Svg(width, f"{title} by step", entries, gap=38)
    x = svg.axis_x((min(steps) - (min(steps) == max(steps)), max(steps)), LEFT, HEIGHT, show_whole, "step")
    y = svg.axis_y((low - pad * is_loss, high + pad), LEFT, HEIGHT, show_count, title)
    for colour, run in enumerate(runs):
        _mark_events(svg, run, x, y)
        for first, last, value in predicted[colour]:
            ends = (x(max(first, x.low)), y(value)), (x(min(last, x.high)), y(value))
            source = f"{run.name}/{EVENTS.name}:predicted_seconds"
            svg.polyline(ends, f"curve dash s{colour % 8}", data_from=source)
        points = [(x(step), y(value)) for step, value in thinned(curves[colour])]
        wide = "curve wide-stroke" if len(runs) > 1 and not colour else "curve"  # seen below an equal one
        source = f"{run.name}/{METRICS.name}"
        svg.polyline(points, f"{wide} s{colour % 8}", data_from=f"{source}:{key}")
        if len(points) == 1:
            svg.circle(*points[0], 3, f"f{colour % 8}")
        for step, value in marks[colour][:: -(-len(marks[colour]) // MAX_MARKS) or 1]:
            text, source = f"step {step}: {value:.4f}", f"{run.name}/{METRICS.name}:validation_loss"
            svg.circle(x(step), y(value), 3.5, f"dot s{colour % 8}", text, data_from=source)
    return svg


def _mark_events(svg: Svg, run: RunRecord, x: PixelScale, y: PixelScale) -> None:
    """Draw a line for each start after the first, each leg and each straggler, named above it where there is space."""
    free = LEFT + 40.0  # the axis is named there
    for event in run.events:
        kind, at = event["event"], x(event["step"])
        if kind not in (START, LEG, STRAGGLER) or not x.low < event["step"] <= x.high:
            continue
        svg.line(at, y.stop - 4, at, y.start, "straggler" if kind == STRAGGLER else "restart")
        text = f"rank {event.get('rank', '?')} slow"
        if kind == LEG:
            text = f"leg {event.get('number', '?')}, {counted(event.get('ranks', 0), 'rank')}"
        if kind == START:
            is_new_plan = event.get("planned_again")
            text = f"planned again, {counted(event.get('ranks', 0), 'rank')}" if is_new_plan else "started again"
        left = min(at, x.stop - text_width(text))
        if left >= free:
            svg.text(left, y.stop - 8, text, "bad" if kind == STRAGGLER else "tick")
            free = left + text_width(text) + 6


def _points(run: RunRecord, key: str) -> list[tuple[int, float]]:
    return [(line["step"], line[key]) for line in run.metrics if math.isfinite(line.get(key, math.nan))]


def _predictions(run: RunRecord) -> list[tuple[float, float, float]]:
    """Return for each start and leg its first step, its last one, and the tokens per second that it expected."""
    starts = [
        (event["step"], seconds)
        for event in run.events
        if event["event"] in (START, LEG) and (seconds := event.get("predicted_seconds"))
    ]
    last = run.metrics[-1]
    tokens = last["tokens_per_second"] * last["step_seconds"]
    ends = [step for step, _ in starts[1:]] + [last["step"]]
    return [(step + 1, end, tokens / seconds) for (step, seconds), end in zip(starts, ends, strict=False) if end > step]
