"""Stacked bars by stage: where a step goes, and what fills memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from hpctrain.observe.report.curves import label_width
from hpctrain.observe.report.groups import MOST_GROUPS, TileGroup, groups_of
from hpctrain.observe.report.record import RunRecord
from hpctrain.observe.report.svg import (
    PixelScale,
    Svg,
    axis_x,
    clip,
    legend,
    legend_height,
    show_bytes,
    show_seconds,
    text_width,
)
from hpctrain.planner.simulate import EXPOSED

BAR, BOTTOM = 15, 40
PARTS = {"compute": "p0", "tensor": "p5", "pipeline": "p2", "data": "p3", "optimizer": "p1"}
"""The fill class of each part of a step."""
PART_NAMES = {
    "compute": "computing",
    "tensor": "tensor grid (x, y, z)",
    "pipeline": "pipeline: messages and waiting",
    "data": "data: sums and weights of replicas",
    "optimizer": "optimizer",
}
MEMORY = {"weights": "p0", "gradients": "p1", "moments": "p2", "activations": "p3", "gathered": "p4", "buffers": "p5"}


@dataclass(frozen=True)
class StackedBar:
    """A bar of parts, and what is written next to it."""

    name: str
    parts: dict[str, float]
    source: str


def step_stacks(run: RunRecord, group: TileGroup) -> list[StackedBar]:
    """Return where a step goes for equal ranks, as predicted and as measured in the last logged step: their mean."""
    stacks = []
    if run.forecast:
        exposed = run.forecast.exposed[group.tile]
        stacks.append(StackedBar("predicted", {part: exposed[part] for part in EXPOSED}, f"{run.name}/forecast"))
    columns = {part: run.ranks[f"{part}_seconds"] for part in EXPOSED} if run.ranks else {}
    measured = {part: [values[rank] for rank in group.ranks] for part, values in columns.items()}
    if measured and all(value is not None for values in measured.values() for value in values):
        parts = {part: fmean(values) for part, values in measured.items()}
        stacks.append(StackedBar("measured", parts, f"{run.name}/ranks.json"))
    return stacks


def memory_stacks(run: RunRecord, group: TileGroup) -> list[StackedBar]:
    """Return what fills the memory of equal ranks as predicted; and their highest peak, where a device counts it."""
    stacks, group_ranks = [], set(group.ranks)
    memory = run.forecast.prediction.memory if run.forecast else ()
    ours = [stage for stage in memory if not group_ranks.isdisjoint(stage.ranks)]
    if ours:
        most = max(ours, key=lambda stage: stage.memory.total)
        stacks.append(StackedBar("predicted", dict(vars(most.memory)), f"{run.name}/forecast"))
    if run.ranks:
        peaks = [run.ranks["memory_peak_bytes"][rank] for rank in group.ranks]
        stacks.append(StackedBar("measured", {"peak": max(peaks)}, f"{run.name}/ranks.json:memory_peak_bytes"))
    return stacks


def step_bars(run: RunRecord, width: int) -> Svg | None:
    """Draw where a step goes, by stage; None where nothing is known of it."""
    groups = groups_of(run)[:MOST_GROUPS]
    lines = [(group, step_stacks(run, group)) for group in groups]
    shown = {part for _, stacks in lines for each in stacks for part, seconds in each.parts.items() if seconds > 0}
    entries = [(PARTS[part], PART_NAMES[part]) for part in EXPOSED if part in shown]
    return _bars(lines, width, entries, PARTS, show_seconds, "seconds of a rank in one step", lambda group: None)


def memory_bars(run: RunRecord, width: int) -> Svg | None:
    """Draw predicted memory by part above the measured peak, against the device's capacity."""
    groups = groups_of(run)[:MOST_GROUPS]
    lines = [(group, memory_stacks(run, group)) for group in groups]
    shown = {part for _, stacks in lines for each in stacks for part, size in each.parts.items() if size}
    entries = [(MEMORY[part], part) for part in MEMORY if part in shown]
    entries += [("pk", "measured peak")] if "peak" in shown else []

    def capacity(group: TileGroup) -> float | None:
        family = run.cluster.families.get(group.tile.family)
        return float(family.memory_bytes) if family else None

    classes = MEMORY | {"peak": "pk"}
    return _bars(lines, width, entries, classes, show_bytes, "memory of the fullest rank", capacity)


def _bars(
    lines: Sequence[tuple[TileGroup, list[StackedBar]]],
    width: int,
    entries: Sequence[tuple[str, str]],
    classes: dict[str, str],
    show: Callable[[float], str],
    title: str,
    capacity: Callable[[TileGroup], float | None],
) -> Svg | None:
    lines = [(group, stacks) for group, stacks in lines if stacks]
    if not lines:
        return None
    left = label_width(["predicted "], width) + 6
    heights = [len(stacks) * BAR + 30 for _, stacks in lines]
    totals = [sum(stack.parts.values()) for _, stacks in lines for stack in stacks]
    limits = [limit for group, _ in lines if (limit := capacity(group))]
    # A capacity that is many times what is used would leave nothing to see: it is said in words alone.
    near = [limit for limit in limits if limit <= 4 * max(totals)]
    entries = [*entries, *([("limitkey", "capacity of a device")] if near else [])]
    head = legend_height(width - 8, entries) + 10
    x = PixelScale(0, max([*totals, *near]) * 1.02, left, width - 76)
    bottom = head + sum(heights)
    svg = Svg(width, bottom + BOTTOM, title, data_x=x)
    legend(svg, 8, 2, width - 8, entries)
    axis_x(svg, x, bottom, head, show, title, base=2 if show is show_bytes else 10)
    top = head
    for (group, stacks), height in zip(lines, heights, strict=True):
        limit = capacity(group)
        text, more = f"{group.label} · {group.who}", f" · capacity {show(limit)}" if limit else ""
        fits = text_width(text + more) < width - left
        svg.text(left, top + 11, text + more if fits else clip(text, width - left - 10), "strong")
        for number, stack in enumerate(stacks):
            at = top + 16 + number * BAR
            svg.text(left - 6, at + 11, stack.name, "tick", "end")
            so_far = 0.0
            for part, value in stack.parts.items():
                if value > 0:
                    wide = x(so_far + value) - x(so_far)
                    name = f"{part}: {show(value)}"
                    svg.rect(
                        x(so_far), at, wide, BAR - 2, f"box {classes[part]}", name, data_from=f"{stack.source}:{part}"
                    )
                    so_far += value
            text, label_at = show(so_far), x(so_far) + 5
            if limit in near and label_at - 5 <= x(limit) <= label_at + text_width(text):
                label_at = x(limit) + 5  # the line of the capacity must not cross it
            svg.text(label_at, at + 11, text, "tick")
        if limit in near:
            svg.line(x(limit), top + 14, x(limit), top + 18 + len(stacks) * BAR, "limit")
        top += height
    return svg
