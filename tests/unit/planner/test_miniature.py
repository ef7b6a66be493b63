"""A cluster and a job that are scaled down together: what takes a second stays a second, and memory stays as full."""

import math
from dataclasses import replace

import pytest

from hpctrain.architectures.description import inner_of
from hpctrain.config.clusters.cluster import ITEM_BYTES
from hpctrain.config.clusters.cluster_file import dump_cluster, parse_cluster, parse_cluster_file
from hpctrain.config.errors import TopologyError
from hpctrain.config.job import Job, Model, load_job
from hpctrain.jobs.common import load_described, ready_miniature
from hpctrain.plan.tiling import even_plan
from hpctrain.plan.uniform import with_families
from hpctrain.planner.prediction.activations import layer_kept
from hpctrain.planner.prediction.predictor import predict
from hpctrain.planner.prices.buffers import message_bytes
from hpctrain.planner.prices.cost import model_flops
from hpctrain.planner.prices.devices import DeviceModel
from hpctrain.planner.prices.network import ClusterNetwork
from hpctrain.planner.prices.setup import Setup
from hpctrain.rehearsal.miniature import choose_width, miniature, with_exact_links
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.items import BLOCK
from hpctrain.sharding.parameters import check_grid, count_parameters

CLUSTER = """
[families.a100]
kind = "cuda"
model = "NVIDIA A100 SXM 80GB"
origin = "datasheet"
memory_bytes = 80e9
memory_bytes_per_second = 2.0e12
host_copy_bytes_per_second = 25e9
peak_flops_per_second = {fp32 = 19.5e12, bf16 = 312e12}
products = [{dtype = "bf16", shape = [8192, 4096, 4096], flops_per_second = 250e12}]

[families.v100]
kind = "cuda"
model = "NVIDIA V100 SXM2 32GB"
origin = "measured"
memory_bytes = 32e9
memory_bytes_per_second = 0.8e12
peak_flops_per_second = {fp32 = 15.7e12, fp16 = 125e12}
sustained_flops_per_second = {fp16 = 95e12}

[fabrics.ib]
origin = "datasheet"
latency_seconds = 3e-6
bytes_per_second = 50e9

[[nodes]]
devices = {a100 = 2}
origin = "datasheet"
link_latency_seconds = 3e-6
link_bytes_per_second = 300e9
nics = [{origin = "datasheet", fabric = "ib", send_bytes_per_second = 25e9, receive_bytes_per_second = 25e9}]

[[nodes]]
devices = {v100 = 2}
origin = "datasheet"
link_latency_seconds = 3e-6
link_bytes_per_second = 150e9
nics = [{origin = "datasheet", fabric = "ib", send_bytes_per_second = 25e9, receive_bytes_per_second = 25e9}]

[[links]]
families = ["a100", "v100"]
fabric = "ib"
origin = "measured"
latency_seconds = 5e-6
bytes_per_second = 20e9
times = [{message_bytes = 1_000_000_000, flows = 2, seconds = 0.1}]
"""
TRUTH = """
[truth]
time_scale = 7.0
memory_scale = 2.0

[truth.devices.a100]
memory_bytes = 80e9
memory_bytes_per_second = 1.7e12
flops_per_second = {fp16 = 265e12}
launch_seconds = 4e-6
tile = [128, 64]
half_speed_rows = 320.0
"""
SETTINGS = ["data.tokens=none", "data.sequence_length=2048", "train.global_batch=16"]
WIDTHS = {"llama-1b": 32, "llama-8b": 64, "gpt-5b": 64, "gpt2-1.5b": 16, "llama-70b": 64}


def job_of(preset: str, *settings: str) -> Job:
    positions = ["model.max_positions=2048"] if preset == "gpt2-1.5b" else []
    return load_job("tiny", [f"model.preset={preset}", *SETTINGS, *positions, *settings])


