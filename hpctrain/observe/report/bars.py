"""Stacked bars by stage: where a step goes, and what fills memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from markupsafe import Markup

from hpctrain.observe.folder.run_folder import CLUSTER
from hpctrain.observe.folder.schema import RANKS, TRAFFIC
from hpctrain.observe.report.record import RunRecord
from hpctrain.observe.report.svg import (
    LANE,
    LANES_LEFT,
    MAX_GROUPS,
    Panel,
    Svg,
    show_bytes,
    show_percent,
    show_seconds,
    text_width,
)
from hpctrain.plan.equal_tiles import TileGroup
from hpctrain.planner.prediction.simulate import EXPOSED
from hpctrain.sharding.grid import AXES

PARTS = {
    "compute": ("p0", "computing"),
    "tensor": ("p5", f"tensor grid ({', '.join(AXES)})"),
    "pipeline": ("p2", "pipeline: messages and waiting"),
    "data": ("p3", "data: sums and weights of replicas"),
    "optimizer": ("p1", "optimizer"),
}
"""The fill class and the name of each part of a step."""
FILLED_BY = ("weights", "gradients", "moments", "activations", "gathered", "buffers")
MEMORY = {part: (f"p{number}", part) for number, part in enumerate(FILLED_BY)} | {"peak": ("pk", "measured peak")}


@dataclass(frozen=True)
class StackedBar:
    """A bar of parts, with its name at the left."""

    name: str
    parts: Mapping[str, float]
    source: str

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def step_stacks(run: RunRecord, group: TileGroup) -> list[StackedBar]:
    """Return where a step goes for equal ranks, as predicted and as measured in the last logged step: their mean."""
    stacks = []
    if run.forecast:
        exposed = run.forecast.exposed[group.tile]
        stacks.append(StackedBar("predicted", {part: exposed[part] for part in EXPOSED}, f"{run.name}/forecast"))
    columns = {part: run.value(RANKS.name, f"{part}_seconds") for part in EXPOSED} if run.ranks else {}
    measured = {part: [values[rank] for rank in group.ranks] for part, values in columns.items()}
    if measured and all(value is not None for values in measured.values() for value in values):
        parts = {part: fmean(values) for part, values in measured.items()}
        stacks.append(StackedBar("measured", parts, f"{run.name}/{RANKS.name}"))
    return stacks


def step_panel(run: RunRecord) -> Panel:
    """Return where a step goes, by stage, and the communication by axis."""
    stacks = {group: step_stacks(run, group) for group in run.groups}
    shown = [(group, bar) for group, bars in stacks.items() for bar in bars[-1:]]
    if not shown:
        return Panel("Where a step goes is not known", lambda width: None)
    num_ranks = sum(len(group.ranks) for group, _ in shown)
    mean = {part: sum(bar.parts[part] * len(group.ranks) for group, bar in shown) / num_ranks for part in EXPOSED}
    total, compute = sum(mean.values()), mean.pop("compute")
    other = max(mean, key=mean.__getitem__)
    verb = "compute" if shown[0][1].name == "measured" else "are predicted to compute"
    keys = ("communication_seconds", "hidden_seconds", "exposed_seconds")
    rows = [
        ["all ranks" if axis == "everyone" else axis]
        + [run.figure(show_seconds, TRAFFIC.name, "axes", axis, key) for key in keys]
        for axis in run.value(TRAFFIC.name, "axes") or ()
    ]
    return Panel(
        f"Ranks {verb} {compute / total:.0%} of a step; next is '{other}' with {mean[other] / total:.1%}",
        lambda width: _draw(stacks, {}, width, PARTS, show_seconds, "seconds of a rank in one step"),
        "Measured are the means of one logged step. Waiting belongs to what is waited for.",
        rows,
    )


def memory_stacks(run: RunRecord, group: TileGroup) -> list[StackedBar]:
    """Return what fills the memory of equal ranks as predicted; and their highest peak, where a device counts it."""
    stacks = []
    memory = run.forecast.prediction.memory if run.forecast else ()
    if ours := [stage.memory for stage in memory if not set(group.ranks).isdisjoint(stage.ranks)]:
        most = max(ours, key=lambda memory: memory.total)
        parts = {part: getattr(most, part) for part in FILLED_BY}  # of the device, without what is in host memory
        stacks.append(StackedBar("predicted", parts, f"{run.name}/forecast"))
    if run.ranks:
        peak = max(run.ranks["memory_peak_bytes"][rank] or 0.0 for rank in group.ranks)
        stacks.append(StackedBar("measured", {"peak": peak}, f"{run.name}/{RANKS.name}:memory_peak_bytes"))
    return stacks


def memory_panel(run: RunRecord) -> Panel:
    """Return predicted memory by part above the measured peak, against the device's capacity."""
    stacks = {group: memory_stacks(run, group) for group in run.groups}
    limits = {name: family.memory_bytes for name, family in run.cluster.families.items()}
    filled = [
        (bar.name == "measured", bar.total / limit, group)
        for group, bars in stacks.items()
        for bar in bars
        if (limit := limits.get(group.tile.family))
    ]
    if not filled:
        return Panel("Memory is not known", lambda width: None)
    is_measured, share, fullest = max(filled, key=lambda each: each[:2])
    family = fullest.tile.family
    title = Markup("The fullest ranks ({}) {} {} of {}").format(
        fullest.describe(),
        "use" if is_measured else "are predicted to use",
        show_percent(share),
        run.figure(show_bytes, CLUSTER, "families", family, "memory_bytes"),
    )
    is_cpu = run.cluster.families[family].kind == "cpu"
    note = "A CPU rank's peak is its whole process: Python, torch and buffers of MPI are in it, and no part above."
    title_of_axis = "memory of the fullest rank"
    return Panel(
        title, lambda width: _draw(stacks, limits, width, MEMORY, show_bytes, title_of_axis), note if is_cpu else ""
    )


