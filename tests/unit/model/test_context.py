"""Keys and values that c gathers in parts of their heads, and heads that it exchanges, in one process."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.model.parallel.axes import ONE_RANK, Axes
from hpctrain.model.parallel.context import see_context
from hpctrain.sharding.intervals import cut_zigzag


class Echo:
    """Two ranks, the other of which has what this one has."""

    rank, size, is_overlapped = 0, 2, True

    def start_all_gather(self, tensor, cuts=None):
        tensor[slice(*cuts[1])] = tensor[slice(*cuts[0])]
        return ONE_RANK

    def start_reduce_scatter(self, tensor, out, cuts=None):
        out.copy_((tensor[slice(*cuts[0])] + tensor[slice(*cuts[1])]).view_as(out))
        return ONE_RANK


class Counting(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("parts", [1, 3, 8])
def test_gradients_of_parts_are_joined_once(parts):
    """Those of slices would be written among zeros for all heads, one part after the other."""
    torch.manual_seed(0)
    heads = [torch.randn(1, count, 4, 2, requires_grad=True) for count in (8, 4, 4)]
    seen = list(see_context(*heads, Axes(c=Echo()), parts=parts))  # pyright: ignore[reportArgumentType]
    assert len(seen) == min(parts, 4)
    joined = [torch.cat(of_kind, dim=1) for of_kind in zip(*(each.heads for each in seen), strict=True)]
    with Counting() as counting:
        torch.autograd.backward(joined, [torch.full_like(each, 2.0) for each in joined])
    assert counting.counts["slice_backward"] == counting.counts["zeros"] == 0
    assert [each.grad.unique().item() for each in heads] == [2, 4, 4], "the other rank's gradients are added"  # pyright: ignore[reportOptionalMemberAccess]


class OfThreads:
    """Ranks that are threads, and take what they get from one another's tensors."""

    is_overlapped = False

    def __init__(self, rank: int, given: list, barrier: threading.Barrier):
        self.rank, self.size, self._given, self._barrier = rank, len(given), given, barrier

    def start_all_to_all(self, tensor, out, cuts, out_cuts):
        self._given[self.rank] = [tensor[slice(*cut)] for cut in cuts]
        self._barrier.wait()
        for cut, of_rank in zip(out_cuts, self._given, strict=True):
            out[slice(*cut)] = of_rank[self.rank]
        self._barrier.wait()
        return ONE_RANK


def added(queries: torch.Tensor, *kinds: torch.Tensor) -> torch.Tensor:
    """Stands for attention: each query head, with the sum over positions of its key and value head."""
    return queries + sum(
        each.repeat_interleave(queries.shape[1] // each.shape[1], dim=1).sum(2, True) for each in kinds
    )


@pytest.mark.parametrize(("c", "kv_heads"), [(2, 8), (2, 2), (4, 2), (4, 1)])
def test_exchanged_heads_have_the_results_and_gradients_of_one_rank(c, kv_heads):
    """Also where several ranks have the same key and value head, whose gradients are summed."""
    torch.manual_seed(0)
    whole = [torch.randint(-4, 5, (2, n, 16, 2)).bfloat16().requires_grad_() for n in (8, kv_heads, kv_heads)]
    upstream = torch.randint(-4, 5, (2, 8, 16, 2)).bfloat16()
    expected = added(*whole)
    expected.backward(upstream)
    given, barrier = [None] * c, threading.Barrier(c, timeout=20)

    def on_rank(rank: int) -> None:
        places = torch.cat([torch.arange(*interval) for interval in cut_zigzag(16, (1,) * c)[rank]])
        own = [each.detach()[:, :, places].requires_grad_() for each in whole]
        (seen,) = see_context(*own, Axes(c=OfThreads(rank, given, barrier), exchanges_heads=True))  # pyright: ignore[reportArgumentType]
        assert [each.shape[1] for each in seen.heads] == [8 // c, max(1, kv_heads // c), max(1, kv_heads // c)]
        mixed = seen.restore(added(*seen.heads))
        assert torch.equal(mixed, expected[:, :, places])
        mixed.backward(upstream[:, :, places])
        for each, of_all in zip(own, whole, strict=True):
            assert of_all.grad is not None and torch.equal(each.grad, of_all.grad[:, :, places])  # pyright: ignore[reportArgumentType]

    with ThreadPoolExecutor(c) as ranks:
        list(ranks.map(on_rank, range(c)))
