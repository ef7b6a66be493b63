"""Counts what a linear layer costs a rank of a tensor grid: products, whole or cut, and their collectives. Pure.

It follows model/operators/linear.py. A product that is cut in parts computes one while
the collective of another is in flight: of all parts the last sum, or the first gather, overlaps none.
"""

from hpctrain.planner.prices.setup import Setup
from hpctrain.planner.prices.work import Exchange, LayerCost, MatrixProduct, PassWork
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import cut_evenly


def linear(
    setup: Setup, tokens: int, into: int, out: int, axes: tuple[str, str], sizes: dict[str, int], parts: int = 1
) -> LayerCost:
    """Return the passes of a layer whose weight [out, in] is cut by the axes (of in, of out)."""
    of_in, of_out = axes
    num_bytes = setup.summed_bytes
    cut = _sizes(tokens, parts if sizes[of_in] > 1 else 1)
    dtype = setup.linear_dtype
    cast_bytes = setup.engine.cast_bytes if dtype else 0.0
    forward = PassWork([MatrixProduct(each, into, out, dtype=dtype) for each in cut], cast_bytes * tokens * into)
    if sizes[of_in] > 1:
        forward.exchanges += _sums(of_in, "all_reduce", forward.products, num_bytes)
    backward = PassWork([MatrixProduct(tokens, out, into, dtype=dtype)], cast_bytes * tokens * out)
    of_weight = MatrixProduct(out, tokens, into, dtype=dtype)
    if sizes[of_out] > 1:
        backward.exchanges.append(Exchange(of_out, "all_reduce", int(tokens * into * num_bytes), behind=(of_weight,)))
    added = 1 if setup.passes.weight else 0
    return LayerCost(forward, backward, PassWork([of_weight], setup.passes.weight * into * out, added))


def gathering_linear(
    setup: Setup, rows: int, into: int, out: int, grid: TensorGrid, regathers: bool, parts: int = 1
) -> LayerCost:
    """Return the passes of a layer whose input is cut by positions over y, and whose weight is [out / y, in / x].

    The input is gathered, and again for the gradient of the weight, if it `regathers`, while that of the input is made.
    """
    tokens, num_bytes = rows * setup.positions, setup.item_bytes
    cost = linear(setup, tokens, into, out, ("x", "y"), {"x": grid.x, "y": 1})
    of_input, of_weight = cost.backward_input.products[0], cost.backward_weight.products[0]
    whole = tokens * into * num_bytes
    operands = tokens * into * setup.operand_bytes
    cut = _Parts(setup, grid, rows, parts)
    products = [MatrixProduct(each, into, out, dtype=setup.linear_dtype) for each in cut.tokens]
    exchanges = _gathers(products, into, setup.operand_bytes)
    if grid.x > 1:
        exchanges += _sums("x", "all_reduce", products, num_bytes)
    # A whole that is kept is joined for its product, too, unless a single row is cut.
    joined = cut.joined_bytes(into) if regathers or not cut.cut_positions else 2.0 * whole
    passed = cost.forward.passed_bytes + joined + cut.placed_bytes(out)
    forward = PassWork(products, passed, cut.copies, exchanges)
    if regathers:
        cost.backward_input.exchanges.append(Exchange("y", "all_gather", operands, behind=(of_input,)))
    cost.backward_input.exchanges.append(Exchange("y", "reduce_scatter", whole, behind=(of_weight,)))
    cost.backward_input.passed_bytes += (1 + regathers) * joining_bytes(rows, whole)
    return LayerCost(forward, cost.backward_input, cost.backward_weight)


def scattering_linear(setup: Setup, rows: int, into: int, out: int, grid: TensorGrid, parts: int = 1) -> LayerCost:
    """Return the passes of a layer whose weight is [out / x, in / y], and whose output is cut by positions over y."""
    tokens, num_bytes = rows * setup.positions, setup.item_bytes
    cost = linear(setup, tokens, into, out, ("y", "x"), {"x": grid.x, "y": 1})
    cut = _Parts(setup, grid, rows, parts)
    products = [MatrixProduct(each, into, out, dtype=setup.linear_dtype) for each in cut.tokens]
    scattered = cost.forward.passed_bytes + cut.joined_bytes(out) + cut.placed_bytes(into)
    forward = PassWork(products, scattered, cut.copies, _sums("y", "reduce_scatter", products, num_bytes))
    of_input = [MatrixProduct(each, out, into, dtype=setup.linear_dtype) for each in cut.tokens]
    gathered = cost.backward_input.passed_bytes + cut.placed_bytes(out) + cut.joined_bytes(out) + cut.placed_bytes(into)
    gathers = _gathers(of_input, out, setup.operand_bytes)
    backward = PassWork(of_input, gathered, 2 * cut.copies, gathers + cost.backward_input.exchanges)
    return LayerCost(forward, backward, cost.backward_weight)


class _Parts:
    """The parts in which a product next to y's positions is computed: some rows, or positions of a single one."""

    def __init__(self, setup: Setup, grid: TensorGrid, rows: int, parts: int):
        positions, y = setup.positions, grid.y
        self.cut_positions = rows == 1 and parts > 1
        cut = [y * size for size in _sizes(positions // y, parts)] if rows == 1 else _sizes(rows, parts)
        self.tokens = cut if rows == 1 else [size * positions for size in cut]
        self.copies = len(cut) if self.cut_positions else 0
        """Operations that copy a part whose positions lie apart in the whole."""
        self._joined_rows = [0] if rows == 1 else [size for size in cut if size > 1]
        self._positions, self._item_bytes, self._all_tokens = positions, setup.item_bytes, sum(self.tokens)

    def joined_bytes(self, features: int) -> float:
        """Return the bytes passed over to put positions of several rows in order, or to take them apart."""
        return 2.0 * sum(self._joined_rows) * self._positions * features * self._item_bytes

    def placed_bytes(self, features: int) -> float:
        """Return the bytes passed over to put parts of a single row's positions in their place, or to take them."""
        return 2.0 * self._all_tokens * features * self._item_bytes if self.cut_positions else 0.0


def _sizes(size: int, parts: int) -> list[int]:
    return [part.size for part in cut_evenly(size, max(1, min(parts, size)))]


def _sums(axis: str, operation: str, products: list[MatrixProduct], num_bytes: float) -> list[Exchange]:
    """Return the sums of outputs, each of which overlaps the next product."""
    behind = [*((each,) for each in products[1:]), ()]
    return [
        Exchange(axis, operation, int(product.m * product.n * num_bytes), behind=following)
        for product, following in zip(products, behind, strict=True)
    ]


def _gathers(products: list[MatrixProduct], features: int, num_bytes: int) -> list[Exchange]:
    """Return the gathers over y of inputs with so many features, each of which overlaps the product before."""
    return [
        Exchange("y", "all_gather", product.m * features * num_bytes, behind=before)
        for product, before in zip(products, [(), *((each,) for each in products[:-1])], strict=True)
    ]


def joining_bytes(rows: int, num_bytes: int) -> float:
    """Return the bytes passed over to put the positions of several rows in order, or to take them apart."""
    return 2.0 * num_bytes if rows > 1 else 0.0
