"""Ranks whose operations move nothing, one of which does not come.

`mpirun -n N python waiting_ranks.py FOLDER STORY R`; FOLDER "-" is none. Stories: "all" come; rank R "skips" an
operation; R is "absent" where all agree on something; R is "stuck" and never lets other Python threads run; R is
"slow"; R is "killed"; R is not there while all are "connecting" by a library, whose phase says what to set; R "fails";
"everybody" but R skips; all "others" fail. R "leaves" by an error, or is "awaited", while the others agree on
something. It leaves while they make files that they share ("sharing"), or while one of them is "busy". All "rest" for
long, and wait for nobody; all fail "equally", or "late" after each other.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from hpctrain.comm.start.launcher import promised_rank
from hpctrain.comm.waiting import Phase
from hpctrain.comm.watchdog import watchdog as watching
from hpctrain.comm.watchdog.recorder import Recorder
from hpctrain.comm.world import HOST_VARIABLE, World
from hpctrain.config.errors import DataError
from hpctrain.jobs.common import started_world

PATIENCE_SECONDS = 1.0
MESSAGE_BYTES = 4_200_000
LONG = ("leaves", "awaited", "sharing", "busy")


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


def play(world: World, folder: str, story: str, culprit: int) -> None:
    rank, size = world.rank, world.size
    comm, recorder = world.raw_mpi.COMM_WORLD.Dup(), world.watchdog.recorder
    everyone, data = (recorder.add_group(name, range(size)) for name in ("everyone", "data"))
    if folder != "-":
        world.keep_records(Path(folder) / "flight")
    # who fails speaks after two seconds, if others do not come
    patience = PATIENCE_SECONDS * {"fails": 10, "others": 10}.get(story, 40 if story in LONG else 1)
    world.enter(Phase("a test", patience, "observe.step_timeout_seconds"))
    together(comm, recorder, everyone, "broadcast")
    for _ in range(3):
        together(comm, recorder, data, "all_reduce")
    if story in ("equally", "late"):
        time.sleep(0.4 * rank * (story == "late"))
        raise DataError("nothing to continue from")
    if story == "rest":
        (Path(folder) / f"resting-{rank}").touch()
        time.sleep(60)
    if (rank == culprit) != (story in ("everybody", "others")):
        if story in ("skips", "everybody", "absent", "connecting"):
            lost_in_thought(60)
        elif story == "stuck":
            lock_python(60)
        elif story == "slow":
            lost_in_thought(PATIENCE_SECONDS / 2)
        elif story == "awaited":
            (Path(folder) / f"resting-{rank}").touch()
            lost_in_thought(60)
        elif story in ("fails", "others", "leaves", "sharing", "busy"):
            raise DataError("nothing to continue from here")
        elif story == "killed":
            time.sleep(PATIENCE_SECONDS / 4)
            os.kill(os.getpid(), signal.SIGKILL)
    if story == "busy" and rank == (culprit + 1) % size:
        lost_in_thought(60)
    if story in ("absent", "leaves", "awaited", "busy"):
        world.agree(None)
    if story == "sharing":
        from hpctrain.comm.transports.window import share_files

        share_files(world.everybody, 0, lambda path, size: None)
    if story == "connecting":
        world.patience.phase = Phase("connecting by NCCL", patience, "", "NCCL_SOCKET_IFNAME names the network")
    together(comm, recorder, data, "all_reduce")
    comm.Free()


if __name__ == "__main__":
    watching.REACTION_SECONDS = watching.ANSWER_SECONDS = 1.0  # or the tests would wait for them
    os.environ[HOST_VARIABLE] = f"node{promised_rank() // 2}"
    with started_world() as started:
        play(started, sys.argv[1], sys.argv[2], int(sys.argv[3]))
