"""Reads the kernel's facts of processes, and removes leftovers of dead ones.

It also covers other processes of this machine: which are alive, and the shared memory that dead ones left behind. It
imports nothing heavy: a command listens to signals before such imports.
"""

import functools
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TextIO

from hpctrain.config.errors import HostError, describe_os_error

STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGXCPU,
)
"""Signals by which people, batch systems and limits end a process. Signals of program faults are not among them, nor
SIGQUIT, which requests an immediate end."""


class StopSignals:
    """Records a signal, and lets the run end where its ranks agree.

    A second SIGINT raises KeyboardInterrupt at once.
    """

    def __init__(self):
        self.received: str | None = None

    def listen(self) -> "StopSignals":
        """Replace the handlers of `STOP_SIGNALS`, in the main thread. SIGHUP stays ignored where nohup ignores it."""
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)
        return self

    def _note(self, number: int, _frame) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name


class LastingStream:
    """A text stream that may fail (a closed pipe, a full disk). After that its text is dropped.

    It replaces the stream that it is made from, and has its other attributes.
    """

    def __init__(self, stream: TextIO | None, name: str, other: "LastingStream | None" = None):
        """`stream` is None where the process was started without it. A loss is reported on `other`, if there is one."""
        self._name, self._other = name, other
        self.losses: list[str] = []
        """Messages about the loss, until the caller takes them to write them elsewhere."""
        # Else the next opened file would get its descriptor, and the output of other code.
        self._stream = stream or open(os.devnull, "w")
        if stream is None:
            self._note("is closed")

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    @property
    def stream(self) -> "LastingStream":
        """The stream below a `PlainStream`, for a progress bar, which draws by control characters of its own."""
        result = LastingStream(self._stream.stream, self._name, self._other)  # pyright: ignore[reportAttributeAccessIssue]
        result.losses = self.losses
        return result

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())  # buffered text goes there too
        os.close(null)
        self._note(f"cannot be written: {describe_os_error(error)}")

    def _note(self, what: str) -> None:
        text = f"{self._name} {what}; training continues, and writes to its run folder"
        self.losses.append(text)
        if self._other is not None:
            print(f"hpctrain: {text}", file=self._other, flush=True)  # pyright: ignore[reportArgumentType] - writes and flushes


def keep_output(speaks: bool) -> None:
    """Replace standard output and error by streams that may fail. A process that `speaks` for all reports a loss."""
    error = LastingStream(sys.stderr, "standard error")
    sys.stdout = LastingStream(sys.stdout, "standard output", error if speaks else None)  # pyright: ignore[reportAttributeAccessIssue]
    sys.stderr = error  # pyright: ignore[reportAttributeAccessIssue]


def take_losses() -> list[str]:
    """Return the messages about streams that failed since the last call."""
    taken = []
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, LastingStream):
            taken += stream.losses
            stream.losses.clear()
    return taken


class ProcessStatus(NamedTuple):
    """The kernel's facts of a process."""

    parent: int
    start_ticks: int
    """Start time, in clock ticks since the machine booted."""


def process_status(process: int) -> ProcessStatus:
    """Return the status of a process of this machine; zeros if there is none, or only a zombie."""
    try:
        state, parent, *others = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ProcessStatus(0, 0)
    return ProcessStatus(0, 0) if state in "ZX" else ProcessStatus(int(parent), int(others[17]))


