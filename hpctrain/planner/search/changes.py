"""Changes that may make the step of a plan shorter. A search tries each, and the predictor says what it saves. Pure.

A change takes the predictor of a plan with one tile a rank, by 1F1B. It yields changed plans, the smallest change
first. The predictor of each says whether it fits in memory and whether it is faster.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hpctrain.config.bounds import MOST_PASSES
from hpctrain.config.errors import PlanError
from hpctrain.plan.checks import check_passes, num_passes
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prediction.cut_products import predict_in_parts
from hpctrain.planner.prediction.offload import format_shortage, unknown_hosts
from hpctrain.planner.prediction.predictor import Prediction, Predictor
from hpctrain.planner.prices.setup import Setup
from hpctrain.planner.search.cut import CutShape
from hpctrain.planner.search.extra_warmup import with_extra_warmup
from hpctrain.planner.search.item_cuts import PricedItems, best_cuts, slowest_seconds
from hpctrain.planner.search.mixed_tiles import is_over_pools, positions_by_worth
from hpctrain.planner.search.score import Scorer
from hpctrain.planner.search.space import BEST
from hpctrain.sharding.intervals import Interval, cut_evenly, divisors
from hpctrain.sharding.items import BLOCK, EMBEDDING, block_of

Change = Callable[[Predictor], Iterator[Plan]]
Stages = tuple[Interval, ...]
"""The items of each stage of a pipeline."""
LEAST_GAIN = 0.002
"""Share of the slowest stage's seconds that cuts inside blocks must save: a plan of whole blocks is easier to read."""


@dataclass(frozen=True, eq=False)
class SimulatedPlan:
    """A plan that fits in memory, with its prediction."""

    layout: CutShape
    predictor: Predictor
    prediction: Prediction
    plain_seconds: float | None = None
    """Seconds of a step by the plan that this one was changed from; None where it is no change."""
    left: tuple[Change, ...] = ()
    """The changes that were not tried on it."""

    @property
    def plan(self) -> Plan:
        return self.predictor.plan

    @property
    def seconds(self) -> float:
        return self.prediction.step_seconds

    def optimistic_seconds(self, change: Change) -> float:
        """Return about the least seconds of a step after a change, by what the estimate knows of extra warm-up and of
        other schedules."""
        if change is more_in_flight:
            return min(self.seconds, self.layout.seconds)
        if change is positions_by_worth:
            return 0.0  # they have nothing in common with the layout
        return self.seconds - self.layout.saved_seconds

    @property
    def is_mixed(self) -> bool:
        """Say whether tiles are over several pools or nodes, and so have nothing in common with the layout."""
        return any(is_over_pools(tile, self.predictor) for tile in self.plan.tiles)

    @property
    def virtual_stages(self) -> int:
        """Return how many tiles a rank has."""
        return len(self.plan.virtual_stages(self.plan.tiles[0]))

    def describe(self, names: Sequence[str]) -> str:
        """Return what each pool does, as `CutShape.describe`, and how many virtual stages there are."""
        if self.is_mixed:
            return self.plan.describe()
        several = f", {self.virtual_stages} virtual stages" if self.virtual_stages > 1 else ""
        return self.layout.describe(names) + several


def cuts_inside_blocks(predictor: Predictor) -> Iterator[Plan]:
    """Yield the plan with cuts also between attention and feed-forward part, where that makes the slowest stage faster.

    Tiles that exchange in every pass must have the same items, also in pipelines side by side.
    """
    plan = predictor.plan
    pipelines = _pipelines(plan)
    if len(pipelines) > 1 and any(tile.zero >= 2 for tile in plan.tiles):
        return
    items: dict[Tile, tuple[Interval, ...]] = {}
    before = after = 0.0
    for stages, tiles in pipelines.items():
        by_stage = [[tile for tile in tiles if tile.items == stage] for stage in stages]
        priced = [_priced(predictor, of_stage) for of_stage in by_stage]
        old = [0, *(stage.stop for stage in stages)]
        new = best_cuts(priced, old)
        before, after = (max(s, slowest_seconds(priced, cuts)) for s, cuts in ((before, old), (after, new)))
        for of_stage, cut in zip(by_stage, itertools.pairwise(new), strict=True):
            items |= dict.fromkeys(of_stage, (Interval(*cut),))
    if after <= before * (1 - LEAST_GAIN):
        yield _with_items(plan, items)


def _pipelines(plan: Plan) -> dict[Stages, list[Tile]]:
    """Return the tiles of each pipeline by its stages. Pipelines with the same stages count as one."""
    result: dict[Stages, list[Tile]] = {}
    for tiles in plan.pipelines:
        result.setdefault(tuple(sorted({tile.items for tile in tiles})), []).extend(tiles)
    return result


def _with_items(plan: Plan, items: Mapping[Tile, Sequence[Interval]]) -> Plan:
    """Return the plan with other items for each tile, in as many tiles as these are."""
    count = len(items[plan.tiles[0]])
    tiles = (replace(tile, items=items[tile][number]) for number in range(count) for tile in plan.tiles)
    return replace(plan, tiles=tuple(tiles))


