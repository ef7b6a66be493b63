"""Start `hpctrain` without importing torch for each rank: a server imports everything once and forks.

    mpirun -n 4 python -I -S tests/warm_start.py SOCKET train job.toml     is  mpirun -n 4 hpctrain train job.toml
    mpirun -n 4 python -I -S tests/warm_start.py SOCKET --script FILE ...  is  mpirun -n 4 python FILE ...
    mpirun -n 4 python -I -S tests/warm_start.py SOCKET --module NAME ...  is  mpirun -n 4 python -m NAME ...
                python -I -S tests/warm_start.py SOCKET -u -c CODE         is              python -u -c CODE

Importing takes two seconds of a core for each rank, most of what a short command takes. A client here hands its
arguments, environment, folder, streams, MPI's connection and namespaces to the server, which forks a process that goes
on as `hpctrain` would. The client passes signals on, ends as that process ended, and takes it along when it is killed.

There are thousands of clients: one imports only what it needs.
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

SERVE = "--serve"
SERVER_VARIABLE = "HPCTRAIN_TEST_SERVER"
"""The variable that names the socket of a server of which others are forked: each takes five seconds to import."""
SCRIPT, MODULE = "--script", "--module"
"""What stands before the file or the module of another program than hpctrain."""
CODE = ["-u", "-c"]
"""What stands before a program as execnet starts it."""
MPI_STREAM = "PMI_FD"
"""The variable that holds the number of MPICH's connection to its launcher."""
NAMESPACES = {"net": 0x40000000, "mnt": 0x00020000}
"""What distinguishes one host of tests/hosts from another, and its flag for setns."""
PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGHUP,
    signal.SIGXCPU,
    signal.SIGCONT,
)
PR_SET_PDEATHSIG = 1
SIZE_BYTES = 8
MOST_STREAMS = 8


def client_command(path: Path | str) -> list[str]:
    """Return what takes the place of `hpctrain` where a server runs; see `serving`."""
    return [sys.executable, "-I", "-S", __file__, str(path)]


@contextmanager
def serving(path: Path, *modules: str) -> Iterator[None]:
    """Run a server that listens at `path`; it ends with this process, and what it started ends with it.

    It imports some `modules`, too, which nothing imports at its start. It is forked from the server that
    `SERVER_VARIABLE` names, if there is one.
    """
    import subprocess
    import time

    root, other = os.path.dirname(os.path.dirname(__file__)), os.environ.get(SERVER_VARIABLE)
    python = [*client_command(other), MODULE] if other else [sys.executable, "-m"]
    command = [*python, "tests.warm_start", str(path), SERVE, *modules]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as server:
        while not path.exists():
            if server.poll() is not None:
                raise RuntimeError(f"the server of warm starts ended with code {server.returncode}")
            time.sleep(0.05)
        yield
        server.communicate()


