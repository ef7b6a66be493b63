"""Curves over steps: loss and throughput of one or several runs."""

import math
from collections.abc import Sequence

from hpctrain.observe.report.record import RunRecord
from hpctrain.observe.report.svg import (
    PixelScale,
    Svg,
    axis_x,
    axis_y,
    clip,
    legend,
    legend_height,
    show_count,
    text_width,
)
from hpctrain.observe.run import START, STRAGGLER

HEIGHT, TOP, BOTTOM, LEFT = 250, 34, 40, 58
MOST_POINTS = 600
"""Of one curve: more than there are pixels."""
MOST_MARKS = 60
"""Validations of one run; of more every second one is shown, or every third, and so on."""


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most `MOST_POINTS` of the points: of each stretch of steps the lowest and the highest, in order."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = -(-len(points) // (MOST_POINTS // 2 - 1))
    kept = [points[0]]
    for first in range(1, len(points) - 1, size):
        part = points[first : min(first + size, len(points) - 1)]
        least, most = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])
        kept += sorted({least, most})
    return [*kept, points[-1]]


def loss_curve(runs: Sequence[RunRecord], width: int) -> Svg | None:
    """Draw training and validation losses by step; None where no step was logged."""
    return _curve(runs, width, "loss", "loss (nats)", "loss by step", "training")


def speed_curve(runs: Sequence[RunRecord], width: int) -> Svg | None:
    """Draw the throughput of each step, with what each start predicted; None where no step was logged."""
    return _curve(runs, width, "tokens_per_second", "tokens/s", "tokens per second by step", "measured")


def _curve(runs: Sequence[RunRecord], width: int, key: str, title: str, label: str, only: str) -> Svg | None:
    """Draw one key of the metrics; `only` is what a single curve is called."""
    dots = "validation_loss" if key == "loss" else ""
    curves = [_points(run, key) for run in runs]
    values = [value for curve in curves for _, value in curve]
    if not values:
        return None
    marks = [_points(run, dots) if dots else [] for run in runs]
    predicted = [_predictions(run) if key == "tokens_per_second" else [] for run in runs]
    values += [value for of_run in marks for _, value in of_run] + [v for each in predicted for _, _, v in each]
    steps = [step for curve in curves for step, _ in curve]
    names = [run.name for run in runs] if len(runs) > 1 else [only]
    entries = [(f"f{number % 8}", clip(name, width - 40)) for number, name in enumerate(names)]
    entries += [("dot", "validation")] if any(marks) else []
    entries += [("dashkey", "predicted by its start")] if any(predicted) else []
    head = 4 + legend_height(width - 8, entries)
    low = min(values) if key == "loss" else 0.0
    high = max(values)
    pad = 0.06 * (high - low or abs(high) or 1)
    x = PixelScale(min(steps) - (min(steps) == max(steps)), max(steps), LEFT, width - 14)
    y = PixelScale(low - pad if key == "loss" else 0.0, high + pad, HEIGHT + head - BOTTOM, head + TOP)
    svg = Svg(width, HEIGHT + head, label, data_x=x, data_y=y)
    legend(svg, 8, 2, width - 8, entries)
    axis_x(svg, x, y.start, y.stop, lambda step: f"{step:,.0f}" if step == int(step) else "", "step")
    axis_y(svg, y, LEFT, width - 14, show_count, title)
    for number, run in enumerate(runs):
        source = f"{run.name}/metrics.jsonl"
        _mark_events(svg, run, x, y)
        for first, last, value in predicted[number]:
            ends = (x(max(first, x.low)), y(value)), (x(min(last, x.high)), y(value))
            svg.polyline(ends, f"curve dash s{number % 8}", data_from=f"{run.name}/events.jsonl:predicted_seconds")
        points = [(x(step), y(value)) for step, value in thinned(curves[number])]
        wide = "curve wide-stroke" if len(runs) > 1 and not number else "curve"  # seen below an equal one
        svg.polyline(points, f"{wide} s{number % 8}", data_from=f"{source}:{key}")
        if len(points) == 1:
            svg.circle(*points[0], 3, f"f{number % 8}")
        for step, value in marks[number][:: -(-len(marks[number]) // MOST_MARKS) or 1]:
            svg.circle(
                x(step), y(value), 3.5, f"dot s{number % 8}", f"step {step}: {value:.4f}", data_from=f"{source}:{dots}"
            )
    return svg


def _mark_events(svg: Svg, run: RunRecord, x: PixelScale, y: PixelScale) -> None:
    """Draw a line for each start after the first and each straggler, with what it is above it, where there is space."""
    free = LEFT + 40.0  # the axis is named there
    for event in run.events:
        kind, at = event["event"], x(event["step"])
        if kind not in (START, STRAGGLER) or not x.low < event["step"] <= x.high:
            continue
        svg.line(at, y.stop - 4, at, y.start, "restart" if kind == START else "straggler")
        again = f"planned again, {event.get('ranks', 0):,} ranks" if event.get("planned_again") else "started again"
        text = again if kind == START else f"rank {event.get('rank', '?')} slow"
        left = min(at, x.stop - text_width(text))
        if left >= free:
            svg.text(left, y.stop - 8, text, "tick" if kind == START else "bad")
            free = left + text_width(text) + 6


def _points(run: RunRecord, key: str) -> list[tuple[int, float]]:
    return [(line["step"], line[key]) for line in run.metrics if math.isfinite(line.get(key, math.nan))]


def _predictions(run: RunRecord) -> list[tuple[float, float, float]]:
    """Return for each start its first step, its last one, and the tokens per second that it expected of each."""
    starts = [event for event in run.events if event["event"] == START and event.get("predicted_seconds")]
    last = run.metrics[-1]
    tokens = last["tokens_per_second"] * last["step_seconds"]
    ends = [event["step"] for event in starts[1:]] + [last["step"]]
    return [
        (start["step"] + 1, end, tokens / start["predicted_seconds"])
        for start, end in zip(starts, ends, strict=False)
        if end > start["step"]
    ]


def label_width(labels: Sequence[str], width: float) -> float:
    """Return how much of a width labels on the left take, at most a third."""
    return min(max((text_width(label) for label in labels), default=0) + 10, width / 3)
