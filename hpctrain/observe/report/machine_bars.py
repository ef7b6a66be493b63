"""Machines side by side: tokens of a second, of money and of a kWh, each with its range."""

from collections.abc import Callable, Sequence

from hpctrain.observe.report.svg import LANE, Panel, Svg, show_count
from hpctrain.planner.what_if import ComparedMachine

LEFT, RIGHT, LANE_GAP = 240, 76, 5
"""Pixels for the names of machines, for the last number, and between bars."""


def machine_panels(rows: Sequence[ComparedMachine], currency: str) -> dict[str, Panel]:
    """Return a panel for each figure that is known of any machine, by its unit."""
    figures: list[tuple[str, Callable[[ComparedMachine], float | None]]] = [
        ("tokens/s", lambda row: row.tokens_per_second),
        (f"tokens/{currency}", lambda row: row.tokens_per_money),
        ("tokens/kWh", lambda row: row.tokens_per_kwh),
    ]
    return {name: _panel(rows, name, value) for name, value in figures if any(map(value, rows))}


def _panel(rows: Sequence[ComparedMachine], name: str, value: Callable[[ComparedMachine], float | None]) -> Panel:
    known = [row for row in rows if value(row)]
    best = max(known, key=lambda row: value(row) or 0.0)
    left_out = [row.machine.name for row in rows if row not in known]
    note = "The thin line is the range of the prediction." + (f" Not known: {', '.join(left_out)}." if left_out else "")
    title = f"{name}: most by '{best.machine.name}'"
    return Panel(title, lambda width: _draw(known, name, [value(row) or 0.0 for row in known], width), note)


def _draw(rows: Sequence[ComparedMachine], name: str, values: Sequence[float], width: int) -> Svg:
    svg = Svg(width, name, [("p0", name)])
    times = [[end / row.tokens_per_second for end in row.interval] for row in rows]
    most = max(value * high for value, (_, high) in zip(values, times, strict=True))
    height = len(rows) * (LANE + LANE_GAP) + 4
    left = min(LEFT, width // 2)
    x = svg.axis_x((0, most * 1.02), left, height, show_count, name, right=RIGHT)
    for number, (row, value, (low, high)) in enumerate(zip(rows, values, times, strict=True)):
        top = svg.top + number * (LANE + LANE_GAP)
        svg.text(left - 6, top + 11, row.machine.name, "tick", "end")
        svg.rect(x(0), top, x(value) - x(0), LANE - 2, "box p0", f"{row.machine.name}: {show_count(value)}")
        svg.line(x(value * low), top + LANE, x(value * high), top + LANE, "axis")
        svg.text(max(x(value), x(value * high)) + 5, top + 11, show_count(value), "tick")
    return svg
