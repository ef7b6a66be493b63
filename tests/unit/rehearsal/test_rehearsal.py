"""Pretended devices: what operations cost, what memory is counted, and which network is between them."""

import math
import time

import pytest
import torch

from hpctrain.comm.waiting import Condition, Patience, Phase, complete
from hpctrain.config.clusters.links import link_between
from hpctrain.config.clusters.truth import PretendDevice
from hpctrain.rehearsal.accelerator import RehearsedAccelerator
from hpctrain.rehearsal.clock import Clock, GroupTiming
from hpctrain.rehearsal.fabric import PretendedNetwork
from tests.pretended import CLUSTER

TRUTH = PretendDevice(memory_bytes=10**6, memory_bytes_per_second=1e12, flops_per_second={"fp32": 1e9})


def device(**changes) -> RehearsedAccelerator:
    return RehearsedAccelerator("pretended", TRUTH.model_copy(update=changes), Clock(), time_scale=1.0, seed=0)


def seconds_for(made: RehearsedAccelerator, work) -> float:
    taken = made.stopwatch()
    with made.running():
        work()
    return taken()


def test_a_product_is_computed_in_whole_tiles_and_slower_with_few_rows():
    truth = TRUTH.model_copy(update={"tile": (64, 32), "half_speed_rows": 64.0})
    assert truth.product_seconds("fp32", 64, 100, 32) == pytest.approx(2 * 64 * 100 * 32 / 1e9 * 2)
    assert truth.product_seconds("fp32", 1, 100, 1) == truth.product_seconds("fp32", 64, 100, 32)
    assert truth.product_seconds("fp32", 65, 100, 33) == pytest.approx(2 * 128 * 100 * 64 / 1e9 * 1.5)
    assert truth.product_seconds("fp32", 64, 100, 32, batch=3) == pytest.approx(6 * 64 * 100 * 32 / 1e9 * 2)


def test_small_operations_take_the_launch_and_large_ones_of_few_products_the_memory():
    truth = TRUTH.model_copy(update={"launch_seconds": 1e-3, "memory_bytes_per_second": 1e6})
    assert truth.product_seconds("fp32", 2, 2, 2) == 1e-3
    assert truth.product_seconds("fp32", 1000, 1, 1000) == pytest.approx(4 * (2 * 1000 + 10**6) / 1e6)
    assert truth.pass_seconds(100) == 1e-3 and truth.pass_seconds(10**4) == pytest.approx(1e-2)
    with pytest.raises(ValueError, match="a device that computes in fp32 was given bf16"):
        truth.product_seconds("bf16", 2, 2, 2)


def test_a_dtype_that_it_does_not_have_is_never_selected():
    assert device().products_per_second(torch.float32) == pytest.approx(1e9, rel=1e-3)
    assert device().products_per_second(torch.bfloat16) == 0.0


def test_forward_and_backward_of_a_product_are_three_products():
    made = device()
    x, weight = torch.randn(50, 40, requires_grad=True), torch.randn(30, 40, requires_grad=True)
    once = 2 * 50 * 40 * 30 / 1e9
    gradient = torch.ones(50, 30)
    assert seconds_for(made, lambda: x @ weight.t()) == pytest.approx(once, rel=1e-3)
    assert seconds_for(made, lambda: (x @ weight.t()).backward(gradient)) == pytest.approx(3 * once, rel=1e-3)
    total = torch.zeros(30, 40)
    assert seconds_for(made, lambda: total.addmm_(gradient.t(), x.detach())) == pytest.approx(once, rel=1e-3)


def test_causal_attention_is_half_of_its_products_and_backward_five_of_them():
    made = device()
    q, k, v = (torch.randn(2, 3, 64, 16, requires_grad=True) for _ in range(3))
    once = 2 * 2 * 3 * 64 * 16 * 64 / 1e9

    def attend(causal):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    assert seconds_for(made, lambda: attend(False)) == pytest.approx(2 * once, rel=1e-3)
    assert seconds_for(made, lambda: attend(True)) == pytest.approx(once, rel=1e-3)
    gradient = torch.ones(2, 3, 64, 16)
    assert seconds_for(made, lambda: attend(True).backward(gradient)) == pytest.approx(3.5 * once, rel=1e-2)


