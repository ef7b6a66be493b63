"""The waterfall of a predicted step: from all devices busy, cause by cause, to the step, and to what was measured."""

from collections.abc import Mapping

from hpctrain.observe.folder.schema import DRIFT
from hpctrain.observe.report.record import RunRecord
from hpctrain.observe.report.svg import LANE, Panel, Svg, show_percent, show_seconds
from hpctrain.planner.prediction.forecast import BUSY, LEAST_SHARE

LEFT, RIGHT = 172, 76
"""Pixels for the names of causes, and for the last number."""


def waterfall_panel(run: RunRecord) -> Panel:
    """Return the waterfall of a run's predicted step."""
    if not run.forecast:
        return Panel("Where a step goes cannot be predicted", lambda width: None)
    parts = run.forecast.prediction.waterfall_seconds
    step = run.forecast.prediction.step_seconds
    causes = {cause: seconds for cause, seconds in parts.items() if cause != BUSY}
    largest = max(causes, key=causes.__getitem__)
    title = f"Devices that are all busy take {show_percent(parts[BUSY] / step)} of the predicted step"
    if causes[largest] > LEAST_SHARE * step:
        title += f"; '{largest}' adds most, {show_percent(causes[largest] / step)}"
    note = "Each cause has the seconds that the step would be shorter without it; 'interaction' is what is left."
    return Panel(title, lambda width: _draw(run, parts, step, width), note)


def _draw(run: RunRecord, parts: Mapping[str, float], step: float, width: int) -> Svg:
    measured = run.drift["measured_seconds"] if run.drift else None
    svg = Svg(width, "a waterfall of the seconds of a step", [("p0", "seconds"), ("p2", "less than nothing")])
    bars, so_far = [], 0.0
    for part, seconds in parts.items():
        if abs(seconds) >= LEAST_SHARE * step:
            bars.append((part, so_far, so_far + seconds, f"{run.name}/forecast:{part}"))
        so_far += seconds
    bars.append(("predicted step", 0.0, step, f"{run.name}/forecast:step"))
    if measured is not None:
        bars.append(("measured step", 0.0, measured, f"{run.name}/{DRIFT.name}:measured_seconds"))
    most = max(max(begin, end) for _, begin, end, _ in bars)
    x = svg.axis_x((0, most * 1.02), LEFT, len(bars) * LANE + 6, show_seconds, "seconds of a step", right=RIGHT)
    for number, (name, begin, end, source) in enumerate(bars):
        top, (left, right) = svg.top + number * LANE, sorted((x(begin), x(end)))
        svg.text(LEFT - 6, top + 11, name, "tick", "end")
        class_ = f"box {'p0' if end >= begin else 'p2'}"
        svg.rect(left, top, right - left, LANE - 2, class_, f"{name}: {show_seconds(end - begin)}", data_from=source)
        svg.text(right + 5, top + 11, show_seconds(end - begin), "tick")
    return svg