def _draw(
    stacks: Mapping[TileGroup, Sequence[StackedBar]],
    limits: Mapping[str, float | None],
    width: int,
    parts: Mapping[str, tuple[str, str]],
    show: Callable[[float], str],
    title: str,
) -> Svg | None:
    """Draw the bars of each group; `limits` are the capacities of families, `parts` the class and name of each part."""
    groups = {group: bars for group, bars in list(stacks.items())[:MAX_GROUPS] if bars}
    if not groups:
        return None
    every = [bar for bars in groups.values() for bar in bars]
    most = max(bar.total for bar in every)
    # A capacity that is many times what is used would leave nothing to see: it is said in words alone.
    near = [limit for group in groups if (limit := limits.get(group.tile.family)) and limit <= 4 * most]
    legend = [parts[part] for part in parts if any(bar.parts.get(part, 0) > 0 for bar in every)]
    legend += [("limitkey", "capacity of a device")] if near else []
    heights = [len(bars) * LANE + 30 for bars in groups.values()]
    svg = Svg(width, title, legend)
    high = max([most, *near]) * 1.02
    base = 2 if show is show_bytes else 10
    x = svg.axis_x((0, high), LANES_LEFT, sum(heights), show, title, right=76, base=base)
    top = svg.top
    for (group, bars), height in zip(groups.items(), heights, strict=True):
        heading, limit = group.describe(), limits.get(group.tile.family)
        full = f"{heading} · capacity {show(limit)}" if limit else heading
        fits = text_width(full) < width - LANES_LEFT - 10
        tops = svg.lanes(top, full if fits else heading, [bar.name for bar in bars])
        for bar, at in zip(bars, tops, strict=True):
            so_far = 0.0
            for part, value in bar.parts.items():
                if value > 0:
                    left, right = x(so_far), x(so_far + value)
                    class_, source = f"box {parts[part][0]}", f"{bar.source}:{part}"
                    svg.rect(left, at, right - left, LANE - 2, class_, f"{part}: {show(value)}", data_from=source)
                    so_far += value
            text, label_at = show(so_far), x(so_far) + 5
            if limit in near and label_at - 5 <= x(limit) <= label_at + text_width(text):
                label_at = x(limit) + 5  # the line of the capacity must not cross it
            svg.text(label_at, at + 11, text, "tick")
        if limit in near:
            svg.line(x(limit), top + 14, x(limit), top + 18 + len(bars) * LANE, "limit")
        top += height
    return svg
