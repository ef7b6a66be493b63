"""The predictor: its parts add up, it scales as physics does, and it is as fast as a search needs."""

import json
import time
from dataclasses import replace

import pytest
from click.testing import CliRunner

from hpctrain.config.clusters.cluster import Cluster, Nodes
from hpctrain.config.clusters.cluster_file import dump_cluster, parse_cluster
from hpctrain.config.clusters.truth import Truth
from hpctrain.config.errors import LaunchError, PlanError, TopologyError
from hpctrain.config.job import load_job
from hpctrain.jobs.predict import command
from hpctrain.plan.file import dump_plan
from hpctrain.plan.schedule import one_f_one_b
from hpctrain.plan.tiling import Plan, Tile, even_plan
from hpctrain.planner.prediction.predictor import Predictor, predict
from hpctrain.planner.prediction.simulate import simulate
from hpctrain.planner.prices.cost import layer_cost
from hpctrain.planner.prices.devices import DeviceModel
from hpctrain.planner.prices.prices import Costs, PassCost, TileCost
from hpctrain.planner.prices.setup import HPCTRAIN, Setup
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import BLOCK
from hpctrain.software.megatron import MEGATRON
from hpctrain.software.predictor import SoftwarePredictor, interleaved
from hpctrain.software.run import STACKS, DescribedRun
from hpctrain.software.software import SoftwareSetup
from tests import clusters
from tests.pretended import CLUSTER, KINDS, PAIR

JOB = load_job("tiny", ["model.vocab_size=1024"])
SETUP = Setup(JOB.model, 128, "fp32", HPCTRAIN)


class UnsplitSetup(Setup):
    splits_backward = False


UNSPLIT = UnsplitSetup(JOB.model, 128, "fp32", HPCTRAIN)
NUM_ITEMS = JOB.model.num_items


def plan_of(grid=(1, 1, 1), pipeline=2, data=2, microbatches=4, **tile) -> Plan:
    families = ["fast", "fast", "slow", "slow"]
    plan = even_plan(NUM_ITEMS, TensorGrid(*grid), pipeline, data, microbatches, 8, **tile)
    tiles = (replace(t, family="+".join(dict.fromkeys(families[r] for r in t.ranks))) for t in plan.tiles)
    return replace(plan, tiles=tuple(tiles), unused=tuple(range(len(plan.ranks), 4)))


LAYOUTS = [
    plan_of(),
    plan_of((1, 2, 1), pipeline=2, data=1),
    plan_of((2, 1, 1), pipeline=2, data=1, recompute="full"),
    plan_of((1, 1, 2), pipeline=2, data=1),
    plan_of((1, 1, 1), 1, 4, zero=3),
    plan_of((1, 1, 1), 1, 4, zero=0),
    plan_of((1, 1, 1), 4, 1),
    plan_of((1, 1, 2), 2, 1, virtual_stages=2, zero=0),
    plan_of((1, 1, 1), 2, 2, virtual_stages=2, zero=2),
    Plan(
        (
            Tile(Interval(0, NUM_ITEMS), Interval(0, 3), (2,), family="slow", row_chunks=2),
            Tile(Interval(0, 3), Interval(3, 8), (0,), family="fast"),
            Tile(Interval(3, NUM_ITEMS), Interval(3, 8), (1,), family="fast"),
        ),
        4,
        8,
        unused=(3,),
    ),
]


@pytest.mark.parametrize("plan", LAYOUTS)
def test_the_parts_add_up_to_the_step(plan):
    result = predict(SETUP, plan, CLUSTER)
    assert sum(result.breakdown_seconds.values()) == pytest.approx(result.step_seconds)
    assert all(seconds >= 0 for part, seconds in result.breakdown_seconds.items() if part != "hidden")
    assert result.breakdown_seconds["hidden"] <= 0
    assert result.interval_seconds[0] < result.step_seconds < result.interval_seconds[1]
    assert result.tokens_per_second == pytest.approx(32 * 128 / result.step_seconds)
    assert 0 < result.mfu < 1


