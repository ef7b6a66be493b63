"""Experts of other software: what ranks hold of them, what they send each other, and published runs of Grok 1."""

from dataclasses import replace

import pytest

from benchmarks.evidence.published import summary
from hpctrain.config.errors import PlanError
from hpctrain.planner.prices.cost import layer_cost
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.items import BLOCK
from hpctrain.sharding.parameters import count_parameters
from hpctrain.software.run import DescribedRun
from hpctrain.software.software import EXPERT_RANKS

RUN = DescribedRun(
    2048,
    4,
    16,
    2048,
    tensor=1,
    pipeline=1,
    data=16,
    microbatch=1,
    global_batch=16,
    accelerator="H100",
    network="NDR",
    ffn=1024,
    architecture="mixtral",
    num_experts=16,
    experts_per_token=4,
    expert_parallel=8,
    dtype="bf16",
    zero=1,
    stack="megatron-core",
    tie_head=False,
)
OF_EXPERTS = RUN.layers * 16 * 3 * 2048 * 1024


def test_ranks_hold_their_own_experts_and_share_moments_with_those_that_have_the_same():
    dense, own = count_parameters(RUN.model) - OF_EXPERTS, OF_EXPERTS // 8
    needed = RUN.memory()[0].memory
    assert needed.weights == pytest.approx(2 * (dense + own))
    assert needed.moments == pytest.approx(12 * (dense / 16 + own / 2), rel=1e-3)
    cut = replace(RUN, tensor=2, data=8, expert_parallel=4, expert_tensor=2)
    assert cut.memory()[0].memory.weights == pytest.approx(2 * (dense / 2 + own), rel=0.01)


def test_tokens_go_to_other_nodes_by_each_ranks_own_port():
    network = RUN.setup().network(RUN.cluster)
    num_bytes = 1 << 30
    inside = network.group_seconds("all_to_all", num_bytes, range(8))
    across = network.group_seconds("all_to_all", num_bytes, range(16))
    assert across == pytest.approx(num_bytes / 2 / (50e9 * 0.85), rel=0.02), "half of them, by 400 Gb/s"
    assert inside < across / 4
    once = replace(RUN, dispatches_once=True).setup().network(RUN.cluster)
    ranks, nodes = 16 * (1 - (15 / 16) ** 4), 2 * (1 - 0.5**4)
    seconds = once.group_seconds("all_to_all", num_bytes, range(16))
    assert seconds == pytest.approx(num_bytes * nodes / 2 / ranks / (50e9 * 0.85), rel=0.02)


def test_what_experts_exchange_is_exposed_unless_it_overlaps():
    far = replace(RUN, expert_parallel=16)
    near, across, once = (run.predict() for run in (RUN, far, replace(far, dispatches_once=True)))
    hidden = replace(far, overlaps_experts=True).predict()
    exposed = [each.breakdown_seconds["tensor"] for each in (near, hidden, once, across)]
    assert 0 < exposed[0] < exposed[2] < exposed[3] and exposed[1] < exposed[3]
    assert near.mfu == pytest.approx(across.mfu * across.step_seconds / near.step_seconds), "the model's operations"


def test_no_product_hides_two_exchanges():
    setup = replace(RUN, overlaps_experts=True).setup()
    cost = layer_cost(setup, TensorGrid(), BLOCK, 1)
    for work in (cost.forward, cost.backward_input):
        behind = [id(each) for exchange in work.exchanges if exchange.axis == EXPERT_RANKS for each in exchange.behind]
        assert len(behind) == len(set(behind)) == 2


def test_experts_that_ranks_cannot_share_are_refused():
    whole = {"expert_parallel": 1, "tensor": 2, "data": 8}  # each rank of a tensor group has all, of its own tokens
    for values in ({"expert_parallel": 3}, {"num_experts": None}, {"tensor": 16, "data": 1}, {"zero": 3}, whole):
        with pytest.raises(PlanError, match="expert_parallel . x expert_tensor 1 must be a multiple of tensor = "):
            replace(RUN, **values)


def test_published_runs_of_grok_are_predicted():
    rows = [row for row in summary("", "grok_h100_gb200.csv").rows if row.run.num_devices <= 64]
    off = [row.run.predict().step_seconds / row.seconds - 1 for row in rows]
    assert len(off) == 8 and max(map(abs, off)) < 0.1