def made_of(job: Job, text: str = CLUSTER, cores: int = 2):
    return miniature(*parse_cluster_file(text, "a test")[:2], job, cores)


@pytest.mark.parametrize("preset", WIDTHS)
def test_heads_stay_and_widths_and_positions_shrink_equally(preset):
    real = job_of(preset)
    made = made_of(real)
    width, model = WIDTHS[preset], made.job.model
    assert choose_width(real) == made.truth.width_scale == made.scale.width == width
    assert model.hidden_size * width == real.model.hidden_size
    assert made.job.data.sequence_length * width == 2048
    kept = "num_layers", "num_heads", "num_kv_heads", "tie_head", "architecture"
    assert [getattr(model, name) for name in kept] == [getattr(real.model, name) for name in kept]
    assert inner_of(model) * width == pytest.approx(inner_of(real.model), rel=0.05)
    assert model.vocab_size == max(64, math.ceil(real.model.vocab_size / width))
    assert Model(**model.model_dump()) == model, "it is a valid model"
    for y in (2, 4, 8):
        if real.model.num_heads % y == 0:
            check_grid(model, TensorGrid(x=2, y=y))
    assert (made.job.plan, made.job.train.global_batch) == (real.plan, real.train.global_batch)


@pytest.mark.parametrize("preset", ["llama-1b", "llama-8b", "gpt-5b"])
def test_seconds_stay_what_they_are(preset):
    real = job_of(preset, "train.dtype=bf16")
    made, cluster = made_of(real), parse_cluster(CLUSTER, "a test")
    setups = Setup.of_job(real, "bf16"), Setup.of_job(made.job, "fp32")
    flops = [model_flops(setup, setup.positions) for setup in setups]
    grid = TensorGrid(x=2, y=2)
    kept = [layer_kept(setup, grid, BLOCK, "none") for setup in setups]
    messages = [message_bytes(setup, grid, 3) for setup in setups]
    weights = [count_parameters(setup.model) * setup.item_bytes for setup in setups]
    for (name, there), here in zip(cluster.families.items(), made.cluster.families.values(), strict=True):
        dtype = "bf16" if name == "a100" else "fp16"
        models = [DeviceModel(name, there), DeviceModel(name, here)]
        speeds = models[0].speed(dtype), models[1].speed("fp32")
        assert flops[1] / speeds[1] == pytest.approx(flops[0] / speeds[0], rel=0.02)
        for sizes, tolerance in ((kept, 0.05), (weights, 0.02)):  # sums for each head do not become fewer
            seconds = [device.pass_seconds(size) for device, size in zip(models, sizes, strict=True)]
            assert seconds[1] == pytest.approx(seconds[0], rel=tolerance)
    for there, here in zip(cluster.nodes, made.cluster.nodes, strict=True):
        for before, after in (
            (there.link_bytes_per_second, here.link_bytes_per_second),
            (there.nics_by_fabric["ib"][0].send_bytes_per_second, here.nics_by_fabric["ib"][0].send_bytes_per_second),
        ):
            assert messages[1] / after == pytest.approx(messages[0] / before, rel=0.02)
        assert here.link_latency_seconds == there.link_latency_seconds
    (there,), (here,) = cluster.links, made.cluster.links
    assert messages[1] / here.bytes_per_second == pytest.approx(messages[0] / there.bytes_per_second, rel=0.02)
    assert here.times[0].seconds == 0.1
    assert here.times[0].message_bytes == pytest.approx(1e9 * messages[1] / messages[0], rel=0.02)
    assert made.cluster.fabrics["ib"].latency_seconds == 3e-6
    assert made.cluster.links_by_key[here.key] == here, "nothing is left of the real one"


