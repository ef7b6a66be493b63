"""What other software does differently from our engine, as physics: less is sent, kept or waited for, by how much."""

from dataclasses import replace

import pytest

from hpctrain.planner.prediction.arrivals import arrivals
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.cost import layer_cost, layer_elements
from hpctrain.planner.prices.devices import DeviceModel
from hpctrain.planner.prices.setup import HPCTRAIN, Setup
from hpctrain.planner.prices.work import Exchange, PassWork
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import BLOCK, layers
from hpctrain.software.deepspeed import DEEPSPEED, EAGER
from hpctrain.software.megatron import MEGATRON, MEGATRON_2020
from hpctrain.software.nccl import NcclNetwork
from hpctrain.software.predictor import SoftwarePredictor
from hpctrain.software.run import DescribedRun
from hpctrain.software.software import SoftwareVersion

# Two stages of eight gaming cards each, a node a stage, one slow port a node.
CARDS = DescribedRun(
    4096, 8, 32, 2048, 8, 2, 1, 1, 8, "RTX-3090", network="Ethernet-10", nics_per_node=1, dtype="fp16", tie_head=False
)


def message_seconds(run: DescribedRun, software: SoftwareVersion) -> float:
    setup = run.setup(software)
    return max(arrivals(setup, run.plan, NcclNetwork(run.cluster)).values()).seconds


def test_ranks_of_a_stage_share_a_message_and_gather_it_inside_the_node():
    whole = message_seconds(CARDS, replace(MEGATRON, gathers_parts=False))
    cut = message_seconds(CARDS, MEGATRON)
    scattered = message_seconds(CARDS, replace(MEGATRON, sequence_parallel=True))
    num_bytes = 2048 * 4096 * 2
    once = num_bytes / (1.25e9 * 0.85)
    assert whole == pytest.approx(8 * once, rel=0.01), "eight copies through one port"
    assert message_seconds(CARDS, MEGATRON_2020) == pytest.approx(whole)
    assert scattered == pytest.approx(once, rel=0.05), "an eighth each"
    assert scattered < cut < 1.3 * once, "and gathered in the node"


def test_sockets_are_discounted_once():
    """By the hosts' copies, not again by the software's share; but DeepSpeed's share was measured on sockets."""
    two = replace(CARDS, tensor=1, devices_per_node=1, dtype="fp32")
    whole = 2048 * 4096 * 4 / 1.25e9
    for stack, share in ((EAGER, 0.85), (replace(EAGER, link_share=0.3), 0.85), (DEEPSPEED, 0.85 * 0.58)):
        network = two.setup(stack).network(two.cluster)
        seconds = network.seconds(0, 1, 2048 * 4096 * 4) - network.latency_seconds(0, 1)
        assert two.num_devices == 2 and seconds == pytest.approx(whole / share, rel=0.01), stack.name


def test_products_whose_dims_are_no_multiples_take_longer():
    device = DeviceModel("a", CARDS.cluster.families["RTX-3090"])
    whole, half, odd = (device.product_seconds("fp16", 4096, 1024, n) for n in (50304, 50272, 50257))
    assert whole < half < odd
    assert half == pytest.approx(1.05 * whole, rel=0.02)
    assert odd == pytest.approx(1.33 * whole, rel=0.02)
    assert device.product_seconds("fp32", 4096, 1024, 50257) <= device.product_seconds("fp32", 4096, 1024, 50304)


def test_batched_products_that_tensor_cores_cannot_load_are_computed_without_them():
    device = DeviceModel("a", replace(CARDS, accelerator="A100-80").cluster.families["A100-80"])
    heads = [device.product_seconds("fp16", 2048, size, 2048, batch=64) for size in (104, 108, 112)]
    assert heads[0] < heads[2] < 0.2 * heads[1]
    assert heads[1] == device.product_seconds("fp32", 2048, 108, 2048, batch=64)
    one, odd = (device.product_seconds("fp16", 4096, 4096, n) for n in (4096, 4092))
    assert odd < 1.4 * one, "a single product is padded"


def test_a_host_that_waits_for_each_operation_starts_none_ahead():
    run = replace(CARDS, accelerator="A100-80", stack="megatron-deepspeed")
    ahead, waiting = (replace(run, blocking_launches=each).predict().step_seconds for each in (False, True))
    operations = 4 * (30 + 50 + 18)  # of the blocks of a stage
    passes = 8 + 1  # of the slower stage, after the other's first
    assert waiting - ahead == pytest.approx(passes * operations * DEEPSPEED.dispatch_seconds, rel=0.15)