def scaled(times: float) -> Cluster:
    """The cluster, `times` as slow in everything."""
    families = {
        name: f.model_copy(
            update={
                "memory_bytes_per_second": f.memory_bytes_per_second / times,
                "sustained_flops_per_second": {d: v / times for d, v in f.peak_flops_per_second.items()},
                "kind": "cpu",  # no host whose speed is not described
                "peak_flops_per_second": {},
            }
        )
        for name, f in CLUSTER.families.items()
    }
    fabrics = {
        n: f.model_copy(update={"latency_seconds": f.latency_seconds * times}) for n, f in CLUSTER.fabrics.items()
    }
    nodes = tuple(
        n.model_copy(
            update={
                "link_latency_seconds": n.link_latency_seconds * times,
                "link_bytes_per_second": n.link_bytes_per_second / times,
                "nics": tuple(
                    nic.model_copy(
                        update={
                            "send_bytes_per_second": nic.send_bytes_per_second / times,
                            "receive_bytes_per_second": nic.receive_bytes_per_second / times,
                        }
                    )
                    for nic in n.nics
                ),
            }
        )
        for n in CLUSTER.nodes
    )
    plain = [{name: getattr(table, name) for name in type(table).model_fields} for table in nodes]
    return Cluster(families=families, fabrics=fabrics, nodes=tuple(Nodes.model_validate(table) for table in plain))


@pytest.mark.parametrize("plan", LAYOUTS)
def test_a_cluster_that_is_slower_in_everything_takes_as_much_longer(plan):
    once, thrice = (predict(SETUP, plan, scaled(times)).step_seconds for times in (1.0, 3.0))
    assert thrice == pytest.approx(3 * once, rel=1e-3), "but for launches, of microseconds"


@pytest.mark.parametrize("microbatches", [1, 2, 4, 16, 64])
def test_the_bubble_of_equal_stages_is_that_of_the_literature(microbatches):
    stages = 4
    plan = even_plan(2 * stages + 2, TensorGrid(), stages, 1, microbatches, 1)
    cost = TileCost((PassCost(1.0),), (PassCost(2.0),))
    pairs = {(a, b): 0.0 for a in plan.tiles for b in plan.tiles}
    schedules = {tile: one_f_one_b(plan, tile) for tile in plan.tiles}
    result = simulate(plan, schedules, Costs(dict.fromkeys(plan.tiles, cost), pairs))
    assert result.step_seconds == pytest.approx(3.0 * (microbatches + stages - 1))
    for parts in result.parts.values():
        assert parts["bubble"] / result.step_seconds == pytest.approx((stages - 1) / (microbatches + stages - 1))


def test_messages_are_hidden_behind_what_is_computed_meanwhile():
    plan = even_plan(6, TensorGrid(), 2, 1, 8, 1)
    schedules = {tile: one_f_one_b(plan, tile) for tile in plan.tiles}
    cost = TileCost((PassCost(1.0),), (PassCost(2.0),))
    steps = []
    for seconds in (0.0, 0.1, 5.0):
        costs = Costs(dict.fromkeys(plan.tiles, cost), {(a, b): seconds for a in plan.tiles for b in plan.tiles})
        steps.append(simulate(plan, schedules, costs))
    assert steps[0].step_seconds < steps[1].step_seconds < steps[2].step_seconds
    first = steps[1].parts[plan.tiles[1]]
    assert first["pipeline"] == pytest.approx(0.8)
    for step in steps:
        for parts in step.parts.values():
            assert sum(parts.values()) == pytest.approx(step.step_seconds)


def test_memory_falls_with_each_zero_stage_and_with_recomputing():
    totals = []
    for zero in range(4):
        (stage,) = predict(SETUP, plan_of((1, 1, 1), 1, 2, zero=zero), CLUSTER).memory
        totals.append(sum(getattr(stage.memory, part) for part in ("weights", "gradients", "moments")))
    assert totals[0] > totals[1] > totals[2] > totals[3]
    kept = [predict(SETUP, plan_of(recompute=how), CLUSTER).memory[0].memory.activations for how in ("none", "full")]
    assert kept[0] > 2 * kept[1]


def test_weight_passes_that_wait_keep_their_operands():
    """By ZB-H1 the last stage keeps as much as the first; by 1F1B splitting takes no more than activations did."""

    def activations(plan, setup=SETUP) -> list[int]:
        return [stage.memory.activations for stage in predict(setup, plan, CLUSTER).memory]

    plan = plan_of(pipeline=4, data=1, microbatches=8)
    as_one, split = activations(plan, UNSPLIT), activations(plan)
    delayed = activations(replace(plan, schedule="zb-h1"))
    assert as_one == split
    assert delayed[0] == split[0]
    assert all(more > less for more, less in zip(delayed[1:], split[1:], strict=True))
    assert activations(replace(plan, schedule="zb-h1", microbatches=1)) == activations(replace(plan, microbatches=1))


