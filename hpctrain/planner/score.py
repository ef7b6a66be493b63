"""Cuts a shape, and estimates in closed form how long a step of it takes, by which shapes are ranked. Pure."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial

from hpctrain.plan.tiling import Plan, Tile
from hpctrain.plan.uniform import with_families
from hpctrain.planner.buffers import message_bytes, waiting_share
from hpctrain.planner.closed_form import done_after, done_interleaved
from hpctrain.planner.cost import update_seconds
from hpctrain.planner.cut import Placed, SearchLayout, SharedBlocks, cut_blocks, cut_rows
from hpctrain.planner.offload import offloaded_update_seconds
from hpctrain.planner.predictor import MOST_BUCKETS
from hpctrain.planner.setup import GRADIENT_BYTES
from hpctrain.planner.space import BEST, BY_SPEED, EVEN, Pipelines, Shape, Space, StageChoice
from hpctrain.planner.stages import (
    BlockLine,
    Holders,
    StageCosts,
    StageShape,
    StageVariant,
    StageVariants,
    row_chunk_counts,
)
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval, cut_evenly
from hpctrain.sharding.items import BLOCK, EMBEDDING

MANY_ROWS = 8
"""So many rows at once show a device's speed."""


def _exchange(now: Sequence[list[float]], members: Sequence[tuple[int, int]], seconds: float) -> None:
    """Let some stages, of a pipeline and a place in it, exchange for so long when all are ready; `now` is by stage."""
    if seconds:
        end = max(now[p][i] for p, i in members) + seconds
        for p, i in members:
            now[p][i] = end


GridRanks = tuple[TensorGrid, tuple[tuple[int, ...], ...]]
"""The grid of a stage, and the ranks of each of its replicas."""