@functools.cache
def this_machine() -> str:
    """Return the name of the scope in which process ids are unique: a boot of a machine, and a process namespace in
    it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{os.uname().nodename}"


SHARED_MEMORY = Path("/dev/shm")
"""Folder of POSIX shared memory on Linux."""
MORE_MEMORY = "start the container with more (docker run --shm-size=8g), or mount a larger tmpfs there"
MPI_BYTES, LONE_MPI_BYTES, SPARE_MPI_BYTES = 6 << 20, 2 << 20, 10 << 20
"""Shared memory that MPI takes: for each rank, for the only rank of a host, and in addition where a host has several.
MPICH with UCX takes 5.4 MB and 1.1 MB, and ends in a bus error where there is less. With less than 10 MB in addition it
ends in a segmentation fault: 2 ranks at 16 and 20 MB, 4 at 28 MB, 8 at 48 MB."""
PREFIX = "hpctrain-"
"""Prefix of the names of our own memory (`hpctrain.comm.transports.window`), which has a name only until all ranks have
opened it."""
PREFIXES = (PREFIX, "mpich_shm_", "vader_segment.", "sm_segment.", "ucx_shm_posix_")
"""Prefixes of shared memory. The others are those of MPICH and its relatives, Open MPI and UCX."""


def require_shared_memory(num_ranks: int, path: Path = SHARED_MEMORY) -> None:
    """Check that this host's ranks, of which there are `num_ranks`, can start MPI. Raises HostError."""
    where, need = f"{os.uname().nodename}:{path}", MPI_BYTES if num_ranks > 1 else LONE_MPI_BYTES
    least = num_ranks * need + (SPARE_MPI_BYTES if num_ranks > 1 else 0)
    try:
        facts = os.statvfs(path)
    except OSError as error:
        if num_ranks == 1:
            return
        raise HostError(f"{where}: {describe_os_error(error)}: ranks share memory there; mount one") from None
    total, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    if not os.access(path, os.W_OK):
        raise HostError(f"{where}: cannot be written, and MPI shares memory there; mount it read-write")
    if facts.f_blocks and (total < least or free < need):  # a tmpfs without a limit has no blocks
        raise HostError(
            f"{where}: has {total / 1e6:,.1f} MB, of which {free / 1e6:,.1f} MB are free, and MPI needs"
            f" {least / 1e6:,.1f} MB for the {num_ranks} ranks of this host; {MORE_MEMORY}"
        )


def remove_dead_segments(folder: Path = SHARED_MEMORY) -> list[str]:
    """Remove shared memory segments that killed processes of MPI libraries or hpctrain left; return their names.

    Only segments are removed that are this user's, older than this process, and open in no process.

    They take memory of the host until it reboots. Worse, MPICH names them by the job step: a job that is requeued by
    Slurm gets the same names again. It opens its dead ranks' segments, and fails while MPI starts.

    Each rank calls it before it starts MPI: a segment of this start is younger, or open. Never raises: a segment that
    cannot be removed stays.
    """
    begun, device = process_start(), 0
    candidates: dict[int, Path] = {}
    with suppress(OSError):
        device = folder.stat().st_dev
        for path in folder.iterdir():
            with suppress(OSError):
                facts = path.stat()
                if path.name.startswith(PREFIXES) and facts.st_uid == os.geteuid() and facts.st_mtime < begun:
                    candidates[facts.st_ino] = path
    removed = []
    for inode in _open_inodes(device) if candidates else ():
        candidates.pop(inode, None)
    for path in candidates.values():
        with suppress(OSError):
            path.unlink()
            removed.append(path.name)
    return sorted(removed)


def process_start() -> float:
    """Return when this process began, in seconds since 1970; now where the system does not report it."""
    with suppress(OSError, ValueError):
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - (uptime - process_status(os.getpid()).start_ticks / os.sysconf("SC_CLK_TCK"))
    return time.time()


def _open_inodes(device: int) -> Iterator[int]:
    """Yield the inodes of a device that processes of this user have open or mapped.

    Each rank of a start asks, and a process maps a thousand files: lines of other devices are passed over unread.
    """
    mapped = re.compile(rf" {os.major(device):02x}:{os.minor(device):02x} (\d+) ")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if process.stat().st_uid != os.geteuid():
                continue
            for link in os.scandir(process / "fd"):
                with suppress(OSError):
                    facts = link.stat()
                    if facts.st_dev == device:
                        yield facts.st_ino
            yield from map(int, mapped.findall((process / "maps").read_text(errors="replace")))
