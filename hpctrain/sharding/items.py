"""The items of a model: 0 the embedding, 2 i + 1 and 2 i + 2 attention and feed-forward part of block i, last
the head.

A plan cuts between any two items. What a tile has of a block, both branches or one, is computed at once: a *layer*.
"""

import itertools
from functools import lru_cache

from hpctrain.sharding.intervals import Interval

EMBEDDING, BLOCK = Interval(0, 1), Interval(1, 3)
"""The first layers of a model that is not cut."""


def block_of(item: int) -> int:
    """Return the block that an item is of; -1 for the embedding, the number of blocks for the head."""
    return (item - 1) // 2


def is_attention(item: int) -> bool:
    """Say which branch of its block an item is."""
    return item % 2 == 1


@lru_cache(maxsize=4096)
def layers(items: Interval) -> tuple[Interval, ...]:
    """Cut consecutive items into layers."""
    first = items.start + 1 + items.start % 2  # a layer starts at an odd item, and with the embedding
    bounds = [items.start, *range(first, items.stop, 2), items.stop]
    return tuple(Interval(a, b) for a, b in itertools.pairwise(bounds) if a < b)


def name_layer(items: Interval, num_items: int) -> str:
    """Return what a layer of a model with so many items is called, such as `block 3`; blocks count from 0."""
    if items.start == 0:
        return "embedding"
    if items.stop == num_items:
        return "head"
    kind = "block" if items.size == 2 else "attention" if is_attention(items.start) else "feed-forward"
    return f"{kind} {block_of(items.start)}"
