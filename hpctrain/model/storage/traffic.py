"""The traffic of a rank that stores shards: it gathers weights a layer early, and scatters gradients a layer late.

Both are overlapped with the computation of other layers (AxoNN, arXiv 2305.13525). Only an overlapped axis allows that:
on others an operation runs when its result is needed.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch

from hpctrain.model.parallel.axes import Axis
from hpctrain.model.storage.units import InFlight, UnitStore
from hpctrain.plan.launch_order import OVERLAPPED_BUFFERS
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import block_of

# Most layers by which a gather starts early: two over the holders of ZeRO 3's shards, then one over z.
FARTHEST = 2


class _Scattering(NamedTuple):
    """The gradients of one layer's units, in flight to their shards."""

    buffer: torch.Tensor | None
    in_flight: tuple[InFlight, ...]
    layer: Interval
    passed: Callable[[int], None] | None


class Traffic:
    """Gathers and scatters what the layers of one tile need, in the order in which they compute.

    All ranks of z, and all holders of shards, must call the same in the same order.
    """

    def __init__(
        self,
        units: Mapping[int, Sequence[UnitStore]],
        z: Axis,
        device: torch.device,
        keep_gathered: Collection[int],
    ):
        """`units` are by item; those of the items `keep_gathered` stay gathered until `forget`."""
        self._units = units
        self._moving: dict[Interval, tuple[list[UnitStore], list[UnitStore]]] = {}
        self._gathers = any(not unit.stays for of_item in units.values() for unit in of_item)
        self._coming: deque[Interval] = deque()
        self._kept = {unit for item in keep_gathered for unit in units[item]}
        self._is_overlapped = any(unit.overlapped_scatters for of_item in units.values() for unit in of_item)
        sizes: Counter[int] = Counter()  # by block: no layer has more elements
        for item, of_item in units.items():
            sizes[block_of(item)] += sum(unit.layout.size for unit in of_item if unit.scatters)
        largest = max(sizes.values(), default=0)
        rooms = OVERLAPPED_BUFFERS if self._is_overlapped else 1
        self._free = deque(torch.zeros(largest, device=device) for _ in range(rooms if largest else 0))
        self._buffer: torch.Tensor | None = None
        self.scattering: deque[_Scattering] = deque()

    def _units_of(self, layer: Interval) -> tuple[list[UnitStore], list[UnitStore]]:
        """Return those units of a layer that are gathered, and those whose gradients are scattered."""
        if layer not in self._moving:
            every = dict.fromkeys(unit for item in range(*layer) for unit in self._units[item])
            self._moving[layer] = [unit for unit in every if not unit.stays], [unit for unit in every if unit.scatters]
        return self._moving[layer]

    def _gathered(self, layer: Interval) -> list[UnitStore]:
        return self._units_of(layer)[0]

    def _scattered(self, layer: Interval) -> list[UnitStore]:
        return self._units_of(layer)[1]

    def expect(self, layers: Iterable[Interval]) -> None:
        """Announce the order of the next layers, and begin to gather for the first of them."""
        self._coming = deque(layers if self._gathers else ())
        self._prefetch()

    def gather(self, layer: Interval) -> None:
        """Make the weights of a layer available, and begin with those of the next; pair with `release`."""
        if self._coming:
            expected = self._coming.popleft()
            assert expected == layer, f"items {list(layer)} compute where {list(expected)} were expected"
        if self._gathers:
            for unit in self._gathered(layer):
                unit.gather()
            self._prefetch()

    def _prefetch(self) -> None:
        for distance, layer in enumerate(self._next(FARTHEST), 1):
            for unit in self._gathered(layer):
                unit.prefetch(distance)

    def _next(self, count: int) -> Iterator[Interval]:
        """Yield the next layers, each of them once."""
        return islice(
            dict.fromkeys(islice(self._coming, 2 * count)), count
        )  # most layers come at most twice in succession

    def release(self, layer: Interval) -> None:
        """Release the weights of a layer, except those that are kept or needed again soon.

        Soon means by the next layer, or by the next two where gathers are overlapped.
        """
        if not self._gathers:
            return
        needed = [self._gathered(other) for other in self._next(2)]
        for unit in self._gathered(layer):
            near = needed if unit.overlapped_gathers else needed[:1]
            unit.release(stays=unit in self._kept or any(unit in other for other in near))

    def forget(self) -> None:
        """Release weights that were kept: they have changed."""
        for unit in self._kept:
            unit.forget()

    def begin_backward(self, layer: Interval) -> None:
        """Provide a buffer for the whole gradients of a layer; pair with `end_backward`."""
        units = self._scattered(layer)
        if not units:
            return
        while not self._free:
            self._collect_first()
        self._buffer = self._free.popleft()
        at = 0
        for unit in units:
            unit.begin_backward(self._buffer[at : at + unit.layout.size])
            at += unit.layout.size

    def end_backward(self, layer: Interval, passed: Callable[[int], None] | None) -> None:
        """Start to sum the gradients of a layer.

        `passed` is called with each of its items, the last first, when each rank's part has been added.
        """
        for earlier in self.scattering:
            for operations in earlier.in_flight:
                operations.bring(2)
        started = tuple(unit.start_scatter() for unit in self._scattered(layer))
        self.scattering.append(_Scattering(self._buffer, started, layer, passed))
        self._buffer = None
        while self.scattering and not (self._is_overlapped and self.scattering[0].in_flight):
            self._collect_first()

    def collect(self) -> None:
        """Wait until all gradients are added to their shards."""
        while self.scattering:
            self._collect_first()

    def _collect_first(self) -> None:
        first = self.scattering.popleft()
        for operations in first.in_flight:
            operations.finish()
        if first.buffer is not None:
            self._free.append(first.buffer)
        if first.passed:
            for item in reversed(range(*first.layer)):
                first.passed(item)
