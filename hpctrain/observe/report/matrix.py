"""The bytes that each rank sends to each other one in a step, coloured by the fabric between them."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup

from hpctrain.comm.operations import OPERATIONS, OperationRow
from hpctrain.comm.watchdog.flight import parse_ranks
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.links import link_between
from hpctrain.observe.folder.schema import TRAFFIC
from hpctrain.observe.report.record import RunRecord
from hpctrain.observe.report.svg import Panel, Svg, show_traffic

MAX_CELLS = 40
OTHER = OperationRow()
"""Stands for operations that older runs have, and groups no longer."""
IN_NODE = "inside a node"


def bytes_between(groups: Sequence[Mapping], cell_of: Callable[[int], int]) -> Counter[tuple[int, int]]:
    """Return the bytes between cells of ranks, by sender and receiver, from the groups of traffic.json.

    What a collective must move is spread evenly over the pairs of its group, whatever algorithm moves it: an all-reduce
    is a reduce-scatter and an all-gather, and in these each of n ranks sends an n-th of the tensor to each other one.
    """
    result: Counter[tuple[int, int]] = Counter()
    for group in groups:
        if "from" in group:
            result[cell_of(group["from"]), cell_of(group["to"])] += group["tensor_bytes"]
            continue
        ranks = parse_ranks(group["ranks"])
        pair_bytes = group["tensor_bytes"] * OPERATIONS.get(group["operation"], OTHER).transfers / len(ranks)
        sizes = Counter(map(cell_of, ranks))
        for one, here in sizes.items() if pair_bytes else ():
            for other, there in sizes.items():
                pairs = here * (there - (one == other))
                if pairs:
                    result[one, other] += pair_bytes * pairs  # pyright: ignore[reportArgumentType] - a share of bytes
    return result


def fabric_between(cluster: Cluster, one: int, other: int) -> str:
    """Return what two ranks communicate over."""
    return link_between(cluster, one, other).fabric or IN_NODE


def fabric_totals(run: RunRecord) -> dict[str, float]:
    """Return the bytes that a step sends by what they pass, the most first."""
    if not run.traffic:
        return {}
    cluster = run.cluster
    first = {device.node: device.rank for device in reversed(cluster.devices)}
    totals: Counter[str] = Counter()
    for (one, other), size in bytes_between(run.traffic["groups"], lambda rank: cluster.devices[rank].node).items():
        totals[IN_NODE if one == other else fabric_between(cluster, first[one], first[other])] += size
    return dict(totals.most_common())


def cells_of(run: RunRecord) -> list[range]:
    """Return the cells of a matrix: ranks, or the ranks of some nodes, so that there are not too many."""
    size = len(run.plan.ranks)
    cell_size = math.ceil(size / MAX_CELLS)
    if cell_size > 1:
        on_node = max(nodes.num_devices for nodes in run.cluster.nodes)
        cell_size = on_node * math.ceil(cell_size / on_node)
    return [range(first, min(size, first + cell_size)) for first in range(0, size, cell_size)]


def traffic_panel(run: RunRecord) -> Panel:
    """Return what ranks send to each other: senders down, receivers across, the darker the more."""
    totals = fabric_totals(run)
    if not totals:
        note = "The run ended before its third step, or has one rank."
        return Panel("Nothing is known of what ranks sent", lambda width: None, note)
    step = run.figure("{:,}".format, TRAFFIC.name, "step")
    title = Markup("Ranks send {} in step {}").format(show_traffic(sum(totals.values())), step)
    note = "Senders down, receivers across; the darker, the more. Collectives are spread evenly over their ranks."
    return Panel(title, lambda width: _draw(run, totals, width), note)


def _draw(run: RunRecord, totals: Mapping[str, float], width: int) -> Svg:
    assert run.traffic, "there are totals of it"
    cells = cells_of(run)
    num_bytes = bytes_between(run.traffic["groups"], lambda rank: rank // len(cells[0]))
    names = [str(cell[0]) if len(cell) == 1 else f"{cell[0]}-{cell[-1]}" for cell in cells]
    fabrics = {IN_NODE: "f0"} | {name: f"f{number}" for number, name in enumerate(run.cluster.fabrics, 1)}
    legend = [(fabrics[name], f"{name}: {show_traffic(size)}") for name, size in totals.items()]
    svg = Svg(width, "bytes between ranks in one step", legend, gap=34)
    head = svg.top
    left = 20 + 7 * max(map(len, names))
    cell = min(46.0, (min(width, 620) - left - 14) / len(names))
    most = max(num_bytes.values())
    svg.height = head + cell * len(names) + 12
    svg.text(left, head - 20, "to rank", "label")
    svg.text(4, head - 6, "from", "label")
    label_interval = max(1, math.ceil(7.0 * max(map(len, names)) / cell))
    for number, name in enumerate(names):
        middle = (number + 0.5) * cell
        if number % label_interval == 0:
            svg.text(left + middle, head - 6, name, "tick", "middle")
        if number % max(1, math.ceil(12 / cell)) == 0:
            svg.text(left - 6, head + middle + 4, name, "tick", "end")
    for a in range(len(names)):
        svg.rect(left, head + a * cell, cell * len(names), cell, "cell")
    for (a, b), size in sorted(num_bytes.items()):
        strength = 0.12 + 0.88 * size / most
        at = left + b * cell, head + a * cell
        where = fabric_between(run.cluster, cells[a][0], cells[b][-1])  # as most of their bytes
        title = f"rank {names[a]} to {names[b]}: {show_traffic(size)} {'' if where == IN_NODE else 'over '}{where}"
        svg.rect(
            *at, cell, cell, f"cell {fabrics[where]}", title, fill_opacity=strength,
            data_from=f"{run.name}/traffic.json:{a},{b}", data_value=repr(float(size)),
        )  # fmt: skip
        if cell >= 40:
            shade = "" if strength < 0.55 else "on" if fabrics[where] == "f0" else "onlight"
            svg.text(
                at[0] + cell / 2, at[1] + cell / 2 + 4, show_traffic(size).replace(" ", ""), f"tiny {shade}", "middle"
            )
    return svg
