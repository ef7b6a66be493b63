"""Collectives of process groups: those of gloo stand for a maker's library, and a pretended device for his.

Gloo's calls return when all ranks have come, and those of a library on a device at once: see `test_torch_device.py`.
"""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch._C._distributed_c10d import ErrorType
from torch.distributed import distributed_c10d

from hpctrain.comm.accelerators.kinds import KINDS, DeviceKind
from hpctrain.comm.collectives import native
from hpctrain.comm.collectives.native import Connection, NativeCollectives
from hpctrain.config.errors import CommError
from tests.examples import costly
from tests.ranks.fake_devices import FakeAccelerator
from tests.ranks.given_on_ranks import given_on_ranks
from tests.ranks.gloo_groups import GlooGroup
from tests.ranks.small_runs import largest_relative_difference, losses, losses_of_one_rank
from tests.ranks.test_launches import PLANS, job_of
from tests.ranks.test_staged import FAMILIES, Pretended, cases, check_collectives

GLOO = DeviceKind(
    "gloo", "nobody", "cpu", (), library="Gloo", groups="tests.ranks.gloo_groups.GlooGroup", debug="GLOO_DEBUG=1"
)


@contextmanager
def of_kind(kind: DeviceKind = GLOO):
    """Make it the kind of the devices of family a."""
    with patch.dict(KINDS, {"gloo": kind}), patch.dict(FAMILIES, {"a": "gloo"}):
        yield


def pretended_ranks(world, families: str = "") -> Pretended:
    families = families or "a" * world.size
    return Pretended(world, families, native=True, device=FakeAccelerator(families[world.rank], kind="gloo"))


def case_of(world, dtype: str, size: int = 100) -> dict:
    ranks = list(range(world.size))
    counts = [0, *(3 * i for i in ranks[1:])]
    return {"ranks": ranks, "size": size, "dtype": dtype, "op": "sum", "counts": counts, "seed": 1}


@contextmanager
def called(names: list[tuple[str, torch.dtype]]):
    """List what process groups are asked for, and the dtypes."""
    run = NativeCollectives._run

    def noting(self, call, *arguments, **options):
        first = arguments[0]
        while isinstance(first, list):
            first = first[0]
        names.append((call, first.dtype))
        assert self._accelerator._stream is self._accelerator.launches.stream, "all launches are on one stream"
        run(self, call, *arguments, **options)

    with patch.object(NativeCollectives, "_run", noting):
        yield


@pytest.mark.timeout(120)
@given_on_ranks(cases(), max_examples=costly(40))
def test_collectives_agree_with_a_reference(world, case):
    """Of any of the ranks, in any order: only members call."""
    with of_kind():
        pretended = pretended_ranks(world)
        if world.rank not in case["ranks"]:
            return
        comm = pretended.group(case["ranks"])
        check_collectives(comm, case, pretended.later)
        assert comm.route_name == "Gloo"
        comm.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16", "int64"])
def test_what_is_asked_of_a_process_group(world, dtype):
    names: list = []
    with of_kind(GLOO._replace(not_summed=("float64",))), called(names):
        pretended = pretended_ranks(world)
        comm = pretended.group(range(world.size))
        del names[:]
        check_collectives(comm, case_of(world, dtype), pretended.later)
        comm.close()
    summed = [asked for call, asked in names if call in ("allreduce", "reduce_scatter", "_reduce_scatter_base")]
    own = {"fp32": torch.float32, "int64": torch.int64}
    assert set(summed) == ({own[dtype]} if dtype in own else set()), "others are summed by ourselves"
    assert {call for call, _ in names} >= {"_allgather_base", "allgather", "alltoall"}


@pytest.mark.timeout(60)
def test_connecting_has_a_limit_of_its_own_that_says_what_names_the_network(world, monkeypatch):
    """The library blocks the host while it connects, so that the watchdog must know how long that may take."""
    phases, before = [], world.patience.phase
    connect = NativeCollectives._connect

    def noting(self, has_pairs):
        phases.append(world.patience.phase)
        connect(self, has_pairs)

    monkeypatch.setattr(NativeCollectives, "_connect", noting)
    with of_kind(GLOO._replace(network="GLOO_IFNAME")):
        pretended = pretended_ranks(world)
        pretended.group(range(world.size)).close()
    (phase,) = phases
    assert phase.seconds == native.CONNECT_SECONDS and world.patience.phase is before
    assert str(phase).endswith("may take 300 s (GLOO_IFNAME names the network that joins the hosts)")


