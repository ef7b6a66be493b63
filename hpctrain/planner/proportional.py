"""Plans by speed: each device of a mixed cluster gets as much work as it does in the time of the others. Pure.

Two kinds: `side by side`, where each family has replicas of its own, pipelines of its own depth, and rows by speed; and
`in a row`, one pipeline over all families, whose blocks are cut by speed. Both are cut exactly: no other cut into whole
rows or blocks makes the slowest part faster. Replicas side by side do not meet before the end of a step: where whole
rows fit their speeds badly, they have them by turns, 5 and 6 for five and a half. Which depths and how many
microbatches is chosen by a closed form of computation and bubble; what is communicated is not weighed.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hpctrain.cluster import Cluster
from hpctrain.errors import PlanError
from hpctrain.intervals import Interval, cut_evenly
from hpctrain.job import Model
from hpctrain.parameters import item_parameters
from hpctrain.plan import Plan, TensorGrid, Tile, even_plan
from hpctrain.planner.even import GRADIENT_SHARD_BYTES, MOMENT_BYTES, WEIGHT_BYTES
from hpctrain.planner.turns import spread
from hpctrain.rows import Rows

# What the small products of a microbatch cost beside those of its rows: some 300 tokens' time for rows of 2,048.
ROWS_LOST = 0.15
# A longer period of rows by turns is not worth less than this share of a step.
TURNS_TOLERANCE = 0.005
# Of one token: what a block keeps in fp32 for each feature of its hidden state (measured), the head for each token id.
BLOCK_BYTES, HEAD_BYTES = 90, 12
SIDE_BY_SIDE, IN_A_ROW, EVEN = "side by side", "in a row", "even"


@dataclass(frozen=True)
class Party:
    """The devices of one family."""

    family: str
    ranks: tuple[int, ...]
    speed: float
    """Of one of them, in any unit that is the same for all."""
    memory_bytes: float = math.inf


@dataclass(frozen=True)
class Candidate:
    """A plan, and what is thought of it."""

    seconds: float
    """Of a step; in the time that a device of speed 1 takes for one row of one block."""
    kind: str
    depths: tuple[int, ...]
    """Stages of each party, or of all."""
    plan: Plan

    @property
    def shape(self) -> tuple[str, tuple[int, ...]]:
        return self.kind, self.depths

    @property
    def describe(self) -> str:
        depths = ", ".join(map(str, self.depths))
        return f"{self.kind}, {depths} stage{'s' if self.depths != (1,) else ''}: {self.plan.describe()}"


@dataclass(frozen=True)
class Work:
    """What is to be planned: a model's items by their cost, and the rows of a step."""

    model: Model
    positions: int
    global_batch: int

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """Return the operations of each item on one row, in blocks: products by their weights, and attention's own."""
        model = self.model
        matrices = sum(math.prod(p.shape) for p in item_parameters(model, 1) if p.decay)
        block = matrices + model.hidden_size * self.positions  # causal: half of the products with keys and values
        head = model.hidden_size * model.vocab_size
        return 0.0, *[1.0] * model.num_layers, head / block

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        """Return how many parameters each item has."""
        items = range(self.model.num_items)
        return tuple(sum(math.prod(p.shape) for p in item_parameters(self.model, item)) for item in items)

    def cost(self, items: Interval) -> float:
        return sum(self.costs[slice(*items)])


