"""Plans by speed: each device of a mixed cluster gets as much work as it does in the time of the others. Pure.

Two kinds: `side by side`, where each family has replicas of its own, pipelines of its own depth, and rows by speed; and
`in a row`, one pipeline over all families, whose blocks are cut by speed. Both are cut exactly: no other cut into whole
rows or blocks makes the slowest part faster. Which depths and how many
microbatches is chosen by a closed form of computation and bubble (`hpctrain.planner.estimate`).

Speeds are one figure for a family, or the curves that the profiler measured of the job. By curves, replicas of the
whole model are allocated by `hpctrain.planner.allocate`, which knows how many rows fit.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hpctrain.cluster import Cluster
from hpctrain.errors import PlanError
from hpctrain.intervals import Interval, cut_evenly
from hpctrain.plan import Plan, TensorGrid, Tile, even_plan
from hpctrain.planner.allocate import share_rows
from hpctrain.planner.curves import FamilyCurves
from hpctrain.planner.estimate import Work, estimate
from hpctrain.planner.replicas import replicas_plan

# Of one parameter in fp32: weight and gradient; both moments; the summed gradient of a shard.
WEIGHT_BYTES, MOMENT_BYTES, GRADIENT_SHARD_BYTES = 8, 8, 4
# Of one token: what a block keeps in fp32 for each feature of its hidden state (measured), the head for each token id.
BLOCK_BYTES, HEAD_BYTES = 90, 12
INPUT_BYTES = 4  # of that, where a block is computed again: its input
SIDE_BY_SIDE, IN_A_ROW, EVEN, SEARCHED = "side by side", "in a row", "even", "searched"


@dataclass(frozen=True)
class Party:
    """The devices of one family."""

    family: str
    ranks: tuple[int, ...]
    speed: float
    """Of one of them, in any unit that is the same for all."""
    memory_bytes: float = math.inf
    curves: FamilyCurves | None = None
    """In place of the speed, and in seconds; of all parties or of none."""

    def seconds(self, work: Work, items: Interval, rows: float) -> float:
        """Return what rows take through items: in seconds by curves, else in the unit of `Candidate.seconds`.

        By curves they are whole; by speed those of a mean may not be.
        """
        if self.curves is not None:
            return self.curves.seconds(items, int(rows))
        return work.cost(items) * rows / self.speed


@dataclass(frozen=True)
class Candidate:
    """A plan, and what is thought of it."""

    seconds: float
    """Of a step; by speeds of any unit in the time of one row of one block at speed 1, by curves in seconds."""
    kind: str
    depths: tuple[int, ...]
    """Stages of each party, or of all."""
    plan: Plan

    @property
    def shape(self) -> tuple:
        """Plans of one shape are as deep, by the same tensor grids, in as many tiles."""
        tiles = self.plan.tiles
        return self.depths, len(tiles), frozenset((tile.family, tile.tensor) for tile in tiles)

    @property
    def describe(self) -> str:
        depths = ", ".join(map(str, self.depths))
        return f"{self.kind}, {depths} stage{'s' if self.depths != (1,) else ''}: {self.plan.describe()}"


def parties_of(
    cluster: Cluster,
    dtype: str,
    speeds: Mapping[str, float] | None = None,
    curves: Mapping[str, FamilyCurves] | None = None,
) -> list[Party]:
    """Return the families of a cluster with the ranks that have such a device; by measured speed, else by peak.

    `curves` are of all families that have devices. Raises PlanError for a family that does not compute in `dtype`.
    """
    found = []
    for name, family in cluster.families.items():
        ranks = tuple(device.rank for device in cluster.devices if device.family == name)
        known = family.peak_flops_per_second | family.sustained_flops_per_second
        if dtype not in known:
            raise PlanError(
                f"families.{name}: its speed in {dtype} is not known, only in {', '.join(known)}; set train.dtype to"
                f" one that all families have, or families.{name}.sustained_flops_per_second"
            )
        if ranks:
            own = curves[name] if curves else None
            found.append(Party(name, ranks, speeds[name] if speeds else known[dtype], family.usable_bytes, own))
    return found


def cut_rows(num_rows: int, speeds: Sequence[float], least: int = 1) -> list[int]:
    """Return how many rows each replica takes, `least` or more, so that the slowest is as fast as can be.

    Exact. Raises PlanError if there are too few.
    """
    return share_rows(num_rows, [lambda rows, speed=speed: rows / speed for speed in speeds], least)


def cut_items(costs: Sequence[float], speeds: Sequence[float]) -> list[Interval]:
    """Return the items of each stage, by the `costs` of all items and the speed of each stage; see `cut_unlike`."""
    return cut_unlike([[cost / speed for cost in costs] for speed in speeds])


def cut_unlike(costs: Sequence[Sequence[float]]) -> list[Interval]:
    """Return the items of each stage, one block at least, so that the slowest is as fast as can be.

    `costs` are for each stage those of all items there; the embedding is with the first block, the head with the last
    one. Exact, by dynamic programming over stages and blocks. Raises PlanError if there are fewer blocks than stages.
    """
    num_blocks, num_stages = len(costs[0]) - 2, len(costs)
    if num_stages > num_blocks:
        raise PlanError(f"{num_stages} stages need as many blocks, the model has {num_blocks}")
    # best[j]: the seconds of the slowest of the first stages if they take j blocks, and how many all but the last take.
    best: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    choices = []
    for stage, of_items in enumerate(costs):
        before = [0.0, *itertools.accumulate(of_items[1:-1])]
        before[0] -= of_items[0]
        before[-1] += of_items[-1]
        left = num_stages - stage - 1
        ends = [num_blocks] if not left else range(stage + 1, num_blocks - left + 1)
        best = {
            end: min((max(best[start][0], before[end] - before[start]), start) for start in best if start < end)
            for end in ends
        }
        choices.append(best)
    bounds = [num_blocks]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]][1])
    bounds = [0, *(bound + 1 for bound in bounds[-2:0:-1]), num_blocks + 2]
    return [Interval(*pair) for pair in itertools.pairwise(bounds)]


def side_by_side(work: Work, parties: Sequence[Party], depths: Sequence[int], microbatches: int) -> Plan:
    """Return the plan in which each party has pipelines of its depth, and each of these rows by its speed or curves."""
    replicas, times = [], []
    for party, depth in zip(parties, depths, strict=True):
        items = cut_unlike([_item_seconds(work, party, 1)] * depth)
        num_replicas = len(party.ranks) // depth
        replicas += [(party, items, replica) for replica in range(num_replicas)]
        times += [_slowest(work, party, items)] * num_replicas
    num_rows = work.global_batch // microbatches

    def plan_with(cut: Sequence[Interval]) -> Plan:
        tiles = []
        for (party, items, replica), rows in zip(replicas, cut, strict=True):
            across = len(party.ranks) // len(items)
            ranks = [party.ranks[stage * across + replica] for stage in range(len(items))]
            tiles += [Tile(part, rows, (rank,), family=party.family) for part, rank in zip(items, ranks, strict=True)]
        return Plan(tuple(tiles), microbatches, num_rows)

    if parties[0].curves is not None:
        return plan_with(_stacked(share_rows(num_rows, times)))
    speeds = [party.speed / max(map(work.cost, items)) for party, items, _ in replicas]
    return plan_with(_stacked(cut_rows(num_rows, speeds)))


def _item_seconds(work: Work, party: Party, rows: float) -> list[float]:
    return [party.seconds(work, Interval(item, item + 1), rows) for item in range(work.model.num_items)]


def _slowest(work: Work, party: Party, stages: Sequence[Interval]) -> Callable[[int], float]:
    """Return what tells how long rows take in the slowest of some stages."""
    return lru_cache(None)(lambda rows: max(party.seconds(work, items, rows) for items in stages))


def in_a_row(work: Work, parties: Sequence[Party], depths: Sequence[int], microbatches: int) -> Plan:
    """Return one pipeline over the parties, in their order; each has its stages, whose replicas share the rows."""
    rows = work.global_batch // microbatches
    stages = []
    for party, depth in zip(parties, depths, strict=True):
        across = len(party.ranks) // depth
        if across > rows:
            raise PlanError(f"{rows} rows of a microbatch are too few for {across} replicas; one is the least")
        stages += [(party, party.ranks[stage * across : (stage + 1) * across]) for stage in range(depth)]
    degrees = {len(ranks) for _, ranks in stages}

    def plan_with(cuts: Mapping[int, Sequence[Interval]]) -> Plan:
        """`cuts` are by the number of replicas."""
        largest = {degree: max(each.size for each in cut) for degree, cut in cuts.items()}
        items = cut_unlike([_item_seconds(work, party, largest[len(ranks)]) for party, ranks in stages])
        tiles = [
            Tile(part, each, (rank,), family=party.family)
            for part, (party, ranks) in zip(items, stages, strict=True)
            for each, rank in zip(cuts[len(ranks)], ranks, strict=True)
        ]
        return Plan(tuple(tiles), microbatches, rows)

    return plan_with({degree: cut_evenly(rows, degree) for degree in degrees})


def _stacked(sizes: Sequence[int]) -> list[Interval]:
    """Return consecutive intervals of these sizes."""
    return [Interval(*pair) for pair in itertools.pairwise(itertools.accumulate(sizes, initial=0))]


def state_bytes(work: Work, plan: Plan) -> dict[Tile, float]:
    """Return what weights, gradients and moments take on a rank of each tile, under ZeRO-1."""
    holders = [sum(tile.holds(item) for tile in plan.tiles) for item in range(work.model.num_items)]
    each = [
        count * (WEIGHT_BYTES + (MOMENT_BYTES + GRADIENT_SHARD_BYTES * (number > 1)) / number)
        for count, number in zip(work.parameters, holders, strict=True)
    ]
    return {tile: sum(each[slice(*tile.items)]) for tile in plan.tiles}


def rows_at_once(plan: Plan, tile: Tile) -> int:
    """Return of how many rows of a microbatch a tile keeps activations: at the loss those of one substep."""
    return tile.rows.size if plan.depth_to_loss(tile) else -(-tile.rows.size // tile.substeps)


def needed_bytes(work: Work, plan: Plan) -> dict[Tile, float]:
    """Return roughly what a rank of each tile needs: states, and activations of the microbatches that 1F1B keeps.

    At the loss a tile keeps those of one substep alone.
    """
    states = state_bytes(work, plan)
    model, last = work.model, work.model.num_items - 1

    def activations(tile: Tile) -> float:
        blocks = tile.items.intersect(Interval(1, last)).size
        again = tile.recompute == "full"
        head = tile.holds(last) * HEAD_BYTES * model.vocab_size
        kept = blocks * (INPUT_BYTES if again else BLOCK_BYTES) * model.hidden_size + (0 if again else head)
        making = max(BLOCK_BYTES * model.hidden_size, head) if again else 0
        depth, rows = plan.depth_to_loss(tile), rows_at_once(plan, tile)
        if depth:
            rows = tile.rows.size * min(depth + 1, plan.microbatches)
        return work.positions * (rows * kept + -(-tile.rows.size // tile.substeps) * making)

    return {tile: states[tile] + activations(tile) for tile in plan.tiles}


def made_to_fit(work: Work, plan: Plan, memory_bytes: Mapping[str, float]) -> Plan:
    """Return the plan with what tiles short of memory can do about it: at the loss go through their rows in as few
    pieces as fit, which costs little; else compute blocks again. `memory_bytes` is of one device, by family."""
    in_pieces = _in_pieces(work, plan, memory_bytes)
    needed = needed_bytes(work, in_pieces)
    if all(needed[tile] <= memory_bytes[tile.family] for tile in in_pieces.tiles):
        return in_pieces
    tiles = (
        given if needed[cut] <= memory_bytes[cut.family] else replace(given, recompute="full")
        for given, cut in zip(plan.tiles, in_pieces.tiles, strict=True)
    )
    return _in_pieces(work, replace(plan, tiles=tuple(tiles)), memory_bytes)


def _in_pieces(work: Work, plan: Plan, memory_bytes: Mapping[str, float]) -> Plan:
    needed, states = needed_bytes(work, plan), state_bytes(work, plan)

    def fitting(tile: Tile) -> Tile:
        room = memory_bytes[tile.family] - states[tile]
        if plan.depth_to_loss(tile) or needed[tile] - states[tile] <= room or room <= 0:
            return tile
        rows_at_once = math.floor(room / (needed[tile] - states[tile]) * tile.rows.size)
        if not rows_at_once:
            return tile
        return replace(tile, substeps=min(-(-tile.rows.size // rows_at_once), tile.rows.size))

    return replace(plan, tiles=tuple(map(fitting, plan.tiles)))


def proportional_candidates(
    work: Work, parties: Sequence[Party], num_ranks: int, zero: int = 1, exchange_seconds: float = 0.0
) -> list[Candidate]:
    """Return plans of the parties' ranks by speed, the others of `num_ranks` unused, the best by estimate first.

    With curves, which are for replicas in stage `zero`, those of the whole model are allocated by them; in stages 2 and
    3, where `exchange_seconds` are those of `allocate_in_step`, there are no other plans. Raises PlanError, with the
    numbers, where there are too few rows or blocks, or no memory for the states.
    """
    speeds = {party.family: party.speed for party in parties}
    memory_bytes = {party.family: party.memory_bytes for party in parties}
    curves = None if parties[0].curves is None else {party.family: party.curves for party in parties}
    families = {rank: party.family for party in parties for rank in party.ranks}
    unused = tuple(rank for rank in range(num_ranks) if rank not in families)
    # First stages keep the activations of most microbatches: those with memory go first.
    by_memory = sorted(parties, key=lambda party: -party.memory_bytes)
    allocated: list[Candidate] = []
    made: list[Candidate] = []
    refusal = None
    if curves is not None:
        try:
            plan, seconds = replicas_plan(work.model, families, curves, work.global_batch, zero, exchange_seconds)
        except PlanError as error:
            if zero >= 2:
                raise
            refusal = error
        else:
            depths = (1,) * len(parties)
            allocated.append(Candidate(seconds, SIDE_BY_SIDE, depths, replace(plan, unused=unused)))
        if zero >= 2:
            return allocated
    for kind, make, order in ((SIDE_BY_SIDE, side_by_side, parties), (IN_A_ROW, in_a_row, by_memory)):
        if kind == IN_A_ROW and len(parties) == 1:  # the same plans
            continue
        for depths in itertools.product(*(divisors(len(party.ranks)) for party in order)):
            if curves is not None and kind == SIDE_BY_SIDE and set(depths) == {1}:  # allocated above
                continue
            for microbatches in divisors(work.global_batch):
                try:
                    plan = made_to_fit(work, make(work, order, depths, microbatches), memory_bytes)
                except PlanError as error:
                    refusal = error
                    break  # more microbatches have fewer rows
                plan = replace(plan, unused=unused)
                made.append(Candidate(estimate(work, plan, speeds, curves), kind, depths, plan))
    if not made and not allocated:
        raise PlanError(f"no plan of {len(families)} ranks by speed for this job; the last one tried says: {refusal}")
    return _that_fit(work, made, memory_bytes, allocated)


def even_candidates(work: Work, parties: Sequence[Party]) -> list[Candidate]:
    """Return even plans of all ranks, whatever their speed, the best by estimate first. Raises PlanError."""
    speeds = {party.family: party.speed for party in parties}
    family = {rank: party.family for party in parties for rank in party.ranks}
    made = []
    for depth in divisors(len(family)):
        for microbatches in divisors(work.global_batch):
            rows, replicas = work.global_batch // microbatches, len(family) // depth
            if depth > work.model.num_layers or rows % replicas:
                continue
            plan = even_plan(work.model.num_items, TensorGrid(), depth, replicas, microbatches, rows)
            plan = replace(plan, tiles=tuple(replace(tile, family=family[tile.ranks[0]]) for tile in plan.tiles))
            made.append(Candidate(estimate(work, plan, speeds), EVEN, (depth,), plan))
    if not made:
        raise PlanError(f"no even plan of {len(family)} ranks for {work.global_batch} rows; set train.global_batch")
    return _that_fit(work, made, {party.family: party.memory_bytes for party in parties})


def _that_fit(
    work: Work, made: Sequence[Candidate], memory: Mapping[str, float], known: Sequence[Candidate] = ()
) -> list[Candidate]:
    """Return those that fit by estimate, and those that are `known` to, the fastest first."""
    fitting, short = list(known), []
    for candidate in made:
        missing = max(
            (needed - memory[tile.family], needed, tile.family)
            for tile, needed in needed_bytes(work, candidate.plan).items()
        )
        if missing[0] > 0:
            short.append(missing)
        else:
            fitting.append(candidate)
    if not fitting:
        _, needed, family = min(short)
        raise PlanError(
            f"no plan of these ranks fits in memory: states and activations need about"
            f" {needed / 2**20:,.1f} MiB on a device of family '{family}', which has {memory[family] / 2**20:,.1f} MiB;"
            " use more devices, or shorter sequences"
        )
    return sorted(fitting, key=lambda candidate: candidate.seconds)


def divisors(number: int) -> Iterator[int]:
    return (n for n in range(1, number + 1) if number % n == 0)
