"""Worlds and legs that are left without the other ranks leave no thread, no file and no memory behind."""

import gc
import os
import threading
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from hpctrain.comm.start.process import PREFIX, SHARED_MEMORY
from hpctrain.comm.waiting import Phase
from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.config.errors import CommError
from hpctrain.engine.run import Run
from hpctrain.engine.start.facts import MachineDescription
from hpctrain.engine.start.resolve import prepare_run
from tests.ranks.small_runs import by, make_job, world_of
from tests.ranks.test_legs import DEVICES, losses_of

ROUNDS = 3


def held() -> tuple[list[str], list[str], int]:
    """Return this process' threads, its open files, and the number of its maps of shared memory."""
    gc.collect()
    files = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that lists them
            files.append(os.readlink(f"/proc/self/fd/{number}"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = [line for line in maps if f"{SHARED_MEMORY}/{PREFIX}" in line or "/dev/zero" in line]
    return sorted(thread.name for thread in threading.enumerate()), sorted(files), len(shared)


@pytest.mark.ranks(2)
@pytest.mark.timeout(60)
def test_worlds_that_are_abandoned_leave_nothing_behind(world):
    kept, written, counts = [], [], [held()]
    for _ in range(ROUNDS):
        own = world_of(world)
        ranks, peer = range(own.size), 1 - own.rank
        shared, channel = own.group(ranks), own.channel(peer, num_bytes=4000, depth=2)
        own.settings = by("messages", own.settings)
        overlapped, messages = own.group(ranks, overlapped=True), own.channel(peer, num_bytes=4000, depth=2)
        figures, blocking = own.gather_numbers([1.0]), own.group(ranks)
        assert shared.all_reduce(torch.ones(3)).tolist() == [own.size] * 3
        started = None
        if own.rank == 0:  # the other rank never comes
            started = overlapped.start_all_reduce(torch.ones(1 << 20))
            messages.expect(torch.empty(1000))
            channel.send(torch.ones(1000))
            own.enter(Phase("a test", 0.1, ""))
            lost = torch.ones(1 << 20)
            with pytest.raises(CommError, match="it is gone or far behind"):
                blocking.all_reduce(lost)
            written.append(weakref.ref(lost))
            del lost
        during = held()
        assert "lanes" in during[0] and during[2] > counts[0][2], "this is what is counted"
        own.abandon("a test")
        assert held()[2] == counts[0][2] + 1, "memory of groups goes before they do; the flight record stays"
        assert own.watchdog.recorder.snapshot().error == "a test"
        if started is not None:
            with pytest.raises(CommError, match="all_reduce of group was abandoned while it was in flight"):
                started.wait()
        kept.append(own.communicators)
        del own, shared, channel, overlapped, messages, figures, blocking, started
        counts.append(held())
    assert counts == [counts[0]] * (ROUNDS + 1)
    assert all(each() is not None for each in written), "MPI may still write into what a call that failed has left"
    world.agree(None)


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
def test_legs_that_are_abandoned_leave_nothing_behind_and_the_run_goes_on(world, tokens, folder):
    own = world_of(world)
    described = MachineDescription(parse_cluster(DEVICES.format(count=own.size), "a test"), "a test")
    plans = {"data": 2}, {"tensor": {"y": 2}}, {"pipeline": 2}, {"tensor": {"z": 2}}
    jobs = [make_job(tokens, "llama", plan, shape={"vocab_size": 64}, steps=len(plans)) for plan in plans]
    run, counts = Run(own, jobs[0], folder / "run", described), []
    for number, job in enumerate(jobs):
        if number:
            run.begin_leg(own, prepare_run(own, job, run.checkpoint, described))
        run.leg.train(number + 1)
        store = weakref.ref(run.leg._trainer.layout.store)
        run.leg.abandon()
        counts.append(held())
        assert store() is None, "weights are freed"
        assert own.num_made == 0 and own._engine is not None
        assert not own._engine._lanes[1:], "lanes left the engine, but that of figures"
    assert counts == [counts[0]] * len(plans)
    with own.all_or_none():
        if own.rank == 0:
            assert len(losses_of(run)) == len(plans)
    run.close()
    own.close()