def test_schedules_that_split_are_faster_and_other_software_does_not():
    plan = plan_of(pipeline=4, data=1, microbatches=8)
    whole = predict(UNSPLIT, plan, CLUSTER)
    split, delayed = (predict(SETUP, replace(plan, schedule=name), CLUSTER) for name in ("1f1b", "zb-h1"))
    assert delayed.step_seconds < split.step_seconds < whole.step_seconds
    assert delayed.breakdown_seconds["compute"] == pytest.approx(whole.breakdown_seconds["compute"], rel=1e-3)


def test_a_plan_that_does_not_fit_says_so():
    assert predict(replace(SETUP, positions=16), plan_of(), CLUSTER).fits
    assert not predict(replace(SETUP, positions=20_000), plan_of(), CLUSTER).fits


def test_measured_products_are_met_exactly_and_interpolated_between():
    speeds = {64: 2e8, 1024: 1e9}
    products = [{"dtype": "fp32", "shape": [n] * 3, "flops_per_second": speed} for n, speed in speeds.items()]
    text = clusters.family("cpu", memory_bytes_per_second=1e12, products=products) + clusters.nodes({"cpu": 1}, None)
    device = DeviceModel("cpu", parse_cluster(text, "a test").families["cpu"])
    small, large = (2 * n**3 / device.product_seconds("fp32", n, n, n) for n in (64, 1024))
    assert small == pytest.approx(2e8, rel=1e-3)
    assert large == pytest.approx(1e9, rel=1e-3)
    assert 2e8 < 2 * 256**3 / device.product_seconds("fp32", 256, 256, 256) < 1e9


def test_larger_products_are_more_efficient_and_waves_show():
    run = DescribedRun(1024, 4, 16, 1024, 1, 1, 1, 1, 1, "A100-80")
    device = DeviceModel("a", run.cluster.families["A100-80"])
    speeds = [2 * n**3 / device.product_seconds("fp16", n, n, n) for n in (256, 1024, 4096, 8192)]
    assert speeds == sorted(speeds)
    assert 0.5 * 312e12 < speeds[-1] < 0.9 * 312e12
    with pytest.raises(PlanError, match="families.a has no speed in fp8.*set its sustained_flops_per_second"):
        device.speed("fp8")


@pytest.mark.parametrize(
    "accelerator, ids, least, most",
    [("H100", 50257, 5.5, 6.0), ("H100", 50258, 3.3, 3.7), ("H100", 50260, 3.3, 3.7), ("A100-80", 50257, 1.3, 1.5)],
)
def test_an_odd_vocabulary_slows_products_of_the_head(accelerator, ids, least, most):
    """An H100 was measured at 115 TFLOP/s with 2047 x 3073 x 8192 numbers, and 3.5 times as slow with 588 as 592."""
    device = DeviceModel("a", DescribedRun(1024, 4, 16, 1024, 1, 1, 1, 1, 1, accelerator).cluster.families[accelerator])
    odd, even = (device.product_seconds("bf16", 8192, 2048, size) for size in (ids, 50304))
    assert least < odd / even < most
    assert device.product_seconds("fp32", 8192, 2048, 50257) <= device.product_seconds("fp32", 8192, 2048, 50304)


@pytest.mark.parametrize("stack", STACKS)
def test_every_software_is_predicted_in_every_width(stack):
    run = DescribedRun(1024, 4, 16, 1024, 2, 1, 1, 4, 4, "A100-80", stack=stack)
    half, whole = (replace(run, dtype=dtype).predict().breakdown_seconds["compute"] for dtype in ("bf16", "fp32"))
    assert whole > 2 * half


def test_a_fused_kernel_reaches_its_share_whatever_the_shape_of_its_heads():
    run = DescribedRun(1024, 4, 16, 1024, 1, 1, 1, 1, 1, "A100-80")
    device = DeviceModel("a", run.cluster.families["A100-80"])
    narrow, wide = (device.product_seconds("fp16", 4096, size, 4096, 64, fused=0.5) / size for size in (64, 128))
    assert narrow == pytest.approx(wide)
    assert 2 * 64 * 4096**2 / wide == pytest.approx(0.5 * device.speed("fp16"))
    scaled_down = DeviceModel("fast", CLUSTER.families["fast"])
    assert scaled_down.product_seconds("fp32", 64, 8, 64, fused=0.5) == scaled_down.product_seconds("fp32", 64, 8, 64)


