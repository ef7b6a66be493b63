"""What a pool can become in a pipeline, as arrays: figures of a stage that the bound reckons with. Pure.

Options that are worse than another one of as many stages in every respect are left out. Figures are optimistic where
they depend on what other pools do.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from hpctrain.plan import TensorGrid
from hpctrain.planner.space import Choice, Space, choices_of
from hpctrain.planner.stages import Line, Needs, StageCosts
from hpctrain.planner.weigh import rank_rows

NEGLIGIBLE_SHARE = 0.002
"""Of what a block computes: exchanges are rounded down to so much, or options would all be unlike."""


ROW_SPEED = 1.02
"""How much faster other numbers of rows than powers of two may be."""
FEW_DEVICES, FEW_ROWS, FEWER_ROWS = 64, 64, 16
"""Up to so many rows, fewer on more devices, a rank's seconds are looked up; those of more follow from its rate."""


ROUNDING = 1e-9
ROOMY = 1.0
"""What stands for the bytes of a block where memory is never short."""
BY_WAY = "seconds", "exchanged", "base_bytes", "kept_bytes", "piece_seconds", "piece_blocks"
"""Arrays of two rows."""


class Rate(NamedTuple):
    """What a rank does at the most: rows in a second of a block, of one that is computed again, of the head, of the
    embedding; and see `Options.late`."""

    block: float
    again: float
    head: float
    embedding: float
    late: float


class Group(NamedTuple):
    """Pipelines that an option may be in."""

    microbatches: int
    rows: int
    """Of a microbatch, for the pipeline."""
    all_rows: int
    """For all pipelines."""
    num_pipelines: int


@dataclass(frozen=True)
class Options:
    """Each array is by option; those of two rows are for activations kept, and computed again."""

    stages: np.ndarray
    seconds: np.ndarray
    """[2, n] of a microbatch for a block, forward and backward."""
    late: np.ndarray
    """The largest share of a stage's time that comes after it has sent the gradient."""
    through: np.ndarray
    """The least share of a stage's time in which a microbatch passes it, there and back."""
    exchanged: np.ndarray
    """[2, n] seconds a step that exchanges of gradients and weights at its end add to what is computed of a block."""
    first_more: np.ndarray
    """Beside that, of the first block, of which nothing is hidden: what is of the others."""
    embedding_exchanged: np.ndarray
    """Seconds a step of an embedding's gradients and weights, of which nothing is hidden."""
    base_bytes: np.ndarray
    """[2, n] of a stage."""
    state_bytes: np.ndarray
    """Of each of its blocks."""
    kept_bytes: np.ndarray
    """[2, n] of each block, for each microbatch whose activations are kept."""
    head: np.ndarray
    embedding: np.ndarray
    """Seconds of a microbatch."""
    piece_seconds: np.ndarray
    """[2, n] of a microbatch for a block, at the least, at the loss in pieces of its rows."""
    piece_blocks: np.ndarray
    """[2, n]: how many a stage has memory for then; 0 where it has enough for whole rows."""
    memory_bytes: int

    def __len__(self) -> int:
        return len(self.stages)

    def most_blocks(self, depth: int, microbatches: int) -> np.ndarray:
        """Return [2, n, depth]: how many blocks a stage has memory for that has so many stages behind it."""
        kept = np.minimum(np.arange(depth) + 1, microbatches)
        each = self.state_bytes[None, :, None] + self.kept_bytes[:, :, None] * kept
        return np.maximum(np.floor((self.memory_bytes - self.base_bytes)[:, :, None] / each), 0.0)

    def only(self, which: np.ndarray) -> "Options":
        return replace(self, **{name: getattr(self, name)[..., which] for name in ARRAYS})


ARRAYS = tuple(f.name for f in fields(Options) if f.name != "memory_bytes")


