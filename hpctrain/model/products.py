"""The products that a tile's linear layers compute, by name. Pure: needs no torch."""

from collections.abc import Iterator
from typing import NamedTuple

from hpctrain.config.job import Model
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.sharding.intervals import cut_evenly
from hpctrain.sharding.parameters import layer_shapes


class Product(NamedTuple):
    """One shape of product, [m, k] @ [k, n]."""

    use: str
    """What it makes: forward (the output), input or weight (their gradients)."""
    dtype: str
    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.use}-{self.dtype}-{self.m}x{self.k}x{self.n}"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n


def parse_product(name: str) -> Product:
    """Return the product of a name that `str` wrote."""
    use, dtype, sizes = name.split("-")
    return Product(use, dtype, *map(int, sizes.split("x")))


def products_of(
    model: Model, plan: Plan, tile: Tile, dtype: str, positions: int, in_halves: bool = False
) -> list[Product]:
    """Return the products of a tile's linear layers, once each, the smallest first.

    `positions` are of a sequence; `in_halves`: blocks compute half of a rank's rows at once (`overlap.forward`).
    """
    whole = _numbers_of_rows(tile)
    halves = {half.size for rows in whole for half in cut_evenly(rows, 2)} - {0}
    of_blocks = halves if in_halves and tile.tensor.cuts_weights else whole
    result = {
        product
        for item in range(*tile.items)
        for out, into in layer_shapes(model, tile.tensor, item)
        for rows in (of_blocks if 0 < item <= model.num_layers else whole)
        for product in _of_layer(rows * positions, out, into, dtype)
    }
    return sorted(result, key=lambda product: (product.flops, product))


def _numbers_of_rows(tile: Tile) -> set[int]:
    """Return of how many rows a rank computes products at once: one number where rows divide, else several."""
    rows = {tile.rows_at(z).size for z in range(tile.tensor.z)}
    return {region.size for size in rows for region in cut_evenly(size, tile.row_chunks)} - {0}


def _of_layer(tokens: int, out: int, into: int, dtype: str) -> Iterator[Product]:
    yield Product("forward", dtype, tokens, into, out)
    yield Product("input", dtype, tokens, out, into)
    yield Product("weight", dtype, out, tokens, into)
