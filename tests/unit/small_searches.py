"""Clusters and models so small that every plan of the search's space can be looked at, and that enumeration."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from hpctrain.config.clusters.cluster import Cluster, Profile, RowTimes
from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.config.errors import PlanError
from hpctrain.config.job import Model
from hpctrain.plan.schedule import schedule_of
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prediction.simulate import simulate
from hpctrain.planner.prices.curves import describe_training
from hpctrain.planner.prices.setup import HPCTRAIN, Setup
from hpctrain.planner.search.extra_warmup import with_extra_warmup
from hpctrain.planner.search.search import Limits
from hpctrain.planner.search.space import Space
from hpctrain.planner.search.stage_variants import row_chunk_counts
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval, cut_evenly
from hpctrain.sharding.items import BLOCK, EMBEDDING
from hpctrain.sharding.parameters import check_grid
from tests import clusters

EVERYTHING = Limits(scored=None, simulated=None, per_group=None)
# of devices, their memory, and links: computing takes milliseconds, and sending some of them
SPEEDS, MEMORY, LINK, NIC = (1e9, 2e9, 3.7e9), 40_000_000, 1e9, 2e8
FAST_NETWORK = {"link": 1e15, "nic": 1e15, "latency": 0.0}


def model_of(num_blocks: int, vocabulary: int = 64) -> Model:
    return Model(
        architecture="llama",
        num_layers=num_blocks,
        hidden_size=32,
        num_heads=2,
        ffn_size=64,
        vocab_size=vocabulary,
        max_positions=16,
    )


def setup_of(num_blocks: int, **more) -> Setup:
    return Setup(model_of(num_blocks, **more), 16, "fp32", HPCTRAIN)


def cluster_of(
    tables: list[tuple[str, int, int]],
    memory: int = MEMORY,
    speeds: dict[str, float] | None = None,
    link: float = LINK,
    nic: float = NIC,
    latency: float = 1e-5,
    times: float = 1.0,
    slowed: float = 1.0,
    nics: Sequence[int] = (),
) -> Cluster:
    """Return a cluster of (family, nodes, devices of a node), `times` as slow in everything, and while devices
    communicate `slowed`; the nodes of each table have so many `nics`, or one."""
    speeds = speeds or dict(zip("abc", SPEEDS, strict=True))
    text = clusters.fabric("ib", latency * times, "datasheet")
    for family in dict.fromkeys(family for family, _, _ in tables):
        speed = speeds[family] / times
        sizes = {"memory_bytes": memory, "memory_bytes_per_second": speed, "overlap_slowdown": slowed}
        text += clusters.family(family, speed, origin="datasheet", **sizes)
    for place, (family, count, devices) in enumerate(tables):
        num_nics = nics[place] if nics else 1
        link_figures = {"link_latency_seconds": latency * times / 10, "link_bytes_per_second": link / times}
        own = {family: devices}
        text += clusters.nodes(own, nic / times, "ib", num_nics, "datasheet", count=count, **link_figures)
    return parse_cluster(text, "a test")


# ---- every plan of the space, enumerated plainly from its definition in hpctrain/planner/search/space.py ------------


def every_plan(setup: Setup, batch: int, cluster: Cluster, space: Space):
    """Yield all plans; families here are pools."""
    families = list(cluster.families)
    for pipelines, microbatches in itertools.product(every_arrangement(families), space.microbatches):
        rows = batch // microbatches
        lists = [every_choice(setup.model, cluster, family, space) for row in pipelines for family in row]
        for choices in itertools.product(*lists):
            resolved = dict(zip([family for row in pipelines for family in row], choices, strict=True))
            shares = any(replicas > 1 for _, _, replicas in choices)
            is_whole = all(len(row) == 1 for row in pipelines) and {(g, s) for g, s, _ in choices} == {
                (choices[0][0], 1)
            }
            zeros = space.zero if len(pipelines) == 1 and shares else (1,)
            if len(pipelines) > 1 and min(space.zero) > 1:
                zeros = space.zero if is_whole else ()
            if any(grid.z * replicas > rows for grid, _, replicas in choices):
                continue
            depths = [sum(resolved[family][1] for family in row) for row in pipelines]
            several = every_count(setup.model.num_layers, depths, microbatches)
            for zero, count in itertools.product(zeros, several):
                if plan := plan_of(setup, cluster, pipelines, resolved, microbatches, rows, zero, count):
                    yield plan
                    least = min(tile.rows.size // tile.tensor.z for tile in plan.tiles)
                    for row_chunks in row_chunk_counts(least, least) if zero > 1 and len(pipelines) > 1 else ():
                        yield replace(plan, tiles=tuple(replace(tile, row_chunks=row_chunks) for tile in plan.tiles))


def every_count(num_blocks: int, depths: list[int], microbatches: int) -> list[int]:
    """Return how many tiles a rank may have where pipelines have so many stages."""
    if min(depths) == 1 or any(microbatches % depth for depth in depths):
        return [1]
    of_stage = num_blocks // max(depths)
    return [1] + [count for count in range(2, of_stage + 1) if count == 2 or of_stage % count == 0]


def every_arrangement(families: list[str]) -> set:
    result = set()
    for size in range(1, len(families) + 1):
        for order in itertools.permutations(families, size):
            for bars in itertools.product((False, True), repeat=size - 1):
                ends = [0, *(i + 1 for i, bar in enumerate(bars) if bar), size]
                rows = [order[start:stop] for start, stop in itertools.pairwise(ends)]
                result.add(tuple(sorted(rows, key=lambda row: min(families.index(f) for f in row))))
    return result


def every_choice(model: Model, cluster: Cluster, family: str, space: Space):
    nodes = [nodes for nodes in cluster.nodes if family in nodes.devices]
    for x, y, z, is_cut in itertools.product(*[range(1, 9)] * 3, (False, True)):
        if is_cut and y == 1:
            continue
        grid = TensorGrid(x, y, z, sequence_parallel=is_cut)
        places = sum(n.count * (n.devices[family] // grid.size) for n in nodes)
        try:
            check_grid(model, grid)
        except PlanError:
            continue
        for stages, replicas in itertools.product(range(1, 9), repeat=2):
            if stages * replicas <= places and grid.size <= space.largest_grid and stages <= model.num_layers:
                yield grid, stages, replicas


def plan_of(setup, cluster, pipelines, resolved, microbatches, rows, zero, virtual_stages=1) -> Plan | None:
    """Cut rows and blocks one by one, and deal the blocks of each stage to its tiles."""
    model, last = setup.model, setup.head

    def seconds(family: str, layer: Interval, of_row: int, recompute: str = "none") -> float:
        grid, _, replicas = resolved[family]
        each = math.ceil(math.ceil(of_row / replicas) / grid.z)
        sharing = replicas if zero > 1 and len(pipelines) == 1 else 1
        slots = places(cluster, family, grid.size)[:sharing]
        return alone(setup, cluster, family, tuple(slots), grid, layer, each, recompute, zero if sharing > 1 else 1)

    def even(row: tuple[str, ...], of_row: int) -> float:
        speed = sum(resolved[family][1] / seconds(family, BLOCK, of_row) for family in row)
        ends = seconds(row[0], EMBEDDING, of_row) / seconds(row[0], BLOCK, of_row)
        ends += seconds(row[-1], last, of_row) / seconds(row[-1], BLOCK, of_row)
        return (model.num_layers + ends) / speed

    shares = [max(resolved[family][0].z * resolved[family][2] for family in row) for row in pipelines]
    if sum(shares) > rows:
        return None
    while sum(shares) < rows:
        first = min(range(len(shares)), key=lambda i: even(pipelines[i], shares[i] + 1))
        shares[first] += 1
    tiles, at, unused = [], 0, {device.rank for device in cluster.devices}
    for row, of_row in zip(pipelines, shares, strict=True):
        stages = [family for family in row for _ in range(resolved[family][1])]
        if len(stages) > model.num_layers:
            return None
        blocks = [1] * len(stages)

        def with_one_more(i: int, stages=stages, blocks=blocks, of_row=of_row) -> float:
            ends = seconds(stages[0], EMBEDDING, of_row) * (i == 0)
            ends += seconds(stages[-1], last, of_row) * (i == len(stages) - 1)
            return (blocks[i] + 1) * seconds(stages[i], BLOCK, of_row) + ends

        while sum(blocks) < model.num_layers:
            blocks[min(range(len(stages)), key=lambda i: (round(with_one_more(i), 12), -i))] += 1
        if min(blocks) < virtual_stages:
            return None
        item, of_stages = 0, ranks_of(cluster, stages, resolved)
        counts = dealt_blocks(stages, blocks, virtual_stages, lambda f, layer, n=of_row: seconds(f, layer, n), last)
        for number, i in itertools.product(range(virtual_stages), range(len(stages))):
            family, is_last = stages[i], (number, i) == (virtual_stages - 1, len(stages) - 1)
            stop = item + 2 * counts[i][number] + (number == i == 0) + is_last
            for part, ranks in zip(cut_evenly(of_row, len(of_stages[i])), of_stages[i], strict=True):
                unused -= set(ranks)
                grid = resolved[family][0]
                tiles.append(Tile(Interval(item, stop), part.shift(at), ranks, grid, family, "none", zero))
            item = stop
        at += of_row
    return Plan(tuple(tiles), microbatches, rows, unused=tuple(sorted(unused)))


def ranks_of(cluster: Cluster, stages: list[str], resolved: dict) -> list[list[tuple[int, ...]]]:
    """Return the ranks of each stage's replicas."""
    free = {family: iter(places(cluster, family, resolved[family][0].size)) for family in stages}
    return [[next(free[family]) for _ in range(resolved[family][2])] for family in stages]