def test_of_a_table_only_the_rows_cost_of_a_fill_what_is_written_and_of_empty_memory_nothing():
    made = device(memory_bytes_per_second=1e8)
    table, rows, ids = torch.zeros(1000, 100), torch.ones(10, 100), torch.arange(10)
    assert seconds_for(made, lambda: torch.nn.functional.embedding(ids, table)) == pytest.approx(8e-5, rel=1e-3)
    assert seconds_for(made, lambda: table.index_add_(0, ids, rows)) == pytest.approx(1.2e-4, rel=1e-3)
    assert seconds_for(made, table.zero_) == pytest.approx(4e-3, rel=1e-3)
    assert seconds_for(made, lambda: torch.zeros_like(table)) == pytest.approx(4e-3, rel=1e-3)
    assert seconds_for(made, lambda: table.copy_(table.half())) == pytest.approx(6e-3 + 6e-3, rel=1e-3)
    assert seconds_for(made, lambda: table.new_empty(10**5)) == pytest.approx(0.0, abs=1e-6)


def test_views_cost_nothing_and_passes_their_bytes():
    made = device(memory_bytes_per_second=1e8)
    x = torch.ones(1000)
    assert seconds_for(made, lambda: x.view(10, 100).t().unsqueeze(0).detach()) == 0.0
    assert seconds_for(made, lambda: x + x) == pytest.approx(3 * 4000 / 1e8)
    assert seconds_for(made, lambda: x.mul_(2)) == pytest.approx(2 * 4000 / 1e8)


def test_time_is_scaled_and_really_passes():
    made = RehearsedAccelerator("pretended", TRUTH, Clock(), time_scale=10.0, seed=0)
    a = torch.ones(100, 100)
    start = time.monotonic()
    assert seconds_for(made, lambda: a @ a) == pytest.approx(2e-3, rel=1e-3)
    assert time.monotonic() - start > 18e-3


@pytest.mark.parametrize(
    ("operation", "moves_for", "seconds"),  # a product alone takes 2 ms
    [
        ("all_reduce", math.inf, 3e-3),
        ("all_reduce", 3e-3, 3e-3),
        ("all_gather", 1.5e-3, 2.5e-3),
        ("all_gather", 0.6e-3, 2.2e-3),
        ("all_reduce", -1e-3, 2e-3),
        ("all_reduce", None, 2e-3),
        ("send", math.inf, 2e-3),
        ("receive", 3e-3, 2e-3),
    ],
)
def test_computing_is_slower_while_collectives_move_bytes_and_what_communicates_is_not_charged(
    operation, moves_for, seconds
):
    made = device(overlap_slowdown=1.5)
    a = torch.ones(100, 100)
    pace = GroupTiming(made.clock)
    here = []

    def communicate():
        here.append(a @ a)
        known = None if moves_for is None else lambda: begun + moves_for
        yield Condition(lambda: True, "nothing", moving_until=known)

    steps = pace.steps(communicate(), operation)
    taken = made.stopwatch()
    begun = made.clock.now
    with made.running():
        next(steps)
        here.append(a @ a)
        complete(steps, "a test", Patience(Phase("a test", 1.0, "no.key")))
    assert taken() == pytest.approx(seconds, rel=1e-3)


def test_storages_count_as_long_as_they_live():
    made = device()
    with made.running():
        a = torch.zeros(1000)
        b = a[:500].view(50, 10)
        assert made.memory().used == 4000
        c = torch.zeros(500)
        assert made.memory().used == 6000
        del a, c
        assert made.memory() == (10**6, 4000, 6000)
        del b
        assert made.memory().used == 0
        with pytest.raises(torch.OutOfMemoryError, match="out of memory: 4000000 bytes more than the 0 in use"):
            torch.zeros(10**6)
        torch.zeros(100)


def test_the_network_is_that_of_the_clusters_links():
    network = PretendedNetwork(CLUSTER, dilation=2.0)
    for source in range(4):
        for target in range(4):
            if source != target:
                link, path = link_between(CLUSTER, source, target), network.paths[4 * source + target]
                assert path.latency_seconds == pytest.approx(2 * link.latency_seconds)
                assert min(network.bandwidths[port] for port in path.ports) == link.bytes_per_second / 2
    assert math.isinf(link_between(CLUSTER, 0, 1).shared_bytes_per_second)
