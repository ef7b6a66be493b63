"""Copies in the memory of hosts: the next start continues from the newest one that is whole."""

import errno
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.checkpoint.copies import complete_copies
from hpctrain.comm.mpi_communicators import FamilyCommunicators
from hpctrain.comm.start.process import SHARED_MEMORY
from hpctrain.comm.world import World
from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.config.errors import LaunchError
from hpctrain.config.recovery import Recovery
from hpctrain.engine.copies import RESTARTS_VARIABLE, choose_copies, interval_seconds
from hpctrain.engine.requests import RESIZE_FILE
from hpctrain.engine.run import Run
from hpctrain.engine.start.facts import MachineDescription, with_values
from tests.ranks.small_runs import largest_relative_difference, make_job
from tests.ranks.test_legs import DEVICES, legs_of, losses_of, train_with_requests

STEPS, EVERY, KILLED_AFTER = 16, 5, 15
HOSTS = ("host0", "host1")


class KillError(Exception):
    pass


def described(world) -> MachineDescription:
    return MachineDescription(parse_cluster(DEVICES.format(count=world.size), "a test"), "a test")


def job_of(tokens, plan: dict | None, copies: int = EVERY, **train):
    job = make_job(tokens, "llama", plan, shape={"vocab_size": 64}, **({"steps": STEPS} | train))
    return with_values(job, "recovery", copies=copies)


def world_on(world, num_hosts: int) -> World:
    """A world of the same ranks, of which equally many are on each pretended host."""
    places = world.topology.places
    places = [place._replace(host=f"host{rank * num_hosts // world.size}") for rank, place in enumerate(places)]
    communicators = FamilyCommunicators(world.raw_mpi, [place.family for place in places])
    return World(communicators, places, world.patience.phase.seconds)


def train_until_killed(own, job, folder, killed_after: int = KILLED_AFTER) -> Path:
    """Train, and fail on all ranks; return the folder of the run's copies."""
    run = Run(own, job, folder, described(own))
    step = run.console.step

    def step_is_done(metrics, *more) -> None:
        step(metrics, *more)
        while run.leg._saver.is_writing:
            time.sleep(0.01)
        if metrics["step"] == killed_after:
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


@pytest.mark.ranks(2)
@pytest.mark.timeout(240)
def test_copies_stay_until_their_state_is_saved_and_go_where_the_run_continues_without_them(world, tokens, folder):
    job, own = job_of(tokens, {"data": 2, "zero": 1}, steps=26), world_on(world, 1)
    job = with_values(job, "checkpoint", every=12)
    copies = train_until_killed(own, job, folder / "killed", killed_after=23)
    assert [path.name for path in complete_copies(copies / "host0")][-1] == "step-00000017"
    own = world_on(world, 1)
    run = Run(own, job, folder / "killed", described(own))
    assert run.leg._first_step == 18
    run.train(stop_after=13)  # nothing is done, and nothing is saved
    own.agree(None)
    assert complete_copies(copies / "host0"), "the state after step 17 is nowhere else"
    own = world_on(world, 1)
    back = with_values(with_values(job, "recovery", copies=0), "checkpoint", resume="step-00000012")
    run = Run(own, back, folder / "killed", described(own))
    if run.lock:
        run.lock.release()
    own.agree(None)
    assert not copies.exists(), "what the run does from now on is another history"
    start_again(world_on(world, 1), job, folder / "killed", begun_after=12)


@pytest.mark.ranks(2)
@pytest.mark.timeout(240)
def test_copies_are_made_while_a_rank_rests_and_it_keeps_those_of_the_other(world, tokens, folder):
    job, own, seen = job_of(tokens, None, copies=2), world_on(world, 2), []
    run = Run(own, job, folder / "legs", described(own))
    step = run.console.step

    def step_is_done(metrics, *more) -> None:
        step(metrics, *more)
        while run.leg._saver.is_writing:
            time.sleep(0.01)
        if own.rank == 0 and metrics["step"] == 11:  # the copy after step 6 is complete by then
            hosts = SHARED_MEMORY / (folder / "legs" / "copies").read_text().strip()
            seen.extend([path.name for path in complete_copies(hosts / host)[-1].glob("part-*")] for host in HOSTS)

    run.console.step = step_is_done
    train_with_requests(run, {3: (RESIZE_FILE, "1"), 12: (RESIZE_FILE, "2")})
    own.agree(None)
    assert own.rank or seen == [["part-00000.h5"], ["part-00000.h5"]]
    assert own.rank or [leg["ranks"] for leg in legs_of(run)] == [1, 2]
    whole = Run(own, with_values(job, "recovery", copies=0), folder / "whole", described(own))
    whole.train()
    own.agree(None)
    assert largest_relative_difference(losses_of(run), losses_of(whole)) < 1e-5