class Scorer:
    """Scores shapes for one job on one cluster."""

    def __init__(self, costs: StageCosts, global_batch: int, space: Space, is_short_of_nothing: bool = False):
        """`is_short_of_nothing`: whatever the memory of devices is, all fits."""
        self._is_roomy = is_short_of_nothing
        self.costs, self.global_batch, self.space = costs, global_batch, space
        self._model = costs.setup.model
        self._families = [device.family for device in costs.cluster.devices]
        self._variants = lru_cache(None)(self._make_variants)
        self._between = lru_cache(None)(self._message_between)
        self._cut_rows = lru_cache(None)(self._rows_by_pipeline)
        self._layer_seconds = lru_cache(None)(self._seconds_of_layer)

    def least_seconds(self, shape: Shape) -> float:
        """Return about what `score` says at the least, in whatever ZeRO stage and with how many virtual stages: without
        what is exchanged, as if blocks could be cut anywhere."""
        rows, longest = self._cut_rows(shape.pipelines, shape.choices, shape.microbatches), 0.0
        if rows is None:
            return math.inf
        for each in zip(shape.pipelines, shape.choices, rows, strict=True):
            depth = sum(choice.stages for choice in each[1])
            bubble = (depth - 1) / (1 if shape.microbatches % depth else self.space.most_virtual_stages)
            longest = max(longest, (shape.microbatches + bubble) * self.even_seconds(*each))
        return longest

    def score(self, shape: Shape) -> SearchLayout | None:
        """Return the shape with its cuts, or None where rows, blocks or memory do not suffice."""
        rows = self._cut_rows(shape.pipelines, shape.choices, shape.microbatches)
        if rows is None:
            return None
        if shape.zero < 2 or len(rows) == 1:
            return self._place(shape, rows)
        # Ranks exchange in each row chunk, and so all of them have as many.
        least = min(n // row[0].replicas // row[0].grid.z for row, n in zip(shape.choices, rows, strict=True))
        layouts = (self._place(shape, rows, row_chunks) for row_chunks in row_chunk_counts(least, least))
        return min(filter(None, layouts), key=lambda layout: layout.seconds, default=None)

    def _place(self, shape: Shape, rows: Sequence[int], row_chunks: int | None = None) -> SearchLayout | None:
        """Return the shape with its blocks cut, too; the rows of a stage go in so many row chunks, or as few as fit."""
        pipelines, passed = [], []
        for number, of_row in enumerate(rows):
            stages = self._stages(shape, number, of_row, row_chunks)
            variants = [self._variants(stage) for stage in stages]
            blocks = self._cut_blocks(stages, of_row, variants)
            if blocks is None or min(blocks) < shape.virtual_stages:
                return None
            placed = [
                Placed(stage, count, variant)
                for stage, count, every in zip(stages, blocks, variants, strict=True)
                if (variant := every.variant(count))  # there is one, or there were no blocks
            ]
            messages = list(itertools.starmap(self._message, itertools.pairwise(placed)))
            pipelines.append(tuple(placed))
            passes = [each.passes for each in placed]
            if shape.virtual_stages > 1:
                messages.append(self._message(placed[-1], placed[0]))
                passed.append(done_interleaved(passes, messages, shape.microbatches, shape.virtual_stages))
                continue
            headroom = self._headroom(placed, [*messages, 0.0], shape.microbatches)
            if min(headroom) < 0:
                return None
            passed.append(done_after(passes, messages, shape.microbatches, headroom))
        return SearchLayout(shape, tuple(rows), tuple(pipelines), self._seconds(shape, pipelines, passed))

    def _stages(self, shape: Shape, number: int, rows: int, row_chunks: int | None) -> list[StageShape]:
        """Return the stages of a pipeline that has so many rows."""
        pairs = list(zip(shape.pipelines[number], shape.choices[number], strict=True))
        pairs = [pair for pair in pairs for _ in range(pair[1].stages)]
        sharing = tuple((row[0], of[0].replicas) for row, of in zip(shape.pipelines, shape.choices, strict=True))
        others = [row for i, row in enumerate(shape.choices) if i != number]
        v, last, result = shape.virtual_stages, len(pairs) - 1, []
        for i, (pool, choice) in enumerate(pairs):
            each, depth = choice.rank_rows(rows), last - i
            in_flight = depth if v == 1 else 2 * depth + (v - 1) * len(pairs)  # see `schedule.passes`
            counts = [row_chunks] if row_chunks else [1]
            if i == last and v == 1 and not row_chunks:
                counts = row_chunk_counts(each, rows // choice.replicas // choice.grid.z)
            result.append(
                StageShape(
                    pool,
                    choice,
                    each,
                    ends=(i == 0, i == last),
                    kept=min(in_flight + 1, v * shape.microbatches) / v,
                    zero=shape.zero,
                    holders=choice.replicas + sum(min(c.replicas for c in row) for row in others),
                    # With whose grids it shares no more than regions: roughly, for it may be with other items.
                    meets_mixed=any(other.grid != choice.grid for row in others for other in row),
                    microbatches=shape.microbatches,
                    virtual_stages=v,
                    row_chunks=tuple(counts),
                    exchanging=Holders.of_stage(pool, choice, shape.zero, sharing if row_chunks else ()),
                )
            )
        return result

    def _make_variants(self, stage: StageShape) -> StageVariants:
        """Return how a stage can be computed."""
        costs, num_blocks = self.costs, self._model.num_layers

        def variants(offload: str) -> Iterator[StageVariant]:
            # Chunks of rows whose activations are offloaded took more memory in a rehearsal than by the memory model.
            counts = [n for n in stage.row_chunks if n == 1 or offload in ("none", "optimizer")]
            for recompute in self.space.recompute:
                fitting, row_chunks = 0, 1
                for row_chunks in counts[-1:] if self._is_roomy else counts:  # the last keep least
                    needs = costs.needs(stage, recompute, row_chunks, offload)
                    most = num_blocks if self._is_roomy else costs.most_blocks(stage, needs)
                    if most > fitting:
                        yield costs.variant(stage, recompute, row_chunks, offload, (fitting, most), needs)
                        fitting = most
                    if fitting >= num_blocks:
                        break  # nothing is gained by more row chunks
                if fitting >= num_blocks and row_chunks == 1:
                    break  # nor by recomputing more

        first, *others = self.space.offload if costs.pools[stage.pool].device.family.kind != "cpu" else ("none",)
        return StageVariants(tuple(variants(first)), lambda: tuple(v for each in others for v in variants(each)))

    # ---- cuts --------------------------------------------------------------------------------------------------------

    def _rows_by_pipeline(
        self, pipelines: Pipelines, choices: tuple[tuple[StageChoice, ...], ...], microbatches: int
    ) -> list[int] | None:
        rows = self.global_batch // microbatches
        least = [max(c.replicas * c.grid.z for c in row) for row in choices]
        if self.space.cut == EVEN:
            replicas = [row[0].replicas for row in choices]
            return [rows // sum(replicas) * each for each in replicas]
        pairs = zip(pipelines, choices, strict=True)
        return cut_rows(rows, least, [partial(self.even_seconds, pools, row) for pools, row in pairs])

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
                block, at_ends = self._layer_seconds(*where, BLOCK, rows), self.costs.layers(stage.ends, 0)
                seconds.append(BlockLine(sum(self._layer_seconds(*where, end, rows) for end in at_ends), block).at)
            blocks = cut_rows(num_blocks, [1] * num_stages, seconds)
        return blocks if blocks and all(map(StageVariants.variant, variants, blocks)) else None

    def speed(self, pool: int, layer: Interval = BLOCK) -> float:
        """Return how many rows of a block, or of another layer, a device of a pool does in a second, if it has many."""
        return MANY_ROWS / self.costs.seconds(pool, TensorGrid(), layer, MANY_ROWS, self.space.recompute[0]).both

    def even_seconds(self, pools: Sequence[int], choices: Sequence[StageChoice], rows: int) -> float:
        """Return what each stage of a pipeline takes for a microbatch if blocks could be cut anywhere."""
        each = [self._layer_seconds(*pair, BLOCK, rows) for pair in zip(pools, choices, strict=True)]
        first = self._layer_seconds(pools[0], choices[0], EMBEDDING, rows) / each[0]
        last = self._layer_seconds(pools[-1], choices[-1], self.costs.head, rows) / each[-1]
        stages = sum(c.stages / block for c, block in zip(choices, each, strict=True))
        return (self._model.num_layers + first + last) / stages

    def _seconds_of_layer(self, pool: int, choice: StageChoice, layer: Interval, rows: int) -> float:
        """Return what a layer takes a stage that has so many rows, as far as cuts are concerned."""
        each, grid = choice.rank_rows(rows), choice.grid
        if self.space.cut == BY_SPEED:
            return each / (self.speed(pool, layer) * grid.x * grid.y)
        return self.costs.seconds(pool, grid, layer, each, self.space.recompute[0]).both

    # ---- seconds -----------------------------------------------------------------------------------------------------

    def _seconds(self, shape: Shape, pipelines: Sequence[Sequence[Placed]], passed: list[list[float]]) -> float:
        """Return the seconds of a step in which stages have `passed` all microbatches after so long.

        What the same stages hold they exchange one after the other, when all of them are ready.
        """
        costs, setup, gathers = self.costs, self.costs.setup, []
        updated = [[0.0] * len(stages) for stages in pipelines]
        for shared in self._shared_blocks(pipelines):
            holders = sum(each.choice.replicas for each in shared.placed)
            for (p, i), each, elements in zip(shared.members, shared.placed, shared.elements, strict=True):
                own = int(elements / holders if shape.zero > 0 and holders > 1 else elements)
                seconds = offloaded_update_seconds if each.variant.offload in ("optimizer", "all") else update_seconds
                updated[p][i] += seconds(setup, costs.pools[each.pool].device, own)
            if holders > 1:
                reduce, gather = self._exchange_seconds(shape.zero, shared)
                _exchange(passed, shared.members, reduce)
                gathers.append((shared.members, gather))
        for members, gather in gathers:
            _exchange(updated, members, gather)
        return max(map(max, passed)) + costs.agree_seconds + max(map(max, updated))

    def _headroom(self, stages: Sequence[Placed], messages: Sequence[float], microbatches: int) -> list[float]:
        """Return how many more microbatches than by 1F1B each stage has memory for; below 0 where it has none for the
        activations that wait to be sent.

        `messages` are the seconds of what each sends. See `Predictor.headroom`.
        """
        if self._is_roomy:
            return [math.inf] * len(stages)
        setup, result = self.costs.setup, []
        for depth, (placed, seconds) in enumerate(zip(reversed(stages), reversed(messages), strict=True)):
            kept = min(depth + 1, microbatches)
            share = waiting_share(placed.forward, seconds)
            message = message_bytes(setup, placed.choice.grid, placed.stage.rows) if share else 0
            waiting = math.ceil(share * (kept - 1)) * message
            free = self.costs.pools[placed.pool].memory_bytes - placed.needed_bytes - waiting
            each = placed.variant.kept_bytes.at(placed.blocks) + message
            headroom = free // each if each else math.copysign(math.inf, free)
            result.append(headroom if headroom < 0 or kept + headroom < microbatches else math.inf)
        return result[::-1]

    def _shared_blocks(self, pipelines: Sequence[Sequence[Placed]]) -> Iterator[SharedBlocks]:
        ends = [list(itertools.accumulate(placed.blocks for placed in stages)) for stages in pipelines]
        start, at = 0, [0] * len(pipelines)
        for stop in sorted(set(itertools.chain(*ends))):
            is_first, is_last = start == 0, stop == self._model.num_layers
            placed = [stages[i] for stages, i in zip(pipelines, at, strict=True)]
            elements = [self.costs.elements(p.choice.grid, is_first, is_last).at(stop - start) for p in placed]
            yield SharedBlocks(list(enumerate(at)), placed, elements, int(stop - start), is_first, is_last)
            at = [i + (bounds[i] == stop) for bounds, i in zip(ends, at, strict=True)]
            start = stop

    def _exchange_seconds(self, zero: int, shared: SharedBlocks) -> tuple[float, float]:
        """Return how long the gradients of shared blocks are waited for after the last backward pass, and the weights,
        where they are overlapped in the next step's first forward pass.

        Ranks of different grids meet in parts of what the finest has, one after the other. At least about a bucket's
        exchange is exposed, with the first item, whose gradients are made last and whose weights are needed first.
        While the last item computes, nothing is there to be summed, and nothing is left to be gathered.
        """
        costs, setup, placed = self.costs, self.costs.setup, shared.placed
        groups = tuple((each.pool, each.choice.grid.size, each.choice.replicas) for each in placed)
        sizes = [size for _, size, _ in groups]
        part, times, buckets = min(shared.elements), max(sizes) / min(sizes), 1
        if setup.bucket_bytes:
            items = shared.blocks + shared.is_first + shared.is_last
            buckets = max(1, min(items, MOST_BUCKETS, int(part * GRADIENT_BYTES / setup.bucket_bytes)))

        def exchange(operation: str, element_bytes: int, meanwhile: str) -> float:
            bucket = costs.sharing_seconds(groups, int(part * element_bytes / buckets), operation)
            seconds = bucket * buckets * times
            if not setup.bucket_bytes or not meanwhile:
                return seconds
            item, blocks = EMBEDDING if shared.is_first else BLOCK, shared.blocks - 1 + shared.is_last
            of_first = (
                costs.elements_of(each.choice.grid, item) / each.choice.grid.z / whole
                for each, whole in zip(placed, shared.elements, strict=True)
            )
            lines = ((getattr(each.variant, meanwhile), each.variant.row_chunks) for each in placed)
            hidden = min(line.each / row_chunks * blocks for line, row_chunks in lines)
            return max(seconds * max(1 / buckets, *of_first), seconds - hidden)

        reduce = gather = 0.0
        if zero < 2:
            reduce = exchange("reduce_scatter" if zero else "all_reduce", setup.gradient_bytes, "backward")
        if zero in (1, 2):
            is_early = len({each.choice.grid for each in placed}) == 1 and placed[0].choice.grid.z == 1
            gather = exchange("all_gather", setup.item_bytes, "forward" if is_early else "")
        return reduce, gather

    def _message(self, source: Placed, target: Placed) -> float:
        """Return the seconds of a message between two stages: the mean of activations and of their gradients."""
        rows = min(placed.stage.rows * placed.choice.grid.z * placed.choice.replicas for placed in (source, target))
        return self._between(source.pool, source.choice, target.pool, target.choice, rows)

    def _message_between(self, source: int, choice: StageChoice, target: int, other: StageChoice, rows: int) -> float:
        """Return the mean of the two messages between the last stage of a pool and the next one, or inside the pool,
        for a microbatch of so many rows. As if their ranks were the first of their pools."""
        sending = self.costs.pools[source].slots(choice.grid.size)[: choice.replicas]
        first = choice.replicas if source == target else 0
        receiving = self.costs.pools[target].slots(other.grid.size)[first : first + other.replicas]
        one, two = (choice.grid, sending), (other.grid, receiving)
        return (self._sent_seconds(one, two, rows) + self._sent_seconds(two, one, rows)) / 2

    def _sent_seconds(self, source: GridRanks, target: GridRanks, rows: int) -> float:
        """Return how long all replicas of a stage, who send at once, send so many rows to those of another one.

        A NIC passes what all of its ranks send, or receive. The y of a receiver may gather it (`transfers.gathers`).
        """
        network, setup, grid = self.costs.network, self.costs.setup, target[0]
        senders, receivers = (tuple(itertools.chain(*ranks)) for _, ranks in (source, target))
        there, here, gather = senders[0], receivers[0], 0.0
        row_bytes = setup.positions * (self._model.hidden_size // grid.x) * setup.item_bytes / grid.position_parts
        num_bytes = rows / grid.z / len(target[1]) * row_bytes
        is_cut = grid.sequence_parallel or source[0].sequence_parallel
        if setup.stack.gathers_parts and grid.y > 1 and not is_cut and not network.is_near(there, here):
            gather = network.group_seconds("all_gather", num_bytes, receivers[: grid.y], network.crowd(target[1][0]))
            num_bytes /= grid.y
        received = network.seconds(there, here, num_bytes, network.flows(here, receivers, there))
        each = num_bytes * len(receivers) / len(senders)
        return gather + max(received, network.seconds(there, here, each, network.flows(there, senders, here)))

    # ---- plans -------------------------------------------------------------------------------------------------------

    def plan(self, layout: SearchLayout) -> Plan:
        """Return the plan of a layout."""
        tiles: list[Tile] = []
        at = 0
        for number, (of_row, stages) in enumerate(zip(layout.rows, layout.stages, strict=True)):
            slots = {p.pool: iter(self.costs.pools[p.pool].slots(p.choice.grid.size)) for p in stages}
            of_stages = [(p, [next(slots[p.pool]) for _ in range(p.choice.replicas)]) for p in stages]
            for (placed, replicas), items in zip(itertools.cycle(of_stages), layout.items(number), strict=False):
                for rows, ranks in zip(cut_evenly(of_row, len(replicas)), replicas, strict=True):
                    how = {
                        "recompute": placed.variant.recompute,
                        "offload": placed.variant.offload,
                        "zero": layout.shape.zero,
                        "row_chunks": placed.variant.row_chunks,
                    }
                    tiles.append(Tile(items, rows.shift(at), ranks, placed.choice.grid, **how))
            at += of_row
        used = {rank for tile in tiles for rank in tile.ranks}
        unused = tuple(rank for rank in range(len(self._families)) if rank not in used)
        return with_families(Plan(tuple(tiles), layout.shape.microbatches, at, unused=unused), self._families)
