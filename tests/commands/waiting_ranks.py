"""Ranks whose operations move nothing, one of which does not come.

`mpirun -n N python waiting_ranks.py FOLDER STORY R`; FOLDER "-" stands for none. Stories: "all" come; rank R "skips" an
operation; R is "stuck" and never lets other Python threads run; R is "slow"; R is "killed"; "everybody" but R skips.
All "rest" for long, and wait for nobody.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import mpi4py

mpi4py.rc.initialize = False
from mpi4py import MPI  # noqa: E402

from hpctrain.comm import watchdog as watching  # noqa: E402
from hpctrain.comm.guarded import Guarded  # noqa: E402
from hpctrain.comm.recorder import Recorder  # noqa: E402
from hpctrain.comm.waiting import Patience, Phase  # noqa: E402
from hpctrain.comm.watchdog import Watchdog  # noqa: E402

PATIENCE_SECONDS = 1.0
MESSAGE_BYTES = 4_200_000
PHASE = Phase("a test", PATIENCE_SECONDS, "observe.step_timeout_seconds")


def together(comm, recorder: Recorder, lane: int, name: str) -> None:
    handle = recorder.start(lane, name, MESSAGE_BYTES)
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)
    recorder.finish(handle)


def lost_in_thought(seconds: float) -> None:
    time.sleep(seconds)


def lock_python(seconds: int) -> None:
    ctypes.PyDLL(None).sleep(seconds)


def main(folder: str, story: str, culprit: int) -> None:
    watching.REACTION_SECONDS = watching.ANSWER_SECONDS = 1.0  # or the tests would wait for them
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    comm = MPI.COMM_WORLD.Dup()
    rank, size = comm.rank, comm.size
    hosts = [f"node{i // 2}" for i in range(size)]
    recorder = Recorder(None, rank, size, hosts[rank], "cpu", comm.bcast(time.time_ns()))
    guarded = Guarded(comm, hosts[rank])
    everyone, data = (recorder.add_group(name, range(size)) for name in ("everyone", "data"))
    if folder != "-":
        recorder.move_to(Path(folder) / "flight")
        comm.Barrier()
        guarded.tell_folder(Path(folder) / "flight")

    def abort(code: int) -> None:
        guarded.say_goodbye(has_told_error=True)
        MPI.COMM_WORLD.Abort(code)  # of another communicator MPICH's mpirun may return 9, the signal of the others

    watchdog = Watchdog(MPI, comm, recorder, hosts, Patience(PHASE), abort)
    watchdog.start()
    together(comm, recorder, everyone, "broadcast")
    for _ in range(3):
        together(comm, recorder, data, "all_reduce")
    if story == "rest":
        (Path(folder) / f"resting-{rank}").touch()
        time.sleep(60)
    if (rank == culprit) != (story == "everybody"):
        if story in ("skips", "everybody"):
            lost_in_thought(60)
        elif story == "stuck":
            lock_python(60)
        elif story == "slow":
            lost_in_thought(PATIENCE_SECONDS / 2)
        elif story == "killed":
            time.sleep(PATIENCE_SECONDS / 4)
            os.kill(os.getpid(), signal.SIGKILL)
    together(comm, recorder, data, "all_reduce")
    watchdog.stop()
    recorder.close()
    guarded.say_goodbye()
    comm.Free()
    MPI.Finalize()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