def test_a_pass_of_small_operations_takes_its_hosts_time_and_collectives_are_operations():
    def seconds(accelerator: str, exchanges: int = 0, measured: float | None = None) -> float:
        family = replace(CARDS, accelerator=accelerator).cluster.families[accelerator]
        family = family.model_copy(update={"operation_seconds": measured or family.operation_seconds})
        work = PassWork(operations=20, exchanges=[Exchange("y", "all_reduce", 8)] * exchanges)
        return DeviceModel("a", family).work_seconds(work, "bf16", MEGATRON)

    assert seconds("H100") == pytest.approx(20 * 10e-6)
    assert seconds("GH200") == pytest.approx(20 * 50e-6), "Grace"
    assert seconds("GH200", 4) == pytest.approx(24 * 50e-6)
    assert seconds("H100", measured=30e-6) == pytest.approx(20 * 30e-6), "as probed"


def test_interleaving_shortens_no_wait_for_a_slower_stage():
    run = replace(CARDS, vocabulary=512_000, network="NDR", global_batch=16)
    plain, twice = (replace(run, interleave=each).predict() for each in (1, 2))
    slowest = plain.step_seconds - plain.breakdown_seconds["data"] - plain.breakdown_seconds["optimizer"]
    assert 16 / 17 * slowest < twice.step_seconds < plain.step_seconds


def test_megatron_pads_its_vocabulary_and_others_do_not():
    run = replace(CARDS, vocabulary=50257, tensor=1, pipeline=1)

    def columns(software: SoftwareVersion) -> int:
        setup = run.setup(software)
        return layer_cost(setup, TensorGrid(), setup.head, 1).forward.products[0].n

    assert columns(MEGATRON) == 50304
    assert columns(EAGER) == 50257


def test_recomputing_whole_blocks_keeps_a_part_of_their_inputs_where_norms_are_cut():
    run = replace(CARDS, recompute="full", microbatch=4, global_batch=32)
    whole, cut = (replace(run, sequence_parallel=each).memory()[0].memory.activations for each in (False, True))
    assert cut == pytest.approx(whole / run.tensor, rel=0.02)


def test_others_recompute_whole_blocks_and_neither_embedding_nor_head():
    theirs = replace(CARDS, tensor=1, pipeline=1).setup()
    ours = Setup(theirs.model, theirs.positions, theirs.dtype, HPCTRAIN)
    for setup, layer, again in ((theirs, theirs.head, 0), (theirs, BLOCK, 1), (ours, ours.head, 1), (ours, BLOCK, 1)):
        plain, full = (layer_cost(setup, TensorGrid(), layer, 1, recompute) for recompute in ("none", "full"))
        more = len(full.backward_input.products) - len(plain.backward_input.products)
        assert more == again * len(plain.forward.products), (setup.engine.name, layer)


def test_a_distributed_optimizer_needs_what_megatrons_readme_says():
    run = replace(CARDS, dtype="bf16", zero=1, data=4, tensor=1, pipeline=1, global_batch=32, stack="megatron-core")
    memory, weights = run.memory()[0].memory, 12 * 4096**2 * 8 + 2 * 4096 * 51200
    result = (memory.weights + memory.gradients + memory.moments) / weights
    assert result == pytest.approx(6 + 12 / 4, rel=0.03)


def test_each_communicator_takes_memory():
    def needed(run: DescribedRun, num_bytes: float) -> int:
        setup = run.setup(replace(MEGATRON, communicator_bytes=num_bytes))
        return Predictor(setup, run.plan, run.cluster).memory[0].memory.total

    for data, groups in ((1, 2), (4, 3)):  # of the tensor grid, between stages, of replicas
        run = replace(CARDS, data=data, global_batch=32)
        assert needed(run, 1e9) - needed(run, 0.0) == pytest.approx(groups * 1e9)


def test_zero_0_of_other_software_stays_0_where_families_hold_the_same():
    run = replace(CARDS, tensor=1, pipeline=1, data=2, devices_per_node=1, global_batch=8)
    nodes = [run.cluster.nodes[0].model_copy(update={"count": 1, "devices": {name: 1}}) for name in ("one", "other")]
    families = {name: run.cluster.families["RTX-3090"] for name in ("one", "other")}
    cluster = run.cluster.model_copy(update={"families": families, "nodes": tuple(nodes)})
    tiles = (replace(tile, family=name) for tile, name in zip(run.plan.tiles, families, strict=True))
    plan = replace(run.plan, tiles=tuple(tiles))
    ours = Setup(run.model, run.positions, run.dtype, HPCTRAIN)
    ours, theirs = (
        made.memory[0].memory
        for made in (Predictor(ours, plan, cluster), SoftwarePredictor(run.setup(), plan, cluster))
    )
    assert theirs.moments == pytest.approx(2 * ours.moments, rel=0.01)


