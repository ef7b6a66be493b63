"""Copies in the memory of hosts: the next start continues from the newest one that is whole."""

import json
import shutil
import time
from pathlib import Path

import pytest

from hpctrain.checkpoint.copies import complete_copies
from hpctrain.comm.mpi_communicators import FamilyCommunicators
from hpctrain.comm.start.process import SHARED_MEMORY
from hpctrain.comm.world import World
from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.engine.run import Run
from hpctrain.engine.start.facts import Described, with_values
from tests.ranks.small_runs import largest_relative_difference, make_job
from tests.ranks.test_legs import DEVICES, losses_of

STEPS, EVERY, KILLED_AFTER = 16, 5, 15


class KillError(Exception):
    pass


def described(world) -> Described:
    return Described(parse_cluster(DEVICES.format(count=world.size), "a test"), "a test")


def job_of(tokens, plan: dict, copies: int = EVERY, **train):
    job = make_job(tokens, "llama", plan, shape={"vocab_size": 64}, **({"steps": STEPS} | train))
    return with_values(job, "recovery", copies=copies)


def world_on(world, num_hosts: int) -> World:
    """A world of the same ranks, of which equally many are on each pretended host."""
    places = world.topology.places
    places = [place._replace(host=f"host{rank * num_hosts // world.size}") for rank, place in enumerate(places)]
    communicators = FamilyCommunicators(world.raw_mpi, [place.family for place in places])
    return World(communicators, places, world.patience.phase.seconds)


def train_until_killed(own, job, folder) -> Path:
    """Train, and fail on all ranks; return the folder of the run's copies."""
    run = Run(own, job, folder, described(own))
    step = run.console.step

    def step_is_done(metrics, *more) -> None:
        step(metrics, *more)
        while run.leg._saver.is_writing:
            time.sleep(0.01)
        if metrics["step"] == KILLED_AFTER:
            raise KillError

    run.console.step = step_is_done
    with pytest.raises(KillError):
        run.train()
    if run.lock:
        run.lock.release()
    own.agree(None)
    return SHARED_MEMORY / (folder / "copies").read_text().strip()


def start_again(own, job, folder, begun_after: int, said: list[str] | None = None) -> list[float]:
    run = Run(own, job, folder, described(own))
    assert run.leg._first_step == begun_after + 1
    if said is not None and own.rank == 0:
        said += [json.loads(line)["text"] for line in (folder / "events.jsonl").read_text().splitlines()]
    run.train()
    own.agree(None)
    result = losses_of(run)
    own.agree(None)  # one rank may remove the folder now
    return result


@pytest.fixture(params=[1, 2], ids=["one host", "two hosts"])
def num_hosts(request):
    return request.param


@pytest.mark.ranks(4)
@pytest.mark.timeout(240)
def test_a_start_continues_from_memory_with_the_same_bits(world, tokens, folder, num_hosts):
    job, own = job_of(tokens, {"tensor": {"y": 2}, "data": 2, "zero": 1}), world_on(world, num_hosts)
    whole = Run(own, with_values(job, "recovery", copies=0), folder / "whole", described(own))
    whole.train()
    copies = train_until_killed(own, job, folder / "killed")
    kept = complete_copies(copies / "host0")
    assert [path.name for path in kept] == ["step-00000005", "step-00000010"]
    assert len(list(kept[1].glob("part-*"))) == 4, "those of the other host too"
    own = world_on(world, num_hosts)
    if own.rank == 0 and num_hosts == 2:
        shutil.rmtree(copies / "host1")  # a host is lost, and replaced
    said: list[str] = []
    own.agree(None)
    result = start_again(own, job, folder / "killed", begun_after=10, said=said)
    assert result == losses_of(whole)
    assert own.rank or "continues after step 10 from memory" in said[-1]
    assert not copies.exists(), "a run that ended in order has a checkpoint"


@pytest.mark.ranks(4)
@pytest.mark.timeout(240)
def test_a_damaged_copy_is_read_elsewhere_or_the_one_before_it(world, tokens, folder):
    job, own = job_of(tokens, {"data": 4, "zero": 1}), world_on(world, 2)
    whole = Run(own, with_values(job, "recovery", copies=0), folder / "whole", described(own))
    whole.train()
    copies = train_until_killed(own, job, folder / "killed")
    saved = folder / "saved"
    if own.rank == 0:
        shutil.copytree(folder / "killed", saved / "run")
        shutil.copytree(copies, saved / "copies")
        damage(copies / "host0" / "step-00000010" / "part-00001.h5")
    own = world_on(world, 2)
    own.agree(None)
    other = job_of(tokens, {"pipeline": 2, "data": 2})
    result = start_again(own, other, folder / "killed", begun_after=10)
    assert largest_relative_difference(result, losses_of(whole)) < 1e-5
    if own.rank == 0:
        shutil.rmtree(folder / "killed")
        shutil.copytree(saved / "run", folder / "killed")
        shutil.copytree(saved / "copies", copies)
        for host in ("host0", "host1"):
            damage(copies / host / "step-00000010" / "part-00001.h5")
    own = world_on(world, 2)
    own.agree(None)
    assert start_again(own, job, folder / "killed", begun_after=5) == losses_of(whole)


def damage(part: Path) -> None:
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