def test_weights_that_replicas_share_are_exchanged_while_others_compute():
    run = DescribedRun(4096, 32, 32, 2048, 1, 1, 16, 4, 64, "A100-80", dtype="bf16", zero=3, stack="fsdp")
    plain = replace(run, zero=0)
    assert run.plan.tiles[0].tensor.z == 16
    assert run.num_devices == plain.num_devices == 16
    sharded, whole = run.predict(), plain.predict()
    assert sharded.memory[0].memory.total < 0.5 * whole.memory[0].memory.total
    assert sharded.breakdown_seconds["compute"] > 1.02 * whole.breakdown_seconds["compute"], "slowed by overlap"
    cut = replace(run, pipeline=2, data=8, stages=(16, 18))
    assert [tuple(tile.items) for tile in cut.plan.tiles] == [(0, 31), (31, 66)]
    with pytest.raises(PlanError, match="with zero = 3 all exchanges are beside"):
        replace(run, overlapped=True)
    slow = replace(run, network="Ethernet-10").predict()
    assert slow.breakdown_seconds["tensor"] > 0.5 * slow.breakdown_seconds["compute"], "no longer hidden"


@pytest.mark.parametrize(("zero", "together"), [(1, ()), (2, ("backward",)), (3, ("forward", "backward"))])
def test_unequal_replicas_that_exchange_in_a_pass_end_its_layers_together(zero, together):
    """The slower one of each layer is waited for: longer than the slower one of the step."""
    items, setup = Interval(0, NUM_ITEMS), replace(SETUP, bucket_bytes=None)
    tiles = tuple(Tile(items, Interval(4 * i, 4 * i + 4), (i,), zero=zero, family=f) for i, f in enumerate(KINDS))
    costs = Predictor(setup, Plan(tiles, 2, 8), PAIR).costs.tiles
    for name in ("forward", "backward"):
        fast, slow = (getattr(costs[tile], name)[0].seconds for tile in tiles)
        assert (fast == pytest.approx(slow)) == (name in together)
        assert fast <= slow * (1 + 1e-9)


def test_4096_ranks_take_seconds():
    run = DescribedRun(12288, 96, 96, 2048, 8, 8, 64, 1, 2048, "A100-80", zero=1)
    start = time.process_time()
    result = run.predict()
    assert time.process_time() - start < 3, "0.4 s on an idle core"
    assert 0.2 < result.mfu < 0.7


def test_other_peoples_runs_can_be_predicted():
    base = DescribedRun(6144, 48, 64, 2048, 8, 1, 1, 4, 4, "A100-80")
    full, selective = (
        replace(base, recompute=how, sequence_parallel=sp).predict()
        for how, sp in (("full", False), ("selective", True))
    )
    assert full.step_seconds > 1.15 * selective.step_seconds
    even = replace(base, pipeline=4, global_batch=16, vocabulary=128)  # next to nothing at the ends
    bubbles = [replace(even, interleave=n).predict().breakdown_seconds["bubble"] for n in (1, 3)]
    assert bubbles[0] == pytest.approx(3 * bubbles[1], rel=0.03)
    with pytest.raises(PlanError, match="no accelerator 'A100'; did you mean"):
        replace(base, accelerator="A100")
    with pytest.raises(PlanError, match="a global batch of 5 is not divisible by data 1 x microbatch 4"):
        replace(base, global_batch=5)
    with pytest.raises(PlanError, match="recompute = 'some': set it to one of none, selective, full"):
        layer_cost(SETUP, TensorGrid(), BLOCK, 1, "some")


def test_errors_say_what_to_do():
    with pytest.raises(
        LaunchError, match=r"the plan is for 8 ranks, and the cluster has 4 devices \(2 fast and 2 slow"
    ):
        predict(SETUP, even_plan(NUM_ITEMS, TensorGrid(), 1, 8, 1, 8), CLUSTER)
    plan = plan_of()
    wrong = replace(plan, tiles=(replace(plan.tiles[0], family="slow"), *plan.tiles[1:]))
    with pytest.raises(PlanError, match="tile 0 is for family 'slow', but its ranks .0. are of 'fast' in this cluster"):
        predict(SETUP, wrong, CLUSTER)


def run_command(tmp_path, *more: str, cluster: Cluster = CLUSTER, plan: Plan | None = None, truth: Truth | None = None):
    (tmp_path / "c.toml").write_text(dump_cluster(cluster, truth=truth))
    (tmp_path / "p.toml").write_text(dump_plan(plan or plan_of()))
    arguments = ["tiny", "--set", "model.vocab_size=1024", "--cluster", str(tmp_path / "c.toml")]
    return CliRunner().invoke(command, [*arguments, "--plan", str(tmp_path / "p.toml"), *more])


