"""Rows by turns: what whole rows of one microbatch cannot give to replicas, those of a whole step can. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from hpctrain.intervals import Interval, tiles_exactly
from hpctrain.plan import Plan, Tile
from hpctrain.planner.cut import cut_rows
from hpctrain.planner.simulate import Costs
from hpctrain.rows import Rows

LEAST_WORTH = 5e-4
"""Of the longest replica's time: what rows by turns must promise to save."""
MOST_REPLICAS = 32
"""Of more, each of which has turns of its own, a simulation takes longer than rows by turns are worth."""


def spread(totals: Sequence[int], microbatches: int) -> list[Rows]:
    """Return for each replica rows that add up to its total over `microbatches`.

    All microbatches have the same number of rows: the totals must add up to a multiple of `microbatches`. A replica's
    numbers of rows differ by one at most, and change as seldom as can be: a pipeline is held up where they grow.

    Each replica always has the whole part of its mean, and one row more in some microbatches. These are dealt out to
    one replica after the other, round and round the step (McNaughton's wrap-around rule, 1959).
    """
    assert sum(totals) % microbatches == 0, (totals, microbatches)
    sizes = [[total // microbatches] * microbatches for total in totals]
    dealt = 0
    for own, total in zip(sizes, totals, strict=True):
        for place in range(dealt, dealt + total % microbatches):
            own[place % microbatches] += 1
        dealt += total % microbatches
    phases: list[list[Interval]] = [[] for _ in totals]
    for cut in zip(*sizes, strict=True):
        at = 0
        for size, rows in zip(cut, phases, strict=True):
            rows.append(Interval(at, at + size))
            at += size
    return [Rows(tuple(each)) for each in phases]


def by_turns(plan: Plan, costs: Callable[[], Costs]) -> Plan | None:
    """Return a plan whose replicas have rows of a whole step by what one takes them; None where that promises nothing.

    For replicas that do not meet before the end of a step, and have whole rows of their own in all stages. `costs` are
    asked for where replicas differ.
    """
    replicas: dict[Rows, list[Tile]] = {}
    for tile in sorted(plan.tiles, key=lambda tile: tile.rows.phases):
        replicas.setdefault(tile.rows, []).append(tile)
    whole = [rows.phases[0] for rows in replicas]
    has_own = plan.period == 1 and tiles_exactly(whole, Interval(0, plan.rows))
    unlike = {(rows.sizes, tuple((t.items, t.family, t.tensor) for t in tiles)) for rows, tiles in replicas.items()}
    if plan.microbatches == 1 or not 1 < len(replicas) <= MOST_REPLICAS or len(unlike) == 1 or not has_own:
        return None
    if any(tile.zero >= 2 for tile in plan.tiles):
        return None
    seconds = costs().longest_seconds
    longest = [max(seconds[tile] for tile in tiles) for tiles in replicas.values()]
    each = [of_all / rows.size for of_all, rows in zip(longest, whole, strict=True)]
    shares = [lambda rows, of_row=of_row: rows * of_row for of_row in each]
    totals = cut_rows(plan.rows * plan.microbatches, [plan.microbatches] * len(shares), shares)
    mean = max(share(total) for share, total in zip(shares, totals, strict=True)) / plan.microbatches
    if mean > max(longest) * (1 - LEAST_WORTH):
        return None
    dealt = dict(zip(replicas, spread(totals, plan.microbatches), strict=True))
    if any(min(dealt[tile.rows].sizes) < tile.tensor.z for tile in plan.tiles):
        return None
    return replace(plan, tiles=tuple(_with_rows(tile, dealt[tile.rows]) for tile in plan.tiles))


def _with_rows(tile: Tile, rows: Rows) -> Tile:
    """Return a tile with other rows, in as many pieces as before if there are enough."""
    return replace(tile, rows=rows, substeps=min(tile.substeps, min(rows.sizes) // tile.tensor.z))
