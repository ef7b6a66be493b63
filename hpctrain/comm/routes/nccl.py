"""NCCL, or RCCL, which has the same interface, through CuPy."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.accelerators.kinds import Ability
from hpctrain.comm.members import on_all
from hpctrain.comm.reduction import as_bytes
from hpctrain.comm.routes.native import NativeCollectives
from hpctrain.sharding.intervals import Interval

# Set before NCCL is first used, unless they are set already. NVLS and CollNet let switches sum, in an order that
# changes from call to call. Connections are made when a communicator is, where all ranks are at the same place: made at
# the first operation they would block the host inside a lane, where ranks may be at different places.
SETTINGS = {"NCCL_NVLS_ENABLE": "0", "NCCL_COLLNET_ENABLE": "0", "NCCL_RUNTIME_CONNECT": "0"}


class Nccl(NamedTuple):
    """CuPy's module `cupy.cuda.nccl`, if it is there."""

    module: Any
    ability: Ability


def load_nccl() -> Nccl:
    """Return the library, or why it cannot be used. Loads CuPy."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        from cupy.cuda import nccl  # pyright: ignore[reportMissingImports] - an extra

        if not getattr(nccl, "available", False):
            return Nccl(None, Ability(False, "CuPy was built without NCCL, or cannot load libnccl.so.2"))
        version = nccl.get_version()
    except Exception as error:  # whatever a broken installation raises
        return Nccl(None, Ability(False, f"CuPy cannot be used ({type(error).__name__}: {error})"))
    name = "RCCL" if torch.version.hip else "NCCL"
    return Nccl(nccl, Ability(True, f"{name} {version // 10000}.{version // 100 % 100}.{version % 100}"))


class NcclCollectives(NativeCollectives):
    """Calls that are given addresses and a stream."""

    def __init__(self, nccl, comm, accelerator: Accelerator):
        """`nccl` is CuPy's module."""
        self._nccl = nccl
        self._operations = {"sum": nccl.NCCL_SUM, "max": nccl.NCCL_MAX, "min": nccl.NCCL_MIN}
        self.sums = self._numbers = {
            torch.float32: nccl.NCCL_FLOAT32,
            torch.float64: nccl.NCCL_FLOAT64,
            torch.int32: nccl.NCCL_INT32,
            torch.int64: nccl.NCCL_INT64,
            torch.int8: nccl.NCCL_INT8,
            torch.uint8: nccl.NCCL_UINT8,
        }
        super().__init__(comm, accelerator)

    def _open(self, comm) -> Any:
        key = comm.bcast(on_all(comm, lambda: self._nccl.get_unique_id() if comm.rank == 0 else None))
        self._comm = self._nccl.NcclCommunicator(comm.size, key, comm.rank)
        return self._comm

    @property
    def _stream(self) -> int:
        return self._accelerator.stream_address()

    @contextmanager
    def _together(self) -> Iterator[None]:
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def _sum(self, flat: torch.Tensor, op: str) -> None:
        at, how = flat.data_ptr(), (self._numbers[flat.dtype], self._operations[op])
        self._comm.allReduce(at, at, flat.numel(), *how, self._stream)

    def _sum_even(self, flat: torch.Tensor, out: torch.Tensor, op: str) -> None:
        how = self._numbers[flat.dtype], self._operations[op]
        self._comm.reduceScatter(flat.data_ptr(), out.data_ptr(), out.numel(), *how, self._stream)

    def _sum_uneven(self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, op: str) -> None:
        """Reduce to each rank, started together: the library knows nothing of uneven cuts."""
        how = self._numbers[flat.dtype], self._operations[op]
        with self._together():
            for root, cut in enumerate(cuts):
                if cut.size:
                    at = flat[slice(*cut)].data_ptr()
                    into = out.data_ptr() if root == self.rank else at
                    self._comm.reduce(at, into, cut.size, *how, root, self._stream)

    def _gather_even(self, data: torch.Tensor, own: torch.Tensor) -> None:
        self._comm.allGather(own.data_ptr(), data.data_ptr(), own.numel(), self._nccl.NCCL_UINT8, self._stream)

    def _broadcast(self, data: torch.Tensor, root: int) -> None:
        at = data.data_ptr()
        self._comm.broadcast(at, at, data.numel(), self._nccl.NCCL_UINT8, root, self._stream)

    def _swap(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        with self._together():
            for peer in range(self.size):
                ours, theirs = as_bytes(sent[peer]), as_bytes(received[peer])
                if peer != self.rank and ours.numel():
                    self._comm.send(ours.data_ptr(), ours.numel(), self._nccl.NCCL_UINT8, peer, self._stream)
                if peer != self.rank and theirs.numel():
                    self._comm.recv(theirs.data_ptr(), theirs.numel(), self._nccl.NCCL_UINT8, peer, self._stream)