def dealt_blocks(stages: list[str], blocks: list[int], virtual_stages: int, seconds, head: Interval) -> list[list[int]]:
    """Return the blocks of each stage's tiles: as even as can be, where the first tile of the first stage has the
    embedding too, and the last one of the last stage the head."""
    result = []
    for i, (family, count) in enumerate(zip(stages, blocks, strict=True)):
        layer = EMBEDDING if i == 0 else head
        is_end = virtual_stages > 1 and i in (0, len(stages) - 1)
        worth = seconds(family, layer) / seconds(family, BLOCK) if is_end else 0.0
        every = []
        for own in range(1, count - virtual_stages + 2) if virtual_stages > 1 else [count]:
            parts = [part.size for part in cut_evenly(count - own, virtual_stages - 1)] if virtual_stages > 1 else []
            lengths = [own + worth, *parts]
            every.append((max(lengths), -min(lengths), own, parts))
        *_, own, parts = min(every)
        result.append([*parts, own] if i == len(stages) - 1 else [own, *parts])
    return result


def places(cluster: Cluster, family: str, size: int) -> list[tuple[int, ...]]:
    nodes: dict[int, list[int]] = {}
    for device in cluster.devices:
        if device.family == family:
            nodes.setdefault(device.node, []).append(device.rank)
    return [tuple(r[i : i + size]) for r in nodes.values() for i in range(0, len(r) - size + 1, size)]