def _priced(predictor: Predictor, tiles: Sequence[Tile]) -> PricedItems:
    """Return the seconds of a stage for any items, as of its slowest replica, and the number of items that fit.

    Each item counts with as much memory as the stage's own items need.
    """
    kinds = predictor.setup.first_equal
    most = min(tile.items.size + predictor.free_items(tile) for tile in tiles)
    every = []
    for tile in {(tile.family, tile.rank_rows): tile for tile in tiles}.values():
        seconds = {kind: _seconds(predictor, tile, Interval(kind, kind + 1)) for kind in set(kinds)}
        every.append(list(itertools.accumulate((seconds[kind] for kind in kinds), initial=0.0)))
    return PricedItems(max(every, key=lambda sums: sums[-1]), most)


def _seconds(predictor: Predictor, tile: Tile, layer: Interval) -> float:
    """Return what a layer takes a tile for a microbatch, forward and backward."""
    passes = (predictor.layer_passes(tile, layer, rows) for rows in tile.chunk_rows)
    return sum(each["forward"].seconds + each["backward"].seconds for each in passes)


def more_in_flight(predictor: Predictor) -> Iterator[Plan]:
    """Yield the plan with an extra warm-up, where slow messages delay a tile."""
    if changed := with_extra_warmup(predictor.plan, predictor.costs, predictor.headroom):
        yield changed


def zero_bubble(predictor: Predictor) -> Iterator[Plan]:
    """Yield the plan by ZB-H1 in place of 1F1B, where its tiles are in a pipeline and may split backward passes.

    Tiles with row chunks, or ZeRO 2 or 3, have no memory for the operands of dW.
    """
    plan = predictor.plan
    splits = all(tile.zero < 2 and tile.row_chunks == 1 for tile in plan.tiles)
    if splits and any(map(plan.upstream, plan.tiles)) and plan.microbatches > 1:
        yield plan.with_schedule(schedule="zb-h1")


def virtual_stages(predictor: Predictor, most: int) -> Iterator[Plan]:
    """Yield the plan with several tiles a rank: two, and as many as divide the blocks of a stage, up to `most`.

    With v virtual stages a rank has v tiles, as many tiles apart as there are stages (Narayanan et al. 2021, arXiv
    2104.04473). The bubble is about the v-th part, and there are v times as many messages. The first of p stages keeps
    the activations of p + (p - 1) / v microbatches instead of p. All pipelines must have two stages or more. The
    microbatches must be a multiple of the stages of each.
    """
    plan = predictor.plan
    pipelines = _pipelines(plan)
    depths = [len(stages) for stages in pipelines]
    if min(depths) == 1 or any(plan.microbatches % depth for depth in depths):
        return
    of_stage = predictor.setup.model.num_layers // max(depths)
    blocks = {stages: _num_blocks(stages) for stages in pipelines}
    limit = min(most, of_stage, *map(min, blocks.values()))
    for count in sorted({2, *divisors(of_stage)} if limit > 1 else ()):
        if not 1 < count <= limit:
            continue
        items: dict[Tile, list[Interval]] = {}
        for stages, tiles in pipelines.items():
            cuts = dealt_cuts(blocks[stages], _end_blocks(predictor, tiles), count)
            dealt = [Interval(*pair) for pair in itertools.pairwise(cuts)]
            items |= {tile: dealt[stages.index(tile.items) :: len(stages)] for tile in tiles}
        changed = _with_items(plan, items)
        if num_passes(changed) <= MOST_PASSES:
            yield changed


def _num_blocks(stages: Sequence[Interval]) -> list[int]:
    """Return how many blocks each stage of a pipeline begins."""
    bounds = [max(0, block_of(stage.start)) for stage in stages] + [block_of(stages[-1].stop - 1)]
    return [stop - start for start, stop in itertools.pairwise(bounds)]


def _end_blocks(predictor: Predictor, tiles: Sequence[Tile]) -> tuple[float, float]:
    """Return how many blocks take as long as the embedding, on a pipeline's first stage, and as the head on its
    last."""
    first, last = (end(tiles, key=lambda tile: (tile.items, tile.rows.size)) for end in (min, max))
    ends = (first, EMBEDDING), (last, predictor.setup.head)
    embedding, head = (_seconds(predictor, tile, layer) / _seconds(predictor, tile, BLOCK) for tile, layer in ends)
    return embedding, head


