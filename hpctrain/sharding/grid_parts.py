"""Parts: the rows, positions and features of hidden states that a coordinate of a tensor grid has, and its weights.

Pure functions of grid and coordinate: a `GridPart` needs no plan. The *holding* of a rank (`hpctrain.plan.holdings`)
says which ranks of a plan have the same.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from hpctrain.sharding.grid import (
    CUTTING_CONTEXT,
    CUTTING_FEATURES,
    CUTTING_PRODUCTS,
    CUTTING_ROWS,
    STORING,
    Coordinate,
    TensorGrid,
)
from hpctrain.sharding.intervals import Interval, cut_evenly, cut_zigzag, section
from hpctrain.sharding.parameters import Box, Parameter, Unit, UnitLayout


class GridPart(NamedTuple):
    """The share that a coordinate of a tensor grid has of any model."""

    grid: TensorGrid
    coordinate: Coordinate

    def rows(self, rows: Interval) -> Interval:
        """Return what it computes of the rows of its tile."""
        index, parts = self.grid.combined(self.coordinate, CUTTING_ROWS)
        return cut_evenly(rows.size, parts)[index].shift(rows.start)

    def context(self, num_positions: int) -> tuple[Interval, ...]:
        """Return the positions of each of its rows of which it computes products, in their order in memory."""
        return cut_zigzag(num_positions, self.grid.context_shares)[self.context_place]

    @property
    def context_place(self) -> int:
        """Its place among the ranks that cut the positions of a row."""
        return self.grid.combined(self.coordinate, CUTTING_CONTEXT)[0]

    def positions(self, num_positions: int) -> tuple[Interval, ...]:
        """Return the positions of each of its rows of which it has hidden states, in their order in memory."""
        index, parts = self.grid.combined(self.coordinate, self.grid.sequence_axes)
        context = self.context(num_positions)
        return section(context, cut_evenly(sum(each.size for each in context), parts)[index])

    def features(self, hidden_size: int) -> Interval:
        """Return what it has of the features of a hidden state."""
        index, parts = self.grid.combined(self.coordinate, CUTTING_FEATURES)
        return cut_evenly(hidden_size, parts)[index]

    def box(self, parameter: Parameter) -> Box | None:
        """Return what it uses of a parameter, in the indices of the padded one; None where it has nothing of it."""
        box = []
        for length, axis in zip(parameter.padded_shape(self.grid), parameter.split, strict=True):
            index, parts = self.grid.combined(self.coordinate, (axis,) if axis else ())
            if axis == "y" and parameter.is_shared_over_y(self.grid):
                index, parts = index * parameter.heads // parts, parameter.heads
            box.append(cut_evenly(length, parts)[index])
        return tuple(box)

    def layout(self, unit: Unit) -> UnitLayout:
        """Return how the boxes that it uses of a unit lie one after the other."""
        return UnitLayout(unit, tuple(map(self.box, unit.parameters)))

    def stored_cuts(self, layout: UnitLayout) -> tuple[Interval, ...]:
        """Return which elements of a unit's flat array each of the ranks stores that use the same weights."""
        return cut_evenly(layout.size, self.grid.stored_parts)

    def stored(self, layout: UnitLayout) -> Interval:
        """Return which elements of a unit's flat array it stores itself."""
        return self.stored_cuts(layout)[self.stored_place]

    @property
    def stored_place(self) -> int:
        """Its place among the ranks that use the same weights, of which each stores a part."""
        return self.grid.combined(self.coordinate, STORING)[0]

    def counts(self, parameter: Parameter) -> bool:
        """Say whether its copy of a parameter is the one that counts, where axes do not cut the parameter.

        Such copies (norm weights over y, for example) have the same gradient everywhere, once what is partial was
        summed. The norm of the gradient and the checkpoint take the first copy.
        """
        return self._has_first(parameter, ())

    def adds(self, parameter: Parameter) -> bool:
        """Say whether its gradient of a parameter adds to a sum over all copies: what counts, or is partial."""
        return self._has_first(parameter, self.partial_axes(parameter))

    def _has_first(self, parameter: Parameter, partial_axes: Iterable[str]) -> bool:
        """Say whether it has the first copy of a parameter along axes that neither cut it nor have parts of its
        gradient."""
        axes = [axis for axis in CUTTING_PRODUCTS if axis not in (*parameter.split, *partial_axes)]
        return next((part for part in self._along(axes) if part.box(parameter)), None) == self

    def _along(self, axes: Iterable[str]) -> "Iterator[GridPart]":
        return (GridPart(self.grid, each) for each in self.grid.along(self.coordinate, axes))

    def partial_axes(self, parameter: Parameter) -> tuple[str, ...]:
        """Return the axes over which copies of a parameter have parts of its gradient, which are to be summed.

        What an axis does not cut acts on hidden states: norms, biases of outputs, learned positions. Where it cuts
        these by positions, each of its ranks has the gradient of its positions alone. What some of them lack has no
        copies. Ranks that store parts of the same weights sum when they scatter gradients.
        """
        axes = (axis for axis in self.grid.sequence_axes if axis not in (*parameter.split, *STORING))
        return tuple(axis for axis in axes if all(part.box(parameter) for part in self._along((axis,))))

    @property
    def counts_loss(self) -> bool:
        """Say whether its sum of the loss is the one that counts: ranks that have the same rows have the same sum."""
        return self.grid.combined(self.coordinate, CUTTING_PRODUCTS)[0] == 0


@lru_cache(maxsize=4096)
def parts_of(grid: TensorGrid) -> tuple[GridPart, ...]:
    """Return the parts of all places of a grid, in the order of its ranks."""
    return tuple(GridPart(grid, grid.coordinate(index)) for index in range(grid.size))


@lru_cache(maxsize=1024)
def same_elements(grid: TensorGrid, shared_heads: int) -> tuple[tuple[int, ...], ...]:
    """Return for each place of a grid the places that store the same elements of a unit, each with a part of their
    gradient: itself, and those of the same key/value head, of so many, where several y have one."""
    firsts = []
    for _, coordinate in parts_of(grid):
        group = grid.y // shared_heads if shared_heads else 1
        firsts.append(coordinate._replace(y=coordinate.y // group * group))
    together: dict[Coordinate, list[int]] = {}
    for index, first in enumerate(firsts):
        together.setdefault(first, []).append(index)
    return tuple(tuple(together[first]) for first in firsts)
