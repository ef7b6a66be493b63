"""The geometry of a state: which rectangle of which tensor is where. Files and live ranks are read by it alike."""

from collections.abc import Sequence

import numpy as np

from hpctrain.config.errors import CheckpointError

Bounds = tuple[int, int]
"""Rows or columns, half-open."""


class StateSource:
    """Tensors as rectangles of flat streams, from which any layout reads what it needs.

    A stream is a file's (`hpctrain.checkpoint.index`), or in the memory of a rank (`hpctrain.checkpoint.live`).
    """

    def __init__(self, tensors: Sequence[tuple[str, tuple[int, ...]]], rectangles: np.ndarray):
        """`tensors` have a name, such as `model/norm.weight`, and a shape. `rectangles` (RECTANGLE) are sorted by
        tensor."""
        self.numbers = {name: number for number, (name, _) in enumerate(tensors)}
        self.shapes = [shape for _, shape in tensors]
        self.rectangles = rectangles
        self.bounds = np.searchsorted(rectangles["tensor"], np.arange(len(tensors) + 1))

    def number(self, tensor: str) -> int:
        """Return the number of a tensor. Raises CheckpointError where there is none."""
        return self.numbers[tensor]

    def read(self, kind: str, name: str, rows: Bounds, columns: Bounds, out: np.ndarray | None = None) -> np.ndarray:
        """Return fp32 rows x columns of a parameter (columns are ignored for one dim), flat.

        With `out` the values are put there; they must not be used before `check_all`.
        """
        number = self.number(f"{kind}/{name}")
        if len(self.shapes[number]) == 1:
            columns = (0, 1)
        result = np.empty((rows[1] - rows[0]) * (columns[1] - columns[0]), "<f4") if out is None else out
        result = result.reshape(rows[1] - rows[0], columns[1] - columns[0])
        rectangles = self.rectangles[self.bounds[number] : self.bounds[number + 1]]
        low = np.maximum(rectangles["rows"][:, 0], rows[0]), np.maximum(rectangles["columns"][:, 0], columns[0])
        high = np.minimum(rectangles["rows"][:, 1], rows[1]), np.minimum(rectangles["columns"][:, 1], columns[1])
        filled = 0
        for at in np.flatnonzero((low[0] < high[0]) & (low[1] < high[1])):
            ours = (int(low[0][at]), int(high[0][at])), (int(low[1][at]), int(high[1][at]))
            part = result[slice(*(i - rows[0] for i in ours[0])), slice(*(i - columns[0] for i in ours[1]))]
            self.read_rectangle(rectangles[at], *ours, part)
            filled += part.size
        if out is None:
            self.check_all()
        if filled != result.size:
            raise self.incomplete(f"{kind}/{name}: no part has some of its elements")
        return result.reshape(-1)

    def read_rectangle(self, rectangle, rows: Bounds, columns: Bounds, out: np.ndarray) -> None:
        """Fill `out` with those rows x columns of a tensor that lie in a rectangle, until `check_all`."""
        raise NotImplementedError

    def check_all(self) -> None:
        """Return when all that was read is there, and sound."""
        raise NotImplementedError

    def incomplete(self, what: str) -> CheckpointError:
        """Return the error for a tensor of which elements are missing."""
        return CheckpointError(what)
