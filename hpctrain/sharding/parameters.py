"""Every parameter of a model by name: its shape, how a tensor grid cuts it, how it starts.

Pure functions of the model's shape and of a tensor grid: no weights here. The model, the optimizer, the checkpoint and
the planner all use these functions, so that none can disagree.

How weights are cut (Agarwal's 3D product as used by AxoNN, arXiv 2305.13525): the weight of a layer `[out, in]` is cut
by y over `out` and by x over `in`. Layers whose input is the output of such a layer swap x and y, so that nothing is
redistributed in between. What a coordinate uses of a weight is its *box* (`grid_parts.py`). The boxes of one *unit*
(the parameters of one item that are exchanged by the same ranks) lie one after another in one flat array. Each of z
stores a consecutive z-th of it.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from hpctrain.architectures.description import Attention, Experts, Mlp, Norm
from hpctrain.config.errors import PlanError
from hpctrain.config.job import Model
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import block_of, is_attention

Box = tuple[Interval, ...]
Update = Literal["decayed", "plain", "balance"]
"""The optimizer's update with weight decay, or without it; or that of the bias that balances experts."""
# The linear layers of a block: of each the parameters that are computed as one product, without ".weight" or ".bias".
BLOCK_PRODUCTS = (
    ("attention.q", "attention.k", "attention.v"),
    ("attention.o",),
    ("ffn.gate", "ffn.up"),
    ("ffn.down",),
)
SHARED_PRODUCTS = ("shared.gate", "shared.up"), ("shared.down",)
"""The same of the expert that computes every token."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of the unsplit model."""

    name: str
    shape: tuple[int, ...]
    split: tuple[str | None, ...]
    """For each dim the axis of the tensor grid that cuts it ("x", "y") or None."""
    init: str
    """How it starts: "normal", "residual" (normal, scaled down by the depth), "zeros", "ones"."""
    heads: int = 0
    """Number of heads in dim 0 of key and value projections; 1 for what all heads share; 0 for all others."""
    pad: bool = False
    """Whether dim 0 is padded to a multiple of y (vocabularies)."""
    balances: bool = False
    """Whether it is the bias that balances experts. Its gradient is their load."""

    @property
    def update(self) -> Update:
        """Return how it is updated: matrices decay; norms and biases do not."""
        return "balance" if self.balances else "decayed" if len(self.shape) > 1 else "plain"

    def padded_shape(self, grid: TensorGrid) -> tuple[int, ...]:
        if not self.pad:
            return self.shape
        return (math.ceil(self.shape[0] / grid.y) * grid.y, *self.shape[1:])

    def is_shared_over_y(self, grid: TensorGrid) -> bool:
        """Say whether several y hold the same head, so that their gradients have to be summed."""
        return 0 < self.heads < grid.y


def padded_vocabulary(model: Model, grid: TensorGrid) -> int:
    """Return the rows of the token table on a grid: the vocabulary, rounded up to a multiple of y."""
    return math.ceil(model.num_ids / grid.y) * grid.y


def box_size(box: Box) -> int:
    return math.prod(interval.size for interval in box)


