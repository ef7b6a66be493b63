"""Curves over steps: loss and step time of one or several runs."""

from collections.abc import Callable, Sequence

from hpctrain.observe.events import START
from hpctrain.observe.report.record import RunRecord
from hpctrain.observe.report.svg import (
    PixelScale,
    Svg,
    axis_x,
    axis_y,
    clip,
    legend,
    show_count,
    show_seconds,
    text_width,
)

HEIGHT, TOP, BOTTOM, LEFT = 250, 34, 40, 58
MOST_POINTS = 600
"""Of one curve: more than there are pixels."""


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
    return _curve(runs, width, "loss", "loss (nats)", "training loss by step", show_count, dots="validation_loss")


def speed_curve(runs: Sequence[RunRecord], width: int) -> Svg | None:
    """Draw the seconds of each step, with those that were predicted; None where no step was logged."""
    return _curve(runs, width, "step_seconds", "seconds of a step", "seconds of each step", show_seconds)


def _curve(
    runs: Sequence[RunRecord],
    width: int,
    key: str,
    title: str,
    label: str,
    show: Callable[[float], str],
    dots: str = "",
) -> Svg | None:
    curves = [[(line["step"], line[key]) for line in run.metrics if key in line] for run in runs]
    values = [value for curve in curves for _, value in curve]
    if not values:
        return None
    marks = [[(line["step"], line[dots]) for line in run.metrics if dots in line] for run in runs]
    predicted = [_predictions(run) if key == "step_seconds" else [] for run in runs]
    values += [value for of_run in marks for _, value in of_run] + [v for each in predicted for _, _, v in each]
    steps = [step for curve in curves for step, _ in curve]
    names = [run.name for run in runs] if len(runs) > 1 else []
    entries = [(f"f{number}", clip(name, width - 40)) for number, name in enumerate(names)]
    entries += [("dot", "validation")] if any(marks) else []
    entries += [("dashkey", "predicted")] if any(predicted) else []
    head = 4 + (legend(Svg(0, 0, ""), 8, 0, width - 8, entries) if entries else 0)
    low = min(values) if key == "loss" else 0.0
    high = max(values)
    pad = 0.06 * (high - low or abs(high) or 1)
    x = PixelScale(min(steps) - (min(steps) == max(steps)), max(steps), LEFT, width - 14)
    y = PixelScale(low - pad if key == "loss" else 0.0, high + pad, HEIGHT + head - BOTTOM, head + TOP)
    svg = Svg(width, HEIGHT + head, label, data_x=x, data_y=y)
    if entries:
        legend(svg, 8, 2, width - 8, entries)
    axis_x(svg, x, y.start, y.stop, lambda step: f"{step:,.0f}" if step == int(step) else "", "step")
    axis_y(svg, y, LEFT, width - 14, show, title)
    for number, run in enumerate(runs):
        source = f"{run.name}/metrics.jsonl"
        for event in run.events:
            if event["event"] == START and x.low < event["step"] <= x.high:
                svg.line(x(event["step"]), y.stop, x(event["step"]), y.start, "restart")
                again = f"planned again, {event['ranks']:,} ranks" if event["planned_again"] else "started again"
                svg.text(x(event["step"]) + 3, y.stop + 11, again, "tick")
        for first, last, seconds in predicted[number]:
            ends = (x(max(first, x.low)), y(seconds)), (x(min(last, x.high)), y(seconds))
            svg.polyline(ends, f"curve dash s{number}", data_from=f"{run.name}/events.jsonl:predicted_seconds")
        points = [(x(step), y(value)) for step, value in thinned(curves[number])]
        svg.polyline(points, f"curve s{number}", data_from=f"{source}:{key}")
        if len(points) == 1:
            svg.circle(*points[0], 3, f"f{number}")
        for step, value in thinned(marks[number]):
            svg.circle(
                x(step), y(value), 3.5, f"dot s{number}", f"step {step}: {value:.4f}", data_from=f"{source}:{dots}"
            )
    return svg


def _predictions(run: RunRecord) -> list[tuple[float, float, float]]:
    """Return for each start its first step, its last one, and the seconds that it expected of each."""
    starts = [event for event in run.events if event["event"] == START and "predicted_seconds" in event]
    last = run.metrics[-1]["step"] if run.metrics else 0
    ends = [event["step"] for event in starts[1:]] + [last]
    return [
        (s["step"] + 1, end, s["predicted_seconds"]) for s, end in zip(starts, ends, strict=True) if end > s["step"]
    ]


def label_width(labels: Sequence[str], width: float) -> float:
    """Return how much of a width labels on the left take, at most a third."""
    return min(max((text_width(label) for label in labels), default=0) + 10, width / 3)
