"""A profile of the job is the best source of compute seconds: exactly where it was measured, by its ratio elsewhere."""

import itertools
from dataclasses import replace
from functools import cached_property

import pytest
from click.testing import CliRunner

from benchmarks.evidence.layers import LayeredPredictor, load_layers
from hpctrain.architectures.registry import presets
from hpctrain.config.clusters.cluster import Cluster, Profile, RowTimes
from hpctrain.config.clusters.cluster_file import dump_cluster, parse_cluster, parse_cluster_file
from hpctrain.config.clusters.truth import Truth
from hpctrain.config.job import Job, Model, load_job
from hpctrain.config.kernels import KernelChoice
from hpctrain.jobs.common import ready_miniature
from hpctrain.jobs.plan import command as plan_command
from hpctrain.jobs.predict import command as predict_command
from hpctrain.plan.file import dump_plan
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.choose import memory_warnings
from hpctrain.planner.prediction.predictor import predict
from hpctrain.planner.prices import prices as prices_module
from hpctrain.planner.prices.cost import layer_cost, update_seconds
from hpctrain.planner.prices.curves import describe_work, has_times
from hpctrain.planner.prices.devices import DATASHEET_ERROR, MEASURED_ERROR, DeviceModel
from hpctrain.planner.prices.profiled import ProfiledDevice, device_models, timed_profiles
from hpctrain.planner.prices.setup import HPCTRAIN, HPCTRAIN_FUSED, Setup
from hpctrain.planner.search import pools as pools_module
from hpctrain.planner.search.search import Limits, search
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import BLOCK, EMBEDDING
from hpctrain.sharding.parameters import count_parameters
from hpctrain.software.megatron import MEGATRON
from hpctrain.software.software import SoftwareSetup

# 4 fast and 4 slow devices, which are what `truth` says; the sheet is right but for its scale.
FILE = """
[families.fast]
kind = "cuda"
origin = "datasheet"
memory_bytes = 15_625_000
memory_bytes_per_second = 3.735e+08
sustained_flops_per_second = {{fp32 = {fast}}}
overlap_slowdown = 1.2

[families.slow]
kind = "cuda"
origin = "datasheet"
memory_bytes = 15_625_000
memory_bytes_per_second = 1.328e+08
sustained_flops_per_second = {{fp32 = 1.233e+08}}
overlap_slowdown = 1.25

[fabrics.ib]
origin = "assumed"
latency_seconds = 5e-06

[[nodes]]
devices = {{fast = 4}}
origin = "datasheet"
link_latency_seconds = 3e-06
link_bytes_per_second = 7.324e+07
nics = [
  {{origin = "datasheet", fabric = "ib", count = 2, send_bytes_per_second = 6.104e+06, receive_bytes_per_second = 6.104e+06}},
]

[[nodes]]
devices = {{slow = 4}}
origin = "datasheet"
link_latency_seconds = 8e-06
link_bytes_per_second = 5.859e+06
nics = [
  {{origin = "datasheet", fabric = "ib", count = 2, send_bytes_per_second = 6.104e+06, receive_bytes_per_second = 6.104e+06}},
]

[truth.devices.fast]
memory_bytes = 15_625_000
memory_bytes_per_second = 3.735e+08
flops_per_second = {{fp32 = 3.815e+08}}
launch_seconds = 5e-06
tile = [2, 2]
half_speed_rows = 3.0

[truth.devices.slow]
memory_bytes = 15_625_000
memory_bytes_per_second = 1.328e+08
flops_per_second = {{fp32 = 1.24e+08}}
launch_seconds = 5e-06
tile = [2, 2]
half_speed_rows = 1.5
"""  # noqa: E501
RIGHT, WRONG = (FILE.format(fast=3.771e8 * times) for times in (1.0, 1.3))
DEVICES = parse_cluster_file(RIGHT, "a test").truth.devices
FOUR_HEADS = "model.num_heads=4"  # so that products between heads are large enough to be well described
JOB = ready_miniature("v100-t4", load_job("mixed", [FOUR_HEADS])).job
SETUP = Setup.of_job(JOB)
LAST = JOB.model.num_items - 1
LIMITS = Limits(scored=300, simulated=5)


class TrueDevice(DeviceModel):
    """A device that computes as the truth says."""

    @cached_property
    def efficiency(self):
        return replace(super().efficiency, launch_seconds=DEVICES[self.name].launch_seconds)

    def product_seconds(self, dtype, m, k, n, batch=1, fused=None, tokens=0):
        return DEVICES[self.name].product_seconds(dtype, m, k, n, batch)

    def pass_seconds(self, num_bytes):
        return num_bytes / DEVICES[self.name].memory_bytes_per_second


