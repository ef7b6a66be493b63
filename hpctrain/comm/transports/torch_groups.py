"""Process groups of torch.distributed, by which a maker's library is used: NCCL, RCCL, oneCCL and HCCL alike.

A group is made by its members alone, by the constructor of its class. MPI broadcasts the address of their store, and
there is no default group.
"""

import ctypes
import importlib
import os
import socket
import threading
import uuid
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.comm.accelerators.kinds import Ability, DeviceKind
from hpctrain.comm.progress.launches import LaunchOrder
from hpctrain.comm.transports.members import Members, on_all
from hpctrain.config.errors import CommError

# Set to 0: do without any library.
NATIVE_VARIABLE = "HPCTRAIN_NATIVE"
CONNECT_SECONDS = 300.0
"""How long ranks of a new group look for each other, and how long their first messages may take after that."""
GROUP_SECONDS = 86400.0
"""After which torch ends an operation, or the process: more than any patience of hpctrain, which says what is late."""
ABORT_SECONDS = 3.0
"""How long a rank waits for a group that it leaves in an error."""


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


def make_group(kind: DeviceKind, members: Members, groups: Any = None) -> Any:
    """Return a process group of the members. All must call; where one fails, all raise.

    `groups` replaces the class, for tests.
    """
    groups = groups or group_class(kind)
    store, name = rendezvous(members)
    options = groups.Options()
    values = {
        "_timeout": timedelta(seconds=GROUP_SECONDS),
        "group_name": name,
        "group_id": name,
        "global_ranks_in_group": list(range(members.size)),
        "is_high_priority_stream": True,
    }
    for key, value in values.items():
        if hasattr(options, key):  # makers' options differ
            setattr(options, key, value)
    return on_all(members, lambda: groups(store, members.rank, members.size, options))


def rendezvous(members: Members) -> tuple[Any, str]:
    """Return a store that the members share, and a new name. All must call; where one fails, all raise."""
    timeout = timedelta(seconds=CONNECT_SECONDS)
    hosts = members.allgather(socket.gethostname())
    open_store = partial(dist.TCPStore, timeout=timeout, wait_for_workers=False)  # pyright: ignore
    server = on_all(members, lambda: open_store("127.0.0.1", 0, is_master=True) if members.rank == 0 else None)
    port, name = members.bcast((server.port if server else 0, f"hpctrain-{uuid.uuid4().hex}"))
    host = hosts[0] if len(set(hosts)) > 1 else "127.0.0.1"
    return on_all(members, lambda: server or open_store(host, port, is_master=False)), name


class Connection:
    """One process group, watched for errors that it notices by itself.

    Without that a peer that is gone shows only when somebody's patience ends: the host waits for its device, and the
    device for the peer. On an error the group is aborted, which ends what waits on the device.
    """

    def __init__(self, name: str, group: Any, launches: LaunchOrder, debug: str = ""):
        """`launches` are those of the rank, which watch it; `debug` is the variable by which the library says more."""
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
        """Take note of an error, and abort. For `LaunchOrder`."""
        with self._lock:  # nobody gives it back while it is looked at
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

        Shutting down waits for what is in flight, and so does who releases it: for a thread of torch's, which may sleep
        for a minute after an error. It is never released, at the interpreter's exit neither.
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
        """Give it back in order: all ranks call, and nothing is in flight."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
        self.group.shutdown()
