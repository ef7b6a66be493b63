"""What a pool can become in a pipeline, as arrays: figures of a stage that the bound reckons with. Pure.

Options that are worse than another one of as many stages in every respect are left out. Figures are optimistic where
they depend on what other pools do.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from hpctrain.plan import TensorGrid
from hpctrain.planner.space import Choice, Space, choices_of
from hpctrain.planner.stages import StageCosts
from hpctrain.planner.weigh import rank_rows

CERTAIN_SHARE = 0.9
"""Of exchanges: replicas may lie on nodes in other ways than the first ones do."""


NEGLIGIBLE_SHARE = 0.002
"""Of what a block computes: exchanges are rounded down to so much, or options would all be unlike."""


ROW_SPEED = 1.02
"""How much faster other numbers of rows than powers of two may be."""
FEW_ROWS = 64
"""Up to so many, a rank's seconds are looked up; those of more follow from its rate."""


ROUNDING = 1e-9
ROOMY, BASE_BYTES = (0.0, 0.0), 4
"""What stands for the bytes of a stage whose memory is never short, and their place in `_figures`."""


class Rate(NamedTuple):
    """What a rank does at the most: rows in a second of a block, the head, the embedding; and see `Options.late`."""

    block: float
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
    """Seconds a block at the end of a step for gradients and weights, or by which these slow what is computed."""
    base_bytes: np.ndarray
    """[2, n] of a stage."""
    state_bytes: np.ndarray
    """Of each of its blocks."""
    kept_bytes: np.ndarray
    """[2, n] of each block, for each microbatch whose activations are kept."""
    head: np.ndarray
    embedding: np.ndarray
    """Seconds of a microbatch."""
    memory_bytes: int

    def __len__(self) -> int:
        return len(self.stages)

    def most_blocks(self, depth: int, microbatches: int) -> np.ndarray:
        """Return [2, n, depth]: how many blocks a stage has memory for that has so many stages behind it."""
        kept = np.minimum(np.arange(depth) + 1, microbatches)
        each = self.state_bytes[None, :, None] + self.kept_bytes[:, :, None] * kept
        return np.maximum(np.floor((self.memory_bytes - self.base_bytes)[:, :, None] / each), 0.0)

    def only(self, which: np.ndarray) -> "Options":
        arrays = {f.name: getattr(self, f.name)[..., which] for f in fields(self) if f.name != "memory_bytes"}
        return replace(self, **arrays)


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
    pool, rows = costs.pools[number], group.rows
    slots = {g: len(pool.slots(g.size)) for g in rates}
    counts: dict[tuple[TensorGrid, int], list[int]] = {}  # of stages, all of which have the same figures
    # Rounded up, fewer rows are never harder: who asks for fewer than there are gets no less than the truth.
    for grid, stages, replicas in choices_of(slots, costs.setup.model.num_layers, rows, rounded_up=True):
        counts.setdefault((grid, replicas), []).append(stages)
    found, stages_of = [], []
    for (grid, replicas), stages in counts.items():
        choice, rate = Choice(grid, 1, replicas), rates[grid]
        blocks = math.floor(seconds * rate.block / (group.microbatches * rank_rows(choice, rows)) * (1 + ROUNDING))
        enough = [count for count in stages if count * blocks >= wanted]
        if blocks < 1 or not enough:
            continue
        for zero in _zeros(space, choice, group.num_pipelines):
            if figures := _figures(costs, space, number, choice, zero, group, seconds, rate):
                found.append(figures)
                stages_of.append(enough)
                if figures[BASE_BYTES] == ROOMY:
                    break  # to keep less of the state, and exchange more, gains nothing
    names = [f.name for f in fields(Options) if f.name not in ("stages", "memory_bytes")]
    columns = zip(*found, strict=True) if found else [()] * len(names)
    times = [len(enough) for enough in stages_of]
    arrays = {
        name: np.repeat(np.array(column, dtype=float), times, axis=0)
        for name, column in zip(names, columns, strict=True)
    }
    arrays |= {name: arrays[name].reshape(-1, 2).T for name in ("seconds", "base_bytes", "kept_bytes")}
    stages = np.array([count for enough in stages_of for count in enough], dtype=float)
    every = Options(stages, **arrays, memory_bytes=pool.memory_bytes)
    return every.only(_undominated(every))