def true_models(cluster: Cluster, *_) -> dict[str, DeviceModel]:
    return {name: TrueDevice(name, family) for name, family in cluster.families.items()}


def true_profile(cluster: Cluster, family: str, **changed) -> Profile:
    """What a profiler would measure of the job on a true device."""
    device = true_models(cluster)[family]

    def passes(layer: Interval, rows: int) -> tuple[float, float]:
        cost = layer_cost(SETUP, TensorGrid(), layer, rows)
        return tuple(device.work_seconds(work, "fp32", SETUP.engine) for work in (cost.forward, cost.backward))

    figures = {
        "origin": "measured",
        "family": family,
        "work": describe_work(JOB, "fp32"),
        "zero": 1,
        "replicas": 8,
        "largest_rows": 45,
        "update_seconds": update_seconds(SETUP, device, count_parameters(JOB.model)) / 8,
        "times": tuple(
            RowTimes(
                rows=rows,
                embedding_seconds=passes(EMBEDDING, rows),
                block_seconds=passes(BLOCK, rows),
                head_seconds=passes(SETUP.head, rows),
            )
            for rows in (1, 2, 4, 8, 16, 32, 45)
        ),
    }
    return Profile(**figures | changed)


def profiled(text: str = WRONG, families=("fast", "slow"), **changed) -> Cluster:
    cluster = parse_cluster(text, "a test")
    profiles = tuple(true_profile(cluster, family, **changed) for family in families)
    return cluster.model_copy(update={"profiles": profiles})


