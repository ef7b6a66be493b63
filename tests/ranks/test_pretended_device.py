"""Whole training runs on a device that finds races, waits and mixed devices."""

import pytest
import torch

from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.data.order import open_datasets
from tests.ranks.pretended_device import DEVICE, NAME, MODULE, PretendedDevice, watched, WatchedNccl
from tests.ranks.small_runs import Alone, largest_relative_difference, losses, losses_of_one_rank, make_job, make_trainer
from tests.ranks.test_launches import PLANS, job_of
from tests.ranks.test_staged import Pretended

@pytest.mark.ranks(1)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_one_rank(world, tokens, model):
    job = make_job(tokens, model)
    with watched():
        got = losses(Alone(), job, 3, PretendedDevice())
        print(MODULE.waits)
    want = losses(Alone(), job, 3, CpuAccelerator())
    print(got, want)
    assert largest_relative_difference(got, want) < 1e-5

ROUTES = [dict(native=True), dict(), dict(direct="a")]

@pytest.mark.ranks(4)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_ranks(world, tokens, plan, route):
    alone = losses_of_one_rank(world, tokens, "gpt2", 3)
    with watched():
        device = PretendedDevice()
        pretended = Pretended(world, "aaaa", device=device, library=WatchedNccl(world.raw_mpi), **route)
        got = losses(pretended, job_of(tokens, plan, True), 3, device)
        pretended.close()
        if world.rank == 0: print(len(MODULE.waits), MODULE.waits[:10])
    assert largest_relative_difference(got, alone) < 1e-5