@pytest.mark.ranks(2)
@pytest.mark.timeout(240)
def test_a_part_that_another_host_cannot_keep_is_said_and_training_continues(world, tokens, folder, monkeypatch):
    own, said = world_on(world, 2), []
    run = Run(own, job_of(tokens, {"data": 2, "zero": 1}, copies=2, steps=8), folder / "full", described(own))

    def is_full(*_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if own.rank == 1:
        monkeypatch.setattr(os, "posix_fallocate", is_full)
    monkeypatch.setattr(run.console, "say", said.append)
    run.train()
    own.agree(None)
    texts = [text for text in said if "no more copies in the memory of hosts" in text]
    assert len(texts) == 1 and "No space left on device" in texts[0]
    assert len(losses_of(run)) == 8


@pytest.mark.ranks(2)
def test_auto_is_for_ranks_that_a_script_starts_again(world, folder, monkeypatch):
    """Open MPI brings the script's variable to the first host alone, so that one rank decides."""
    own, counts = world_on(world, 2), [1000, 1000]
    asked = own, Recovery(), folder, counts, 0, 0.5
    monkeypatch.delenv(RESTARTS_VARIABLE, raising=False)
    copying, why = choose_copies(*asked)
    assert copying is None and "scripts of hpctrain mpirun and slurm do" in why
    if own.rank == 0:
        monkeypatch.setenv(RESTARTS_VARIABLE, "3")
    copying, why = choose_copies(*asked)
    assert copying
    assert (copying.every - 1) * 0.5 < interval_seconds(copying.predicted_seconds, 2) <= copying.every * 0.5
    assert f"every {copying.every} steps in /dev/shm" in why and "second ones of 2 ranks on other hosts" in why
    copying.copies.close(forget=True)
    if own.rank == 0:
        monkeypatch.setenv(RESTARTS_VARIABLE, "many")
    with pytest.raises(LaunchError, match=f"{RESTARTS_VARIABLE} = 'many': is no whole number"):
        choose_copies(*asked)


@pytest.mark.ranks(2)
def test_a_small_dev_shm_is_said_and_copies_go_into_the_folder_that_is_named(world, folder, monkeypatch):
    own, statvfs = world_on(world, 1), os.statvfs
    small = SimpleNamespace(f_frsize=1 << 20, f_blocks=64, f_bavail=16)
    monkeypatch.setattr(os, "statvfs", lambda path: small if path == SHARED_MEMORY else statvfs(path))
    counts, lacks = [1 << 20, 1 << 20], "host0:/dev/shm has room for 9.6 MiB of copies, and they need 16.0"
    copying, why = choose_copies(own, Recovery(copies=5), folder, counts, 0, None)
    assert (copying, why) == (None, f"off: {lacks}; name a folder of each host (recovery.copies_folder)")
    copying, why = choose_copies(own, Recovery(copies=5, copies_folder=folder / "none"), folder, counts, 0, None)
    assert (copying, why) == (None, f"off: {lacks}; host0:{folder / 'none'} cannot be written")
    copying, why = choose_copies(own, Recovery(copies=5, copies_folder=folder), folder, counts, 0, None)
    assert copying and copying.copies.folder.is_relative_to(folder)
    assert why.startswith(f"every 5 steps in {folder}, 16.0 MiB a host, no second ones") and why.endswith(lacks)
    copying.copies.close(forget=True)
    own.agree(None)
    if own.rank == 0:
        (folder / (folder / "copies").read_text().strip()).write_text("a file")
    own.agree(None)
    copying, why = choose_copies(own, Recovery(copies=5, copies_folder=folder), folder, counts, 0, None)
    assert copying is None and why.startswith("off: ") and "cannot be written" in why, "training goes on"


def damage(part: Path) -> None:
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
