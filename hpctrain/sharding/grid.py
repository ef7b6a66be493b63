"""The tensor grid: how the ranks of a tile share its products and its weights."""

from typing import NamedTuple


class TensorGrid(NamedTuple):
    """Sizes of a tensor grid: x cuts input features, y output features, z rows and the storage of weights."""

    x: int = 1
    y: int = 1
    z: int = 1

    @property
    def size(self) -> int:
        return self.x * self.y * self.z

    @property
    def cuts_weights(self) -> bool:
        """Whether products are of parts of weights, and their results are summed."""
        return self.x > 1 or self.y > 1

    def coordinate(self, index: int) -> tuple[int, int, int]:
        """Return the (x, y, z) of a place in the order z (slowest), x, y (fastest)."""
        zx, y = divmod(index, self.y)
        z, x = divmod(zx, self.x)
        return x, y, z

    def __str__(self) -> str:
        """Return `TP4` for a grid that is y alone, else `TP8 (x=2, y=4)`."""
        if self.x == self.z == 1:
            return f"TP{self.y}"
        return f"TP{self.size} ({', '.join(f'{axis}={size}' for axis, size in self._asdict().items() if size > 1)})"


ONE_RANK = TensorGrid()