def pid_of(path: Path) -> int:
    """Return the process of the server that listens at `path`."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(path))
        return int.from_bytes(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)


def call(path: str, arguments: list[str]) -> None:
    """Be a client: end as the process that the server forked."""
    environment = dict(os.environ)
    streams = [0, 1, 2]
    if MPI_STREAM in environment:
        streams.append(int(environment[MPI_STREAM]))
    namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    request = {"arguments": arguments, "environment": environment, "folder": os.getcwd()}
    message = marshal.dumps(request)
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        socket.send_fds(link, [len(message).to_bytes(SIZE_BYTES, "big")], [*namespaces, *streams])
        link.sendall(message)
        for number in PASSED_ON:
            signal.signal(number, lambda received, _: link.send(bytes([received])))
        ended = link.recv(2)
    by_signal, code = ended if len(ended) == 2 else (signal.SIGKILL, 0)
    if by_signal:
        signal.signal(by_signal, signal.SIG_DFL) if by_signal != signal.SIGKILL else None
        os.kill(os.getpid(), by_signal)
    os._exit(code)


def serve(path: str, modules: Sequence[str] = ()) -> dict:
    """Fork a process for each client until standard input ends; return in the forked process, with its request."""
    import gc
    import selectors

    _import_everything(modules)
    gc.collect()
    gc.freeze()  # a forked process does not copy what it only reads
    events = selectors.DefaultSelector()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(128)
    events.register(0, selectors.EVENT_READ, ("stdin", None))
    events.register(listening, selectors.EVENT_READ, ("client", None))
    links: dict[int, socket.socket] = {}
    server = os.getpid()
    while True:
        for key, _ in events.select():
            kind, pid = key.data
            if kind == "stdin":
                os._exit(0)  # and with it, by their own wish, all that were forked
            elif kind == "client":
                link, _ = listening.accept()
                request = _receive(link)
                if request is None:
                    link.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    events.close()
                    listening.close()
                    for other in (link, *links.values()):
                        other.close()
                    _become(request, server)
                    return request
                for stream in request["streams"]:
                    os.close(stream)
                links[pid] = link
                events.register(link, selectors.EVENT_READ, ("signal", pid))
                events.register(os.pidfd_open(pid), selectors.EVENT_READ, ("end", pid))
            elif kind == "signal":
                if pid not in links:
                    continue  # its process has ended, as an event of the same `select` said
                try:
                    number = key.fileobj.recv(1)
                except OSError:
                    number = b""
                if not number:  # the client was killed
                    events.unregister(key.fileobj)
                with suppress(ProcessLookupError):
                    os.kill(pid, number[0] if number else signal.SIGKILL)
            else:
                _, status = os.waitpid(pid, 0)
                events.unregister(key.fd)
                os.close(key.fd)
                link = links.pop(pid)
                with suppress(KeyError):
                    events.unregister(link)
                with suppress(OSError):
                    link.send(bytes([os.WTERMSIG(status), os.WEXITSTATUS(status)]))
                link.close()


def _import_everything(modules: Sequence[str]) -> None:
    import importlib
    import pkgutil

    import mpi4py

    mpi4py.rc(initialize=False, finalize=False)
    import h5py  # noqa: F401
    import torch  # noqa: F401
    from mpi4py import MPI  # noqa: F401

    import hpctrain

    for module in pkgutil.walk_packages(hpctrain.__path__, "hpctrain."):
        if not module.name.endswith(("__main__", "_child", "guardian")):
            importlib.import_module(module.name)
    for name in modules:
        importlib.import_module(name)


def _receive(link: socket.socket) -> dict | None:
    """Return what a client asks for; None where it was killed before it had said so."""
    streams: list[int] = []
    try:
        size, streams, _, _ = socket.recv_fds(link, SIZE_BYTES, MOST_STREAMS)
        left, parts = int.from_bytes(size, "big"), []
        while left and (part := link.recv(left)):
            parts.append(part)
            left -= len(part)
        return marshal.loads(b"".join(parts)) | {"streams": streams}
    except (OSError, ValueError, EOFError):
        for stream in streams:
            os.close(stream)
        return None


def _become(request: dict, server: int) -> None:
    """Take on what the client was started with."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    namespaces, streams = request["streams"][: len(NAMESPACES)], request["streams"][len(NAMESPACES) :]
    for (name, flag), namespace in zip(NAMESPACES.items(), namespaces, strict=True):
        same = os.fstat(namespace).st_ino == os.stat(f"/proc/self/ns/{name}").st_ino
        if not same and libc.setns(namespace, flag):
            raise OSError(ctypes.get_errno(), f"cannot enter the client's {name} namespace")
        os.close(namespace)
    for number, stream in enumerate(streams[:3]):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    if streams[3:]:
        os.set_inheritable(streams[3], True)
        os.environ[MPI_STREAM] = str(streams[3])
    os.chdir(request["folder"])
    sys.argv = ["hpctrain", *request["arguments"]]


def _run_to_its_end() -> None:
    """Run what the client asked for, and end as Python would, but without clearing what was imported.

    That takes a quarter of a second of a core, since its memory is shared with the server until it is changed.
    """
    import atexit
    import threading

    from mpi4py import MPI

    code = 0
    try:
        _run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - it waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = 120
    if MPI_STREAM in os.environ and MPI.Is_finalized():
        stream = int(os.environ[MPI_STREAM])
        os.write(stream, b"cmd=finalize\n")  # as MPICH does at exit: else the launcher takes it for killed
        os.read(stream, 64)
    os._exit(code & 0xFF)


def _run() -> None:
    """Run what the client asked for, as Python would."""
    import runpy

    from hpctrain.cli import main

    if sys.argv[1:2] == [SCRIPT]:
        sys.argv = sys.argv[2:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    elif sys.argv[1:2] == [MODULE]:
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif sys.argv[1:3] == CODE:
        sys.argv, code = sys.argv[2:3], sys.argv[3]
        exec(code, {"__name__": "__main__"})
    else:
        main()


if __name__ == "__main__":
    if sys.argv[2:3] == [SERVE]:
        serve(sys.argv[1], sys.argv[3:])
        _run_to_its_end()
    else:
        call(sys.argv[1], sys.argv[2:])