def options_of(
    costs: StageCosts,
    space: Space,
    group: Group,
    number: int,
    rates: Mapping[TensorGrid, Rate],
    seconds: float,
    wanted: float,
) -> Options:
    """Return what a pool can become in a pipeline of a group that takes no longer than `seconds`.

    `rates` are by grid; left out is what cannot do the blocks that are wanted of the pool.
    """
    pool = costs.pools[number]
    slots = {g: len(pool.slots(g.size)) for g in rates}
    counts: dict[TensorGrid, dict[int, list[int]]] = {}  # of stages, all of which have the same figures
    # Rounded up, fewer rows are never harder: who asks for fewer than there are gets no less than the truth.
    for grid, stages, replicas in choices_of(slots, costs.setup.model.num_layers, group.rows, rounded_up=True):
        counts.setdefault(grid, {}).setdefault(replicas, []).append(stages)
    found = []
    for grid, by_replicas in counts.items():
        figures = _Figures(costs, space, group, number, grid, rates[grid], seconds)
        found += figures.options(by_replicas, wanted)
    arrays = {name: np.zeros((2, 0) if name in BY_WAY else 0) for name in ARRAYS}
    if found:
        arrays = {name: np.concatenate([each[name] for each in found], axis=-1) for name in ARRAYS}
    every = Options(**arrays, memory_bytes=pool.memory_bytes)
    return every.only(_undominated(every))


