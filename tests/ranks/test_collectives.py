"""Collectives and channels against a float64 reference, over random groups, sizes, dtypes and routes."""

import errno
import itertools
import os
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from hpctrain.comm.collectives.shared import MIN_SLOT_BYTES, SLOT_BYTES, SharedCollectives
from hpctrain.comm.groups.settings import Settings
from hpctrain.comm.topology import Place, Topology, candidates
from hpctrain.comm.transports.transport import HostTransport
from hpctrain.comm.waiting import Patience, Phase
from hpctrain.comm.world import World
from hpctrain.config.errors import CommError
from hpctrain.sharding.intervals import Interval
from tests.examples import costly
from tests.ranks.given_on_ranks import given_on_ranks
from tests.ranks.small_runs import by

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
INTEGERS = {"int64": torch.int64, "int32": torch.int32}
# One rounding of the result; the sum itself is done in fp32 or better.
ROUNDING = {"fp32": 1e-6, "bf16": 2**-8, "fp16": 2**-11, "fp64": 1e-14}
SIZES = st.one_of(st.integers(1, 40), st.sampled_from([2048, 2049, SLOT_BYTES // 4 - 1, SLOT_BYTES // 4 * 2 + 5]))


def doubling(operation: str, num_bytes: int, ranks, by_domains: bool) -> str:
    """Choose as networks do whose links make doubling the fastest where there are no domains."""
    first = candidates(operation, num_bytes, len(ranks), by_domains)[0]
    return first if first == "domains" else "doubling"


NETWORKS = {"exchange": None, "doubling": SimpleNamespace(algorithm=doubling, bytes_under_way=lambda ranks: 1 << 24)}
"""By the algorithm of all-reduces over messages."""


@contextmanager
def having(world, settings: Settings):
    """Make groups by other settings, while it lasts."""
    before, world.settings = world.settings, settings
    try:
        yield
    finally:
        world.settings = before


@st.composite
def cases(draw):
    """A route over hosts and families, a group in any order, a size, a dtype, an operation, uneven counts, a seed."""
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    ranks = draw(st.permutations(range(size)))[: draw(st.integers(2, size))]
    counts = draw(st.lists(st.integers(0, 3000), min_size=len(ranks), max_size=len(ranks)))
    return {
        "shares_memory": draw(st.booleans()),
        "algorithm": draw(st.sampled_from(sorted(NETWORKS))),
        "families": draw(st.lists(st.sampled_from("abc"), min_size=size, max_size=size)),
        "hosts": draw(st.sampled_from([["h"] * size, [f"h{i % 2}" for i in range(size)]])),
        "ranks": ranks,
        "size": draw(SIZES),
        "dtype": draw(st.sampled_from(sorted(DTYPES | INTEGERS))),
        "op": draw(st.sampled_from(["sum", "max", "min"])),
        "counts": counts,
        "seed": draw(st.integers(0, 2**31)),
    }


def contribution(case, position: int, size: int) -> torch.Tensor:
    """What the rank at a position of the group brings; every rank can compute everybody's."""
    values = np.random.default_rng([case["seed"], position]).normal(size=size) * 100
    return torch.from_numpy(values).to((DTYPES | INTEGERS)[case["dtype"]])


def reduced(case, size: int) -> torch.Tensor:
    """The float64 reference."""
    parts = torch.stack([contribution(case, i, size).double() for i in range(len(case["ranks"]))])
    return {"sum": parts.sum(0), "max": parts.amax(0), "min": parts.amin(0)}[case["op"]]


def assert_close(case, result: torch.Tensor, expected: torch.Tensor, op: str):
    rounding = ROUNDING.get(case["dtype"], 0) if op == "sum" else 0
    magnitude = 100 * 4 * len(case["ranks"])  # of the terms: cancellation loses what they had
    scale = expected.abs() * rounding + magnitude * min(rounding, ROUNDING["fp32"])
    assert ((result.double() - expected).abs() <= scale).all()


def check_all_to_all(comm, case, put):
    """Exchange parts of any sizes and in any order, also empty ones; what lies between parts stays as it is.

    `put` brings values to where tensors are. A part of `counts[i] // (j + 1)` elements goes from i to j.
    """
    me, counts, sent, dtype = comm.rank, case["counts"], comm.bytes_sent, (DTYPES | INTEGERS)[case["dtype"]]
    before = list(sent)

    def cuts_of(sizes) -> list[Interval]:
        """Put parts one after the other from the last one on, each behind an element that belongs to none."""
        bounds = np.cumsum([1 + size for size in reversed(sizes)]).tolist()
        return [Interval(stop - size, stop) for size, stop in zip(sizes, reversed(bounds), strict=True)]

    cuts = [cuts_of([counts[i] // (j + 1) for j in range(comm.size)]) for i in range(comm.size)]
    out_cuts = cuts_of([counts[i] // (me + 1) for i in range(comm.size)])
    whole = [contribution(case, i, cuts[i][0].stop) for i in range(comm.size)]
    given, out = put(whole[me]), put(torch.full((out_cuts[0].stop,), 7, dtype=dtype))
    assert comm.all_to_all(given, out, cuts[me], out_cuts) is out
    expected = torch.full((out_cuts[0].stop,), 7, dtype=dtype)
    for i, cut in enumerate(out_cuts):
        expected[slice(*cut)] = whole[i][slice(*cuts[i][me])]
    assert torch.equal(out.cpu(), expected)
    by_message = [now - earlier for now, earlier in zip(sent, before, strict=True)]
    others = [0 if j == me else cuts[me][j].size * given.element_size() for j in range(comm.size)]
    assert all(size in (0, others[j]) for j, size in enumerate(by_message))
    assert by_message == others or comm.route_name != "MPI on host memory"

    even = contribution(case, me, 3 * comm.size)
    received = put(torch.zeros(3 * comm.size, dtype=dtype))
    comm.start_all_to_all(put(even), received).wait()
    parts = [contribution(case, i, 3 * comm.size)[3 * me : 3 * me + 3] for i in range(comm.size)]
    assert torch.equal(received.cpu(), torch.cat(parts))


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.timeout(120)
@given_on_ranks(cases(), max_examples=costly(120))
def test_collectives_agree_with_a_reference(world, case):
    if world.rank not in case["ranks"]:
        return
    places = tuple(Place(*place) for place in zip(case["hosts"], case["families"], strict=True))
    topology, network = Topology(places, case["shares_memory"]), NETWORKS[case["algorithm"]]
    with having(world, replace(world.settings, topology=topology, network=network)):
        comm = world.group(case["ranks"])

    try:
        me, size = comm.rank, case["size"]
        tensor = contribution(case, me, size)
        comm.all_reduce(tensor, case["op"])
        assert_close(case, tensor, reduced(case, size), case["op"])
        everywhere = tensor.clone()
        comm.all_reduce(everywhere, "max")
        assert torch.equal(everywhere, tensor), "the result is the same bits on every rank"

        bounds = np.cumsum([0, *case["counts"]]).tolist()
        cuts = [Interval(a, b) for a, b in itertools.pairwise(bounds)]
        total, own = bounds[-1], slice(*cuts[me])
        out = torch.empty(cuts[me].size, dtype=tensor.dtype)
        given = contribution(case, me, total)
        comm.reduce_scatter(given, out, cuts)
        given.zero_()  # whoever returns is done with it, and so are the others
        assert_close(case, out, reduced(case | {"op": "sum"}, total)[own], "sum")

        gathered = torch.zeros(total, dtype=tensor.dtype)
        gathered[own] = contribution(case, me, total)[own]
        comm.all_gather(gathered, cuts)
        expected = torch.cat([contribution(case, i, total)[slice(*cut)] for i, cut in enumerate(cuts)])
        assert torch.equal(gathered, expected)

        check_all_to_all(comm, case, lambda values: values)
        common = comm.allocate_common(comm.size, torch.int64, tensor.device)
        assert (common is not None) == (comm.route_name == "shared memory")
        if common is not None:
            common[me] = me
            comm.barrier()
            assert common.tolist() == list(range(comm.size))

        if comm.size == 2:
            token = torch.tensor([me])
            if me:
                comm.receive(token)
                assert token == 0
            else:
                comm.send(token)
        comm.barrier()
    finally:
        comm.close()


@pytest.mark.timeout(60)
def test_ranks_share_no_large_array_where_shared_memory_is_too_small(world, monkeypatch):
    from hpctrain.comm.transports import window

    comm = world.group(range(world.size))
    if world.rank == world.size - 1:  # one host of several, say
        monkeypatch.setattr(window, "free_bytes", lambda: 1 << 20)
    assert comm.allocate_common(1 << 20, torch.float32, torch.device("cpu")) is None
    comm.close()


@pytest.mark.timeout(60)
def test_little_shared_memory_makes_small_slots_and_the_same_sums(world, monkeypatch):
    from hpctrain.comm.transports import window

    monkeypatch.setattr(window, "free_bytes", lambda: (4 if world.rank else 3) << 20)
    comm = world.group(range(world.size))
    shared = comm._collectives
    assert isinstance(shared, SharedCollectives) and shared._window.bytes[0].numel() == 2 * MIN_SLOT_BYTES
    tensor = torch.arange(3 * MIN_SLOT_BYTES, dtype=torch.float32)
    expected = tensor * world.size
    comm.all_reduce(tensor)
    assert torch.equal(tensor, expected)
    for counts in ([50_000] + [7] * (world.size - 1), [7] * (world.size - 1) + [50_000]):  # who sends most has chunks
        check_all_to_all(comm, {"counts": counts, "dtype": "bf16", "seed": 3}, lambda values: values)
    comm.close()


@pytest.mark.ranks(2)
@pytest.mark.timeout(60)
def test_a_channel_without_room_in_shared_memory_sends_messages(world, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "full")

    if world.rank:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    channel = world.channel(1 - world.rank, num_bytes=4000, depth=2)
    assert channel.route_name != "shared memory" and "--shm-size" in channel.reason
    sent, received = torch.full((1000,), float(world.rank)), torch.empty(1000)
    channel.send(sent)
    channel.receive(received)
    assert (received == 1 - world.rank).all()
    channel.close()


@pytest.mark.ranks(2)
@pytest.mark.timeout(60)
def test_shared_memory_that_fails_otherwise_than_for_lack_of_room_is_an_error(world, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "broken")

    comm = world.group([0, 1])
    if world.rank:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(CommError, match="cannot share memory in .*broken"):
        world.channel(1 - world.rank, num_bytes=4000, depth=2)
    with pytest.raises(CommError, match="cannot share memory in .*broken"):
        comm.allocate_common(1000, torch.float32, torch.device("cpu"))
    comm.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["auto", "messages"])
def test_half_precision_is_summed_in_fp32(world, name):
    with having(world, by(name, world.settings)):
        comm = world.group(range(world.size))
    for size in (8, 20_000):  # both algorithms
        tensor = torch.full((size,), 256.0 if comm.rank == 0 else 1.0, dtype=torch.bfloat16)
        comm.all_reduce(tensor)
        exact = 256.0 + (comm.size - 1)  # bf16 additions one by one would lose every 1.0
        assert tensor[0] == torch.tensor(exact).bfloat16()
        assert (tensor == tensor[0]).all()


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["auto", "messages"])
def test_channels_keep_order_in_both_directions(world, name):
    peer = world.rank ^ 1
    with having(world, by(name, world.settings)):
        channel = world.channel(peer, num_bytes=4 * 1000, depth=3)
    for size in (1, 1000, 17):  # up to `depth` messages may be in flight in each direction
        channel.send(torch.full((size,), world.rank * 1000.0 + size))
    for size in (1, 1000, 17):
        received = torch.empty(size)
        channel.receive(received)
        assert (received == peer * 1000.0 + size).all()
    channel.close()


@pytest.mark.ranks(2)
@pytest.mark.timeout(60)
def test_what_is_expected_arrives_before_it_is_received(world, monkeypatch):
    """A large message waits at its sender until somebody has said where it goes."""
    if not world.has_threads:
        pytest.skip("this MPI has no threads, and nothing moves while the rank computes")
    monkeypatch.setattr(HostTransport, "polls_freely", True)
    size, number = 4 << 20, 3
    with having(world, by("messages", world.settings)):
        channel = world.channel(1 - world.rank, num_bytes=4 * size, depth=1)
        summary = world.group([0, 1])
    if world.rank == 0:
        for i in range(number):  # with a depth of one each waits for the one before to have gone
            channel.send(torch.full((size,), float(i)))
        summary.barrier()
    else:
        arrivals = [torch.empty(size) for _ in range(number)]
        for arrival in arrivals:
            channel.expect(arrival)
        summary.barrier()
        for i, arrival in enumerate(arrivals):
            channel.receive(arrival)
            assert (arrival == i).all()
    channel.close()
    summary.close()


@pytest.mark.timeout(60)
def test_a_waiting_rank_does_not_burn_its_core(world):
    comm = world.group(range(world.size))
    comm.barrier()
    if comm.rank == 0:
        time.sleep(1.0)
    start = time.process_time()
    comm.barrier()
    assert time.process_time() - start < 0.2, "a second of waiting costs less than 0.2 s of CPU"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["auto", "messages"])
def test_a_missing_rank_is_named_after_the_timeout(world, name):
    before, world.patience = world.patience, Patience(Phase("a test", 0.5, "no.key"))
    with having(world, by(name, world.settings)):
        comm, lanes = world.group(range(world.size)), world.group(range(world.size), overlapped=True)
    world.patience = before
    if comm.rank != comm.size - 1:
        missing = rf"rank {comm.size - 1} of {comm.size}"
        others = missing if name == "auto" else f"the other {comm.size - 1} ranks"
        with pytest.raises(CommError, match=rf"waited \d+ s for {others} in all_to_all"):
            comm.all_to_all(torch.ones(comm.size), torch.ones(comm.size))
        started = lanes.start_all_to_all(torch.ones(comm.size), torch.ones(comm.size))
    comm.abandon()
    lanes.abandon()
    if comm.rank != comm.size - 1:
        with pytest.raises(CommError, match="all_to_all of group was abandoned while it was in flight"):
            started.wait()


@pytest.mark.timeout(60)
def test_a_missing_rank_of_a_sum_is_named_after_the_timeout(world):
    before, world.patience = world.patience, Patience(Phase("a test", 0.5, "no.key"))
    comm = world.group(range(world.size))
    world.patience = before
    if comm.rank != comm.size - 1:
        with pytest.raises(CommError, match=rf"waited \d+ s for rank {comm.size - 1} of {comm.size} in all_reduce"):
            comm.all_reduce(torch.ones(3))
    comm.abandon()


@pytest.mark.ranks(2)
@pytest.mark.timeout(60)
def test_without_threads_a_rank_that_waits_moves_all_that_is_in_flight(world, monkeypatch):
    """Else one waits for a step of the other's lane, and that one for the group's operation."""
    monkeypatch.setattr(World, "has_threads", False)
    monkeypatch.setattr(world, "_engine", None)
    monkeypatch.setattr(world, "patience", Patience(Phase("a test", 20.0, "no.key")))
    group, overlapped = world.group(range(world.size)), world.group(range(world.size), overlapped=True)
    many, one = torch.ones(4 << 20), torch.ones(1)
    operation = overlapped.start_all_reduce(many)
    if world.rank == 1:
        operation.wait()
    group.all_reduce(one)
    if world.rank != 1:
        operation.wait()
    assert (many == world.size).all() and one.item() == world.size
    overlapped.close()
    group.close()


@pytest.mark.timeout(60)
def test_lanes_move_while_the_main_thread_does_something_else(world):
    first, second = (world.group(range(world.size), overlapped=True) for _ in range(2))
    ones, counts = torch.ones(300_000), torch.arange(5.0)
    started = [first.start_all_reduce(ones), first.start_all_gather(ones), second.start_all_reduce(counts)]
    deadline = time.monotonic() + 30
    while not all(operation.ended for operation in started):  # nobody polls but the thread
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for operation in started:
        operation.wait()
    assert (ones == world.size).all()
    assert counts.tolist() == [world.size * i for i in range(5)]
    for group in (first, second):
        group.close()


@pytest.mark.timeout(60)
def test_a_lane_keeps_its_order_and_reports_what_it_waits_for(world):
    before, world.patience = world.patience, Patience(Phase("a test", 0.5, "no.key"))
    group = world.group(range(world.size), overlapped=True)
    world.patience = before
    if world.rank:
        started = [group.start_all_reduce(torch.ones(3)), group.start_all_gather(torch.ones(3))]
        with pytest.raises(CommError, match=r"waited \d+ s for its turn in all_gather"):
            started[1].wait()
        with pytest.raises(CommError, match=r"waited \d+ s for rank 0 of \d+ in all_reduce"):
            started[0].wait()
    group.abandon()


@pytest.mark.timeout(60)
def test_what_does_not_fit_is_refused_before_anybody_waits(world):
    comm = world.group(range(world.size))
    with pytest.raises(CommError, match="no reduction 'mean'; there are sum, max, min"):
        comm.all_reduce(torch.ones(4), "mean")
    with pytest.raises(CommError, match="no reduction 'mean'; there are sum, max, min"):
        comm.reduce_scatter(torch.ones(2 * world.size), torch.ones(2), op="mean")
    with pytest.raises(CommError, match="not contiguous"):
        comm.all_reduce(torch.ones(4, 4).t())
    with pytest.raises(CommError, match=f"1 elements of output, where rank {world.rank} gets 2"):
        comm.reduce_scatter(torch.ones(2 * world.size), torch.ones(1))
    own = [Interval(0, 2 if i == world.rank else 1) for i in range(world.size)]
    with pytest.raises(CommError, match=f"rank {world.rank} sends 2 elements to itself, and gets 1"):
        comm.all_to_all(torch.ones(2), torch.ones(world.size), own)
    with pytest.raises(CommError, match=f"1 cuts up to 2 for {world.size} ranks and 1 elements"):
        comm.all_to_all(torch.ones(2), torch.ones(1), own, [Interval(0, 2)])
    if comm.size > 2:
        with pytest.raises(CommError, match=f"a message in a group of {comm.size} ranks; groups of two have messages"):
            comm.send(torch.ones(1))
    comm.close()
