"""Collectives inside a family by its maker's library: NCCL, RCCL, oneCCL and HCCL alike, by process groups of torch.

A group is made by its members alone, by the constructor of its class. They find each other by a store that all ranks
share, which `open_store` makes once. There is no default group. Operations are calls of a group, on the stream of all
launches.
"""

import ctypes
import importlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, distributed_c10d

from hpctrain.comm.accelerators.base import Accelerator, describe_overflow
from hpctrain.comm.accelerators.kinds import KINDS, Ability, DeviceKind
from hpctrain.comm.accelerators.launches import LaunchOrder
from hpctrain.comm.collectives.flat import Collectives, reduce_in_order, section_of
from hpctrain.comm.operations import OPERATIONS
from hpctrain.comm.transports.members import Members, on_all
from hpctrain.comm.transports.transport import as_bytes
from hpctrain.comm.waiting import Phase, Steps
from hpctrain.config.errors import CommError, RankLossError
from hpctrain.sharding.intervals import Interval, cut_evenly

# 0: do without any library. 1, with HPCTRAIN_SHARE_DEVICES=1: also where ranks share a device, for tests.
NATIVE_VARIABLE = "HPCTRAIN_NATIVE"
CONNECT_SECONDS = 300.0
"""Seconds that ranks of a new group have to find each other, and the same again for their first messages."""
GROUP_SECONDS = 86400.0
"""Timeout after which torch ends an operation, or the process. It is longer than any timeout of hpctrain, whose report
says who is late."""
ABORT_SECONDS = 3.0
"""Seconds that a rank waits for a group to abort after an error."""
ADDRESS_SECONDS = 5.0
"""Seconds that a rank tries one address of the store before the next."""
ROUTE_PROBE_ADDRESS = "192.0.2.1"
"""A documentation address (RFC 5737). The route to it shows the address under which others see this host. Nothing is
sent."""


def group_class(kind: DeviceKind) -> Any:
    """Return the class of process groups that use a kind's library. Raises AttributeError or ImportError without it."""
    module, name = kind.groups.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def library_ability(kind: DeviceKind) -> Ability:
    """Say whether this torch uses the library of a kind of device."""
    if os.environ.get(NATIVE_VARIABLE) == "0":
        return Ability(False, f"{NATIVE_VARIABLE}=0")
    try:
        group_class(kind)
        version = f"of torch {torch.__version__}"
        if kind.torch_type == "cuda":
            from torch.cuda import nccl

            version = ".".join(map(str, nccl.version()))
    except Exception as error:  # whatever a broken installation raises
        return Ability(False, f"torch {torch.__version__} has no {kind.groups} ({type(error).__name__})")
    return Ability(True, f"{kind.library} {version}")


def make_group(kind: DeviceKind, members: Members, store: Any, groups: Any = None) -> Any:
    """Return a process group of the members. All must call; where one fails, all raise.

    `store` is shared by all ranks; each group has a prefix of its own. `groups` replaces the class, for tests.
    """
    groups = groups or group_class(kind)
    name = members.bcast(f"hpctrain-{uuid.uuid4().hex}")
    options = groups.Options()
    values = {
        "_timeout": timedelta(seconds=GROUP_SECONDS),
        "group_name": name,
        "group_id": name,
        "global_ranks_in_group": list(range(members.size)),
        "is_high_priority_stream": True,
    }
    for key, value in values.items():
        if hasattr(options, key):  # each maker's options have other keys
            setattr(options, key, value)
    prefixed = dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage]
    return on_all(members, lambda: groups(prefixed, members.rank, members.size, options))