def dealt_cuts(blocks: Sequence[int], ends: tuple[float, float], virtual_stages: int) -> list[int]:
    """Return the items where tiles begin, and where the last one ends, if each stage of so many blocks has several.

    The longest tile of a stage is as short as can be: one with an end of the model, which takes as long as so many
    blocks (`ends`), has fewer blocks, but one at least.
    """
    parts, others, last = [], virtual_stages - 1, len(blocks) - 1
    for number, count in enumerate(blocks):
        end = ends[0] if number == 0 else ends[1] if number == last else 0.0

        def lengths(own: int, count: int = count, end: float = end) -> tuple[float, float]:
            """Return the key to minimise over `own`, the number of blocks with the end: first the longest tile, then
            minus the shortest one."""
            left = count - own
            return max(own + end, -(-left // others)), -min(own + end, left // others)

        own = min(range(1, count - others + 1), key=lengths)
        rest = [part.size for part in cut_evenly(count - own, others)]
        parts.append([*rest, own] if number == last else [own, *rest])
    sizes = itertools.chain(*zip(*parts, strict=True))
    *inner, stop = itertools.accumulate(2 * size for size in sizes)
    return [0, *(end + 1 for end in inner), stop + 2]


class Simulator:
    """Simulates the layouts of a search, and their changes."""

    def __init__(self, scorer: Scorer, setup_of: Callable[[Plan], Setup], tries_all: bool):
        """`setup_of` returns the setup for the simulation of a plan. With `tries_all` every degree of a change is
        simulated."""
        self._scorer, self._costs, self._setup_of, self._tries_all = scorer, scorer.costs, setup_of, tries_all
        self._changes = more_in_flight, zero_bubble, partial(virtual_stages, most=scorer.space.most_virtual_stages)
        num_nodes = sum(len(pool.nodes) for pool in scorer.costs.pools)
        if num_nodes > 1 and scorer.costs.setup.context_sizes and scorer.space.cut == BEST:
            self._changes = positions_by_worth, *self._changes
        self._mixed: set[tuple[int, ...]] = set()
        """The unused ranks of the plans that `positions_by_worth` was tried on: its plans follow from these alone."""
        self.shortage = ""
        """Says what the first plan lacked that did not fit, or why it cannot run; empty so far."""

    def simulated(self, layout: CutShape) -> Iterator[SimulatedPlan]:
        """Yield the plan of a layout by 1F1B, with cuts inside of blocks where that is faster; none where it does not
        fit, or has more passes than a plan may have."""
        plan = self._scorer.plan(layout)
        try:
            check_passes(plan)
        except PlanError as error:
            self.shortage = self.shortage or str(error)
            return
        # The best number of parts depends on the whole plan: the best numbers of its grids are tried.
        counts = {self._costs.part_count(stage.pool, stage.choice.grid) for stage in layout.all_stages}
        setup = self._setup_of(plan)
        whole = self._predictor(plan, setup, None)
        plans = [*cuts_inside_blocks(whole), plan] if self._scorer.space.cut == BEST else [plan]
        for tried in plans:

            def make(setup: Setup, like: Predictor | None, tried: Plan = tried) -> Predictor:
                return self._predictor(tried, setup, like or whole)

            predictor, prediction = predict_in_parts(setup, tried, make, counts)
            if prediction.fits:
                yield SimulatedPlan(layout, predictor, prediction, left=self._changes)
                if not self._tries_all:
                    return
        if not prediction.fits:
            shortage = format_shortage(prediction.memory, prediction.host_shortage)
            self.shortage = self.shortage or (
                f"no plan of {self._costs.cluster.describe()} fits in memory; the nearest ({plan.describe()}) does not:"
                f" {shortage}; use more devices, or shorter sequences (data.sequence_length is {setup.positions})"
                + "".join(f"; {words}" for words in [unknown_hosts(self._costs.cluster)] if words)
            )

    def changed(self, base: SimulatedPlan) -> Iterator[SimulatedPlan]:
        """Yield a plan with its other changes, and what the most promising change makes of it, where that fits.

        More of the change is tried as long as it makes the step shorter. Tiles over several nodes are tried in each
        size, with the least that is recomputed to fit.
        """
        change = min(base.left, key=base.optimistic_seconds)
        if others := tuple(other for other in base.left if other is not change):
            yield replace(base, left=others)
        mixes, least, setup, fitting = change is positions_by_worth, base.seconds, base.predictor.setup, set()
        if mixes and base.plan.unused in self._mixed:
            return
        self._mixed.update([base.plan.unused] if mixes else ())
        for plan in change(base.predictor):
            if mixes and plan.microbatches in fitting:
                continue
            if mixes:  # whose groups may not overlap what those of the base do
                setup = replace(self._setup_of(plan), tensor_parts=setup.tensor_parts)
            predictor = self._predictor(plan, setup, base.predictor)
            if not all(stage.fits for stage in predictor.memory) or not (prediction := predictor.predict()).fits:
                continue
            fitting.add(plan.microbatches)
            yield SimulatedPlan(base.layout, predictor, prediction, base.seconds)
            if prediction.step_seconds >= least and not self._tries_all and not mixes:
                break
            least = prediction.step_seconds

    def _predictor(self, plan: Plan, setup: Setup, like: Predictor | None) -> Predictor:
        return Predictor(setup, plan, self._costs.cluster, prices=self._costs.prices, like=like)
