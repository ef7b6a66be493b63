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

Where the launcher itself was killed, no rank is to blame, and it says nothing. Where all were sent a signal that they
do not handle, the first to go is reported all the same.

It sleeps all the while, and ends with the last rank of its host, or once it has spoken. It is run as a script, by its
path, without site-packages: it needs nothing of them, and is there in 30 ms with 12 MB.
"""

import os
import select
import socket
import struct
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

LONGEST_LINE = 4096
# How long the ranks of a host may take to connect; a guardian that nobody needs ends after this.
START_SECONDS = 30.0
# A launcher that was killed is gone this long after the ranks that die of it.
LAUNCHER_SECONDS = 0.3


class Guardian:
    """The work of the process: it listens to the ranks of its host until one dies or all take leave."""

    def __init__(self, listener: socket.socket, ranks: Collection[int]):
        """`ranks` are the processes that are listened to."""
        self._listener, self._processes = listener, frozenset(ranks)
        self._poll = select.epoll()  # reports events in the order in which they happened
        self._poll.register(listener, select.EPOLLIN)
        self._connections: dict[int, socket.socket] = {}
        self._ranks: dict[int, tuple[int, int, str]] = {}
        """By connection: rank, process, host."""
        self._texts: dict[int, bytes] = {}
        self._goodbyes = False
        self.folder: Path | None = None

    def watch(self) -> tuple[int, int, str] | None:
        """Return the first that dies without a goodbye (rank, process, host); None if all have said theirs."""
        deadline = time.monotonic() + START_SECONDS
        while self._connections or time.monotonic() < deadline:
            for number, _ in self._poll.poll(None if self._connections else START_SECONDS):
                if number == self._listener.fileno():
                    self._admit(self._listener.accept()[0])
                elif self._is_gone(number):
                    self._poll.unregister(number)
                    self._connections.pop(number).close()
                    if number in self._ranks and not self._goodbyes:
                        return self._ranks[number]
                    if self._goodbyes and not self._connections:
                        return None
        return None

    def _admit(self, made: socket.socket) -> None:
        """Listen to a connection if it is from a rank of this start, and this user; close all others."""
        process, user = peer_of(made)
        if process not in self._processes or user != os.geteuid():
            made.close()
            return
        self._connections[made.fileno()] = made
        self._poll.register(made, select.EPOLLIN)

    def _is_gone(self, number: int) -> bool:
        """Take in what a rank says; return whether that was the last of it."""
        try:
            data = self._connections[number].recv(LONGEST_LINE)
        except OSError:
            data = b""
        *lines, rest = (self._texts.get(number, b"") + data).split(b"\n")
        self._texts[number] = rest
        for line in lines:
            word, _, text = os.fsdecode(line).partition(" ")
            if word == "rank":
                rank, process, host = text.split(" ", 2)
                self._ranks[number] = int(rank), int(process), host
            elif word == "folder":
                self.folder = Path(text)
            elif word == "goodbye":
                self._goodbyes = True
        return not data


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end: who connected, or who listened. The kernel says so."""
    process, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, user


def parent_of(process: int) -> int:
    """Return the process that waits for this one; 0 if this one has ended."""
    try:
        state, parent, *_ = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state in "ZX" else int(parent)


def describe_death(folder: Path | None, rank: int, process: int, host: str) -> str | None:
    """Return what to say of the rank that died first; None if another guardian has said it. Leaves a note."""
    from hpctrain.comm.watchdog.flight import claim_last_word, read_flight, record_path

    text = (
        f"hpctrain: rank {rank} (host {host}, process {process}) was killed or crashed: the first to end without a word"
    )
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
    number, launcher, launched_by, speaks, *ranks = map(int, sys.argv[1:])
    guardian = Guardian(socket.socket(fileno=number), ranks)
    died = guardian.watch()
    if not died:
        return
    time.sleep(LAUNCHER_SECONDS)
    if parent_of(launcher) != launched_by:  # it is gone, or its own parent is: mpirun, of which it is a part
        return
    text = describe_death(guardian.folder, *died)
    if text and speaks:
        from hpctrain.config.terminal import printable

        with suppress(OSError):  # nobody listens
            os.write(2, f"{printable(text)}\n".encode())


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    main()
