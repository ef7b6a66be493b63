"""Host memory for what blocks keep until their backward pass.

Autograd hands each tensor that it saves to a hook. The storage of a large one is copied to host memory at once, on a
stream of its own where the device has streams. When the next block has been computed, the copy on the device is let
go. In the backward pass the storages of a block come back while the block behind it is computed. So a tile has what
two blocks keep on its device.
"""

from collections import defaultdict
from collections.abc import Collection
from contextlib import AbstractContextManager

import torch
from torch.autograd.graph import saved_tensors_hooks

from hpctrain.comm.accelerators.base import Accelerator, Event
from hpctrain.model.recompute import KeptTensor, unpack
from hpctrain.sharding.host_buckets import moves


class _Moved:
    """A storage that is in host memory, and on the device as long as it is needed there."""

    def __init__(self, on_host: torch.Tensor, on_device: torch.Tensor):
        self.on_host = on_host
        self.on_device: torch.Tensor | None = on_device
        self.places = 0
        """Of tensors in it that a graph needs."""
        self.is_needed_once = False
        """Whether it leaves the device with the last of them: in the backward pass."""


class _Place:
    """The place of a tensor in a storage that moves, which a graph keeps instead of the tensor."""

    def __init__(self, moved: _Moved, saved: torch.Tensor):
        self._moved, self._dtype = moved, saved.dtype
        moved.places += 1
        self._where = saved.size(), saved.stride(), saved.storage_offset()

    def restored(self) -> torch.Tensor:
        flat = self._moved.on_device
        assert flat is not None, "it was fetched before the backward pass of its layer"
        return flat.view(self._dtype).as_strided(*self._where)

    def __del__(self) -> None:
        """A graph drops it when it has gone backward there."""
        self._moved.places -= 1
        if self._moved.is_needed_once and not self._moved.places:
            self._moved.on_device = None


class KeptLayer:
    """The storages that one block keeps of one microbatch."""

    def __init__(self, host: "HostActivations", given: torch.Tensor, y: int):
        """`given` is the block's input, on a tensor grid with so many y."""
        self._host, self._given_bytes, self._y = host, given.numel() * given.element_size(), y
        self._moved: dict[int, _Moved] = {}
        self._sent: Event = host.sent
        self._arrived: Event | None = None
        self._input: torch.Tensor | KeptTensor | None = None

    def packing(self) -> AbstractContextManager:
        """Enclose the forward pass of the block."""
        return saved_tensors_hooks(self.pack, unpack)

    def pack(self, saved: torch.Tensor) -> torch.Tensor | KeptTensor:
        """Return what a graph keeps in the place of a tensor. Its copy to the host begins now, where it is large."""
        storage = saved.untyped_storage()
        if saved.dtype == torch.bool or not moves(
            storage.nbytes(), self._given_bytes, self._y
        ):  # masks are of all blocks
            return saved
        if storage.data_ptr() not in self._moved:
            flat = saved.detach().as_strided((storage.nbytes() // saved.element_size(),), (1,), 0).view(torch.uint8)
            self._moved[storage.data_ptr()] = _Moved(self._host.send(flat), flat)
        return _Place(self._moved[storage.data_ptr()], saved)

    def keep_input(self, given: torch.Tensor) -> None:
        """Keep the block's input alone, of which all else is computed again."""
        self._input = self.pack(given.detach())

    def input(self) -> torch.Tensor:
        """Return the input that was kept, which must have been fetched."""
        kept, self._input = self._input, None
        assert kept is not None, "it was kept alone, and is taken once"
        return unpack(kept)

    def fetch(self) -> None:
        """Start to bring back what is not on the device."""
        for moved in self._moved.values():
            if moved.on_device is None:
                moved.on_device, self._arrived = self._host.fetch(moved.on_host)

    def begin_backward(self) -> None:
        """Let the device wait for what was fetched. What the backward pass has used leaves the device from now on."""
        self._host.accelerator.wait_for(self._sent)
        if self._arrived is not None:
            self._host.accelerator.wait_for(self._arrived)
        for moved in self._moved.values():
            moved.is_needed_once = True

    def computed(self) -> None:
        """Take note that the forward pass of the block is over: all copies to the host have begun."""
        self._sent = self._host.sent

    def leave(self) -> None:
        """Let go of what is on the device, once it is in host memory, which the device waits for."""
        self._host.accelerator.wait_for(self._sent)
        for moved in self._moved.values():
            moved.on_device = None

    def end(self) -> None:
        """Forget everything, after the backward pass."""
        self.leave()
        for moved in self._moved.values():
            self._host.release(moved.on_host)
        self._moved.clear()


class HostActivations:
    """The activations of one rank in host memory. Involves no other rank."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.sent: Event = accelerator.queued()
        """The end of all copies to the host that have begun."""
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._leaving: KeptLayer | None = None
        """The last block that was computed, whose storages are still on the device."""

    def send(self, flat: torch.Tensor) -> torch.Tensor:
        """Start to copy device memory, uint8 [bytes], and return the host memory that it goes to."""
        free = self._free[flat.numel()]
        target = free.pop() if free else self.accelerator.host_buffer(flat.numel())
        self.sent = self.accelerator.move(target, flat, self.accelerator.queued())
        return target

    def fetch(self, on_host: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Start to copy host memory, uint8 [bytes]; return the device memory that it goes to, and when it is there."""
        target = torch.empty(on_host.numel(), dtype=torch.uint8, device=self.accelerator.device)
        return target, self.accelerator.move(target, on_host, self.accelerator.queued())

    def release(self, on_host: torch.Tensor) -> None:
        self._free[on_host.numel()].append(on_host)

    def computed(self, layer: KeptLayer) -> None:
        """Take note that a block has been computed forward; the one before it leaves the device."""
        layer.computed()
        if self._leaving is not None:
            self._leaving.leave()
        self._leaving = layer

    def begin_backward(self, layers: Collection[KeptLayer | None]) -> None:
        """Let the last block leave the device, unless it is one of these, which are needed now."""
        if self._leaving is not None and not any(layer is self._leaving for layer in layers):
            self._leaving.leave()
        self._leaving = None