def _zeros(space: Space, choice: Choice, num_pipelines: int) -> Iterator[int]:
    """Yield ZeRO stages, of 0 and 1 that which needs less."""
    if num_pipelines > 1 or choice.replicas == 1:
        yield 1
        return
    yield from (zero for zero in space.zero if zero or 1 not in space.zero)


def _figures(
    costs: StageCosts, space: Space, number: int, choice: Choice, zero: int, group: Group, seconds: float, rate: Rate
) -> tuple | None:
    """Return all figures but the number of stages, None where a stage cannot do a block."""
    grid, _, replicas = choice
    most, least = rank_rows(choice, group.rows), rank_rows(choice, group.rows, fewest=True)
    first, last, m = space.recompute[0], space.recompute[-1], group.microbatches
    extra = costs.exchange(number, grid, replicas, 1, zero).both * CERTAIN_SHARE

    def block(how: str) -> float:
        """What rows beyond a few take is not looked up for each number of them."""
        if most <= FEW_ROWS:
            return costs.seconds(number, grid, 1, most, how).both + extra
        if how == first:
            return most / rate.block + extra
        few = costs.seconds(number, grid, 1, FEW_ROWS, how).both
        return few * most / FEW_ROWS / ROW_SPEED + extra

    once = block(first)
    blocks = math.floor(seconds / (m * once))
    if blocks < 1:
        return None
    late = rate.late if costs.splits(grid, first, zero) else 0.0
    holders = replicas if group.num_pipelines == 1 else replicas + group.all_rows - group.rows
    memory, depth = costs.pools[number].memory_bytes, min(m, costs.setup.model.num_layers)
    ends, least_blocks = (False, False), 1
    needs = costs.needs(grid, most, first, zero, holders, ends, least_blocks)
    if needs.keeping(depth).at(blocks) <= memory:
        again, base, state, kept = once, ROOMY, 1.0, (0.0, 0.0)  # memory is never short
    else:
        both = needs, costs.needs(grid, most, last, zero, holders, ends, least_blocks)
        again = block(last)
        base = [each.state.base for each in both]
        state = min(each.state.each for each in both)
        kept = [each.activations.each for each in both]
        if max(each.keeping(1).most(memory) for each in both) < 1:
            return None
    fastest = once if least == most else least / rate.block + extra
    # What goes on beside takes no less than it slows what is computed, were it all hidden.
    share = 1.0 if costs.setup.bucket_bytes is None else 1 - 1 / costs.pools[number].device.overlap_times
    exchanged = 0.0
    if zero < 2 and share:
        exchanged = costs.ending(number, grid, replicas, group.num_pipelines) * share * CERTAIN_SHARE
    step = m * once * NEGLIGIBLE_SHARE
    return (
        (once, again),
        late,
        (1 - late) * fastest / once,
        step * math.floor(exchanged / step),
        base,
        state,
        kept,
        most / rate.head,
        most / rate.embedding,
    )


def rates_of(costs: StageCosts, space: Space, number: int, rows: int) -> dict[TensorGrid, Rate]:
    """Return by grid what a rank of a pool does at the most, if it has up to `rows` rows."""
    largest, counts = space.largest_grid or math.inf, [1 << n for n in range(rows.bit_length())]
    grids = (grid for grid in costs.grids[number] if grid.size <= largest)
    return {grid: _rate(costs, number, grid, space.recompute[0], counts) for grid in grids}


def _rate(costs: StageCosts, number: int, grid: TensorGrid, how: str, counts: Sequence[int]) -> Rate:
    def speed(item: int) -> float:
        return max(n / costs.seconds(number, grid, item, n, how).both for n in counts) * ROW_SPEED

    passes = [(number, grid, item, n, how) for item in (1, costs.last) for n in counts]
    late = max(costs.parts(*each)[1] / costs.seconds(*each).both for each in passes) * ROW_SPEED
    return Rate(speed(1), speed(costs.last), speed(0), late)


def _undominated(options: Options) -> np.ndarray:
    """Return which options no other one of as many stages is as good as in everything."""
    figures = np.vstack(
        [
            options.seconds,
            -options.late,
            options.through,
            options.exchanged,
            options.base_bytes,
            options.state_bytes,
            options.kept_bytes,
            options.head,
            options.embedding,
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
