"""The tensor grid: how the ranks of a tile share its products and its weights, axis by axis.

`AXES` says of each axis what it cuts. Code that needs an answer for all axes asks the table, and names no axis.
`hpctrain.sharding.grid_parts` says what a coordinate has of a model.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Literal, NamedTuple


class GridAxis(NamedTuple):
    """An entry of `AXES`: what an axis of the tensor grid cuts, and which keys are about its communication."""

    cuts: Literal["features", "outputs", "rows", "context"]
    """What the axis cuts among its ranks: hidden features (inputs of products), outputs of products, rows, or the
    context: the positions of each row, in all that ranks compute."""
    overlap: Literal["tensor", "z"]
    """The switch of a job's [overlap] for its collectives."""
    stores: bool = False
    """Whether its ranks use the same weights, and each stores a part of them. Other axes cut products."""
    cuts_sequence: bool = False
    """Whether its ranks cut hidden states by positions in a grid that is sequence parallel."""


AXES: dict[str, GridAxis] = {
    "x": GridAxis("features", overlap="tensor"),
    "y": GridAxis("outputs", overlap="tensor", cuts_sequence=True),
    "z": GridAxis("rows", overlap="z", stores=True),
    "c": GridAxis("context", overlap="tensor", stores=True),
}
"""Axes by name, in the order of the fields of `TensorGrid` and `Coordinate`."""
STORING = tuple(name for name, axis in AXES.items() if axis.stores)
CUTTING_PRODUCTS = tuple(name for name in AXES if name not in STORING)
CUTTING_ROWS = tuple(name for name, axis in AXES.items() if axis.cuts == "rows")
CUTTING_CONTEXT = tuple(name for name, axis in AXES.items() if axis.cuts == "context")
CUTTING_FEATURES = tuple(name for name, axis in AXES.items() if axis.cuts == "features")
CUTTING_SEQUENCE = tuple(name for name, axis in AXES.items() if axis.cuts_sequence)
CONTEXT = "c"
"""The name of the group of ranks that cut the positions of a row."""
STORED = "z"
"""The name of the group of ranks that store parts of the same weights."""
GROUPS = {name: (name,) for name in (*CUTTING_PRODUCTS, *CUTTING_CONTEXT)} | {STORED: STORING}
"""Axes along which ranks of a grid have a group, by the name of the group."""
RANK_ORDER = ("z", "c", "x", "y")
"""The axes as the ranks of a tile go through them, the slowest first: y exchanges the most, and sits closest."""


class Coordinate(NamedTuple):
    """The place of a rank in a tensor grid."""

    x: int = 0
    y: int = 0
    z: int = 0
    c: int = 0


class TensorGrid(NamedTuple):
    """The size of each axis of a tensor grid.

    With `sequence_parallel` y also cuts hidden states by positions, outside of attention and feed-forward parts. With
    `exchanges_heads` ranks of c exchange heads for positions in attention; else they gather keys and values.
    `position_shares` has the share of each rank of c in the positions of a row; without any they are equal.
    """

    x: int = 1
    y: int = 1
    z: int = 1
    c: int = 1
    sequence_parallel: bool = False
    exchanges_heads: bool = False
    position_shares: tuple[int, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis by its name."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def size(self) -> int:
        return self.num_parts(tuple(AXES))

    @lru_cache(maxsize=4096)  # noqa: B019 - grids are small values, and there are few
    def num_parts(self, axes: tuple[str, ...]) -> int:
        """Return how many ranks there are along some axes."""
        return math.prod(getattr(self, axis) for axis in axes)

    @property
    def cuts_weights(self) -> bool:
        """Say whether products are of parts of weights, and their results are summed."""
        return self.product_parts > 1

    @property
    def overlaps_parts(self) -> bool:
        """Say whether parts of blocks may overlap collectives: those of products, or gathers of keys and values."""
        return self.cuts_weights or self.context_parts > self.head_parts

    @property
    def product_parts(self) -> int:
        """Number of parts into which products are cut."""
        return self.num_parts(CUTTING_PRODUCTS)

    @property
    def stored_parts(self) -> int:
        """Number of parts into which weights of one box are cut to be stored."""
        return self.num_parts(STORING)

    @property
    def row_parts(self) -> int:
        """Number of parts into which the rows of a tile are cut."""
        return self.num_parts(CUTTING_ROWS)

    @property
    def context_parts(self) -> int:
        """Number of parts into which the positions of a row are cut for all that ranks compute, but keys and values."""
        return self.num_parts(CUTTING_CONTEXT)

    @property
    def context_shares(self) -> tuple[int, ...]:
        """The share of each of `context_parts` in the positions of a row."""
        return self.position_shares or (1,) * self.context_parts

    @property
    def of_weights(self) -> "TensorGrid":
        """The grid by which weights are cut and stored: who has which positions and heads makes no difference."""
        return self._replace(position_shares=(), exchanges_heads=False)

    @property
    def head_parts(self) -> int:
        """Number of parts into which attention cuts the heads that a rank has products of."""
        return self.context_parts if self.exchanges_heads else 1

    @property
    def sequence_parts(self) -> int:
        """Number of parts into which `sequence_axes` cut the positions of a hidden state that a rank has."""
        return self.num_parts(self.sequence_axes)

    @property
    def copies(self) -> int:
        """Number of ranks that have the same part of a hidden state."""
        parts = self.row_parts * self.context_parts * self.sequence_parts * self.num_parts(CUTTING_FEATURES)
        return self.size // parts

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """The axes that cut hidden states by positions outside of attention and feed-forward parts alone."""
        return CUTTING_SEQUENCE if self.sequence_parallel else ()

    def coordinate(self, index: int) -> Coordinate:
        """Return the coordinate of a place in `RANK_ORDER`."""
        place = {}
        for axis in reversed(RANK_ORDER):
            index, place[axis] = divmod(index, getattr(self, axis))
        return Coordinate(**place)

    def index_of(self, coordinate: Coordinate) -> int:
        """Return the place of a coordinate in `RANK_ORDER`."""
        index = 0
        for axis in RANK_ORDER:
            index = index * getattr(self, axis) + getattr(coordinate, axis)
        return index

    def along(self, coordinate: Coordinate, axes: Iterable[str]) -> Iterator[Coordinate]:
        """Yield the coordinates that differ on some axes only, the first axis being the slowest."""
        axes = tuple(axes)
        for places in itertools.product(*(range(getattr(self, axis)) for axis in axes)):
            yield coordinate._replace(**dict(zip(axes, places, strict=True)))

    def combined(self, coordinate: Coordinate, axes: Iterable[str]) -> tuple[int, int]:
        """Return the place of a coordinate along some axes taken as one, and the size of that."""
        index, size = 0, 1
        for axis in axes:
            index, size = index * getattr(self, axis) + getattr(coordinate, axis), size * getattr(self, axis)
        return index, size

    def __str__(self) -> str:
        """Return `TP4` for a grid that is y alone, else `TP8 (x=2, y=4)`; `TP4+SP` where it is sequence parallel."""
        suffix = "+SP" * self.sequence_parallel + ", heads exchanged" * self.exchanges_heads
        suffix += f", positions {':'.join(map(str, self.position_shares))}" if self.position_shares else ""
        if self.size == self.y:
            return f"TP{self.y}{suffix}"
        return f"TP{self.size}{suffix} ({', '.join(f'{axis}={n}' for axis, n in self.sizes.items() if n > 1)})"


ONE_RANK = TensorGrid()