class _Figures:
    """Figures of one tensor grid of a pool, of all numbers of replicas at once."""

    def __init__(
        self,
        costs: StageCosts,
        space: Space,
        group: Group,
        number: int,
        grid: TensorGrid,
        rate: Rate,
        seconds: float,
    ):
        self._costs, self._space, self._group, self._number, self._grid = costs, space, group, number, grid
        self._rate, self._seconds = rate, seconds
        self._first, self._last = space.recompute[0], space.recompute[-1]
        self._memory = costs.pools[number].memory_bytes
        self._few = FEW_ROWS if costs.cluster.num_devices <= FEW_DEVICES else FEWER_ROWS

    def options(self, stages: Mapping[int, Sequence[int]], wanted: float) -> list[dict[str, np.ndarray]]:
        """Return them by name, for each ZeRO stage; `stages` are the numbers of stages by replicas."""
        most, enough = self._seconds * self._rate.block / self._group.microbatches * (1 + ROUNDING), {}
        for replicas, counts in stages.items():
            blocks = math.floor(most / rank_rows(Choice(self._grid, 1, replicas), self._group.rows))
            if blocks and (found := [count for count in counts if count * blocks >= wanted]):
                enough[replicas] = found
        left, told = np.array(list(enough), dtype=int), []
        for zero in sorted({1, *self._space.zero}):
            which = left[self._may_have(zero, left)]
            figures, is_roomy = self._of(which, zero) if len(which) else ({}, which)
            if not figures:
                continue
            times = [len(enough[replicas]) for replicas in figures["replicas"].tolist()]
            repeated = {name: np.repeat(each, times, axis=-1) for name, each in figures.items() if name != "replicas"}
            counts = [count for replicas in figures["replicas"].tolist() for count in enough[replicas]]
            told.append(repeated | {"stages": np.array(counts, dtype=float)})
            # Where memory is never short, to keep less of the state, and exchange more, gains nothing.
            left = left[~np.isin(left, figures["replicas"][is_roomy])]
        return told

    def _may_have(self, zero: int, replicas: np.ndarray) -> np.ndarray:
        """Return which replicas may have a ZeRO stage: of 0 and 1 that which needs less, 1 where it makes no
        difference."""
        is_shared = (replicas > 1) & (self._group.num_pipelines == 1)
        is_wanted = zero in self._space.zero and not (zero == 0 and 1 in self._space.zero)
        return (is_shared & is_wanted) | (~is_shared & (zero == 1))

    def _of(self, replicas: np.ndarray, zero: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return figures of stages with these replicas, those that can do a block, and which of them are never short
        of memory."""
        costs, group, m = self._costs, self._group, self._group.microbatches
        most, least = (-(-tile // self._grid.z) for tile in (-(-group.rows // replicas), group.rows // replicas))
        extra = self._exchanged_inside(replicas, zero)
        once = self._block(self._first, most) + extra
        can = np.floor(self._seconds / (m * once)) >= 1
        replicas, most, least, extra, once = (each[can] for each in (replicas, most, least, extra, once))
        if not len(replicas):
            return {}, np.zeros(0, dtype=bool)
        blocks = np.floor(self._seconds / (m * once))
        late = self._rate.late if costs.splits(self._grid, self._first, zero) else 0.0
        holders = replicas if group.num_pipelines == 1 else replicas + group.all_rows - group.rows
        both = [self._needs(how, most, zero, holders) for how in (self._first, self._last)]
        depth = min(m, costs.setup.model.num_layers)
        is_roomy = both[0].keeping(depth).at(blocks) <= self._memory
        base, kept = (
            np.array([np.broadcast_to(line, most.shape) for line in lines])
            for lines in zip(*((n.state.base, n.activations.each) for n in both), strict=True)
        )
        state = np.broadcast_to(np.minimum(*(needs.state.each for needs in both)), most.shape)
        whole = [_most(needs.keeping(1), self._memory) for needs in both]
        is_short = ~is_roomy & (whole[0] < blocks)
        piece_blocks, piece_seconds = self._in_pieces(most, zero, holders, is_short)
        fastest = np.where(least == most, once, least / self._rate.block + extra)
        step = m * once * NEGLIGIBLE_SHARE
        seconds = np.stack([once, np.where(is_roomy, once, self._block(self._last, most) + extra)])
        is_known = (most <= self._few) & ~piece_blocks.any(axis=0)
        exchanged, first, of_embedding = self._exchanged(replicas, zero, seconds, is_known)
        figures = {
            "replicas": replicas,
            "seconds": seconds,
            "late": np.full(len(most), late),
            "through": (1 - late) * fastest / once,
            "exchanged": step * np.floor(exchanged / step),
            "first_more": step * np.floor(first / step),
            "embedding_exchanged": step * np.floor(of_embedding / step),
            "base_bytes": np.where(is_roomy, 0.0, base),
            "state_bytes": np.where(is_roomy, ROOMY, state),
            "kept_bytes": np.where(is_roomy, 0.0, kept),
            "head": most / self._rate.head,
            "embedding": most / self._rate.embedding,
            "piece_seconds": np.where(piece_blocks > 0, piece_seconds + extra, once),
            "piece_blocks": piece_blocks,
        }
        fits = is_roomy | (np.maximum(*whole) >= 1) | (piece_blocks.max(axis=0) >= 1)
        return {name: each[..., fits] for name, each in figures.items()}, is_roomy[fits]

    def _exchanged_inside(self, replicas: np.ndarray, zero: int) -> np.ndarray:
        """Return what ZeRO 2 and 3 add to the passes over a block; nothing where stages may lie unlike each other."""
        if zero < 2:
            return np.zeros(len(replicas))
        costs, number, grid = self._costs, self._number, self._grid
        counts = (n if costs.lies_alike(number, grid.size, n) else 1 for n in replicas.tolist())
        return np.array([costs.exchange(number, grid, n, 1, zero).both for n in counts])

    def _row(self, how: str) -> float:
        """Return what a row takes at the least."""
        return 1 / (self._rate.block if how == self._first else self._rate.again)

    def _block(self, how: str, rows: np.ndarray) -> np.ndarray:
        """Return what a block takes; what rows beyond a few take is not looked up for each number of them."""
        known, row = self._costs.seconds, self._row(how)
        each = (known(self._number, self._grid, 1, n, how).both if n <= self._few else n * row for n in rows.tolist())
        return np.fromiter(each, float, len(rows))

    def _needs(self, how: str, rows: np.ndarray, zero: int, holders: np.ndarray, at_once: int | None = None) -> Needs:
        return self._costs.needs_of(self._grid, rows, how, zero, holders, (False, False), 1, at_once)

    def _exchanged(
        self, replicas: np.ndarray, zero: int, seconds: np.ndarray, is_known: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what exchanges at the end of a step add to what is computed: [2, n] of each block, [n] of the first
        one more, and [n] of the embedding.

        The last backward pass and the next first forward one hide some of it, of which a block takes `seconds`; if that
        is not known it is taken that they hide all.
        """
        costs, num_pipelines, none = self._costs, self._group.num_pipelines, np.zeros(len(replicas))
        if zero >= 2:
            return np.zeros_like(seconds), none, none
        each = [costs.ending(self._number, self._grid.size, n, num_pipelines) for n in replicas.tolist()]
        taken, embedding = (np.array(each) * costs.own_elements(self._grid, i, num_pipelines == 1) for i in (1, 0))
        if costs.setup.bucket_bytes is None:
            return np.broadcast_to(taken, seconds.shape), none, embedding
        # Beside it a device computes at 1 / t of its speed: it is done with taken / t, and no more than there is. Both
        # passes together, for ZeRO 0, which has no options of its own, exchanges all beside the backward one.
        overlap_times = costs.pools[self._number].device.overlap_times
        hidden = np.minimum(taken / overlap_times, np.where(is_known, seconds, np.inf))
        return taken - hidden, hidden.min(axis=0), embedding

    def _in_pieces(
        self, rows: np.ndarray, zero: int, holders: np.ndarray, is_short: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return [2, n] of stages that are short of memory at the loss: how many blocks they have memory for if they
        keep a row at a time, and what one takes in the largest pieces that fit."""
        blocks, seconds = np.zeros((2, len(rows))), np.zeros((2, len(rows)))
        which = np.flatnonzero(is_short & (rows > 1))
        for i, how in enumerate((self._first, self._last) if len(which) else ()):
            few = rows[which]
            of_row = self._needs(how, few, zero, holders[which], 1).keeping(1)
            room = np.maximum(self._memory - of_row.at(1), 0) // self._costs.row_bytes(self._grid, how)
            at_once = np.minimum(1 + room, -(-few // 2)).astype(int)
            blocks[i, which] = _most(of_row, self._memory)
            seconds[i, which] = few * self._row(how)
            for place in np.flatnonzero((blocks[i, which] > 0) & (at_once <= self._few)).tolist():
                known = self._number, self._grid, int(few[place]), how, int(at_once[place])
                seconds[i, which[place]] = self._costs.in_pieces(*known)
        return blocks, seconds


def _most(bytes_of: Line, memory_bytes: int) -> np.ndarray:
    """Return for how many blocks memory suffices."""
    return np.maximum(np.floor((memory_bytes - bytes_of.base) / bytes_of.each), 0.0)


def rates_of(costs: StageCosts, space: Space, number: int, rows: int) -> dict[TensorGrid, Rate]:
    """Return by grid what a rank of a pool does at the most, if it has up to `rows` rows, rounded up to a power of
    two."""
    largest, highest = space.largest_grid or math.inf, (rows - 1).bit_length()
    counts = [1 << n for n in range(highest + 1)]
    if costs.pools[number].device.profiled:  # what was measured need not be smooth
        counts = _every_count(1 << highest)
    grids = (grid for grid in costs.grids[number] if grid.size <= largest)
    return {grid: _rate(costs, number, grid, space.recompute, counts) for grid in grids}


def _every_count(most: int) -> list[int]:
    """Return numbers of rows up to the most so near each other that none between is faster by more than `ROW_SPEED`."""
    found = [1]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, int(found[-1] * ROW_SPEED))))
    return found


def _rate(costs: StageCosts, number: int, grid: TensorGrid, hows: Sequence[str], counts: Sequence[int]) -> Rate:
    how, again = hows[0], hows[-1]

    def speed(item: int, how: str = how) -> float:
        return max(n / costs.seconds(number, grid, item, n, how).both for n in counts) * ROW_SPEED

    passes = [(number, grid, item, n, how) for item in (1, costs.last) for n in counts]
    late = max(costs.parts(*each)[1] / costs.seconds(*each).both for each in passes) * ROW_SPEED
    return Rate(speed(1), speed(1, again), speed(costs.last), speed(0), late)


def _undominated(options: Options) -> np.ndarray:
    """Return which options no other one of as many stages is as good as in everything."""
    figures = np.vstack(
        [
            options.seconds,
            -options.late,
            options.through,
            options.exchanged,
            options.first_more,
            options.embedding_exchanged,
            options.base_bytes,
            options.state_bytes,
            options.kept_bytes,
            options.head,
            options.embedding,
            options.piece_seconds,
            np.where(options.state_bytes == ROOMY, -np.inf, -options.piece_blocks),
        ]
    )
    kept = np.ones(len(options), dtype=bool)
    for stages in np.unique(options.stages):
        of_these = np.flatnonzero(options.stages == stages)
        own = figures[:, of_these]
        is_as_good = np.all(own[:, :, None] <= own[:, None, :], axis=0)  # [better, worse]
        is_same = is_as_good & is_as_good.T
        before = np.arange(len(of_these))[:, None] < np.arange(len(of_these))[None, :]
        kept[of_these] = ~np.any((is_as_good & ~is_same) | (is_same & before), axis=0)
    return np.flatnonzero(kept)
