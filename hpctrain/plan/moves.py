"""Counts the bytes of masters and moments that move where a run goes on by another plan. Pure.

A rank needs what it updates by the next plan. It has what it owned by the last one. What it lacks comes once from the
rank that owned it, as in `hpctrain.checkpoint.live`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from hpctrain.config.job import Model
from hpctrain.plan.holdings import Rectangle, holding_of
from hpctrain.plan.stored import state_of
from hpctrain.plan.tiling import Plan

ElementBytes = Callable[[tuple[int, ...]], int]
"""Bytes of the master and the moments of an element, by the shape of its parameter."""


class PlanState:
    """The masters and moments of a plan, by rank."""

    def __init__(self, model: Model, plan: Plan, bucket_bytes: int | None = None):
        """`bucket_bytes` is that of `holding_of`."""
        self.owned: dict[str, list[tuple[int, Rectangle]]] = {}
        """By parameter each rectangle, with the rank that owns it."""
        self.updated: dict[str, list[tuple[int, Rectangle]]] = {}
        """The same of ranks that update it: all holders, where they keep whole states (ZeRO 0)."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        for rank in sorted({rank for tile in plan.tiles for rank in tile.ranks}):
            holding = holding_of(model, plan, rank, bucket_bytes)
            for places, is_owned in ((self.owned, True), (self.updated, False)):
                for parameter, where in state_of(holding, rank, is_owned):
                    self.shapes[parameter.name] = parameter.shape
                    places.setdefault(parameter.name, []).append((rank, where))

    def bytes_of(self, element_bytes: ElementBytes, is_owned: bool = False) -> Counter[int]:
        """Return the bytes that each rank updates; `is_owned`: those that it owns, as in checkpoints and copies."""
        result: Counter[int] = Counter()
        for name, places in (self.owned if is_owned else self.updated).items():
            for rank, where in places:
                result[rank] += element_bytes(self.shapes[name]) * _size(where)
        return result

    def moves_to(
        self, other: "PlanState", kept: Sequence[int], element_bytes: ElementBytes
    ) -> Counter[tuple[int, int]]:
        """Return the bytes that go from each rank of this plan to each rank of another one, by their numbers here.

        `kept` are the ranks here of the ranks there. A source may be a rank that is not kept.
        """
        result: Counter[tuple[int, int]] = Counter()
        for name, places in other.updated.items():
            each = element_bytes(self.shapes[name])
            for rank, needed in places:
                for owner, had in self.owned[name]:
                    if owner != kept[rank] and (size := _size(_both(needed, had))):
                        result[owner, kept[rank]] += each * size
        return result

    def lost_bytes(self, lost: Collection[int], element_bytes: ElementBytes) -> int:
        """Return the bytes that no rank has in memory any more where some are lost."""
        total = 0
        for name, places in self.owned.items():
            left = [where for rank, where in places if rank in lost]
            for rank, where in self.updated[name] if left else ():
                if rank not in lost:
                    left = [part for each in left for part in _without(each, where)]
            total += element_bytes(self.shapes[name]) * sum(map(_size, left))
        return total


def _size(where: Rectangle) -> int:
    return where[0].size * where[1].size


def _both(one: Rectangle, other: Rectangle) -> Rectangle:
    return one[0].intersect(other[0]), one[1].intersect(other[1])


def _without(whole: Rectangle, other: Rectangle) -> list[Rectangle]:
    """Return rectangles of all that is in one rectangle and not in another."""
    rows, columns = _both(whole, other)
    if not (rows.size and columns.size):
        return [whole]
    bands = rows._replace(start=whole[0].start, stop=rows.start), rows._replace(start=rows.stop, stop=whole[0].stop)
    sides = (
        columns._replace(start=whole[1].start, stop=columns.start),
        columns._replace(start=columns.stop, stop=whole[1].stop),
    )
    parts = [*((band, whole[1]) for band in bands), *((rows, side) for side in sides)]
    return [part for part in parts if _size(part)]