@pytest.mark.parametrize("preset", ["llama-1b", "llama-8b"])
def test_the_job_fills_as_large_a_share_of_memory(preset):
    real = job_of(preset, "plan.pipeline=4", "plan.microbatch=1")
    text = CLUSTER.replace("devices = {v100 = 2}", "devices = {a100 = 2}")
    made = made_of(real, text)
    plan = even_plan(real.model.num_items, TensorGrid(), 4, 1, 16, 1, family="a100")
    shares = []
    for job, cluster, dtype in ((real, parse_cluster(text, "a test"), "bf16"), (made.job, made.cluster, "fp32")):
        stages = predict(Setup.of_job(job, dtype), plan, cluster).memory
        shares.append(max(stage.memory.total for stage in stages) / cluster.families["a100"].memory_bytes)
    assert shares[1] == pytest.approx(shares[0], rel=0.02)


def test_a_small_job_stays_as_it_is():
    job = load_job("tiny", ["model.vocab_size=1024", "train.dtype=fp32"])
    made = made_of(job)
    assert made.job == job and not made.is_job_scaled
    real = with_exact_links(parse_cluster(CLUSTER, "a test"))
    assert made.cluster.nodes == real.nodes and made.cluster.fabrics == real.fabrics
    assert made.cluster.families["a100"].memory_bytes == 80_000_000_000
    speed = DeviceModel("a100", real.families["a100"]).speed("fp32")
    assert made.cluster.families["a100"].sustained_flops_per_second == {"fp32": speed}
    assert 20 < made.truth.time_scale < 1000, "cores need some 80 us for an operation that is launched in 2"
    again = made_of(job, dump_cluster(made.cluster, truth=made.truth))
    assert (again.cluster, again.truth, again.job) == (made.cluster, made.truth, made.job), "it is not scaled twice"


def test_without_a_truth_devices_do_what_their_figures_say():
    made = made_of(job_of("llama-8b"))
    devices = made.truth.devices
    assert set(devices) == {"a100", "v100"}
    rows = 16384 // 64
    for name, device in devices.items():
        family = made.cluster.families[name]
        seconds = device.product_seconds("fp32", rows, 4096, 4096)
        assert 2.0 * rows * 4096**2 / seconds == pytest.approx(family.sustained_flops_per_second["fp32"], rel=0.01)
        assert device.tile == (2, 2) and device.memory_bytes == family.memory_bytes
        assert device.overlap_slowdown == family.overlap_slowdown > 1
    assert made.cluster.families["v100"].sustained_flops_per_second["fp32"] == pytest.approx(95e12 / 64**3)
    assert made.cluster.families["v100"].origin_of("sustained_flops_per_second") == "measured"
    assert made.cluster.families["a100"].origin_of("sustained_flops_per_second") == "assumed"
    assert made.cluster.families["a100"].products[0].shape == (128, 64, 64)
    assert devices["v100"].memory_bytes_per_second == pytest.approx(0.8e12 * 2 / 64**2), "measured: no share of it"
    assert devices["a100"].memory_bytes_per_second < 2.0e12 * 2 / 64**2


def test_a_truth_of_real_size_goes_before_them():
    made = made_of(job_of("llama-8b"), CLUSTER + TRUTH)
    device = made.truth.devices["a100"]
    assert device.flops_per_second == pytest.approx({"fp32": 265e12 / 64**3})
    assert (device.tile, device.half_speed_rows, device.launch_seconds) == ((2, 1), 5.0, 4e-6)
    assert device.memory_bytes == made.cluster.families["a100"].memory_bytes == round(80e9 * 2 / 64**2)
    assert made.truth.time_scale == 7.0 and made.truth.memory_scale == 2.0
    assert "v100" in made.truth.devices, "by its own figures"
    assert made.describe("ours") == (
        "rehearsal of ours: hidden 4096 -> 64, positions 2048 -> 32, vocabulary 128256 -> 2004 (1/64);"
        " FLOP/s 1/262,144; bytes/s 1/2,048; memory 1/2,048; fp32 represents half precision; the real job is predicted"
        f" to take {made.real_times:.2f} times as long: it casts between fp32 and half precision, its gradients and"
        " moments are fp32, its products have tiles of real size; 7 s for one of the cluster"
    )