def test_the_command_tells_all_that_is_asked_of_it(tmp_path):
    summary = json.loads(run_command(tmp_path, "--json").stdout)
    assert {"step_seconds", "interval_seconds", "breakdown_seconds", "memory_bytes"} < set(summary)
    assert {"tokens_per_second", "mfu", "assumed_inputs", "fits"} < set(summary)
    assert sum(summary["breakdown_seconds"].values()) == pytest.approx(summary["step_seconds"])
    stage = summary["memory_bytes"][0]
    parts = ("weights", "gradients", "moments", "activations", "gathered", "buffers")
    assert sum(stage[part] for part in parts) == stage["total"]
    assert any("families.fast.model: unknown" in text for text in summary["assumed_inputs"])
    assert any("fp32, the only one" in text for text in summary["assumed_inputs"])
    shown = run_command(tmp_path).stdout
    assert "where the time goes" in shown
    assert "bubble" in shown
    assert "fits" in shown


@pytest.mark.parametrize(
    ("switch", "plan"),
    [("tensor", LAYOUTS[1]), ("z", LAYOUTS[3]), ("data", LAYOUTS[0]), ("data", LAYOUTS[4]), ("data", LAYOUTS[8])],
)
def test_the_command_hides_what_the_job_says_and_what_a_run_there_would(tmp_path, switch, plan):
    def summary(*settings: str, truth: Truth | None = None) -> dict:
        exposed = [f"overlap.{each}=false" for each in {"tensor", "z", "data"} - {switch}]
        exposed += ["overlap.tensor_parts=1", "kernels.fused=false"]
        all_set = [part for each in (*exposed, *settings) for part in ("--set", each)]
        return json.loads(run_command(tmp_path, "--json", *all_set, plan=plan, truth=truth).stdout)

    on, off, auto = summary(f"overlap.{switch}=true"), summary(f"overlap.{switch}=false"), summary()
    assert on["step_seconds"] < off["step_seconds"]
    assert not on["resolved"] and list(auto["resolved"]) == [f"overlap.{switch}"]
    several_families = plan is LAYOUTS[4]  # share weights: their sums are of parts, which nothing may come between
    assert auto["step_seconds"] == (off if several_families else on)["step_seconds"], auto["resolved"]
    pretended = summary(truth=Truth())
    assert pretended["step_seconds"] == on["step_seconds"]
    assert pretended["resolved"][f"overlap.{switch}"].startswith("on: a rehearsal's devices")


def test_other_software_is_predicted_on_different_families_in_one_pipeline():
    """A dtype, sequence parallelism and interleaving that are not ours."""
    cluster = parse_cluster(dump_cluster(CLUSTER).replace("fp32 =", "fp16 ="), "c.toml")
    plan = even_plan(10, TensorGrid(y=2), 2, 1, 8, 4, family="fast")
    fast, slow = plan.tiles
    plan = replace(plan, tiles=(fast, replace(slow, family="slow")))
    job = load_job("tiny", ["model.num_layers=4", "model.vocab_size=512"])

    def predicted(software=MEGATRON):
        return SoftwarePredictor(SoftwareSetup(job.model, 128, "fp16", software), plan, cluster).predict()

    plain, setup = predicted(), SoftwareSetup(job.model, 128, "fp16", MEGATRON)
    twice = interleaved(plain, plan, 2, setup)
    assert twice.breakdown_seconds["bubble"] == pytest.approx(plain.breakdown_seconds["bubble"] / 2)
    assert sum(twice.breakdown_seconds.values()) == pytest.approx(twice.step_seconds)
    cut = predicted(replace(MEGATRON, sequence_parallel=True))
    assert cut.memory[0].memory.activations < plain.memory[0].memory.activations
    with pytest.raises(PlanError, match="no more virtual stages, here 8, than the model has layers with its ends, 6"):
        interleaved(plain, plan, 4, setup)


def test_the_command_refuses_a_family_that_has_no_dtype_to_train_in(tmp_path):
    families = dict(CLUSTER.families)
    families["slow"] = families["slow"].model_copy(update={"peak_flops_per_second": {"fp8": 1e9}})
    result = run_command(tmp_path, cluster=CLUSTER.model_copy(update={"families": families}))
    assert isinstance(result.exception, TopologyError)
    assert "family slow has no dtype to train in (bf16 or fp16 or fp32); set its peak_flops" in str(result.exception)
