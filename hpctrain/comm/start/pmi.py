"""MPI under Slurm: ranks of MPICH learn each other's addresses, however long these are.

MPICH hands addresses to its launcher in lines `cmd=put kvsname=NAME key=KEY value=VALUE` (PMI-1), after it asked how
long a value may be. Slurm's plugin pmi2 (22.05, and others) answers 1,024, and then reads 1,024 bytes of a line. The
rest of a longer line is taken for the next request: ranks wait for ever, or connect to garbage. Whether a line gets so
long depends on the zeros in an address and in the memory after it. So the same job starts today and not tomorrow.
"""

import ctypes
import os
import re
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hpctrain.comm.start.launcher import number_in
from hpctrain.config.errors import LaunchError, describe_os_error

STREAM_VARIABLE = "PMI_FD"
"""The variable with the file descriptor of MPICH's connection to its launcher."""
SLURM_VARIABLE = "SLURM_STEP_ID"
LINE_BYTES = 1024
CONNECTING_VARIABLES = (STREAM_VARIABLE, "PMIX_RANK")
"""Variables from which MPICH concludes that it has a launcher, even where they are empty. MPICH then ends the process
with a message of its own."""
WORDS_BYTES = 128
"""Bytes of a line without the value: `cmd=put kvsname= key= value=`, a key of up to 64 bytes, the job's number."""
VALUE_LIMIT = re.compile(rb"(?<=vallen_max=)\d+")
READ_BYTES = 1 << 16


def init_thread(mpi) -> None:
    """Start MPI with MPI_THREAD_MULTIPLE, as mpi4py's `Init_thread` does. All ranks must call.

    Raises LaunchError where the launcher's connection is not there.
    """
    for variable in CONNECTING_VARIABLES:
        if not os.environ.get(variable, "").strip():
            os.environ.pop(variable, None)
    stream = _launcher_stream()
    if stream is None or SLURM_VARIABLE not in os.environ:
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        return
    with short_values(stream):
        # mpi4py would keep the interpreter's lock, and the answers would not be passed on.
        ctypes.CDLL(mpi.__file__).MPI_Init_thread(None, None, mpi.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))


def _launcher_stream() -> int | None:
    """Return the open connection to MPICH's launcher; None without any. Raises LaunchError."""
    stream, _ = number_in([STREAM_VARIABLE])
    if stream is None:
        return None
    try:
        os.fstat(stream)
    except OSError as error:
        raise LaunchError(
            f"{STREAM_VARIABLE} = {stream}: is no connection to a launcher: {describe_os_error(error)}; start the ranks"
            f" with mpirun or srun, or unset {STREAM_VARIABLE}"
        ) from None
    return stream


@contextmanager
def short_values(stream: int) -> Iterator[None]:
    """Cap the limit of a value in the launcher's answers at `LINE_BYTES - WORDS_BYTES`, in this block.

    Answers are read from `stream`. `stream` is a file descriptor. After the block it is the launcher's own again;
    nobody may be waiting for an answer then.
    """
    inheritable = os.get_inheritable(stream)
    with socket.socket(fileno=os.dup(stream)) as launcher:
        ours, theirs = socket.socketpair()
        os.dup2(theirs.fileno(), stream, inheritable)
        theirs.close()
        between = threading.Thread(target=_stand_between, args=(ours, launcher), daemon=True)
        between.start()
        try:
            yield
        finally:
            os.dup2(launcher.fileno(), stream, inheritable)  # closes the other end of `ours`, which ends the thread
            between.join()


def _stand_between(rank: socket.socket, launcher: socket.socket) -> None:
    """Forward bytes between rank and launcher, answers in whole lines, until one of them closes its end."""
    answers, most = b"", LINE_BYTES - WORDS_BYTES
    with rank, selectors.DefaultSelector() as events:
        events.register(rank, selectors.EVENT_READ)
        events.register(launcher, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                received = os.read(key.fd, READ_BYTES)
                if not received:
                    return
                if key.fd == rank.fileno():
                    launcher.sendall(received)
                    continue
                lines, end, answers = (answers + received).rpartition(b"\n")
                rank.sendall(VALUE_LIMIT.sub(lambda limit: b"%d" % min(int(limit[0]), most), lines) + end)
