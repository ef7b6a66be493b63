"""A rank's connection to its host's guardian, the process that says who died first; see `comm.watchdog.guardian`."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpctrain.comm.watchdog.flight import claim_last_word, this_machine
from hpctrain.comm.watchdog.guardian import parent_of, peer_of

GUARDIAN = Path(__file__).with_name("guardian.py")
GOODBYE_SECONDS = 1.0
BACKLOG = 1024


def launcher_names_the_dead(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher itself prints the rank and the host of a process that was killed."""
    if "HYDI_CONTROL_FD" in environment:  # MPICH's, maybe started by Slurm
        return False
    return "OMPI_COMM_WORLD_RANK" in environment or "SLURM_PROCID" in environment


class Guarded:
    """A rank's connection to the guardian of its host. All ranks must make it, together."""

    def __init__(self, comm, host: str):
        """Start the guardian (the lowest rank of each machine) and connect; `reason` says why not, if it is not."""
        self.reason = "a single rank" if comm.size == 1 else ""
        self._folder: Path | None = None
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen | None = None
        if self.reason:
            return
        networks, processes = zip(*comm.allgather((_network(), os.getpid())), strict=True)
        leader, offered = networks.index(networks[comm.rank]), ""
        if leader == comm.rank:
            ours = [p for p, network in zip(processes, networks, strict=True) if network == networks[leader]]
            try:
                self._process, offered = _start_guardian(ours, speaks=not launcher_names_the_dead())
            except OSError as error:
                self.reason = f"rank {leader} could not start it: {error}"
        name = comm.allgather(offered)[leader]
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.connect(_address(name))  # waits where others have filled the queue
            self._socket.settimeout(GOODBYE_SECONDS)
            if peer_of(self._socket) != (processes[leader], os.geteuid()):
                raise ConnectionRefusedError("another process has its name")
        except OSError as error:
            self.reason = self.reason or f"rank {leader} cannot be reached: {error}"
            self._socket = None
            return
        os.register_at_fork(after_in_child=self._socket.close)  # a child that outlives its rank must not keep it open
        self._say(f"rank {comm.rank} {os.getpid()} {host}")

    def announce_folder(self, folder: Path) -> None:
        """Say where the flight records are. All ranks must call, after all records of earlier attempts were removed."""
        self._folder = folder
        self._say(f"folder {folder.absolute()}")

    def say_goodbye(self, reports_error: bool = False) -> bool:
        """Announce that this rank ends in order, or that it prints why it does not: before MPI is ended or aborted.

        Return False where another rank or a guardian has announced before that it prints what happened.
        """
        has_last_word = True
        if reports_error and self._folder is not None:
            has_last_word = claim_last_word(self._folder, {})
        self._say("goodbye")
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None and not reports_error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GOODBYE_SECONDS)
            self._process = None
        return has_last_word

    def _say(self, line: str) -> None:
        if self._socket is not None:
            with suppress(OSError):  # it has ended
                self._socket.sendall(os.fsencode(line) + b"\n")  # a folder's name may be no UTF-8


def _address(name: str) -> bytes:
    return b"\0hpctrain-" + name.encode()  # an abstract name, of Linux: nothing that could be left behind


def _network() -> str:
    """Name what abstract names are unique in: a boot of a machine, and a network namespace of it."""
    try:
        return f"{this_machine()}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return this_machine()


def _start_guardian(ranks: Sequence[int], speaks: bool) -> tuple[subprocess.Popen, str]:
    """Start the guardian of the processes `ranks`; return it, and the name under which it listens. Raises OSError."""
    name = os.urandom(8).hex()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(_address(name))
        listener.listen(BACKLOG)
        # -I -S: without site-packages, whose .pth files cost more than all the rest.
        arguments = listener.fileno(), os.getppid(), parent_of(os.getppid()), int(speaks), *ranks
        command = [sys.executable, "-I", "-S", str(GUARDIAN), *map(str, arguments)]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(
            command, pass_fds=[listener.fileno()], stdin=quiet, stdout=quiet, start_new_session=True, cwd="/"
        )
        return process, name