def test_what_is_gathered_for_a_product_in_fp8_carries_one_byte_and_what_is_summed_two():
    half = replace(CARDS, accelerator="H100", stack="fsdp", dtype="bf16", sequence_parallel=True)

    def exchanged(run: DescribedRun, operation: str) -> float:
        grid = TensorGrid(y=8, sequence_parallel=run.stack == "fsdp")
        cost = layer_cost(run.setup(), grid, BLOCK, 1)
        passes = (cost.forward, cost.backward_input, cost.backward_weight)
        return sum(e.num_bytes for work in passes for e in work.exchanges if e.operation == operation)

    for run, operation, share in (
        (half, "all_gather", 0.5),
        (half, "reduce_scatter", 1.0),
        (replace(half, stack="megatron-core"), "all_reduce", 0.75),
        (replace(half, stack="megatron-lm", sequence_parallel=False), "all_reduce", 1.0),
    ):
        assert exchanged(replace(run, linear_dtype="fp8"), operation) == share * exchanged(run, operation) > 0, run


def test_interleaved_stages_keep_the_microbatches_of_megatrons_warm_up():
    plain = replace(CARDS, layers=16, tensor=1, pipeline=4, global_batch=32, architecture="llama")
    twice = replace(plain, interleave=2)
    for depth, (one, more) in enumerate(zip(reversed(plain.memory()), reversed(twice.memory()), strict=True)):
        kept = [stage.memory.activations for stage in (one, more)]
        microbatches = (4 + 1 + 2 * depth) / 2
        if depth:
            assert kept[1] / kept[0] == pytest.approx(microbatches / (depth + 1), rel=1e-6)
        else:  # the logits, of one microbatch
            assert 1 < kept[1] / kept[0] < microbatches


def test_attention_of_megatron_core_follows_its_version():
    run = replace(CARDS, dtype="bf16", positions=8192, network="HDR", nics_per_node=None)
    for accelerator, is_faster in (("H100", True), ("A100-80", False)):
        now, before = (
            replace(run, accelerator=accelerator, stack=stack).predict().breakdown_seconds["compute"]
            for stack in ("megatron-core", "megatron-core-2024")
        )
        assert (before > 1.02 * now) == is_faster, accelerator


def test_gathers_that_overlap_nothing_are_waited_for_at_the_end_of_a_step():
    run = replace(
        CARDS, accelerator="A100-80", tensor=1, pipeline=1, data=8, zero=1, overlapped=True, stack="torch-flash"
    )
    early, late = (replace(run, exposes_gathers=exposes).predict() for exposes in (False, True))
    network = run.setup().network(run.cluster)
    weights = 2 * sum(
        layer_elements(run.setup(), TensorGrid(), layer) for layer in layers(Interval(0, run.model.num_items))
    )
    gather = network.group_seconds("all_gather", weights, tuple(range(8)))
    assert 0.5 * gather < late.step_seconds - early.step_seconds < gather, (
        "what the first pass does not hide is early too"
    )


def test_memory_follows_what_a_run_says_of_its_optimizer_and_of_sequence_parallelism():
    run = replace(CARDS, accelerator="A100-80", stack="megatron-core", dtype="bf16", pipeline=1, data=2, zero=1)
    plain, narrow, whole = (
        each.memory()[0].memory
        for each in (run, replace(run, gradient_bytes=2, optimizer_bytes=6), replace(run, sequence_parallel=False))
    )
    assert narrow.moments == pytest.approx(plain.moments / 2, rel=1e-3), "moments of 2 bytes each, 16 bits of masters"
    assert narrow.gradients == pytest.approx(plain.gradients / 2, rel=1e-3)
    assert whole.activations > 1.5 * plain.activations, "Megatron-Core cuts norms over y unless it is told not to"


def test_inputs_of_products_in_fp8_are_kept_in_it():
    """Of each block: normed inputs and inner features are kept in one byte in place of two. Attention's output is kept
    twice, since the kernel needs it in half precision."""
    run = DescribedRun(1024, 2, 8, 1024, 1, 1, 1, 1, 1, "H100", ffn=4096, architecture="llama", stack="megatron-core")
    run = replace(run, dtype="bf16")
    half, eighth = (
        stages[0].memory.activations for stages in (run.memory(), replace(run, linear_dtype="fp8").memory())
    )
    assert half - eighth == 2 * 1024 * (1024 + 4096)


def test_megatron_core_copies_gradients_for_the_update_when_activations_are_gone():
    run = DescribedRun(1024, 8, 8, 1024, 1, 1, 2, 8, 16, "H100", dtype="bf16", stack="megatron-core", zero=1)
    run = replace(run, overlapped=True)
    many, few = (each.memory()[0].memory for each in (run, replace(run, microbatch=1, positions=128)))
    assert many.gradients == many.weights, "activations are more than the copy"
    copy = few.moments / 12 * 4
    assert few.gradients == pytest.approx(few.weights + copy - few.activations, abs=4)
