"""The guardian: a tiny process on each host that outlives the ranks briefly, to report which of them died first.

Where one rank is killed, MPICH's launcher kills the others of its host within milliseconds and names a host and some
process, but no rank: nobody is left to speak. So the lowest rank of a host starts a process that belongs to no group
of the launcher's. Every rank of the host keeps a socket to it open. The kernel closes a rank's socket before the
launcher can know of the death, and so before it kills others: the first that is closed without a goodbye is the rank
that died first. A rank says goodbye if it ends in order or has printed an error of its own.

The launcher turns to the other hosts only when all that write to its standard error have closed it, this process
among them. Before it ends it leaves a note with the flight records. So the note is there before the guardians of other
hosts see their ranks die, and orders them to be silent.

It believes the ranks of its own start alone. Anyone on the host may connect to an abstract name, so the kernel is asked
which process of which user each connection is from (SO_PEERCRED): others are closed unread.

It tells the other ranks of its host at once. Where no launcher kills them (Slurm, Open MPI with fault tolerance), they
end within milliseconds, and not after a timeout. They wait for its report, which its own end tells them.

Where the launcher itself was killed, no rank is to blame, and it says nothing. Where all were sent a signal that they
do not handle, the first to go is reported all the same.

It sleeps all the while, and ends with the last rank of its host, or once it has spoken. It is run as a script, by its
path, without site-packages: it needs nothing of them, and is there in 30 ms with 12 MB.
"""

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

LOST = "lost"
"""First word of the message about a rank that was lost."""
LONGEST_MESSAGE = 8192
"""Most bytes of a message: a word and a path."""
BACKLOG = 1024
# Seconds that a host's ranks have to connect, and the guardian to answer. An unused guardian ends after this.
START_SECONDS = 30.0
# A launcher that was killed is gone this long after the ranks that die of it.
LAUNCHER_SECONDS = 0.3
GOODBYE_SECONDS = 1.0
REPORT_SECONDS = 0.7
"""Seconds for which a rank waits for the report on another one. The guardian of another host does not end then."""


class Guarded:
    """A rank's connection to the guardian of its host. All ranks must make it, together.

    Where a guardian cannot be started or reached, no message names a rank that is killed.
    """

    def __init__(self, members, host: str):
        """The lowest rank of each machine starts the guardian, and all of its ranks connect.

        `members` are all ranks (`hpctrain.comm.transports.members`).
        """
        self._folder: Path | None = None
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen | None = None
        networks, processes, hosts = zip(*members.allgather((network_name(), os.getpid(), host)), strict=True)
        leader, name = networks.index(networks[members.rank]), ""
        if leader == members.rank:
            here = (rank for rank, network in enumerate(networks) if network == networks[leader])
            with suppress(OSError):
                self._process, name = start_guardian({processes[rank]: (rank, hosts[rank]) for rank in here})
        name = members.allgather(name)[leader]
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with suppress(OSError):
            link.connect(_address(name))  # waits where others have filled the queue
            link.settimeout(GOODBYE_SECONDS)
            if peer_of(link) == (processes[leader], os.geteuid()):
                self._socket = link
                os.register_at_fork(after_in_child=link.close)  # a child that outlives its rank must not keep it open
                return
        link.close()  # another process has its name, or none

    def announce_folder(self, folder: Path) -> None:
        """Tell the guardian the folder of the flight records. All ranks must call, after old records are removed.

        It answers, and the caller waits for that. On a busy machine a rank could die before the guardian has accepted
        all connections. It could then find several of them closed, and not know which was the first.
        """
        self._folder = folder
        self._say(f"folder {folder.absolute()}")

    @property
    def descriptor(self) -> int | None:
        """The file descriptor at which the guardian can be heard; None without one."""
        return None if self._socket is None else self._socket.fileno()

    def hear(self, seconds: float = GOODBYE_SECONDS) -> str:
        """Return the guardian's next message; "" where it has ended, or says nothing for so long."""
        if self._socket is None:
            return ""
        self._socket.settimeout(seconds)
        with suppress(OSError):
            return os.fsdecode(self._socket.recv(LONGEST_MESSAGE))
        return ""

    def say_goodbye(self, reports_error: bool = False, hears_report: bool = False) -> bool:
        """Announce, before MPI is ended or aborted, that this rank ends in order, or that it prints an error.

        With `hears_report` it returns when the guardian has reported the death of another rank, or after
        `REPORT_SECONDS`. Return False where another rank or a guardian has already announced that it prints what
        happened.
        """
        from hpctrain.comm.watchdog.flight import claim_last_word

        has_last_word = not reports_error or self._folder is None or claim_last_word(self._folder, {})
        self._say("goodbye")
        if hears_report:
            self.hear(REPORT_SECONDS)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None and not reports_error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GOODBYE_SECONDS)
            self._process = None
        return has_last_word

    def _say(self, message: str) -> None:
        if self._socket is not None:
            with suppress(OSError):  # it has ended
                self._socket.send(os.fsencode(message))  # a folder's name may be no UTF-8


def launcher_names_the_dead(environment: Mapping[str, str] = os.environ) -> bool:
    """Say whether the launcher itself prints the rank and the host of a killed process."""
    if "HYDI_CONTROL_FD" in environment:  # MPICH's, maybe started by Slurm
        return False
    if "OMPI_COMM_WORLD_RANK" in environment:
        return environment.get("OMPI_MCA_mpi_ft_enable") != "1"  # mpirun --with-ft ulfm says nothing of it
    return "SLURM_PROCID" in environment


