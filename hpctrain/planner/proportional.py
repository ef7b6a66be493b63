"""Plans by speed: each device of a mixed cluster gets as much work as it does in the time of the others. Pure.

Two kinds: `side by side`, where each family has replicas of its own, pipelines of its own depth, and rows by speed; and
`in a row`, one pipeline over all families, whose blocks are cut by speed. Both are cut exactly: no other cut into whole
rows or blocks makes the slowest part faster. Replicas that do not meet before the end of a step have rows by turns
where whole ones fit their speeds badly: 5 in some microbatches and 6 in the others. Which depths and how many
microbatches is chosen by a closed form of computation and bubble; what is communicated is not weighed.
"""

import heapq
import itertools
import math
from collections import Counter
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
# Rows by turns are not worth less than this share of a step.
TURNS_WORTH = 0.005
# Of one token: what a block keeps in fp32 for each feature of its hidden state (measured), the head for each token id.
BLOCK_BYTES, HEAD_BYTES = 90, 12
INPUT_BYTES = 4  # of that, where a block is computed again: its input
RECOMPUTED = 4 / 3  # as long as without: another forward pass
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
    """Of a step; where it is an estimate by speeds of any unit, in the time of one row of one block at speed 1."""
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
    def _block(self) -> int:
        """Return the multiplications of a block for one token, forward."""
        matrices = sum(math.prod(p.shape) for p in item_parameters(self.model, 1) if p.decay)
        return matrices + self.model.hidden_size * self.positions  # causal: half of the products with keys and values

    @property
    def flops(self) -> float:
        """Of one row of one block, forward and back."""
        return 6.0 * self.positions * self._block

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """Return the operations of each item on one row, in blocks: products by their weights, and attention's own."""
        head = self.model.hidden_size * self.model.vocab_size
        return 0.0, *[1.0] * self.model.num_layers, head / self._block

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
    num_rows = work.global_batch // microbatches
    speeds = [party.speed / max(map(work.cost, items)) for party, items, _ in replicas]

    def plan_with(cut: Sequence[Rows]) -> Plan:
        tiles = []
        for (party, items, replica), rows in zip(replicas, cut, strict=True):
            across = len(party.ranks) // len(items)
            ranks = [party.ranks[stage * across + replica] for stage in range(len(items))]
            tiles += [Tile(part, rows, (rank,), family=party.family) for part, rank in zip(items, ranks, strict=True)]
        return Plan(tuple(tiles), microbatches, num_rows)

    return _shorter(work, parties, *(plan_with(cut) for cut in _whole_and_by_turns(num_rows, speeds, microbatches)))


def in_a_row(work: Work, parties: Sequence[Party], depths: Sequence[int], microbatches: int) -> Plan:
    """Return one pipeline over the parties, in their order; each has its stages, whose replicas share the rows.

    Where all stages have as many replicas, these are pipelines that do not meet, and may have rows by turns.
    """
    rows = work.global_batch // microbatches
    stages = []
    for party, depth in zip(parties, depths, strict=True):
        across = len(party.ranks) // depth
        if across > rows:
            raise PlanError(f"{rows} rows of a microbatch are too few for {across} replicas; one is the least")
        stages += [(party, party.ranks[stage * across : (stage + 1) * across]) for stage in range(depth)]
    degrees = {len(ranks) for _, ranks in stages}

    def plan_with(cuts: Mapping[int, Sequence[Rows]]) -> Plan:
        """`cuts` are by the number of replicas."""
        largest = {degree: max(each.mean for each in cut) for degree, cut in cuts.items()}
        items = cut_items(work.costs, [party.speed / largest[len(ranks)] for party, ranks in stages])
        tiles = [
            Tile(part, each, (rank,), family=party.family)
            for part, (party, ranks) in zip(items, stages, strict=True)
            for each, rank in zip(cuts[len(ranks)], ranks, strict=True)
        ]
        return Plan(tuple(tiles), microbatches, rows)

    if len(degrees) == 1:
        (degree,) = degrees
        both = _whole_and_by_turns(rows, [1.0] * degree, microbatches)
        return _shorter(work, parties, *(plan_with({degree: cut}) for cut in both))
    return plan_with({degree: [Rows((cut,)) for cut in cut_evenly(rows, degree)] for degree in degrees})


def _whole_and_by_turns(
    num_rows: int, speeds: Sequence[float], microbatches: int
) -> tuple[Sequence[Rows], Sequence[Rows]]:
    """Return the rows of replicas by their speeds: the same of all microbatches, and so that they fit over the step.

    Raises PlanError as `cut_rows`.
    """
    whole = spread(cut_rows(num_rows, speeds), 1)
    return whole, spread(cut_rows(num_rows * microbatches, speeds, least=microbatches), microbatches)