def alone(setup, cluster, family, slots, grid, layer, rows, recompute, zero) -> float:
    """The time of a layer by itself, from the predictor: a plan that does nothing else, with a replica on each slot."""
    key = (id(setup), id(cluster), family, slots, grid, layer, rows, recompute, zero)
    if key not in KNOWN_ALONE:
        of_replica = Interval(0, rows * grid.z)
        tiles = tuple(
            Tile(layer, of_replica.shift(i * rows * grid.z), ranks, grid, family, recompute, zero)
            for i, ranks in enumerate(slots)
        )
        unused = tuple(d.rank for d in cluster.devices if all(d.rank not in ranks for ranks in slots))
        plan = Plan(tiles, 1, len(slots) * rows * grid.z, unused=unused)
        cost = Predictor(setup, plan, cluster).costs.tiles[tiles[0]]
        KNOWN_ALONE[key] = sum(p.compute + p.tensor + p.data for p in (*cost.forward, *cost.backward))
    return KNOWN_ALONE[key]


KNOWN_ALONE: dict = {}


NETWORKS = ({}, {"nic": 2e7}, {"latency": 1e-3}, {"link": 1e7})
BUCKETS, ALL_IN_ONE = (1, 20_000), 1 << 30
"""Bytes: of an item in each bucket, of some. Where all are in one, nothing hides: then ZeRO 2 may be faster than 1, by
less than a percent, and a search tries it where memory is short alone."""
SLOW = {"nic": 1e6}
"""Messages take as long as computing: what ranks plans is not near what decides any more."""


