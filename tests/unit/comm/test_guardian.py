"""The guardian of a host believes the ranks of its own start, whoever else finds its socket."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.comm.start.process import process_status
from hpctrain.comm.topology import Place
from hpctrain.comm.waiting import Patience, Phase
from hpctrain.comm.watchdog import guardian, watchdog
from hpctrain.comm.watchdog.flight import LAST_WORD

NOBODY = 65534
HEARD_SECONDS = 0.2
"""In which a guardian that believed a stranger would have acted."""
CLIENT = """
import os, socket, sys
user, name = int(sys.argv[1]), sys.stdin.readline().strip()
words = sys.stdin.readline().strip().encode().decode("unicode_escape").encode()
if user != os.geteuid():
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    link.connect(b"\\0hpctrain-" + name.encode())
    link.sendall(words)
except OSError:
    pass  # it is not listened to
print("said", flush=True)
sys.stdin.readline()
"""
"""Connects as a user, to the name in the first line of its input, and says the second one."""
ATTACKS = {
    "a false death, with a code that clears the screen": "rank 3 1 node7\x1b[2J",
    "a death that is hidden": "goodbye",
    "a file where the attacker says": "folder {elsewhere}",
    "a line that ends it": "rank nonsense",
}


@contextmanager
def client(user: int) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-I", "-S", "-c", CLIENT, str(user)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def say(process: subprocess.Popen, name: str, words: str) -> None:
    assert process.stdin and process.stdout
    process.stdin.write(f"{name}\n{words!r}\n".replace("'", ""))
    process.stdin.flush()
    assert process.stdout.readline() == "said\n"


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def sockets_of(process: int) -> int:
    links = []
    for path in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            links.append(os.readlink(path))
    return sum(link.startswith("socket:") for link in links)


@pytest.mark.parametrize("words", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("user", ["nobody", "a process of the same user"])
def test_strangers_are_not_believed(tmp_path: Path, capfd, user, words):
    if user == "nobody" and os.geteuid() != 0:
        pytest.skip("only root can start a process as another user")
    own, elsewhere = tmp_path / "run" / "flight", tmp_path / "elsewhere"
    for folder in (own, elsewhere):
        folder.mkdir(parents=True)
    with client(os.geteuid()) as rank, client(NOBODY if user == "nobody" else os.geteuid()) as stranger:
        process, name = guardian.start_guardian({rank.pid: (0, "node0")}, speaks=True)
        say(rank, name, f"folder {own}")
        wait_until(lambda: sockets_of(process.pid) == 2)  # it listens, and has heard the rank
        say(stranger, name, words.replace("{elsewhere}", str(elsewhere)))
        stranger.kill()
        stranger.wait()
        time.sleep(HEARD_SECONDS)
        assert not list(elsewhere.iterdir())
        os.kill(rank.pid, signal.SIGKILL)
        wait_until(lambda: not process_status(process.pid).parent)
    said = capfd.readouterr().err
    assert said.startswith(f"hpctrain: rank 0 (host node0, process {rank.pid}) was killed or crashed"), said
    assert said.count("was killed") == 1
    assert "\x1b" not in said
    assert (own / LAST_WORD).is_file()
    assert not list(elsewhere.iterdir())


def test_a_folder_is_answered_so_that_no_rank_computes_before_it_is_listened_to(tmp_path: Path):
    process, name = guardian.start_guardian({os.getpid(): (0, "node0")}, speaks=False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.settimeout(20)
        link.connect(b"\0hpctrain-" + name.encode())
        link.send(b"folder " + os.fsencode(tmp_path))
        assert link.recv(100)
        link.send(b"goodbye")
    assert process.wait(20) == 0


def test_the_other_ranks_hear_at_once_who_died_of_which_signal():
    with client(os.geteuid()) as victim:
        process, name = guardian.start_guardian({os.getpid(): (0, "node0"), victim.pid: (1, "node0")}, speaks=False)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.settimeout(20)
            link.connect(b"\0hpctrain-" + name.encode())
            say(victim, name, "here")
            wait_until(lambda: sockets_of(process.pid) == 3)
            os.kill(victim.pid, signal.SIGSEGV)
            heard = link.recv(1000).decode()
            assert heard == f"lost rank 1 (host node0, process {victim.pid}) was killed or crashed (SIGSEGV)"
            assert link.recv(1000) == b"", "its end says that it has reported"
    assert process.wait(20) == 0


def test_a_rank_does_not_speak_to_another_process_that_has_the_guardians_name():
    process, name = guardian.start_guardian({os.getpid(): (1, "node0")}, speaks=False)
    try:
        own = guardian.network_name()
        answers = iter([[(own, 1, "node0"), (own, os.getpid(), "node0")], [name, ""]])
        comm = SimpleNamespace(rank=1, size=2, allgather=lambda value: next(answers))
        assert guardian.Guarded(comm, "node0")._socket is None
    finally:
        process.kill()
        process.wait()


def test_a_watchdog_that_hears_of_a_death_while_it_asks_makes_no_report(monkeypatch, capfd):
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 0.2)
    alarms = SimpleNamespace(iprobe=lambda status: False, isend=lambda *_, **__: SimpleNamespace(Test=lambda: True))
    mpi = SimpleNamespace(Status=lambda: None)
    communicators = SimpleNamespace(mpi=mpi, alarms=alarms, rank=0, made_at=1)
    patience, aborted = Patience(Phase("a test", 0.0, "a.key")), []
    places = [Place("node0", "cpu")] * 2
    watched = watchdog.Watchdog(communicators, places, patience, aborted.append)  # pyright: ignore[reportArgumentType]
    watched.recorder.start(watched.recorder.add_group("world", range(2)), "agree", 0)
    heard, said = os.pipe()
    watched._guarded = SimpleNamespace(hear=lambda: "lost rank 1 was killed", say_goodbye=lambda **_: True)
    watched._awaited.register(heard, select.POLLIN)
    os.write(said, b".")
    watched._speak()
    assert patience.interruption and (aborted, capfd.readouterr().err) == ([], "")
    os.close(heard)
    os.close(said)
