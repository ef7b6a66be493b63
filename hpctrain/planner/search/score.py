"""Cuts a shape, and estimates the seconds of its step. The estimate ranks shapes. Pure."""

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache, partial

from hpctrain.plan.tiling import Plan, Tile
from hpctrain.plan.uniform import joined_family
from hpctrain.planner.prediction.offload import offloaded_update_seconds
from hpctrain.planner.prices.cost import update_seconds
from hpctrain.planner.prices.network import Port
from hpctrain.planner.prices.prices import exchange_of, least_bucket_bytes
from hpctrain.planner.search.cut import CutShape, CutStage, SharedBlocks, cut_blocks, deal_out
from hpctrain.planner.search.holders import HolderGroup, Holders
from hpctrain.planner.search.item_cuts import PricedItems, best_cuts
from hpctrain.planner.search.pipeline_run import StageMessages, done_after, slowed_by_shared_ports
from hpctrain.planner.search.space import BEST, BY_SPEED, EVEN, Pipelines, PoolUse, Shape, Space
from hpctrain.planner.search.stage_variants import (
    LEADING,
    BlockLine,
    StageShape,
    StageVariant,
    StageVariants,
    row_chunk_counts,
)
from hpctrain.planner.search.stages import StageCosts
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval, cut_evenly
from hpctrain.sharding.items import BLOCK, EMBEDDING

ROWS_OF_FULL_SPEED = 8
"""Number of rows at once that shows a device's full speed."""
ZB_H1_SHORTENS = 3
"""Factor by which ZB-H1 shortens bubbles, where all passes take equally long (Qi et al. 2023, arXiv 2401.10241)."""
ZB_H1_SAVES = 0.3
"""Share of bubbles that ZB-H1 saves in simulated steps, whose passes differ and whose messages are exposed."""