def _shorter(work: Work, parties: Sequence[Party], whole: Plan, by_turns: Plan) -> Plan:
    """Return the plan by turns if its step is enough shorter, else that with whole rows."""
    speeds = {party.family: party.speed for party in parties}
    shorter = estimate(work, by_turns, speeds) * (1 + TURNS_WORTH) < estimate(work, whole, speeds)
    return by_turns if shorter else whole


def estimate(work: Work, plan: Plan, speeds: Mapping[str, float]) -> float:
    """Return the time of a step: that of the slowest of the pipelines that share no messages.

    Of each one its slowest tile for every microbatch, and the rest of the longest path once; and where rows grow from a
    microbatch to the next one, as much of it again as they grow, for the tiles behind wait then. An estimate of
    computation and bubble, from above where paths are unlike or rows go by turns; communication is left out.
    """

    def seconds(tile: Tile, rows: int) -> float:
        again = RECOMPUTED if tile.recompute == "full" else 1.0
        return work.cost(tile.items) * (rows + ROWS_LOST * tile.substeps) * again / speeds[tile.family]

    path: dict[Tile, float] = {}
    for tile in sorted(plan.tiles, key=lambda tile: -tile.items.start):
        ahead = max((path[other] for other in plan.downstream(tile)), default=0.0)
        path[tile] = seconds(tile, tile.rows.most()) + ahead
    steps = []
    for tiles in _pipelines(plan):
        of_period = [max(seconds(tile, tile.rows_of(m).size) for tile in tiles) for m in range(plan.period)]
        every = [of_period[m % plan.period] for m in range(plan.microbatches)]
        slowest = max(every)
        rest = max(path[tile] for tile in tiles) - slowest
        growth = sum(max(0.0, after - before) for before, after in itertools.pairwise([0.0, *every]))
        steps.append(min(slowest * plan.microbatches + rest, sum(every) + rest * growth / slowest))
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
    whole = dict(zip(replicas, spread(cut_rows(plan.rows, each), 1), strict=True))
    same = replace(plan, tiles=tuple(replace(tile, rows=whole[tile.rows]) for tile in plan.tiles))
    longer = estimate(work, same, speeds) / estimate(work, plan, speeds) - 1
    shares = Counter(
        f"{rows.mean:.4g} on {' and '.join(dict.fromkeys(tile.family for tile in tiles))}"
        for rows, tiles in replicas.items()
    )
    means = ", ".join(f"{count} x {share}" for share, count in shares.items())
    return f"by turns, of {plan.rows} on the mean {means}; with whole rows a step would take {longer:.1%} longer"


def state_bytes(work: Work, plan: Plan) -> dict[Tile, float]:
    """Return what weights, gradients and moments take on a rank of each tile, under ZeRO-1."""
    holders = [sum(tile.holds(item) for tile in plan.tiles) for item in range(work.model.num_items)]
    each = [
        count * (WEIGHT_BYTES + (MOMENT_BYTES + GRADIENT_SHARD_BYTES * (number > 1)) / number)
        for count, number in zip(work.parameters, holders, strict=True)
    ]
    return {tile: sum(each[slice(*tile.items)]) for tile in plan.tiles}


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
        depth, at_once = plan.depth_to_loss(tile), -(-tile.rows.most() // tile.substeps)
        rows = tile.rows.most(min(depth + 1, plan.microbatches)) if depth else at_once
        return work.positions * (rows * kept + at_once * making)

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
        rows_at_once = math.floor(room / (needed[tile] - states[tile]) * tile.rows.most())
        if not rows_at_once:
            return tile
        return replace(tile, substeps=min(-(-tile.rows.most() // rows_at_once), *tile.rows.sizes))

    return replace(plan, tiles=tuple(map(fitting, plan.tiles)))


def proportional_candidates(work: Work, parties: Sequence[Party], num_ranks: int) -> list[Candidate]:
    """Return plans of the parties' ranks by speed, the others of `num_ranks` unused, the best by estimate first.

    Raises PlanError, with the numbers, where there are too few rows or blocks, or no memory for the states.
    """
    speeds = {party.family: party.speed for party in parties}
    memory_bytes = {party.family: party.memory_bytes for party in parties}
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
                    plan = made_to_fit(work, make(work, order, depths, microbatches), memory_bytes)
                except PlanError as error:
                    refusal = error
                    break  # more microbatches have fewer rows
                plan = replace(plan, unused=unused)
                made.append(Candidate(estimate(work, plan, speeds), kind, depths, plan))
    if not made:
        raise PlanError(f"no plan of {len(used)} ranks by speed for this job; the last one tried says: {refusal}")
    return _that_fit(work, made, memory_bytes)


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