@pytest.mark.timeout(60)
def test_half_precision_is_summed_in_fp32(world):
    with of_kind():
        pretended = pretended_ranks(world)
        comm = pretended.group(range(world.size))
        for size in (1, 8, 20_000):
            tensor = pretended.later(torch.full((size,), 256.0 if comm.rank == 0 else 1.0, dtype=torch.bfloat16))
            comm.all_reduce(tensor)
            assert (tensor == torch.tensor(256.0 + (comm.size - 1)).bfloat16()).all()
        comm.close()
    assert not distributed_c10d._world.pg_map, "torch keeps nothing of it"


@pytest.mark.ranks(4)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("plan", [PLANS[1], PLANS[3], PLANS[4]], ids=str)
def test_training_with_all_overlaps_gives_the_bits_of_training_without(world, tokens, plan):
    alone = losses_of_one_rank(world, tokens, "gpt2", 3)
    results = []
    with of_kind():
        for on in (True, False):
            pretended = pretended_ranks(world)
            results.append(losses(pretended, job_of(tokens, plan, on), 3, pretended.device))
            pretended.close()
    assert results[0] == results[1]
    assert largest_relative_difference(results[0], alone) < 1e-5


def open_anew(world, host: str):
    return native.open_store(world.space.members(range(world.size)), host)


def refused(world) -> str:
    """Return why a group has no library; nobody waits for ever, and nobody goes by messages instead."""
    with pytest.raises(CommError) as error:
        pretended_ranks(world).group(range(world.size))
    reasons = world.all_objects(str(error.value))
    assert len(set(reasons)) == 1, "all ranks give the same reason"
    assert reasons[0].endswith("HPCTRAIN_NATIVE=0 does without it, through MPI")
    return reasons[0]


@pytest.mark.timeout(60)
def test_a_group_without_its_backend_is_refused_with_the_reason(world):
    with of_kind(GLOO._replace(groups="torch.distributed.ProcessGroupXCCL")):
        assert "Gloo refuses these" in (reason := refused(world)) and "XCCL" in reason and "GLOO_DEBUG=1" in reason


@pytest.mark.timeout(60)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_does_not_reach_the_store_is_an_error_on_all_ranks(world, failing):
    real = native.dist.TCPStore

    def store(*arguments, **options):
        if world.rank == failing:
            raise ConnectionError(f"rank {failing} has no network")
        return real(*arguments, **options)

    with of_kind(), patch.object(native.dist, "TCPStore", store), patch("tests.ranks.test_staged.store_of", open_anew):
        with pytest.raises(CommError) as error:
            pretended_ranks(world)
        reasons = world.all_objects(str(error.value))
    assert set(reasons) == {f"ConnectionError: rank {failing} has no network"}, "all ranks give the same reason"


@pytest.mark.timeout(90)
def test_a_rank_that_makes_no_group_is_an_error_on_all_ranks(world):
    real = GlooGroup.__init__

    def make(*arguments):
        if world.rank == 1:
            raise RuntimeError("no device is left")
        real(*arguments)

    few = patch.object(native, "GROUP_SECONDS", 3.0)
    with of_kind(), few, patch.object(GlooGroup, "__init__", make):
        assert "refuses these" in refused(world)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("leaves", [True, False])
def test_a_lost_peer_is_an_error_on_every_other_rank(world, leaves):
    """One that closes its connections, and one that is silent."""
    with of_kind(), patch.object(native, "GROUP_SECONDS", 3.0):
        pretended = pretended_ranks(world)
        comm = pretended.group(range(world.size))
        world.gather_objects(None)
        if world.rank == world.size - 1:
            if leaves:
                comm.abandon()
        else:
            with pytest.raises(CommError, match="Gloo reports: .*; a rank or its network may be gone"):
                for _ in range(3):  # who is no neighbour of the lost one may finish an operation, but not several
                    comm.all_reduce(pretended.later(torch.ones(1000)))
            comm.abandon()
        world.gather_objects(None)
        comm.abandon()


@pytest.mark.timeout(60)
def test_an_error_that_torch_notices_by_itself_ends_the_wait(world):
    with of_kind():
        pretended = pretended_ranks(world)
        comm = pretended.group(range(world.size))
        (native,) = comm._backend.collectives._natives
        connection = native.connection
        connection.look()
        native.check()
        connection.group.get_error = lambda: ErrorType.SUCCESS
        native.connection = Connection("Gloo", connection.group, pretended.device.launches, GLOO.debug)
        native.connection.look()
        native.check()
        connection.group.get_error = lambda: ErrorType.REMOTE_ERROR
        native.connection.look()
        with pytest.raises(CommError, match="Gloo reports: REMOTE_ERROR; .*GLOO_DEBUG=1 shows which"):
            native.check()
        world.gather_objects(None)
        comm.abandon()
