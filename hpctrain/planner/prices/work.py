"""The work of a pass over a layer: products, bytes passed over, what is exchanged. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Self


class MatrixProduct(NamedTuple):
    """`batch` products [m, k] @ [k, n] at once, of which only `share` is computed."""

    m: int
    k: int
    n: int
    batch: int = 1
    share: float = 1.0
    fused: float | None = None
    """Share of a large product's speed, inside a kernel that keeps the result to itself. None: a product of its own."""
    dtype: str | None = None
    """Dtype that replaces the setup's."""
    tokens: int = 0
    """The one of m and k that is how many tokens an expert has; 0: neither is. Rows are aligned, however many there
    are."""


class Exchange(NamedTuple):
    """A collective over an axis of the tensor grid, or over the holders of the weights ("data")."""

    axis: str
    operation: str
    num_bytes: int
    """Bytes of the whole tensor."""
    behind: tuple[MatrixProduct, ...] = ()
    """Products of the same pass that overlap the collective, where the software overlaps them."""
    purpose: Literal["activations", "weights", "gradients"] = "activations"
    """What is exchanged. Weights come before a layer computes and gradients of weights leave after it, so that other
    layers may overlap them."""


class ItemPass(NamedTuple):
    """A pass over an item, by which a profile of the job is looked up."""

    item: str
    """`embedding`, `block` or `head`."""
    direction: int
    """0: forward, 1: backward."""
    rows: int
    """Rows of the rank."""
    work: "PassWork"
    """Part of the pass that is done."""


@dataclass
class PassWork:
    """The work of a rank in one pass over one layer."""

    products: list[MatrixProduct] = field(default_factory=list)
    passed_bytes: float = 0.0
    operations: int = 0
    exchanges: list[Exchange] = field(default_factory=list)
    passes: tuple[ItemPass, ...] = field(default=(), compare=False, repr=False)
    """Passes that the work consists of: one, or also those that are computed again."""

    @classmethod
    def joined(cls, works: "Iterable[PassWork]") -> Self:
        """Return all of them as one, in their order."""
        result = cls()
        for work in works:
            result.products += work.products
            result.passed_bytes += work.passed_bytes
            result.operations += work.operations
            result.exchanges += work.exchanges
            result.passes += work.passes
        return result

    def as_pass(self, item: str, direction: int, rows: int) -> Self:
        """Return it as a pass over an item, or as a part of one."""
        of_item = (ItemPass(item, direction, rows, self),)
        return type(self)(self.products, self.passed_bytes, self.operations, self.exchanges, of_item)


@dataclass(frozen=True)
class LayerCost:
    """The passes over one layer."""

    forward: PassWork
    backward_input: PassWork
    """Work for the gradient of the input, what is recomputed included."""
    backward_weight: PassWork

    @cached_property
    def backward(self) -> PassWork:
        """Both backward parts as one pass."""
        return PassWork.joined((self.backward_input, self.backward_weight))