class Scorer:
    """Scores shapes for one job on one cluster."""

    def __init__(self, costs: StageCosts, global_batch: int, space: Space, ignores_memory: bool = False):
        """Every shape fits with `ignores_memory`, whatever memory the devices have."""
        self._ignores_memory = ignores_memory
        self.costs, self.global_batch, self.space = costs, global_batch, space
        self._model = costs.setup.model
        self.offloads = [
            space.offload if num_bytes and pool.device.family.kind != "cpu" else ("none",)
            for pool, num_bytes in zip(costs.pools, costs.host_bytes, strict=True)
        ]
        """What stages of each pool may keep in host memory."""
        self._families = [device.family for device in costs.cluster.devices]
        # Each caches the method of the same name with an underscore before it.
        self.variants = lru_cache(None)(self._variants)
        self.messages_between = lru_cache(None)(self._messages_between)
        self.ports_between = lru_cache(None)(self._ports_between)
        self.cut_rows = lru_cache(None)(self._cut_rows)
        self.layer_seconds = lru_cache(None)(self._layer_seconds)
        self.item_seconds = lru_cache(1024)(self._item_seconds)
        self._bucket_bytes = lru_cache(None)(partial(least_bucket_bytes, costs.setup))

    def optimistic_seconds(self, shape: Shape) -> float:
        """Return about the least seconds that a simulation may give a shape, in any ZeRO stage and by any schedule.

        Exchanges are left out, and blocks count as if they could be cut anywhere.
        """
        rows, longest = self.cut_rows(shape.pipelines, shape.choices, shape.microbatches), 0.0
        if rows is None:
            return math.inf
        for each in zip(shape.pipelines, shape.choices, rows, strict=True):
            depth = sum(choice.stages for choice in each[1])
            shorter = (
                ZB_H1_SHORTENS if shape.microbatches % depth else max(ZB_H1_SHORTENS, self.space.most_virtual_stages)
            )
            bubble = (depth - 1) / shorter
            longest = max(longest, (shape.microbatches + bubble) * self.balanced_seconds(*each))
        return longest

    def score(self, shape: Shape) -> CutShape | None:
        """Return the shape with its cuts, or None where there are too few rows or blocks, or too little memory."""
        rows = self.cut_rows(shape.pipelines, shape.choices, shape.microbatches)
        if rows is None:
            return None
        if shape.zero < 2 or len(rows) == 1:
            return self._cut_shape(shape, rows)
        # Ranks exchange in each row chunk, so all need the same number of row chunks.
        least = min(n // row[0].replicas // row[0].grid.row_parts for row, n in zip(shape.choices, rows, strict=True))
        layouts = (self._cut_shape(shape, rows, row_chunks) for row_chunks in row_chunk_counts(least, least))
        return min(filter(None, layouts), key=lambda layout: layout.seconds, default=None)

    def _cut_shape(self, shape: Shape, rows: Sequence[int], row_chunks: int | None = None) -> CutShape | None:
        """Return the shape with its blocks cut, too. Each stage computes its rows in so many row chunks, or in the
        fewest that fit."""
        pipelines, passes, messages, ports = [], [], [], []
        for number, of_row in enumerate(rows):
            stages = self._stages(shape, number, of_row, row_chunks)
            variants = [self.variants(stage) for stage in stages]
            blocks = self._cut_blocks(stages, of_row, variants)
            if blocks is None:
                return None
            firsts = _first_slots([(stage.pool, stage.choice) for stage in stages])
            cut_stages = [
                CutStage(stage, count, variant, first)
                for stage, count, every, first in zip(stages, blocks, variants, firsts, strict=True)
                if (variant := every.variant(count))  # there is one, or there were no blocks
            ]
            pipelines.append(tuple(cut_stages))
            counts = self._cut_items(cut_stages) if self.space.cut == BEST else blocks
            passes.append([stage.variant.passes(count) for stage, count in zip(cut_stages, counts, strict=True)])
            messages.append(list(itertools.starmap(self._messages, itertools.pairwise(cut_stages))))
            ports.append([self.ports_between(*a.place, *b.place) for a, b in itertools.pairwise(cut_stages)])
        slowest = max(each.both for each in itertools.chain(*passes))
        messages = slowed_by_shared_ports(messages, ports, slowest)
        done, busy, idle = [], [], []
        for of_stages, between, cut_stages in zip(passes, messages, pipelines, strict=True):
            done.append(done_after(of_stages, between, shape.microbatches, partial(self._has_headroom, cut_stages)))
            busy.append([shape.microbatches * each.both for each in of_stages])
            first = (each.forward + message.activation for each, message in zip(of_stages, between, strict=False))
            idle.append(list(itertools.accumulate(first, initial=0.0)))
        after = self._seconds_after(shape, pipelines, idle)
        seconds, without_bubbles = (
            max(sum(pair) for of in zip(until, after, strict=True) for pair in zip(*of, strict=True))
            + self.costs.agree_seconds
            for until in (done, busy)
        )
        saved = (seconds - without_bubbles) * self._saved_share(shape, pipelines)
        return CutShape(shape, tuple(rows), tuple(pipelines), seconds, saved)

    def _saved_share(self, shape: Shape, pipelines: Sequence[Sequence[CutStage]]) -> float:
        """Return about the share of bubbles that other schedules may save; see `changes.py`."""
        depths, stages = [len(stages) for stages in pipelines], list(itertools.chain(*pipelines))
        splits = shape.zero < 2 and all(each.variant.row_chunks == 1 for each in stages)
        interleaves = min(depths) > 1 and not any(shape.microbatches % depth for depth in depths)
        most = min(self._model.num_layers // max(depths), *(each.blocks for each in stages))
        virtual_stages = min(most, self.space.most_virtual_stages) if interleaves else 1
        return max(ZB_H1_SAVES * splits, 1 - 1 / max(1, virtual_stages))

    def _stages(self, shape: Shape, number: int, rows: int, row_chunks: int | None) -> list[StageShape]:
        """Return the stages of a pipeline that has so many rows."""
        pairs = list(zip(shape.pipelines[number], shape.choices[number], strict=True))
        pairs = [pair for pair in pairs for _ in range(pair[1].stages)]
        both = zip(shape.pipelines, shape.choices, strict=True)
        sharing = tuple(HolderGroup(row[0], of[0].grid.size, of[0].replicas) for row, of in both)
        others = [row for i, row in enumerate(shape.choices) if i != number]
        last, result = len(pairs) - 1, []
        for i, ((pool, choice), first) in enumerate(zip(pairs, _first_slots(pairs), strict=True)):
            each, size = choice.rank_rows(rows), choice.grid.size
            first = self.costs.pools[pool].first_equivalent(first, size, choice.replicas)
            own = HolderGroup(pool, size, choice.replicas, first)
            counts = [row_chunks] if row_chunks else [1]
            if i == last and not row_chunks:
                counts = row_chunk_counts(each, rows // choice.replicas // choice.grid.row_parts)
            result.append(
                StageShape(
                    pool,
                    choice,
                    each,
                    ends=(i == 0, i == last),
                    kept=min(last - i + 1, shape.microbatches),
                    zero=shape.zero,
                    holders=choice.replicas + sum(min(c.replicas for c in row) for row in others),
                    # With other grids it shares only regions. An estimate: those may be of other items.
                    meets_mixed=any(other.grid != choice.grid for row in others for other in row),
                    microbatches=shape.microbatches,
                    row_chunks=tuple(counts),
                    exchanging=Holders.of_stage(own, shape.zero, sharing if row_chunks else ()),
                )
            )
        return result

    def _variants(self, stage: StageShape) -> StageVariants:
        """Return how a stage can be computed."""
        costs, num_blocks = self.costs, self._model.num_layers

        def variants(offload: str) -> Iterator[StageVariant]:
            for recompute in self.space.recompute:
                fitting, row_chunks = 0, 1
                # Where memory does not count, those that keep the least stand for all.
                for row_chunks in stage.row_chunks[-1:] if self._ignores_memory else stage.row_chunks:
                    most = num_blocks
                    if not self._ignores_memory:
                        most = costs.most_blocks(stage, recompute, row_chunks, offload)
                    if most > fitting:
                        yield costs.variant(stage, recompute, row_chunks, offload, most)
                        fitting = most
                    if fitting >= num_blocks:
                        break  # nothing is gained by more row chunks
                if fitting >= num_blocks and row_chunks == 1:
                    break  # nor by recomputing more

        first, *others = self.offloads[stage.pool]
        return StageVariants(tuple(variants(first)), lambda: tuple(v for each in others for v in variants(each)))

    # ---- cuts --------------------------------------------------------------------------------------------------------

    def _cut_rows(
        self, pipelines: Pipelines, choices: tuple[tuple[PoolUse, ...], ...], microbatches: int
    ) -> list[int] | None:
        rows = self.global_batch // microbatches
        least = [max(c.replicas * c.grid.row_parts for c in row) for row in choices]
        if self.space.cut == EVEN:
            replicas = [row[0].replicas for row in choices]
            return [rows // sum(replicas) * each for each in replicas]
        pairs = zip(pipelines, choices, strict=True)
        return deal_out(rows, least, [partial(self.balanced_seconds, pools, row) for pools, row in pairs])

    def _cut_blocks(
        self, stages: Sequence[StageShape], rows: int, variants: Sequence[StageVariants]
    ) -> list[int] | None:
        """Return how many blocks each stage of a pipeline takes; None where memory or blocks do not suffice."""
        num_blocks, num_stages = self._model.num_layers, len(stages)
        if self.space.cut == BEST:
            return cut_blocks(num_blocks, variants)
        if num_stages > num_blocks:
            return None
        if self.space.cut == EVEN:
            blocks = [part.size for part in cut_evenly(num_blocks, num_stages)]
        else:
            seconds = []
            for stage in stages:
                where = stage.pool, stage.choice
                block, at_ends = self.layer_seconds(*where, BLOCK, rows), self.costs.end_layers(stage.ends)
                seconds.append(BlockLine(sum(self.layer_seconds(*where, end, rows) for end in at_ends), block).at)
            blocks = deal_out(num_blocks, [1] * num_stages, seconds)
        return blocks if blocks and all(map(StageVariants.variant, variants, blocks)) else None

    @cached_property
    def _block_sums(self) -> list[float]:
        """Return for each item how many blocks those before it are worth; the ends of the model are worth none."""
        seconds = (
            self.costs.both_seconds(0, TensorGrid(), layer, ROWS_OF_FULL_SPEED, self.space.recompute[0])
            for layer in (Interval(BLOCK.start, BLOCK.start + 1), BLOCK)
        )
        attention = operator.truediv(*seconds)
        items = [attention, 1 - attention] * self._model.num_layers
        return list(itertools.accumulate([0.0, *items, 0.0], initial=0.0))

    def _cut_items(self, stages: Sequence[CutStage]) -> list[float]:
        """Return about how many blocks each stage has, where cuts may be inside blocks, as `changes.py` makes them."""
        sums, last = self._block_sums, len(self._block_sums) - 1
        priced = [
            PricedItems(self.item_seconds(s.variant.line, s.shape.ends), 2 * s.variant.most + sum(s.shape.ends))
            for s in stages
        ]
        bounds = [2 * count for count in itertools.accumulate((stage.blocks for stage in stages), initial=0)]
        old = [0, *(bound + 1 for bound in bounds[1:-1]), last]
        return [sums[stop] - sums[start] for start, stop in itertools.pairwise(best_cuts(priced, old))]

    def _item_seconds(self, line: BlockLine, ends: tuple[bool, bool]) -> list[float]:
        """Return the seconds of a stage's items as prefix sums, where those of its blocks are a line."""
        first, head = line.fixed * ends[0], line.fixed * (ends[1] and not ends[0])
        seconds = [line.at(count) - line.fixed + first for count in self._block_sums]
        seconds[0], seconds[-1] = 0.0, seconds[-1] + head
        return seconds

    def speed(self, pool: int, layer: Interval = BLOCK) -> float:
        """Return how many rows of a block, or of another layer, a device of a pool does in a second, if it has many."""
        rows = ROWS_OF_FULL_SPEED
        return rows / self.costs.passes(pool, TensorGrid(), layer, rows, self.space.recompute[0]).both

    def balanced_seconds(self, pools: Sequence[int], choices: Sequence[PoolUse], rows: int) -> float:
        """Return what each stage of a pipeline takes for a microbatch if blocks could be cut anywhere."""
        each = [self.layer_seconds(*pair, BLOCK, rows) for pair in zip(pools, choices, strict=True)]
        first = self.layer_seconds(pools[0], choices[0], EMBEDDING, rows) / each[0]
        last = self.layer_seconds(pools[-1], choices[-1], self.costs.head, rows) / each[-1]
        stages = sum(c.stages / block for c, block in zip(choices, each, strict=True))
        num_leading, blocks = self.costs.setup.num_leading, float(self._model.num_layers)
        if num_leading:
            blocks += num_leading * (self.layer_seconds(pools[0], choices[0], LEADING, rows) / each[0] - 1)
        return (blocks + first + last) / stages

    def _layer_seconds(self, pool: int, choice: PoolUse, layer: Interval, rows: int) -> float:
        """Return the seconds of a layer on a stage with so many rows, as far as cuts are concerned."""
        each, grid = choice.rank_rows(rows), choice.grid
        if self.space.cut == BY_SPEED:
            return each / (self.speed(pool, layer) * grid.product_parts)
        return self.costs.both_seconds(pool, grid, layer, each, self.space.recompute[0])

    # ---- seconds -----------------------------------------------------------------------------------------------------

    def _seconds_after(
        self, shape: Shape, pipelines: Sequence[Sequence[CutStage]], idle: Sequence[Sequence[float]]
    ) -> list[list[float]]:
        """Return about the seconds of each stage after its last pass: to exchange what others hold too, and to update
        its own.

        Exchanges run one after the other. Before its first pass a stage is `idle` for so many seconds.
        """
        costs, setup = self.costs, self.costs.setup
        seconds = [[0.0] * len(stages) for stages in pipelines]
        parts = max(len(stages) * each.choice.grid.size for stages in pipelines for each in stages)
        bucket_bytes = self._bucket_bytes(parts)
        for shared in self._shared_blocks(pipelines):
            holders = sum(each.choice.replicas for each in shared.stages)
            before = min(idle[p][i] for p, i in shared.members)
            exchange = self._exchange_seconds(shape.zero, shared, before, bucket_bytes) if holders > 1 else 0.0
            for (p, i), each, elements in zip(shared.members, shared.stages, shared.elements, strict=True):
                own = int(elements / holders if shape.zero > 0 and holders > 1 else elements)
                update = offloaded_update_seconds if each.variant.offload == "optimizer" else update_seconds
                seconds[p][i] += exchange + update(setup, costs.pools[each.pool].device, own)
        return seconds

    def _shared_blocks(self, pipelines: Sequence[Sequence[CutStage]]) -> Iterator[SharedBlocks]:
        ends = [list(itertools.accumulate(stage.blocks for stage in stages)) for stages in pipelines]
        start, at = 0, [0] * len(pipelines)
        for stop in sorted(set(itertools.chain(*ends))):
            is_first, is_last = start == 0, stop == self._model.num_layers
            sharing = [stages[i] for stages, i in zip(pipelines, at, strict=True)]
            elements = [self.costs.elements(s.choice.grid, is_first, is_last).at(stop - start) for s in sharing]
            yield SharedBlocks(list(enumerate(at)), sharing, elements, int(stop - start), is_first, is_last)
            at = [i + (bounds[i] == stop) for bounds, i in zip(ends, at, strict=True)]
            start = stop

    def _exchange_seconds(self, zero: int, shared: SharedBlocks, idle: float, bucket_bytes: int | None) -> float:
        """Return the exposed seconds of summing the gradients of shared blocks, and of gathering their weights.

        They are exchanged in buckets of whole blocks, in ZeRO 2 layer by layer.

        Sums follow the last backward pass. Gathers may overlap the next step's first forward pass and the `idle`
        seconds before it. Ranks of different grids exchange parts of what the finest grid has, one after the other.
        Where exchanges are overlapped, that of one item at least is exposed: its gradients are made last, its weights
        needed first.
        """
        costs, setup, stages = self.costs, self.costs.setup, shared.stages
        sizes = [each.choice.grid.size for each in stages]
        groups = costs.places.first_equivalent(
            tuple(
                HolderGroup(each.pool, each.choice.grid.size, each.choice.replicas, each.first_slot) for each in stages
            )
        )
        part, times = min(shared.elements), max(sizes) / min(sizes)
        items = shared.blocks + shared.is_first + shared.is_last
        count = items if zero == 2 else 1
        if bucket_bytes and zero < 2:
            blocks_at_once = math.ceil(bucket_bytes * shared.blocks / (part * setup.gradient_bytes))
            count = math.ceil(shared.blocks / blocks_at_once)

        def seconds_of(operation: str, num_bytes: float) -> float:
            return times * costs.places.seconds(groups, int(num_bytes), operation)

        def exposed(seconds: float, meanwhile: str) -> float:
            if not seconds or not setup.bucket_bytes or not meanwhile:
                return seconds
            of_block = (getattr(each.variant, meanwhile).per_block / each.variant.row_chunks for each in stages)
            return max(seconds / items, seconds - min(of_block) * (shared.blocks - 1 + shared.is_last))

        reduce, gather = exchange_of(setup, zero, part, seconds_of, count)
        is_early = len({each.choice.grid for each in stages}) == 1 and stages[0].choice.grid.stored_parts == 1
        return exposed(reduce, "backward") + max(0.0, exposed(gather, "forward" if is_early else "") - idle * is_early)

    def _has_headroom(self, stages: Sequence[CutStage], number: int, extra: int) -> bool:
        """Say whether one of some stages has memory for so many more microbatches in flight."""
        shape, blocks, how, *_ = stages[number]
        kept = shape._replace(kept=shape.kept + extra)
        return self.costs.most_blocks(kept, how.recompute, how.row_chunks, how.offload) >= blocks

    def _messages(self, source: CutStage, target: CutStage) -> StageMessages:
        """Return the seconds of messages between two stages."""
        rows = min(stage.shape.rows * stage.choice.grid.row_parts * stage.choice.replicas for stage in (source, target))
        (*one, first), (*other, second) = source.place, target.place
        if source.pool == target.pool:
            replicas = source.choice.replicas
            first = self.costs.pools[source.pool].first_equivalent(first, source.choice.grid.size, replicas, stages=2)
            second = first + replicas
        return self.messages_between(*one, first, *other, second, rows)

    def _replicas(
        self, source: int, choice: PoolUse, first: int, target: int, other: PoolUse, second: int
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return slots of two stages that exchange rows, so many that a whole node of each is there: others are like
        these."""
        places = (self.costs.pools[source], choice.grid.size), (self.costs.pools[target], other.grid.size)
        before, after = (pool.slots(size) for pool, size in places)
        few, most = sorted((choice.replicas, other.replicas))
        # Those that follow each other begin inside a node, and go through the next one.
        window = 2 * max(pool.largest_node // size for pool, size in places) - 1
        numbers = {*range(min(most, window)), *(-(-i * most // few) for i in range(min(few, window)))}
        places = ((first + i * choice.replicas // most, second + i * other.replicas // most) for i in sorted(numbers))
        return [(before[here], after[there]) for here, there in places]

    def _ports_between(self, *stages) -> tuple[frozenset[Port], frozenset[Port]]:
        """Return the ports that activations and gradients between two stages pass, by the first rank of each slot."""
        firsts = [(before[0], after[0]) for before, after in self._replicas(*stages)]
        ways = firsts, [pair[::-1] for pair in firsts]
        forward, back = (frozenset(p for pair in way for p, _ in self.costs.network.ports(*pair)) for way in ways)
        return forward, back

    def _messages_between(
        self, source: int, choice: PoolUse, first: int, target: int, other: PoolUse, second: int, rows: int
    ) -> StageMessages:
        """Return about the seconds of messages of a microbatch of so many rows between two stages.

        The estimate takes equal parts for all. Where some replicas are on two nodes, their messages are the slowest.
        """
        network, replicas = self.costs.network, self._replicas(source, choice, first, target, other, second)
        crossing = [pair for pair in replicas if network.ports(pair[0][0], pair[1][0])] or replicas[:1]
        return StageMessages(
            self._message_seconds(crossing, choice, other, rows),
            self._message_seconds([(there, here) for here, there in crossing], other, choice, rows),
            network.latency_seconds(crossing[0][0][0], crossing[0][1][0]),
            self.costs.setup.blocking_share(choice.rank_rows(rows), choice.grid),
        )

    def _message_seconds(
        self, slots: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], use: PoolUse, other: PoolUse, rows: int
    ) -> float:
        """Return the seconds of messages from some slots to others."""
        network, setup = self.costs.network, self.costs.setup
        # Positions that the senders cut are not gathered: each receiver is sent its own copy (`plan/transfers.py`).
        copies = other.grid.copies if use.grid.sequence_parts * use.grid.context_parts > 1 else 1
        num_bytes = copies * rows * setup.positions * self._model.hidden_size * setup.item_bytes
        sent, received = (num_bytes / (each.replicas * each.grid.size) for each in (use, other))
        senders, receivers = (tuple(itertools.chain(*dict.fromkeys(ranks))) for ranks in zip(*slots, strict=True))
        return max(
            max(
                network.seconds(there, here, sent, network.flows(there, senders, here)),
                network.seconds(there, here, received, network.flows(here, receivers, there)),
            )
            for (there, *_), (here, *_) in slots
        )

    # ---- plans -------------------------------------------------------------------------------------------------------

    def plan(self, layout: CutShape) -> Plan:
        """Return the plan of a layout."""
        tiles: list[Tile] = []
        at = 0
        for number, (of_row, stages) in enumerate(zip(layout.rows, layout.stages, strict=True)):
            slots = {p.pool: iter(self.costs.pools[p.pool].slots(p.choice.grid.size)) for p in stages}
            of_stages = [(p, [next(slots[p.pool]) for _ in range(p.choice.replicas)]) for p in stages]
            for (stage, replicas), items in zip(of_stages, layout.items(number), strict=True):
                how = {
                    "recompute": stage.variant.recompute,
                    "offload": stage.variant.offload,
                    "zero": layout.shape.zero,
                    "row_chunks": stage.variant.row_chunks,
                }
                for rows, ranks in zip(cut_evenly(of_row, len(replicas)), replicas, strict=True):
                    family = joined_family(ranks, self._families)
                    tiles.append(Tile(items, rows.shift(at), ranks, stage.choice.grid, family, **how))
            at += of_row
        used = {rank for tile in tiles for rank in tile.ranks}
        unused = tuple(rank for rank in range(len(self._families)) if rank not in used)
        return Plan(tuple(tiles), layout.shape.microbatches, at, unused=unused)


def _first_slots(stages: Sequence[tuple[int, PoolUse]]) -> list[int]:
    """Return the slot of its pool with which each stage of a pipeline begins: stages of a pool follow each other."""
    pools = [pool for pool, _ in stages]
    return [(i - pools.index(pool)) * choice.replicas for i, (pool, choice) in enumerate(stages)]
