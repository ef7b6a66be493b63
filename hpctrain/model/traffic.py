"""When whole weights and whole gradients are there, where a rank stores shards of them: gathered an item ahead and
scattered an item behind, while other items compute (AxoNN, arXiv 2305.13525).

That is as far as the axes let it: what one does at once is done when it is needed.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch

from hpctrain.model.axes import Axis
from hpctrain.model.units import InFlight, UnitStore

# How many items ahead something starts: over the holders of ZeRO 3's shards two, over z, which needs that, one.
FARTHEST = 2
# Items whose gradients are in the making or in flight: the one that goes back, and the one before it.
OVERLAPPED_BUFFERS = 2


class _Scattering(NamedTuple):
    """The gradients of one item's units on their way to their shards."""

    buffer: torch.Tensor | None
    in_flight: tuple[InFlight, ...]
    final: Callable[[], None]


class Traffic:
    """Gathers and scatters what the items of one tile need, in the order in which they compute.

    All ranks of z, and all holders of shards, must call the same in the same order.
    """

    def __init__(
        self,
        units: Mapping[int, Sequence[UnitStore]],
        z: Axis,
        device: torch.device,
        keep_gathered: Collection[int],
    ):
        """`units` are by item; those of the items `keep_gathered` stay gathered until `forget`.

        All ranks of z must call.
        """
        self._units = units
        self._coming: deque[int] = deque()
        self._kept = {unit for item in keep_gathered for unit in units[item]}
        self._is_overlapped = any(unit.overlapped_scatters for of_item in units.values() for unit in of_item)
        sizes = (sum(unit.layout.size for unit in of_item if unit.scatters) for of_item in units.values())
        largest = max(sizes, default=0)
        rooms = OVERLAPPED_BUFFERS if self._is_overlapped else 1
        self._free = deque(z.allocate(largest, torch.float32, device) for _ in range(rooms if largest else 0))
        self._buffer: torch.Tensor | None = None
        self._scattering: deque[_Scattering] = deque()

    def expect(self, items: Iterable[int]) -> None:
        """Say which items come next, in what order; begin to gather what the first of them need."""
        self._coming = deque(items)
        self._prefetch()

    def gather(self, item: int) -> None:
        """Make the weights of an item available, and begin with those of the next; pair with `release`."""
        if self._coming:
            expected = self._coming.popleft()
            assert expected == item, f"item {item} computes where {expected} was expected"
        for unit in self._units[item]:
            unit.gather()
        self._prefetch()

    def _prefetch(self) -> None:
        for distance, item in enumerate(self._next(FARTHEST), 1):
            for unit in self._units[item]:
                unit.prefetch(distance)

    def _next(self, count: int) -> Iterator[int]:
        """Return the items that come next, each of them once."""
        return islice(dict.fromkeys(islice(self._coming, 2 * count)), count)  # most come twice running at the most

    def release(self, item: int) -> None:
        """Let go of the weights of an item, but for those that are kept or needed again: at once, or, where there is
        a buffer for another item than the one that computes, by the one after it."""
        needed = list(self._next(2))
        for unit in self._units[item]:
            near = needed if unit.overlapped_gathers else needed[:1]
            unit.release(stays=unit in self._kept or any(unit in self._units[other] for other in near))

    def forget(self) -> None:
        """Let go of weights that were kept: they have changed."""
        for unit in self._kept:
            unit.forget()

    def begin_backward(self, item: int) -> None:
        """Make room for the whole gradients of an item; pair with `end_backward`."""
        units = [unit for unit in self._units[item] if unit.scatters]
        if not units:
            return
        while not self._free:
            self._collect_first()
        self._buffer = self._free.popleft()
        at = 0
        for unit in units:
            unit.begin_backward(self._buffer[at : at + unit.layout.size])
            at += unit.layout.size

    def end_backward(self, item: int, passed: Callable[[int], None] | None) -> None:
        """Start to sum the gradients of an item.

        `passed` is called with its number when each rank's part has been added.
        """
        for earlier in self._scattering:
            for operations in earlier.in_flight:
                operations.bring(2)
        started = tuple(unit.start_scatter() for unit in self._units[item] if unit.scatters)
        final = partial(passed, item) if passed else _do_nothing
        self._scattering.append(_Scattering(self._buffer, started, final))
        self._buffer = None
        while self._scattering and not (self._is_overlapped and self._scattering[0].in_flight):
            self._collect_first()

    def collect(self) -> None:
        """Have all gradients where they belong."""
        while self._scattering:
            self._collect_first()

    def _collect_first(self) -> None:
        first = self._scattering.popleft()
        for operations in first.in_flight:
            operations.finish()
        if first.buffer is not None:
            self._free.append(first.buffer)
        first.final()


def _do_nothing() -> None:
    pass
