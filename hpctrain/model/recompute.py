"""Tensors that a backward pass needs and that are computed again there, operator by operator.

Between the products of a block lie operators that cost little and whose results are large: norms, rotary positions,
activation functions, scores with a cap. Selective recomputing keeps what the products return and drops the results of
these operators, which autograd would keep as operands of what follows. Megatron's (Korthikanti et al. 2022) recomputes
core attention instead; here a fused kernel keeps no scores.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import ref

import torch
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

Recompute = Callable[[torch.Tensor], torch.Tensor]
"""Recomputes a result from the same input, with the same operations: the same bits, in the same layout."""


class _View(NamedTuple):
    """The place of a tensor in the storage of what is computed again: a graph keeps it instead of the tensor."""

    of: "_Dropped"
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _Dropped:
    """A tensor that graphs do not keep. It is computed again at the first use, and gone after the last one."""

    def __init__(self, tensor: torch.Tensor, compute: Callable[[], torch.Tensor]):
        self.tensor, self._compute = ref(tensor), compute
        self.uses = 0
        """Views of it that graphs keep and have not used."""
        self._value: torch.Tensor | None = None

    def value(self) -> torch.Tensor:
        if self._value is None:
            with torch.no_grad():
                self._value = self._compute()
        value = self._value
        self.uses -= 1
        if not self.uses:
            self._value = None
        return value


class Dropping:
    """Around the forward pass of a block: its graph keeps no operand that lies in the storage of a dropped result."""

    def __init__(self):
        self._dropped: dict[int, _Dropped] = {}

    def drop(self, result: torch.Tensor, compute: Recompute, given: torch.Tensor) -> None:
        """Let graphs keep `given` instead of a result. The first use in a backward pass recomputes it, for all uses.

        The caller holds the result until all operators that read it have run.
        """
        kept = self.pack(given.detach())
        self._dropped[_address(result)] = _Dropped(result, lambda: compute(_unpack(kept)))

    def drops(self, tensor: torch.Tensor) -> bool:
        dropped = self._dropped.get(_address(tensor))
        # Another tensor may have the address after the dropped one is gone.
        return dropped is not None and dropped.tensor() is not None

    def pack(self, saved: torch.Tensor) -> torch.Tensor | _View:
        """Return the object that a graph keeps instead of a tensor."""
        if not self.drops(saved):
            return saved
        dropped = self._dropped[_address(saved)]
        dropped.uses += 1
        return _View(dropped, saved.size(), saved.stride(), saved.storage_offset())

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Wrap the forward pass.

        Each tensor that a graph keeps refers to `pack`, and so to this object, until the last backward pass of the
        block. So the graph itself keeps the recompute functions and their inputs, and frees them operator by operator.
        """
        try:
            with saved_tensors_hooks(self.pack, _unpack):
                yield
        finally:
            self._dropped.clear()


def _unpack(kept: torch.Tensor | _View) -> torch.Tensor:
    """Return the tensor that a graph has kept, or what it has kept in its place."""
    return kept if isinstance(kept, torch.Tensor) else kept.of.value().as_strided(kept.size, kept.stride, kept.offset)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class End(Function):
    """A number at the end of a graph, from which a backward pass continues with a given gradient of the output.

    To give torch the gradient itself has it import sympy, a third of a second of every rank.
    """

    @staticmethod
    def forward(ctx, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.gradient, None


class KeepingInputs(Function):
    """The result of `compute`, of whose inputs alone is kept what its backward pass needs."""

    @staticmethod
    def forward(ctx, compute: Callable[..., torch.Tensor], *inputs: torch.Tensor):
        ctx.compute = compute
        ctx.save_for_backward(*inputs)
        return compute(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        leaves = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            end = End.apply(ctx.compute(*leaves), gradient)
        end.backward()
        return None, *(leaf.grad for leaf in leaves)