def test_a_miniature_is_taken_as_it_is_and_scales_its_job_again():
    real = job_of("llama-8b")
    made = made_of(real, CLUSTER + TRUTH)
    again = made_of(real, dump_cluster(made.cluster, truth=made.truth), cores=64)
    assert (again.cluster, again.truth, again.job) == (made.cluster, made.truth, made.job)
    assert again.scale is None and "the cluster as it is" in again.describe("it")
    small = load_job("tiny", ["model.vocab_size=1024"])
    assert made_of(small, dump_cluster(made.cluster, truth=made.truth)).job == small


def test_more_cores_need_less_time():
    seconds = [made_of(job_of("llama-8b"), cores=cores).truth.time_scale for cores in (1, 2, 4, 100)]
    assert seconds[0] == pytest.approx(2 * seconds[1], rel=0.05) and seconds[1] == pytest.approx(
        2 * seconds[2], rel=0.1
    )
    assert seconds[3] == seconds[2], "four ranks keep no more than four cores busy"


def test_the_dtype_decides_what_is_scaled():
    made = made_of(job_of("llama-8b", "train.dtype=fp32"))
    assert made.scale.item_bytes == ITEM_BYTES["fp32"] and made.scale.num_bytes == 1 / 64**2
    assert made.cluster.families["v100"].peak_flops_per_second == pytest.approx({"fp32": 15.7e12 / 64**3})
    only_fp32 = CLUSTER.replace(", fp16 = 125e12", "").replace("{fp16 = 95e12}", "{fp32 = 15e12}")
    assert made_of(job_of("llama-8b"), only_fp32).scale.item_bytes == 4
    with pytest.raises(
        TopologyError, match="families.v100 has no speed in bf16 or fp16; set its peak_flops_per_second"
    ):
        made_of(job_of("llama-8b", "train.dtype=bf16"), only_fp32)


def test_a_pretended_network_gives_all_of_its_bandwidth():
    """What a data sheet says of links is discounted for real clusters alone."""
    made = ready_miniature("ib-roce").cluster
    for pair in ((0, 1), (0, 4)):
        full, shared = (ClusterNetwork(made, link_share).seconds(*pair, 1 << 20) for link_share in (1.0, 0.5))
        assert full == shared


def test_a_miniature_has_the_figures_of_a_family_that_its_table_leaves_out():
    made = made_of(job_of("llama-8b"))
    some = made.truth.model_copy(update={"devices": {"a100": made.truth.devices["a100"]}})
    again = made_of(job_of("llama-8b"), dump_cluster(made.cluster, truth=some))
    assert again.truth.devices["a100"] == made.truth.devices["a100"] and again.scale is None
    speed = made.cluster.families["v100"].sustained_flops_per_second["fp32"]
    assert again.truth.devices["v100"].flops_per_second == pytest.approx({"fp32": speed}, rel=0.02)


def test_one_line_says_how_much_longer_the_real_job_takes_than_its_rehearsal():
    """`plan search` and `predict` have the real job, a rehearsal the miniature: both predicted for one plan."""
    name = "v100-t4"
    described, job, made = load_described(name), load_job("mixed"), ready_miniature(name)
    families = [device.family for device in described.cluster.devices]
    plan = with_families(even_plan(job.model.num_items, TensorGrid(), 8, 1, 192, 1), families)
    half = replace(Setup.of_job(job, "fp16"), by_family=tuple((each, "fp16") for each in sorted({*families})))
    real = predict(half, plan, described.cluster).step_seconds
    rehearsed = predict(Setup.of_job(made.job, "fp32"), plan, made.cluster).step_seconds
    assert made.real_times == pytest.approx(real / rehearsed, rel=1e-6) and made.real_times > 1.1
