"""The model sees communication as one communicator for each axis of its tensor grid."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hpctrain.sharding.intervals import Interval, cut_evenly, cut_zigzag, section


class PendingWork(Protocol):
    """A started operation, which may continue while the rank computes."""

    def wait(self) -> None:
        """Return when it has ended. Raises its error."""
        ...


class Following:
    """Several operations, and a function to call after all of them."""

    def __init__(self, works: Sequence[PendingWork], then: Callable[[], object] = lambda: None):
        self._works, self._then = works, then

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._then()


class Axis(Protocol):
    """Collectives over the ranks that differ in one coordinate only; every one of them must call.

    Tensors are contiguous. Cuts are intervals of the flat tensor, one for each rank; by default it is cut evenly.
    Started operations may be overlapped: their tensors must not be touched before the wait. All ranks start the same
    operations in the same order.
    """

    rank: int
    size: int

    @property
    def is_overlapped(self) -> bool:
        """True where what is started continues while the rank computes; else it is done when `start_...` returns."""
        ...

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce in place; return the tensor."""
        ...

    def start_all_reduce(self, tensor: torch.Tensor) -> PendingWork:
        """Sum in place."""
        ...

    def start_reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, cuts: Sequence[Interval] | None = None
    ) -> PendingWork:
        """Put this rank's cut of the sum into `out`."""
        ...

    def all_gather(self, tensor: torch.Tensor, cuts: Sequence[Interval] | None = None) -> object:
        """Fill the tensor, in which each rank has set its own cut."""
        ...

    def start_all_gather(self, tensor: torch.Tensor, cuts: Sequence[Interval] | None = None) -> PendingWork:
        """Fill the tensor, in which each rank has set its own cut."""
        ...

    def start_all_to_all(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor,
        cuts: Sequence[Interval] | None = None,
        out_cuts: Sequence[Interval] | None = None,
    ) -> PendingWork:
        """Send rank i its cut of the tensor, and receive into cut i of `out` from it."""
        ...

    def barrier(self) -> object: ...

    def allocate_common(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None: ...


class OneRank:
    """The axis of a rank that is alone on it: there is nothing to exchange, and every operation ends at once."""

    rank, size, is_overlapped, bytes_sent = 0, 1, False, (0,)

    def wait(self) -> None:
        """Return: an axis of one rank is the work that it starts, which has ended."""

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor) -> PendingWork:
        return self

    def start_reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, cuts: Sequence[Interval] | None = None
    ) -> PendingWork:
        out.copy_(tensor.view_as(out))
        return self

    def all_gather(self, tensor: torch.Tensor, cuts: Sequence[Interval] | None = None) -> object:
        return tensor

    def start_all_gather(self, tensor: torch.Tensor, cuts: Sequence[Interval] | None = None) -> PendingWork:
        return self

    def start_all_to_all(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor,
        cuts: Sequence[Interval] | None = None,
        out_cuts: Sequence[Interval] | None = None,
    ) -> PendingWork:
        ((start, stop),), ((at, end),) = cuts or [(0, tensor.numel())], out_cuts or [(0, out.numel())]
        out.view(-1)[at:end] = tensor.view(-1)[start:stop]
        return self

    def barrier(self) -> object: ...

    def allocate_common(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        return None


ONE_RANK = OneRank()


@dataclass(frozen=True)
class Axes:
    """The axes of a tensor grid: x cuts input features, y output features, z rows, c the positions of rows.

    All ranks of z and c use the same weights, and each stores a part of them.
    """

    x: Axis = ONE_RANK
    y: Axis = ONE_RANK
    z: Axis = ONE_RANK
    """The ranks that store parts of the same weights: those of z and c."""
    c: Axis = ONE_RANK
    sequence_parallel: bool = False
    """Whether hidden states are cut by positions over y, outside of attention and feed-forward parts."""
    exchanges_heads: bool = False
    """Whether ranks of c exchange heads for positions in attention, and gather no keys and values."""
    position_shares: tuple[int, ...] = ()
    """The share of each rank of c in the positions of a row; without any they are equal."""

    @property
    def storing(self) -> Axis:
        """The axis whose ranks use the same weights, of which each stores a part."""
        return self.z

    def contexts(self, count: int) -> tuple[tuple[Interval, ...], ...]:
        """Return the positions of each row of which each rank of c computes products, this one `count` of them."""
        shares = self.position_shares or (1,) * self.c.size
        return cut_zigzag(count * sum(shares) // shares[self.c.rank], shares)

    def context(self, count: int, first: int = 0) -> tuple[Interval, ...]:
        """Return the positions of each row of which this rank computes products, `count` of them; rows begin at
        `first`."""
        return tuple(each.shift(first) for each in self.contexts(count)[self.c.rank])

    def positions(self, count: int, first: int = 0) -> tuple[Interval, ...]:
        """Return those of `context` of which this rank has hidden states, which y may cut."""
        own = self.context(count, first)
        return section(own, cut_evenly(count, self.y.size)[self.y.rank]) if self.sequence_parallel else own