def whole_rows(parameter: Parameter, box: Box, elements: Interval) -> Iterator[tuple[Interval, slice, Interval]]:
    """Cut consecutive elements of a box into runs that one hyperslab of the whole parameter holds.

    Yields (rows of the parameter, columns of the parameter, elements of the box): at most a part of a row, whole
    rows, and a part of a row. One-dim parameters have one-element rows. Rows in the padding are left out.
    """
    width = box_size(box[1:])
    first_row, columns = box[0].start, box[1] if len(box) > 1 else Interval(0, 1)
    first_whole, last_whole = -(-elements.start // width) * width, elements.stop // width * width
    inner = {bound for bound in (first_whole, last_whole) if elements.start < bound < elements.stop}
    for start, stop in itertools.pairwise(sorted({*elements, *inner})):
        first, offset = divmod(start, width)
        if offset or stop - start < width:
            rows, inside = Interval(first, first + 1), Interval(offset, offset + stop - start)
        else:
            rows, inside = Interval(first, stop // width), Interval(0, width)
        rows = rows.shift(first_row)
        real = rows.intersect(Interval(0, parameter.shape[0]))
        if real.size:
            taken = Interval(start, start + real.size * inside.size)
            yield real, slice(columns.start + inside.start, columns.start + inside.stop), taken


@dataclass(frozen=True)
class Unit:
    """Parameters that are stored, gathered over z and exchanged among the same ranks together."""

    items: tuple[int, ...]
    """The items that use it: one, or the first and the last for a tied embedding."""
    parameters: tuple[Parameter, ...]
    shared_heads: int = 0
    """Number of heads, where several y hold the same head; otherwise 0."""


@dataclass(frozen=True)
class UnitLayout:
    """The flat array that holds a unit's boxes at one coordinate."""

    unit: Unit
    boxes: tuple[Box | None, ...]
    """The box of each parameter; None where the coordinate has nothing of it."""

    @cached_property
    def size(self) -> int:
        return sum(box_size(box) for box in self.boxes if box)

    def placed(self) -> Iterator[tuple[Parameter, Box, Interval]]:
        """Yield (parameter, box, interval in the unit's flat array) of the parameters that are there."""
        at = 0
        for parameter, box in zip(self.unit.parameters, self.boxes, strict=True):
            if box:
                yield parameter, box, Interval(at, at + box_size(box))
                at += box_size(box)

    def runs(self, names: Collection[str]) -> "list[FlatRegion]":
        """Return the named parameters, as few as can be: neighbours with equal trailing dims are one."""
        runs: list[FlatRegion] = []
        for parameter, box, at in self.placed():
            if parameter.name not in names:
                continue
            run = FlatRegion((parameter.name,), at, tuple(interval.size for interval in box))
            if runs and runs[-1].at.stop == at.start and runs[-1].shape[1:] == run.shape[1:]:
                above, num_rows = runs.pop(), run.shape[0]
                shape = above.shape[0] + num_rows, *above.shape[1:]
                run = FlatRegion(above.names + run.names, Interval(above.at.start, at.stop), shape)
            runs.append(run)
        return runs


class FlatRegion(NamedTuple):
    """Parameters of a unit that are used as one."""

    names: tuple[str, ...]
    at: Interval
    """Interval in the unit's flat array."""
    shape: tuple[int, ...]


def _branch(model: Model, item: int) -> list[Parameter]:
    i = block_of(item)
    h, block, name = model.hidden_size, model.description.blocks[i], f"blocks.{i}"
    attention, mlp = block.attention, block.mlp

    def layer(parts: Sequence[str], outs: Sequence[int], into: int, split: tuple[str, str], bias: bool, **more):
        """Yield the weights of one product side by side, then its biases."""
        heads = {"k": attention.kv_heads, "v": attention.kv_heads}
        for kind in ("weight", "bias")[: 1 + bias]:
            for part, out in zip(parts, outs, strict=True):
                shape, init = ((out, into), more.get("init", "normal")) if kind == "weight" else ((out,), "zeros")
                yield Parameter(f"{name}.{part}.{kind}", shape, split[: len(shape)], init, heads.get(part[10:], 0))

    if not is_attention(item):
        parameters = _norm(model, f"{name}.ffn_norm", mlp.norm)
        if isinstance(mlp, Experts):
            parameters += _experts(model, name, mlp)
            if mlp.shared_inner:
                parameters += layer(SHARED_PRODUCTS[0], (mlp.shared_inner,) * 2, h, ("y", "x"), mlp.bias)
                parameters += layer(SHARED_PRODUCTS[1], (h,), mlp.shared_inner, ("x", "y"), mlp.bias, init="residual")
            return parameters
        parts = BLOCK_PRODUCTS[2][not mlp.gated :]
        parameters += layer(parts, (mlp.inner,) * len(parts), h, ("y", "x"), mlp.bias)
        parameters += layer(BLOCK_PRODUCTS[3], (h,), mlp.inner, ("x", "y"), mlp.bias, init="residual")
        return parameters + (_norm(model, f"{name}.ffn_out_norm", mlp.out_norm) if mlp.out_norm else [])
    parameters = _norm(model, f"{name}.attention_norm", attention.norm)
    sizes = attention.query_size, attention.key_size, attention.key_size
    parameters += layer(BLOCK_PRODUCTS[0], sizes, h, ("y", "x"), attention.bias)
    if attention.sinks:
        parameters.append(Parameter(f"{name}.attention.sinks.weight", (attention.heads,), ("y",), "zeros"))
    if attention.head_norm:
        parameters += [_head_norm(f"{name}.attention.{of}_norm", attention) for of in ("q", "k")]
    parameters += layer(BLOCK_PRODUCTS[1], (h,), attention.query_size, ("x", "y"), attention.out_bias, init="residual")
    return parameters + (_norm(model, f"{name}.attention_out_norm", attention.out_norm) if attention.out_norm else [])


def _experts(model: Model, name: str, experts: Experts) -> list[Parameter]:
    """Return the router, and the rows of all experts one after the other, which y cuts by whole experts.

    The first product of an expert has the rows of its gate, then those of up.
    """
    h, count = model.hidden_size, experts.count
    router = [Parameter(f"{name}.router.weight", (count, h), (None, "x"), "normal")]
    if experts.bias:
        router.append(Parameter(f"{name}.router.bias", (count,), (None,), "zeros"))
    if experts.balances:
        router.append(Parameter(f"{name}.router.balance", (count,), (None,), "zeros", balances=True))
    sizes = {"up": count * experts.up_size, "down": count * h}
    biases = [Parameter(f"{name}.experts.{part}.bias", (size,), ("y",), "zeros") for part, size in sizes.items()]
    return [
        *router,
        Parameter(f"{name}.experts.up.weight", (sizes["up"], h), ("y", "x"), "normal"),
        Parameter(f"{name}.experts.down.weight", (sizes["down"], experts.inner), ("y", None), "residual"),
        *(biases if experts.bias else []),
    ]


def _norm(model: Model, name: str, norm: Norm) -> list[Parameter]:
    weight = Parameter(f"{name}.weight", (model.hidden_size,), ("x",), "zeros" if norm.offset else "ones")
    bias = Parameter(f"{name}.bias", (model.hidden_size,), ("x",), "zeros")
    return [weight, bias] if norm.has_bias else [weight]


def _head_norm(name: str, attention: Attention) -> Parameter:
    """Return a norm that all heads share: as if there were one head, of which every y has the whole."""
    assert attention.head_norm, "there is one"
    init = "zeros" if attention.head_norm.offset else "ones"
    return Parameter(f"{name}.weight", (attention.head_size,), ("y",), init, heads=1)


def item_parameters(model: Model, item: int) -> list[Parameter]:
    """List the parameters of an item; a tied head lists the embedding's weight again."""
    description = model.description
    if 0 < item < model.num_items - 1:
        return _branch(model, item)
    table = (model.num_ids, model.hidden_size)
    embedding = Parameter("embedding.weight", table, ("y", "x"), "normal", pad=True)
    if item == 0:
        if description.learned_positions is None:
            return [embedding]
        positions = (description.learned_positions, model.hidden_size)
        return [embedding, Parameter("positions.weight", positions, (None, "x"), "normal")]
    norm = _norm(model, "norm", description.norm)
    if description.tied_head:
        return [*norm, embedding]
    return [*norm, Parameter("head.weight", table, ("y", "x"), "normal", pad=True)]


def all_parameters(model: Model) -> dict[str, Parameter]:
    """Return every parameter of the model once, by name, in the order of the items."""
    return {p.name: p for item in range(model.num_items) for p in item_parameters(model, item)}


def count_parameters(model: Model) -> int:
    return sum(math.prod(p.shape) for p in all_parameters(model).values())


def item_units(model: Model, grid: TensorGrid, item: int) -> list[Unit]:
    """Cut an item into units for tiles of this tensor grid; a tied embedding belongs to the first item."""
    last = model.num_items - 1
    parameters = item_parameters(model, item)
    result = []
    if model.description.tied_head and item in (0, last):
        if item == 0:
            result.append(Unit((0, last), tuple(p for p in parameters if p.name == "embedding.weight")))
        parameters = [p for p in parameters if p.name != "embedding.weight"]
    by_heads: dict[int, list[Parameter]] = {0: []}
    for parameter in parameters:
        by_heads.setdefault(parameter.heads if parameter.is_shared_over_y(grid) else 0, []).append(parameter)
    return result + [Unit((item,), tuple(some), heads) for heads, some in by_heads.items() if some]


def join_units(units: Iterable[Unit]) -> list[Unit]:
    """Return units with those of the same items as one, for those who decide by regions who shares what."""
    result: dict[tuple[int, ...], list[Parameter]] = {}
    for unit in units:
        result.setdefault(unit.items, []).extend(unit.parameters)
    return [Unit(items, tuple(parameters)) for items, parameters in result.items()]


@lru_cache(maxsize=256)  # asked for by every rank of a plan that one process looks at
def units(model: Model, grid: TensorGrid) -> tuple[Unit, ...]:
    """Cut the model into units for tiles of this tensor grid, in the order of the items."""
    return tuple(unit for item in range(model.num_items) for unit in item_units(model, grid, item))


def check_grid(model: Model, grid: TensorGrid) -> None:
    """Refuse a tensor grid that cannot cut the model, with the number that does not divide.

    Raises PlanError.
    """
    for block in {id(block): block for block in model.description.blocks}.values():
        _check_block(model, block.attention, block.mlp, grid)


def _check_block(model: Model, attention: Attention, mlp: Mlp, grid: TensorGrid) -> None:
    wanted = [
        ("hidden_size", model.hidden_size, "x", grid.x),
        ("num_heads", attention.heads, "y", grid.y),
    ]
    if isinstance(mlp, Experts):
        wanted.append(("num_experts", mlp.count, "y", grid.y))
        wanted.append(("shared_experts x expert_size", mlp.shared_inner, "y", grid.y))
        if grid.x > 1:
            raise PlanError(f"tensor x = {grid.x}, and x does not cut experts; set x = 1, and y to cut them")
    else:
        wanted.append(("ffn_size", mlp.inner, "y", grid.y))
    if grid.y <= attention.kv_heads:
        wanted.append(("num_kv_heads", attention.kv_heads, "y", grid.y))
    for what, number, axis, parts in wanted:
        if number % parts:
            fits = [str(n) for n in range(1, number + 1) if number % n == 0 and n <= 64]
            raise PlanError(
                f"model.{what} {number} is not divisible by tensor {axis} = {parts};"
                f" set {axis} to one of {', '.join(fits)}"
            )
    if grid.y > attention.kv_heads and grid.y % attention.kv_heads:
        raise PlanError(
            f"tensor y = {grid.y} is more than model.num_kv_heads {attention.kv_heads} and not a multiple of it;"
            f" set y to a multiple or a divisor of {attention.kv_heads}"
        )
    if attention.sinks and grid.head_parts > 1:
        raise PlanError("exchange_heads does not move the sinks of heads; set exchange_heads to false for this model")
    queries, keys, parts = attention.heads // grid.y, max(1, attention.kv_heads // grid.y), grid.head_parts
    if queries % parts or (keys % parts and parts % keys):
        raise PlanError(
            f"exchange_heads cuts a rank's {queries} heads, and its {keys} of keys and values, into tensor c = {parts}"
            " parts; set c so that it divides the heads, and divides those of keys and values or is a multiple of them,"
            " or set exchange_heads to false"
        )