def parties_of(cluster: Cluster, dtype: str, speeds: Mapping[str, float] | None = None) -> list[Party]:
    """Return the families of a cluster with the ranks that have such a device; by measured speed, else by peak.

    Raises PlanError for a family that does not compute in `dtype`.
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
            found.append(Party(name, ranks, speeds[name] if speeds else known[dtype], family.memory_bytes))
    return found


def cut_rows(num_rows: int, speeds: Sequence[float], least: int = 1) -> list[int]:
    """Return how many rows each replica takes, `least` or more, so that the slowest is as fast as can be.

    Exact: rows are given one by one to who would then be done first. Raises PlanError if there are too few.
    """
    if num_rows < least * len(speeds):
        raise PlanError(
            f"{num_rows // least} rows of a microbatch are too few for {len(speeds)} replicas; one is the least"
        )
    rows = [least] * len(speeds)
    waiting = [((least + 1) / speed, i) for i, speed in enumerate(speeds)]
    heapq.heapify(waiting)
    for _ in range(num_rows - least * len(speeds)):
        _, i = waiting[0]
        rows[i] += 1
        heapq.heapreplace(waiting, ((rows[i] + 1) / speeds[i], i))
    return rows


def cut_rows_by_turns(num_rows: int, speeds: Sequence[float], microbatches: int) -> list[Rows]:
    """Return which rows of each microbatch a replica takes, so that over the step the slowest is as fast as can be.

    What counts is a replica's rows of the whole step: it waits for no other one before its end. The period is the
    shortest for which the slowest replica takes no longer than by the best of all, but for `TURNS_TOLERANCE`.
    Raises PlanError as `cut_rows`.
    """

    def slowest(period: int) -> float:
        totals = cut_rows(num_rows * period, speeds, least=period)
        return max(total / speed for total, speed in zip(totals, speeds, strict=True)) / period

    enough = slowest(microbatches) * (1 + TURNS_TOLERANCE)
    period = next(period for period in divisors(microbatches) if slowest(period) <= enough)
    return spread(cut_rows(num_rows * period, speeds, least=period), period)


def cut_items(costs: Sequence[float], speeds: Sequence[float]) -> list[Interval]:
    """Return the items of each stage, one block at least, so that the slowest is as fast as can be.

    `costs` are of all items; the embedding is with the first block, the head with the last one. Exact, by dynamic
    programming over stages and blocks. Raises PlanError if there are fewer blocks than stages.
    """
    num_blocks, num_stages = len(costs) - 2, len(speeds)
    if num_stages > num_blocks:
        raise PlanError(f"{num_stages} stages need as many blocks, the model has {num_blocks}")
    before = [0.0, *itertools.accumulate(costs[1:-1])]
    before[0] -= costs[0]
    before[-1] += costs[-1]
    # best[j]: the seconds of the slowest of the first stages if they take j blocks, and how many all but the last take.
    best: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    choices = []
    for stage, speed in enumerate(speeds):
        left = num_stages - stage - 1
        ends = [num_blocks] if not left else range(stage + 1, num_blocks - left + 1)
        best = {
            end: min(
                (max(best[start][0], (before[end] - before[start]) / speed), start) for start in best if start < end
            )
            for end in ends
        }
        choices.append(best)
    bounds = [num_blocks]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]][1])
    bounds = [0, *(bound + 1 for bound in bounds[-2:0:-1]), len(costs)]
    return [Interval(*pair) for pair in itertools.pairwise(bounds)]


def side_by_side(work: Work, parties: Sequence[Party], depths: Sequence[int], microbatches: int) -> Plan:
    """Return the plan in which each party has pipelines of its depth, and each of these rows by its speed."""
    cuts = [cut_items(work.costs, [1.0] * depth) for depth in depths]
    replicas = [
        (party, items, replica)
        for party, depth, items in zip(parties, depths, cuts, strict=True)
        for replica in range(len(party.ranks) // depth)
    ]
    speeds = [party.speed / max(map(work.cost, items)) for party, items, _ in replicas]
    num_rows = work.global_batch // microbatches
    tiles = []
    for (party, items, replica), rows in zip(replicas, cut_rows_by_turns(num_rows, speeds, microbatches), strict=True):
        across = len(party.ranks) // len(items)
        ranks = [party.ranks[stage * across + replica] for stage in range(len(items))]
        tiles += [Tile(part, rows, (rank,), family=party.family) for part, rank in zip(items, ranks, strict=True)]
    return Plan(tuple(tiles), microbatches, num_rows)


def in_a_row(work: Work, parties: Sequence[Party], depths: Sequence[int], microbatches: int) -> Plan:
    """Return one pipeline over the parties, in their order; each has its stages, whose replicas share the rows."""
    rows = work.global_batch // microbatches
    stages = []
    for party, depth in zip(parties, depths, strict=True):
        across = len(party.ranks) // depth
        if across > rows:
            raise PlanError(f"{rows} rows of a microbatch are too few for {across} replicas; one is the least")
        stages += [(party, party.ranks[stage * across : (stage + 1) * across]) for stage in range(depth)]
    items = cut_items(work.costs, [party.speed / math.ceil(rows / len(ranks)) for party, ranks in stages])
    tiles = [
        Tile(part, cut, (rank,), family=party.family)
        for part, (party, ranks) in zip(items, stages, strict=True)
        for cut, rank in zip(cut_evenly(rows, len(ranks)), ranks, strict=True)
    ]
    return Plan(tuple(tiles), microbatches, rows)


def estimate(work: Work, plan: Plan, speeds: Mapping[str, float]) -> float:
    """Return the time of a step: that of the slowest of the pipelines that share no messages.

    Of each one its slowest tile for every microbatch, and the rest of the longest path once. Tiles that share messages
    wait for each other in every microbatch, so that their turns do not make up for each other. An estimate of
    computation and bubble, from above where paths are unlike; communication is left out.
    """

    def seconds(tile: Tile, rows: int) -> float:
        return work.cost(tile.items) * (rows + ROWS_LOST) / speeds[tile.family]

    path: dict[Tile, float] = {}
    for tile in sorted(plan.tiles, key=lambda tile: -tile.items.start):
        ahead = max((path[other] for other in plan.downstream(tile)), default=0.0)
        path[tile] = seconds(tile, tile.rows.most()) + ahead
    steps = []
    for tiles in _pipelines(plan):
        slowest = [max(seconds(tile, tile.rows_of(m).size) for tile in tiles) for m in range(plan.period)]
        every = sum(slowest[m % plan.period] for m in range(plan.microbatches))
        steps.append(max(path[tile] for tile in tiles) + every - max(slowest))
    return max(steps)


def _pipelines(plan: Plan) -> list[list[Tile]]:
    """Return the tiles that share messages, directly or through others, together."""
    found: list[list[Tile]] = []
    seen: set[Tile] = set()
    for start in plan.tiles:
        if start in seen:
            continue
        seen.add(start)
        together = [start]
        for tile in together:  # grows while it is gone through
            near = [t for t in (*plan.upstream(tile), *plan.downstream(tile)) if t not in seen]
            seen.update(near)
            together += near
        found.append(together)
    return found


def turns_reason(work: Work, plan: Plan, speeds: Mapping[str, float]) -> str | None:
    """Say what rows by turns are for; None where all microbatches are cut alike."""
    if plan.period == 1:
        return None
    replicas: dict[Rows, list[Tile]] = {}
    for tile in plan.tiles:
        replicas.setdefault(tile.rows, []).append(tile)
    each = [min(speeds[tile.family] / work.cost(tile.items) for tile in tiles) for tiles in replicas.values()]
    by_turns = max(rows.mean / speed for rows, speed in zip(replicas, each, strict=True))
    whole = max(rows / speed for rows, speed in zip(cut_rows(plan.rows, each), each, strict=True))
    share = ", ".join(f"{tiles[0].family} {rows.mean:.4g}" for rows, tiles in replicas.items())
    return (
        f"by turns of {plan.period} microbatches, on the mean {share} of {plan.rows};"
        f" whole rows would make the slowest {whole / by_turns - 1:.1%} slower"
    )


def state_bytes(work: Work, plan: Plan) -> dict[Tile, float]:
    """Return what weights, gradients and moments take on a rank of each tile, under ZeRO-1."""
    holders = [sum(tile.holds(item) for tile in plan.tiles) for item in range(work.model.num_items)]
    each = [
        count * (WEIGHT_BYTES + (MOMENT_BYTES + GRADIENT_SHARD_BYTES * (number > 1)) / number)
        for count, number in zip(work.parameters, holders, strict=True)
    ]
    return {tile: sum(each[slice(*tile.items)]) for tile in plan.tiles}


def needed_bytes(work: Work, plan: Plan) -> dict[Tile, float]:
    """Return roughly what a rank of each tile needs: states, and activations of the microbatches that 1F1B keeps."""
    states = state_bytes(work, plan)
    model, last = work.model, work.model.num_items - 1

    def activations(tile: Tile) -> float:
        blocks = tile.items.intersect(Interval(1, last)).size
        each = blocks * BLOCK_BYTES * model.hidden_size + tile.holds(last) * HEAD_BYTES * model.vocab_size
        kept = min(plan.depth_to_loss(tile) + 1, plan.microbatches)
        return tile.rows.most(kept) * work.positions * each

    return {tile: states[tile] + activations(tile) for tile in plan.tiles}


def proportional_candidates(work: Work, parties: Sequence[Party], num_ranks: int) -> list[Candidate]:
    """Return plans of the parties' ranks by speed, the others of `num_ranks` unused, the best by estimate first.

    Raises PlanError, with the numbers, where there are too few rows or blocks, or no memory for the states.
    """
    speeds = {party.family: party.speed for party in parties}
    used = {rank for party in parties for rank in party.ranks}
    unused = tuple(rank for rank in range(num_ranks) if rank not in used)
    # First stages keep the activations of most microbatches: those with memory go first.
    by_memory = sorted(parties, key=lambda party: -party.memory_bytes)
    made: list[Candidate] = []
    refusal = None
    for kind, make, order in ((SIDE_BY_SIDE, side_by_side, parties), (IN_A_ROW, in_a_row, by_memory)):
        if kind == IN_A_ROW and len(parties) == 1:  # the same plans
            continue
        for depths in itertools.product(*(divisors(len(party.ranks)) for party in order)):
            for microbatches in divisors(work.global_batch):
                try:
                    plan = replace(make(work, order, depths, microbatches), unused=unused)
                except PlanError as error:
                    refusal = error
                    break  # more microbatches have fewer rows
                made.append(Candidate(estimate(work, plan, speeds), kind, depths, plan))
    if not made:
        raise PlanError(f"no plan of {len(used)} ranks by speed for this job; the last one tried says: {refusal}")
    return _that_fit(work, made, {party.family: party.memory_bytes for party in parties})


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


def _that_fit(work: Work, made: Sequence[Candidate], memory: Mapping[str, float]) -> list[Candidate]:
    fitting, short = [], []
    for candidate in made:
        missing = max(
            (needed - memory[tile.family], needed, tile.family)
            for tile, needed in needed_bytes(work, candidate.plan).items()
        )
        (short if missing[0] > 0 else fitting).append((missing, candidate))
    if not fitting:
        (_, needed, family), _ = min(short, key=lambda pair: pair[0])
        raise PlanError(
            f"no plan of these ranks fits in memory: states and activations need about"
            f" {needed / 2**20:,.1f} MiB on a device of family '{family}', which has {memory[family] / 2**20:,.1f} MiB;"
            " use more devices, or shorter sequences"
        )
    return sorted((candidate for _, candidate in fitting), key=lambda candidate: candidate.seconds)


def divisors(number: int) -> Iterator[int]:
    return (n for n in range(1, number + 1) if number % n == 0)