def open_store(members: Members, host: str) -> Any:
    """Return a store that all members share, served by the first one. All must call; where one fails, all raise.

    `host` is this member's host. Members on the first one's host connect through its loopback. Others try the host's
    name, its full name and its addresses, since some sites resolve only one of them.
    """
    timeout = timedelta(seconds=CONNECT_SECONDS)
    connect = partial(dist.TCPStore, timeout=timeout, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    server = on_all(members, lambda: connect("127.0.0.1", 0, is_master=True) if members.rank == 0 else None)
    own = on_all(members, lambda: own_addresses() if server else [])
    first, port, addresses = members.bcast((host, server.port if server else 0, own))

    def connect_to_store() -> Any:
        if server is not None:
            return server
        return connect("127.0.0.1" if host == first else reachable(addresses, port), port, is_master=False)

    return on_all(members, connect_to_store)


def own_addresses() -> list[str]:
    """Return the addresses under which other hosts may reach this one, the best first: name, full name, IP
    addresses."""
    name = socket.gethostname()
    result = [name, socket.getfqdn()]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((ROUTE_PROBE_ADDRESS, 9))
        result.append(probe.getsockname()[0])
    with suppress(OSError, UnicodeError):
        result += socket.gethostbyname_ex(name)[2]
    return [each for each in dict.fromkeys(result) if not each.startswith(("127.", "localhost"))] or [name]


def reachable(addresses: Sequence[str], port: int) -> str:
    """Return the first of some addresses at which a port answers. Raises CommError with each address' failure."""
    failures = []
    for address in addresses:
        try:
            socket.create_connection((address, port), timeout=ADDRESS_SECONDS).close()
            return address
        except (OSError, UnicodeError) as error:
            failures.append(f"{address}: {error}")
    raise CommError(
        f"host {socket.gethostname()} does not reach the first rank's host on port {port} ({'; '.join(failures)}); have"
        " the hosts of this job resolve and reach each other, or set HPCTRAIN_NATIVE=0"
    )


class Connection:
    """One process group, watched for errors that the library notices by itself.

    Without the watch a lost peer shows only after a timeout: the host waits for its device, and the device for the
    peer. On an error the group is aborted, which ends the waiting operations on the device.
    """

    def __init__(self, name: str, group: Any, launches: LaunchOrder, debug: str = ""):
        """`launches` is the rank's launch order, which watches the group; `debug` is the variable for more verbose
        output."""
        self.name, self.group, self._launches = name, group, launches
        self._hint = f". {debug} shows which" if debug else ""
        self._error: str | None = None
        self._is_open = True
        self._lock = threading.Lock()
        try:
            group.get_error()
            self._knows_errors = True
        except (AttributeError, RuntimeError):  # not every maker's group can be asked
            self._knows_errors = False
        launches.watch(self)

    def look(self) -> None:
        """Record an error, and abort. For `LaunchOrder`."""
        with self._lock:  # no shutdown during the check
            if not (self._is_open and self._knows_errors):
                return
            error = self.group.get_error().name
        if error != "SUCCESS":
            self._error = error
            self.abort()

    def check(self) -> None:
        """Raise CommError where the library has noticed an error since the start."""
        if self._error is not None:
            raise CommError(f"{self.name} reports: {self._error}; a rank or its network is gone{self._hint}")

    def abort(self) -> None:
        """Leave without the others, whatever is in flight: the group is aborted, not shut down.

        A shutdown waits for operations in flight. Releasing the group waits too, for a thread of torch that may sleep
        for a minute after an error. So the group is never released, not even at the interpreter's exit.
        """
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))

        def work() -> None:
            with suppress(Exception):  # the process is about to end, and says why elsewhere
                self._launches.accelerator.use()
                self.group.abort()

        thread = threading.Thread(target=work, name=f"{self.name} abort", daemon=True)
        thread.start()
        thread.join(ABORT_SECONDS)

    def shutdown(self) -> None:
        """Shut the group down in order: all ranks call, and nothing is in flight."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
        self.group.shutdown()


SUMS = (torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8)
# Bytes received before they are summed; bounds the memory.
SEGMENT_BYTES = 64 << 20


class NativeCollectives(Collectives):
    """Collectives queued on the stream that the caller's thread uses when it takes the steps. The steps never wait.

    The library sums the dtypes `sums`, in an order that depends on ranks, sizes and the machine alone. It would round
    half precision at every addition, so such dtypes are exchanged and summed here, in order of rank and at least in
    fp32. A device does one operation at a time for all groups (`hpctrain.comm.accelerators.launches`).

    Operations are requested as synchronous ones, which process groups do on the stream of the thread. A group with a
    stream of its own begins after that stream, and `wait` orders the thread's stream after it. The host waits for
    neither.

    Uneven reduce-scatters and all-gathers are requested as asynchronous ones. They are several messages that torch's
    group starts together. As a synchronous operation torch would record its end on an idle stream, and the library
    would never be asked about a lost peer.
    """

    def __init__(
        self,
        members: Members,
        accelerator: Accelerator,
        store: Any,
        host: Collectives,
        has_pairs: bool = True,
        groups: Any = None,
    ):
        """All `members` must call, with their devices bound. `store` is that of all ranks, of `open_store`. `host` does
        what is not for the library: tensors in host memory, and barriers.

        With `has_pairs` all pairs of ranks are connected at once; half precision is exchanged over these connections.
        Each takes megabytes of the device. Without it they connect at the first operation that needs it, which all
        ranks call. `groups` replaces torch's class of process groups, for tests.
        """
        self.rank, self.size = members.rank, members.size
        self._accelerator, self._kind, self._host = accelerator, KINDS[accelerator.kind], host
        self.name = self._kind.library
        self.sums: Collection[torch.dtype] = [
            dtype for dtype in SUMS if str(dtype).removeprefix("torch.") not in self._kind.not_summed
        ]
        accelerator.synchronize()  # ranks connect on the host, while no other group's operation waits for them
        self._group = make_group(self._kind, members, store, groups)
        self.connection = Connection(self.name, self._group, accelerator.launches, self._kind.debug)
        remedy = f"{self._kind.network} names the network that joins the hosts"
        try:
            # The first operation connects inside of the library, which blocks without a limit: the watchdog has one.
            with (
                members.space.patience.within(Phase(f"connecting by {self.name}", CONNECT_SECONDS, "", remedy)),
                accelerator.on(accelerator.launches.stream),
            ):
                self._connect(has_pairs)
        except Exception:
            self.abandon()
            raise

    def _connect(self, has_pairs: bool) -> None:
        """Sum and exchange a little: the first operation of each kind connects ranks, which blocks the host."""
        self._sum(torch.zeros(1, dtype=torch.int32, device=self._accelerator.device), "sum")
        if has_pairs:
            sent = torch.zeros(self.size, dtype=torch.uint8, device=self._accelerator.device)
            self._swap(sent.split(1), torch.empty_like(sent).split(1))
        done, deadline = self._accelerator.queued(), time.monotonic() + CONNECT_SECONDS
        while not done.query():
            if time.monotonic() > deadline:
                raise CommError(
                    f"first messages were not there after {CONNECT_SECONDS:g} s; {self._kind.network} names the network"
                    " that joins the hosts"
                )
            time.sleep(1e-4)

    def steps(self, operation: str, flat: torch.Tensor, *arguments: Any) -> Steps:
        """Return the steps of an operation, to which all ranks bring the same kind of tensor."""
        if OPERATIONS[operation].is_launched and self._accelerator.is_on_device(flat):
            return super().steps(operation, flat, *arguments)
        return self._host.steps(operation, flat, *arguments)

    # Each queues one operation. Tensors are flat; those of bytes are uint8.

    def _run(self, call: str, *arguments: Any, options: str, op: str = "", is_asynchronous: bool = False) -> None:
        given = getattr(distributed_c10d, options)()
        given.asyncOp = is_asynchronous
        if op:
            given.reduceOp = getattr(ReduceOp, op.upper())
        try:
            work = getattr(self._group, call)(*arguments, given)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise CommError(f"{self.name} reports: {error}; a rank or its network may be gone") from error

    def _sum(self, flat: torch.Tensor, op: str) -> None:
        self._run("allreduce", [flat], options="AllreduceOptions", op=op)

    def _swap(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Exchange bytes with all others in one call; this rank's own part is skipped."""
        ours, theirs = (
            [as_bytes(part if peer != self.rank else part[:0]) for peer, part in enumerate(parts)]
            for parts in (sent, received)
        )
        self._run("alltoall", theirs, ours, options="AllToAllOptions")

    def all_reduce(self, flat: torch.Tensor, op: str) -> Steps:
        if flat.dtype in self.sums:
            self._sum(flat, op)
            return
        cuts = cut_evenly(flat.numel(), self.size)
        self._exchange(flat, cuts, flat[slice(*cuts[self.rank])], op)
        yield from self.all_gather(flat, cuts)

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, op: str) -> Steps:
        """Reduce and scatter. Uneven cuts become a reduction to each rank, started together by the group."""
        if flat.dtype not in self.sums:
            self._exchange(flat, cuts, out, op)
        elif _are_even(cuts):
            self._run("_reduce_scatter_base", out, flat[: cuts[-1].stop], options="ReduceScatterOptions", op=op)
        else:
            parts = [flat[slice(*cut)] for cut in cuts]
            self._run("reduce_scatter", [out], [parts], options="ReduceScatterOptions", op=op, is_asynchronous=True)
        yield from ()

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[Interval]) -> Steps:
        """Gather from all ranks. Uneven cuts become a broadcast from each rank, started together by the group."""
        parts = [as_bytes(flat[slice(*cut)]) for cut in cuts]
        if _are_even(cuts):
            whole = as_bytes(flat[: cuts[-1].stop])
            self._run("_allgather_base", whole, parts[self.rank], options="AllgatherOptions")
        else:
            self._run("allgather", [parts], [parts[self.rank]], options="AllgatherOptions", is_asynchronous=True)
        yield from ()

    def all_to_all(
        self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, out_cuts: Sequence[Interval]
    ) -> Steps:
        sent, received = ([whole[slice(*cut)] for cut in of] for whole, of in ((flat, cuts), (out, out_cuts)))
        received[self.rank].copy_(sent[self.rank])
        self._swap(sent, received)
        yield from ()

    def _exchange(self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, op: str) -> None:
        """Reduce-scatter by sending each rank its part unsummed: half the bytes of partial sums in fp32."""
        step = max(1, SEGMENT_BYTES // (self.size * flat.element_size()))
        buffer = flat.new_empty(self.size, min(step, cuts[self.rank].size))
        for start in range(0, max(cut.size for cut in cuts), step):
            parts = [section_of(cut, start, step) for cut in cuts]
            own = parts[self.rank]
            of_ranks = [part[: own.size] for part in buffer]
            of_ranks[self.rank] = flat[slice(*own)]
            self._swap([flat[slice(*section)] for section in parts], of_ranks)
            if own.size:
                reduce_in_order(of_ranks, out[start : start + own.size], op)

    def check(self) -> None:
        """Raise CommError where the library has noticed a lost peer or network."""
        self.connection.check()

    def abandon(self) -> None:
        """Leave without the others; operations in flight are aborted, since waiting for them could take for ever."""
        self._accelerator.launches.forget(self.connection)
        self.connection.abort()

    def close(self) -> None:
        """All ranks must call."""
        self._accelerator.synchronize()
        self._accelerator.launches.note_ended()
        self._accelerator.launches.forget(self.connection)
        self.connection.shutdown()


def connect_native(
    members: Members,
    accelerator: Accelerator,
    store: Any,
    host: Collectives,
    has_pairs: bool = True,
    groups: Any = None,
) -> NativeCollectives:
    """Return the library's collectives over the members. All must call, with their devices bound.

    Raises CommError on all of them, with the library's message, where the library refuses. A run without it would be
    many times slower; a person has to decide that. For the other arguments see `NativeCollectives`.
    """
    made: list[NativeCollectives] = []

    def connect() -> None:
        try:
            made.append(NativeCollectives(members, accelerator, store, host, has_pairs, groups))
        except Exception as error:
            if overflow := describe_overflow(error, accelerator):
                raise torch.OutOfMemoryError(overflow) from error
            raise

    try:
        on_all(members, connect)
        return made[0]
    except CommError as error:
        for each in made:
            each.abandon()
        if isinstance(error, RankLossError):
            raise
        kind = KINDS[accelerator.kind]
        raise CommError(
            f"{kind.library} refuses these {members.size} ranks ({error}); {kind.debug} shows why, {NATIVE_VARIABLE}=0"
            " does without it, through MPI"
        ) from error.__cause__


def _are_even(cuts: Sequence[Interval]) -> bool:
    size = cuts[0].size
    return size > 0 and all(cut == (i * size, (i + 1) * size) for i, cut in enumerate(cuts))