@st.composite
def profiles(draw, setup: Setup, cluster: Cluster) -> Cluster:
    """Return the cluster with a profile of the setup's work of each family or of some, whose curves are not smooth."""
    result = []
    for family in draw(st.sets(st.sampled_from(sorted(cluster.families)), min_size=1)):
        rows = draw(st.sampled_from([[1], [1, 2, 4], [1, 2, 3, 6]]))

        def seconds(least: float, rows=rows) -> list[float]:
            steps = [least * draw(st.sampled_from([0.1, 0.7, 1.0, 1.5])) for _ in rows]
            return list(itertools.accumulate(steps))

        # Ends that take exactly as long as each other would make cuts equal, of which rounding then chooses one.
        passes = [list(zip(seconds(least), seconds(2 * least), strict=True)) for least in (1e-4, 1e-3, 3.137e-4)]
        names = "embedding_seconds", "block_seconds", "head_seconds"
        result.append(
            Profile(
                origin="measured",
                family=family,
                work=describe_training(setup.model, setup.positions, setup.dtype),
                zero=1,
                replicas=draw(st.sampled_from([cluster.num_devices, 99])),
                largest_rows=rows[-1],
                update_seconds=draw(st.sampled_from([None, 1e-4])),
                times=tuple(
                    RowTimes(rows=n, **dict(zip(names, at, strict=True))) for n, *at in zip(rows, *passes, strict=True)
                ),
            )
        )
    return cluster.model_copy(update={"profiles": tuple(result)})


@st.composite
def cases(draw, networks=NETWORKS, batches=(2, 4, 6), buckets=BUCKETS):
    sizes = draw(
        st.sampled_from(
            [[(1, 1)], [(1, 2)], [(2, 1)], [(1, 4)], [(3, 1)], [(2, 2)], [(1, 6)], [(7, 1)], [(8, 1)]]
            + [[(1, 1), (1, 1)], [(1, 2), (1, 1)], [(1, 1), (2, 1)], [(1, 3), (1, 1)], [(1, 1), (1, 1), (1, 1)]]
            + [[(2, 3)], [(1, 2), (1, 2)], [(1, 2), (2, 2)], [(2, 2), (2, 1)]]
        )
    )
    tables = [(family, *size) for family, size in zip("abc", sizes, strict=False)]
    network = draw(st.sampled_from(networks))
    speeds = {family: draw(st.sampled_from(SPEEDS)) * (1 + 0.01 * i) for i, family in enumerate("abc")}
    batch = draw(st.sampled_from(batches))
    microbatches = draw(st.sampled_from([m for m in (1, 2, 3, 4, 6) if batch % m == 0]))
    largest = draw(st.sampled_from([1, 1, 2]))
    zeros = [(1,), (0, 1), (1, 2, 3)] if len(sizes) == 1 else [(1,), (1,), (2,), (3,)]
    zero = draw(st.sampled_from(zeros)) if largest == 1 else (1,)
    setup = setup_of(draw(st.sampled_from([1, 2, 3, 4, 5, 7, 12])), vocabulary=draw(st.sampled_from([8, 512])))
    if draw(st.booleans()):
        setup = replace(setup, overlaps=frozenset(("tensor", "z")), bucket_bytes=draw(st.sampled_from(buckets)))
    space = Space((microbatches,), largest, zero, ("none",))
    slowed = draw(st.sampled_from([1.0, 1.5]))
    nics = [draw(st.sampled_from([1, 2])) if devices > 1 else 1 for _, _, devices in tables]
    cluster = cluster_of(tables, speeds=speeds, slowed=slowed, nics=nics, **network)
    return setup, batch, draw(profiles(setup, cluster)) if draw(st.booleans()) else cluster, space


def step_seconds(setup: Setup, plan: Plan, cluster: Cluster) -> float:
    """What the predictor says of a plan, or of it with more microbatches in flight or by ZB-H1, if that fits and is
    faster."""

    def simulated(plan: Plan, predictor: Predictor) -> float:
        schedules = {tile: schedule_of(plan, tile) for tile in plan.first_tiles}
        return simulate(plan, schedules, predictor.costs).step_seconds

    predictor = Predictor(setup, plan, cluster)
    result = [simulated(plan, predictor)]
    others = [with_extra_warmup(plan, predictor.costs, predictor.headroom)]
    ranks, whole = [rank for tile in plan.tiles for rank in tile.ranks], {tile.items.size for tile in plan.tiles}
    is_split = all(tile.zero < 2 and tile.row_chunks == 1 for tile in plan.tiles)
    if is_split and len(ranks) == len(set(ranks)) and whole != {setup.model.num_items} and plan.microbatches > 1:
        others.append(replace(plan, schedule="zb-h1"))
    for other in filter(None, others):
        predictor = Predictor(setup, other, cluster)
        if all(stage.fits for stage in predictor.memory):
            result.append(simulated(other, predictor))
    return min(result)