def replicas_plan(rows=(30, 18), **how) -> Plan:
    tiles, at = [], 0
    for rank in range(8):
        own = rows[rank // 4]
        family = ("fast", "slow")[rank // 4]
        tiles.append(Tile(Interval(0, LAST + 1), Interval(at, at + own), (rank,), family=family, **how))
        at += own
    return Plan(tuple(tiles), 1, at)


# ---- prices ----------------------------------------------------------------------------------------------------------


def passes_of(cluster: Cluster, grid: TensorGrid, layer: Interval, rows: int, recompute: str = "none") -> list[float]:
    device = device_models(cluster, SETUP)["fast"]
    cost = layer_cost(SETUP, grid, layer, rows, recompute)
    works = cost.forward, cost.backward, cost.backward_input, cost.backward_weight
    return [device.work_seconds(work, SETUP.dtype, SETUP.engine) for work in works]


@pytest.mark.parametrize("layer", [EMBEDDING, BLOCK, SETUP.head])
def test_what_was_measured_is_taken_as_it_is(layer):
    cluster = profiled()
    name = {EMBEDDING: "embedding_seconds", BLOCK: "block_seconds", SETUP.head: "head_seconds"}[layer]
    for times in cluster.profiles[0].times:
        forward, backward = getattr(times, name)
        result = passes_of(cluster, TensorGrid(), layer, times.rows)
        assert result[:2] == pytest.approx([forward, backward])
        assert result[2] + result[3] == pytest.approx(backward), "the formula says which part is which"
        again = passes_of(cluster, TensorGrid(), layer, times.rows, "full")
        assert again[0] == pytest.approx(forward) and again[1] == pytest.approx(forward + backward)


def test_of_a_model_with_experts_a_block_with_experts_is_measured():
    sizes = {"vocab_size": 512, "num_layers": 2, "dense_layers": 1}
    setup = Setup(Model.model_validate(presets()["tiny-moe"] | sizes), 64, "fp32", HPCTRAIN)
    cluster, block = profiled(), layer_cost(setup, TensorGrid(), Interval(3, 5), 4)
    times = RowTimes(rows=4, embedding_seconds=(1, 1), block_seconds=(0.3, 0.7), head_seconds=(1, 1))
    profile = true_profile(cluster, "fast", times=(times,))
    device = ProfiledDevice("fast", cluster.families["fast"], setup=setup, profile=profile)
    works = block.forward, block.backward
    assert [device.work_seconds(work, "fp32", setup.engine) for work in works] == pytest.approx([0.3, 0.7])


def test_beyond_the_last_point_rows_are_as_fast_as_there():
    (at_last, _, *_), (beyond, _, *_) = (passes_of(profiled(), TensorGrid(), BLOCK, rows) for rows in (45, 450))
    assert beyond == pytest.approx(10 * at_last)


@pytest.mark.parametrize("grid", [TensorGrid(2, 1, 1), TensorGrid(1, 2, 1), TensorGrid(1, 1, 2), TensorGrid(2, 2, 1)])
def test_other_tensor_grids_are_corrected_by_as_many_rows_on_one_rank(grid):
    cluster = profiled()
    plain = cluster.model_copy(update={"profiles": ()})
    for layer, rows in ((EMBEDDING, 4), (BLOCK, 4), (BLOCK, 16), (SETUP.head, 4)):
        for i in (0, 1):
            by_formula, alone = (passes_of(plain, each, layer, rows)[i] for each in (grid, TensorGrid()))
            expected = by_formula / alone * passes_of(cluster, TensorGrid(), layer, rows)[i]
            assert passes_of(cluster, grid, layer, rows)[i] == pytest.approx(expected)


@pytest.mark.parametrize("grid", [TensorGrid(2, 1, 1), TensorGrid(1, 2, 1), TensorGrid(1, 1, 2)])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_the_correction_comes_nearer_to_the_truth_on_other_tensor_grids(grid, rows):
    cluster = profiled()
    work = layer_cost(SETUP, grid, BLOCK, rows).forward
    true = true_models(cluster)["fast"].work_seconds(work, "fp32", SETUP.engine)
    plain = passes_of(cluster.model_copy(update={"profiles": ()}), grid, BLOCK, rows)[0]
    result = passes_of(cluster, grid, BLOCK, rows)[0]
    assert result == pytest.approx(true, rel=0.05) and abs(result - true) < 0.3 * abs(plain - true)


@pytest.mark.parametrize(
    "setup",
    [replace(SETUP, dtype="bf16"), replace(SETUP, positions=16), SoftwareSetup.of(SETUP, MEGATRON)],
    ids=["dtype", "positions", "software"],
)
def test_a_profile_of_other_work_does_not_count(setup):
    assert all(device.profile is None for device in device_models(profiled(), setup).values())


def test_a_table_of_measured_layers_goes_before_a_profile(tmp_path):
    lines = ["device,microbatch,tensor,layer,forward_seconds,backward_seconds,update_seconds"]
    last = JOB.model.num_layers + 1
    points = itertools.product(DEVICES, (1, 8), (0, 1, last))
    lines += [f"{name},{rows},1,{item},{rows},{rows},0.1" for name, rows, item in points]
    (tmp_path / "layers.csv").write_text("\n".join(lines) + "\n")
    layers, plan = load_layers(tmp_path / "layers.csv"), replicas_plan((8, 8))
    result, plain = (
        LayeredPredictor(layers, SETUP, plan, cluster).predict()
        for cluster in (profiled(), parse_cluster(WRONG, "a test"))
    )
    assert result == plain and result.breakdown_seconds["compute"] == pytest.approx(2 * 8 * (last + 1))


def test_times_hold_for_any_number_of_replicas_and_updates_do_not():
    plan = replicas_plan()
    eight, four = (predict(SETUP, plan, profiled(replicas=n)) for n in (8, 4))
    assert four.breakdown_seconds["compute"] == pytest.approx(eight.breakdown_seconds["compute"])
    assert any("families.fast: seconds of updates, by formula" in text for text in four.assumed_inputs)
    slower = predict(SETUP, plan, profiled(update_seconds=1.0))
    assert slower.breakdown_seconds["optimizer"] == pytest.approx(1.0, rel=0.3), "each updates an eighth"
    assert predict(SETUP, plan, profiled(zero=2)) == predict(SETUP, plan, parse_cluster(WRONG, "a test"))


def test_families_with_the_same_sheet_and_different_profiles_are_two_pools():
    text = RIGHT.replace("1.328e+08", "3.735e+08").replace("1.233e+08", "377100000.0").replace("1.25", "1.2")
    text = text.replace("8e-06", "3e-06").replace("5.859e+06", "7.324e+07")
    same = parse_cluster(text, "a test")
    assert len(pools_module.pools_of(same, ["fast", "slow"], SETUP)) == 1
    assert len(pools_module.pools_of(profiled(text), ["fast", "slow"], SETUP)) == 2


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_a_prediction_says_what_is_measured_and_what_is_assumed():
    result = predict(SETUP, replicas_plan(), profiled())
    assert result.profiled == ("fast", "slow")
    assert result.interval_seconds[0] == pytest.approx(result.step_seconds * (1 - MEASURED_ERROR))
    assert not any(text.startswith("families.") for text in result.assumed_inputs), result.assumed_inputs
    half = predict(SETUP, replicas_plan(), profiled(families=("fast",)))
    assert half.profiled == ("fast",)
    assert half.interval_seconds[0] == pytest.approx(half.step_seconds * (1 - DATASHEET_ERROR))
    assert "families.slow: no profile of this job, which other families have" in half.assumed_inputs
    many = predict(SETUP, replicas_plan((50, 46), zero=2), profiled())
    assert "families.slow: 46 rows at once, at the speed of the 45 that were profiled" in many.assumed_inputs
    assert "families.fast: passes in ZeRO 2 and 3, as profiled in 1" in many.assumed_inputs


def test_the_commands_say_where_seconds_are_from(tmp_path):
    (tmp_path / "c.toml").write_text(
        dump_cluster(profiled(largest_rows=20, limited_by="memory"), truth=Truth(width_scale=64))
    )
    (tmp_path / "p.toml").write_text(dump_plan(replicas_plan()))
    cluster = ["--cluster", str(tmp_path / "c.toml"), "--set", FOUR_HEADS]
    summary = CliRunner().invoke(predict_command, ["mixed", *cluster, "--plan", str(tmp_path / "p.toml")]).stdout
    assert "source    compute seconds of fast, slow: profile of this job" in summary
    assert "warning   families.fast: of the whole model 20 rows fit when it was profiled (ZeRO 1)" in summary
    planned = CliRunner().invoke(plan_command, ["search", "mixed", *cluster, "--budget", "50"]).stdout
    assert "# compute seconds of fast, slow: profile of this job" in planned
    assert "# warning families.slow: of the whole model 20 rows fit" in planned


def test_the_memory_model_is_contradicted_by_what_fit_and_by_what_did_not():
    (fits,) = {warning.split(", ")[1].split()[0] for warning in memory_warnings(SETUP, profiled(largest_rows=1_000))}
    modelled = int(fits)
    near = {"largest_rows": modelled - 1, "limited_by": "memory"}
    assert not memory_warnings(SETUP, profiled(**near))
    fewer = near | {"largest_rows": modelled // 2}
    assert len(memory_warnings(SETUP, profiled(**fewer))) == 2
    assert not memory_warnings(SETUP, profiled(**fewer | {"limited_by": "job"})), "more may have fit"
    assert not memory_warnings(SETUP, profiled(**fewer | {"replicas": 4})), "these share the state otherwise"
    roomy = predict(SETUP, replicas_plan((modelled, modelled)), profiled())
    assert roomy.fits and not predict(SETUP, replicas_plan((modelled + 1, modelled + 1)), profiled()).fits


# ---- what it is for --------------------------------------------------------------------------------------------------


def test_a_search_by_profile_is_as_good_as_one_that_knows_the_truth(monkeypatch):
    """The sheet of one family is wrong by 30 %: its plan is slower than need be, on true devices."""
    wrong, cluster = (
        search(SETUP, JOB.train.global_batch, c, limits=LIMITS) for c in (parse_cluster(WRONG, "a test"), profiled())
    )
    for module in (pools_module, prices_module):
        monkeypatch.setattr(module, "device_models", true_models)
    right = parse_cluster(RIGHT, "a test")
    truth = search(SETUP, JOB.train.global_batch, right, limits=LIMITS)
    by_sheet, by_profile = (predict(SETUP, result.best.plan, right).step_seconds for result in (wrong, cluster))
    assert by_profile <= 1.02 * truth.best.seconds
    assert by_sheet > 1.02 * truth.best.seconds
    assert cluster.best.seconds == pytest.approx(by_profile, rel=0.02)
    assert wrong.best.seconds < 0.9 * by_sheet


def with_kernels(fused: bool | None) -> Job:
    return JOB.model_copy(update={"kernels": KernelChoice(fused=fused)})


def test_a_setup_takes_the_profile_of_its_own_kernels():
    cluster = profiled(families=("fast",))
    fused = replace(SETUP, engine=HPCTRAIN_FUSED)
    assert timed_profiles(cluster, fused) == timed_profiles(cluster, SETUP), "better than none"
    assumed = device_models(cluster, fused)["fast"].assumptions(replicas_plan().tiles)
    assert "families.fast: passes with this run's kernels, as profiled with separate ones" in assumed
    own = cluster.profiles[0].model_copy(update={"work": describe_work(with_kernels(True), "fp32")})
    both = cluster.model_copy(update={"profiles": (own, *cluster.profiles)})
    assert timed_profiles(both, fused) == {"fast": own}
    assert timed_profiles(both, SETUP) == {"fast": cluster.profiles[0]}


@pytest.mark.parametrize(
    ("fused", "has"), [(None, (True, True)), (True, (True, False)), (False, (False, True))], ids=["auto", "on", "off"]
)
def test_a_job_with_kernels_that_were_not_profiled_is_profiled(fused, has):
    """What `auto` becomes is known of no machine before, so that either will do."""
    works = (describe_work(with_kernels(True), "fp32"), describe_work(JOB, "fp32"))
    assert tuple(has_times(profiled(work=work), with_kernels(fused), "fp32") for work in works) == has
