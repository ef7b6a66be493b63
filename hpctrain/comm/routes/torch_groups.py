"""A maker's library through torch.distributed: oneCCL of Intel, HCCL of Huawei, and NCCL or RCCL without CuPy.

A group is made by its members alone. MPI broadcasts the address of their store, and there is no default group.
"""

import os
import socket
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.accelerators.kinds import Ability, DeviceKind
from hpctrain.comm.members import on_all
from hpctrain.comm.reduction import as_bytes
from hpctrain.comm.routes.native import NATIVE_VARIABLE, NativeCollectives
from hpctrain.comm.routes.nccl import NcclCollectives, load_nccl
from hpctrain.config.errors import CommError

STORE_SECONDS = 30.0
"""How long ranks of a new group look for each other."""
GROUP_SECONDS = 86400.0
"""After which torch ends an operation, or the process: more than any patience of hpctrain, which says what is late."""
SUMS = (torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8)


class Library(NamedTuple):
    """A kind of device's library: how groups get it, and whether that works."""

    make: Callable[[Any, Accelerator], NativeCollectives]
    ability: Ability


def load_library(kind: DeviceKind) -> Library:
    """Return the library of a kind of device: CuPy's where that works, else torch's."""
    if os.environ.get(NATIVE_VARIABLE) == "0":
        return Library(TorchCollectives, Ability(False, f"{NATIVE_VARIABLE}=0"))
    before = ""
    if kind.uses_cupy:
        nccl = load_nccl()
        if nccl.ability.works:
            return Library(partial(NcclCollectives, nccl.module), nccl.ability)
        before = f"{nccl.ability.reason}; "
    works = dist.is_available() and dist.is_backend_available(kind.backend)
    has = f"does {kind.library} by its backend" if works else f"has no backend for {kind.library}, which is called"
    reason = f"{before}torch.distributed of torch {torch.__version__} {has} {kind.backend}"
    return Library(TorchCollectives, Ability(works, reason))


class TorchGroup:
    """A process group, in the terms of `Connection`."""

    def __init__(self, backend: str, store: Any, name: str, comm, device: torch.device):
        from torch.distributed import distributed_c10d

        self._module, self._store = distributed_c10d, store
        # What `init_process_group` calls for its only group, which would be one of all processes.
        make: Any = distributed_c10d._new_process_group_helper
        timeout = timedelta(seconds=GROUP_SECONDS)
        self.group, _ = make(comm.size, comm.rank, [], backend, store, group_name=name, timeout=timeout)
        distributed_c10d._world.pg_group_ranks[self.group] = {rank: rank for rank in range(comm.size)}
        try:
            self._get_error = self.group._get_backend(device).get_error
            self._get_error()
        except (AttributeError, RuntimeError):  # not every backend can be asked
            self._get_error = None

    def check_async_error(self) -> None:
        if self._get_error and (error := self._get_error()).name != "SUCCESS":
            raise CommError(error.name)

    def abort(self) -> None:
        self.group.abort()

    def destroy(self) -> None:
        self._module.destroy_process_group(self.group)


class TorchCollectives(NativeCollectives):
    """Calls of a process group, on the stream of the thread.

    `wait` of what they return lets that stream wait, and not the host, where a device has streams.
    """

    def _open(self, comm) -> TorchGroup:
        self.sums = [dtype for dtype in SUMS if str(dtype).removeprefix("torch.") not in self._kind.not_summed]
        made = TorchGroup(self._kind.backend, *rendezvous(comm), comm, self._accelerator.device)
        self._group, self._module = made.group, made._module
        return made

    def _connect(self) -> None:
        """Sum first: a backend makes its communicator of all ranks at the first operation, which blocks the host."""
        self._sum(torch.zeros(1, dtype=torch.int32, device=self._accelerator.device), "sum")
        super()._connect()

    def _run(self, call: str, *arguments: Any, options: str, op: str = "", **values: int) -> None:
        given = getattr(self._module, options)()
        given.asyncOp = False  # on the stream of the thread, where the backend can
        if op:
            given.reduceOp = getattr(dist.ReduceOp, op.upper())
        for name, value in values.items():
            setattr(given, name, value)
        try:
            work = getattr(self._group, call)(*arguments, given)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise CommError(f"{self.name} reports: {error}; a rank or its network may be gone") from error

    def _sum(self, flat: torch.Tensor, op: str) -> None:
        self._run("allreduce", [flat], options="AllreduceOptions", op=op)

    def _sum_even(self, flat: torch.Tensor, out: torch.Tensor, op: str) -> None:
        self._run("_reduce_scatter_base", out, flat, options="ReduceScatterOptions", op=op)

    def _gather_even(self, data: torch.Tensor, own: torch.Tensor) -> None:
        self._run("_allgather_base", data, own, options="AllgatherOptions")

    def _broadcast(self, data: torch.Tensor, root: int) -> None:
        self._run("broadcast", [data], options="BroadcastOptions", rootRank=root)

    def _swap(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Exchange through packed copies, which all backends take."""
        ours, theirs = (
            [as_bytes(part if peer != self.rank else part[:0]) for peer, part in enumerate(parts)]
            for parts in (sent, received)
        )
        out, into = [part.numel() for part in ours], [part.numel() for part in theirs]
        packed = torch.empty(sum(into), dtype=torch.uint8, device=self._accelerator.device)
        self._run("alltoall_base", packed, torch.cat(ours), into, out, options="AllToAllOptions")
        for part, data in zip(theirs, packed.split(into), strict=True):
            part.copy_(data)


def rendezvous(comm) -> tuple[Any, str]:
    """Return a store that the ranks of `comm` share, and a new name. All must call; where one fails, all raise."""
    timeout = timedelta(seconds=STORE_SECONDS)
    hosts = comm.allgather(socket.gethostname())
    open_store = partial(dist.TCPStore, timeout=timeout, wait_for_workers=False)  # pyright: ignore
    server = on_all(comm, lambda: open_store("127.0.0.1", 0, is_master=True) if comm.rank == 0 else None)
    port, name = comm.bcast((server.port, f"hpctrain-{uuid.uuid4().hex}") if server else None)
    host = hosts[0] if len(set(hosts)) > 1 else "127.0.0.1"
    return on_all(comm, lambda: server or open_store(host, port, is_master=False)), name