def _address(name: str) -> bytes:
    return b"\0hpctrain-" + name.encode()  # an abstract name, of Linux: nothing that could be left behind


def network_name() -> str:
    """Return the name of the scope in which abstract names are unique: a boot of a machine, and a network namespace."""
    from hpctrain.comm.start.process import this_machine

    try:
        return f"{this_machine()}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return this_machine()


def start_guardian(ranks: Mapping[int, tuple[int, str]], speaks: bool | None = None) -> tuple[subprocess.Popen, str]:
    """Start the guardian of `ranks`, number and host by process; return it, and the name under which it listens.

    It is silent where the launcher names the dead, unless `speaks` says otherwise. Raises OSError.
    """
    from hpctrain.comm.start.process import process_status

    name = os.urandom(8).hex()
    speaks = not launcher_names_the_dead() if speaks is None else speaks
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(_address(name))
        listener.listen(BACKLOG)
        # -I -S: without site-packages, whose .pth files cost more than all the rest.
        launcher = os.getppid()
        arguments = listener.fileno(), launcher, process_status(launcher).parent, int(speaks)
        described = [f"{process}:{rank}:{host}" for process, (rank, host) in ranks.items()]
        command = [sys.executable, "-I", "-S", __file__, *map(str, arguments), *described]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(
            command, pass_fds=[listener.fileno()], stdin=quiet, stdout=quiet, start_new_session=True, cwd="/"
        )
        return process, name


def watch(listener: socket.socket, processes: Collection[int]) -> tuple[int | None, Path | None, list[socket.socket]]:
    """Listen to the ranks with these processes until one dies without a goodbye, or all have gone.

    Return the process that died first, and the folder of the flight records; None for either where there is none.
    Return the connections of the other ranks too.
    """
    poll = select.epoll()  # reports events in the order in which they happened
    poll.register(listener, select.EPOLLIN)
    connections: dict[int, tuple[socket.socket, int]] = {}
    folder, has_goodbye, deadline = None, False, time.monotonic() + START_SECONDS
    while connections or time.monotonic() < deadline:
        for number, _ in poll.poll(None if connections else START_SECONDS):
            if number == listener.fileno():
                made = listener.accept()[0]
                process, user = peer_of(made)
                if process in processes and user == os.geteuid():
                    connections[made.fileno()] = made, process
                    poll.register(made, select.EPOLLIN)
                else:
                    made.close()
                continue
            connection, process = connections[number]
            message = b""  # the peer is gone
            with suppress(OSError):
                message = connection.recv(LONGEST_MESSAGE)
            word, _, text = os.fsdecode(message).partition(" ")
            if word == "folder":
                folder = Path(text)
                with suppress(OSError):
                    connection.send(b"heard")
            elif word == "goodbye":
                has_goodbye = True
            elif not word:
                poll.unregister(number)
                connections.pop(number)[0].close()
                if not has_goodbye:
                    return process, folder, [other for other, _ in connections.values()]
                if not connections:
                    return None, folder, []
    return None, folder, []


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end, as the kernel reports them."""
    process, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, user


def how_it_ended(process: int) -> str:
    """Return by which signal or code a process is ending, such as " (SIGKILL)"; "" where its parent has removed it.

    The kernel closes the files of a process before its parent is told of its end, and knows the code by then.
    """
    with suppress(OSError, ValueError):
        code = int(Path(f"/proc/{process}/stat").read_text().split()[-1])
        if number := code & 0x7F:
            return f" ({signal.Signals(number).name})"
        return f" (exit code {code >> 8})" if code else ""
    return ""


def describe_death(folder: Path | None, rank: int, process: int, host: str, fate: str) -> str | None:
    """Return the message about the rank that died first, and leave a note; None if another guardian has reported it."""
    from hpctrain.comm.watchdog.flight import claim_last_word, read_flight, record_path

    text = f"hpctrain: {fate}: the first to end without a word"
    if folder is None:
        return text
    if not claim_last_word(folder, {"rank": rank, "process": process, "host": host, "time": time.time()}):
        return None
    from hpctrain.comm.watchdog.diagnosis import Evidence
    from hpctrain.config.errors import CommError

    try:
        flight = read_flight(record_path(folder, rank))
    except CommError:
        return text
    last = Evidence({rank: flight}, flight.size, time.time()).last_operation(rank)
    return f"{text}; {last}\n  more: hpctrain inspect {folder.parent}"


def main() -> None:
    number, launcher, launched_by, speaks = map(int, sys.argv[1:5])
    ranks = {int(process): (int(rank), host) for process, rank, host in (each.split(":", 2) for each in sys.argv[5:])}
    died, folder, others = watch(socket.socket(fileno=number), ranks)
    if died is None:
        return
    rank, host = ranks[died]
    fate = f"rank {rank} (host {host}, process {died}) was killed or crashed{how_it_ended(died)}"
    for other in others:
        with suppress(OSError):  # it dies too
            other.send(os.fsencode(f"{LOST} {fate}"))
    from hpctrain.comm.start.process import process_status

    time.sleep(LAUNCHER_SECONDS)
    if (
        process_status(launcher).parent != launched_by
    ):  # the launcher has ended, or its parent has: mpirun, of which it is a part
        return
    text = describe_death(folder, rank, died, host, fate)
    if text and speaks:
        from hpctrain.config.terminal import printable

        with suppress(OSError):  # nothing listens
            os.write(2, f"{printable(text)}\n".encode())


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    main()
