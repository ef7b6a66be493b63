"""What other software does differently from our engine, as physics: less is sent, kept or waited for, by how much."""

from dataclasses import replace

import pytest

from hpctrain.plan import TensorGrid
from hpctrain.planner.cost import Setup, item_cost
from hpctrain.planner.described import DescribedRun
from hpctrain.planner.devices import DeviceModel
from hpctrain.planner.messages import arrivals
from hpctrain.planner.network import ClusterNetwork
from hpctrain.planner.stack import EAGER, MEGATRON, Stack

# Two stages of eight gaming cards each, a node a stage, one slow port a node.
CARDS = DescribedRun(
    4096, 8, 32, 2048, 8, 2, 1, 1, 8, "RTX-3090", network="Ethernet-10", nics_per_node=1, dtype="fp16", tie_head=False
)


def message_seconds(run: DescribedRun, stack: Stack) -> float:
    setup: Setup = run.setup(stack)
    return max(arrivals(setup, run.plan, ClusterNetwork(run.cluster, is_nccl=True)).values())[0]


def test_ranks_of_a_stage_share_a_message_and_gather_it_inside_the_node():
    whole = message_seconds(CARDS, replace(MEGATRON, cuts_messages=False))
    cut = message_seconds(CARDS, MEGATRON)
    scattered = message_seconds(CARDS, replace(MEGATRON, cuts_messages=False, sequence_parallel=True))
    num_bytes = 2048 * 4096 * 2
    once = num_bytes / (1.25e9 * 0.5)
    assert whole == pytest.approx(8 * once, rel=0.01), "eight copies through one port"
    assert scattered == pytest.approx(once, rel=0.05), "an eighth each"
    assert scattered < cut < 1.3 * once, "and gathered in the node"


def test_products_whose_dims_are_no_multiples_take_longer():
    device = DeviceModel("a", CARDS.cluster.families["RTX-3090"])
    whole, half, odd = (device.product_seconds("fp16", 4096, 1024, n) for n in (50304, 50272, 50257))
    assert whole < half < odd
    assert half == pytest.approx(1.05 * whole, rel=0.02)
    assert odd == pytest.approx(1.33 * whole, rel=0.02)
    assert device.product_seconds("fp32", 4096, 1024, 50257) <= device.product_seconds("fp32", 4096, 1024, 50304)


def test_megatron_pads_its_vocabulary_and_others_do_not():
    run = replace(CARDS, vocabulary=50257, tensor=1, pipeline=1)

    def columns(stack: Stack) -> int:
        return item_cost(run.setup(stack), TensorGrid(), run.layers + 1, 1).forward.products[0].n

    assert columns(MEGATRON) == 50304
    assert columns(EAGER) == 50257
