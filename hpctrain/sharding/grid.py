"""The tensor grid: how the ranks of a tile share its products and its weights."""

from typing import NamedTuple


class TensorGrid(NamedTuple):
    """Sizes of a tensor grid: x cuts input features, y output features, z rows and the storage of weights.

    With `sequence_parallel` y also cuts hidden states by positions, outside of attention and feed-forward parts.
    """

    x: int = 1
    y: int = 1
    z: int = 1
    sequence_parallel: bool = False

    @property
    def size(self) -> int:
        return self.x * self.y * self.z

    @property
    def cuts_weights(self) -> bool:
        """Say whether products are of parts of weights, and their results are summed."""
        return self.x > 1 or self.y > 1

    @property
    def position_parts(self) -> int:
        """Into how many parts the positions of hidden states are cut."""
        return self.y if self.sequence_parallel else 1

    def coordinate(self, index: int) -> tuple[int, int, int]:
        """Return the (x, y, z) of a place in the order z (slowest), x, y (fastest)."""
        zx, y = divmod(index, self.y)
        z, x = divmod(zx, self.x)
        return x, y, z

    def __str__(self) -> str:
        """Return `TP4` for a grid that is y alone, else `TP8 (x=2, y=4)`; `TP4+SP` where it is sequence parallel."""
        suffix = "+SP" if self.sequence_parallel else ""
        if self.x == self.z == 1:
            return f"TP{self.y}{suffix}"
        sizes = {"x": self.x, "y": self.y, "z": self.z}
        return f"TP{self.size}{suffix} ({', '.join(f'{axis}={size}' for axis, size in sizes.items() if size > 1)})"


ONE_RANK = TensorGrid()
