"""Torchtitan's configuration: each key is read, has no effect, or is refused; plans are written and read back."""

import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.errors import JobError, PlanError
from hpctrain.config.job import Job, load_job
from hpctrain.config.tables import toml_value
from hpctrain.plan.tiling import Plan, even_plan
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.software.advice import better_flags
from hpctrain.software.run import DescribedRun
from hpctrain.software.torchtitan import NO_EFFECT, READ, REFUSED, TABLE, TitanRun, read_config, titan_run
from hpctrain.software.torchtitan_export import titan_config

KEYS = {
    name: (kind, choices[0].split(",") if choices else [])
    for line in (Path(__file__).parent / "torchtitan_keys.txt").read_text().splitlines()[1:]
    for name, kind, *choices in [line.split(" ")]
}
"""The type and the choices of each key, as torchtitan's own dataclasses have them."""
TYPES = {"str": str, "int": int, "float": float, "bool": bool, "list": list}
LLAMA_8B = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[activation_checkpoint]
selective_ac_option = "op"
"""


def machine(devices: int = 8) -> Cluster:
    return DescribedRun(1024, 4, 16, 1024, devices, 1, 1, 1, 1, "H100").cluster


@pytest.fixture
def read(tmp_path):
    """Return what reads keys, in place of others of the same name, as a run on 8 devices."""

    def run_of(*keys: str, devices: int = 8) -> TitanRun:
        tree = tomllib.loads(LLAMA_8B)
        for key in keys:
            for section, values in tomllib.loads(key).items():
                tree.setdefault(section, {}).update(values)
        (tmp_path / "config.toml").write_text("\n".join(f"{key} = {toml_value(value)}" for key, value in tree.items()))
        return titan_run(read_config(str(tmp_path / "config.toml")), machine(devices))

    return run_of


def test_every_key_of_torchtitan_is_read_or_has_no_effect_or_is_refused():
    for name in KEYS:
        places = [name in READ, name in REFUSED, bool(NO_EFFECT.fullmatch(name))]
        assert sum(places) == 1, (name, places)
    assert READ.keys() | REFUSED.keys() <= KEYS.keys()


def test_what_is_read_has_the_types_and_choices_of_torchtitan():
    for name, default in READ.items():
        kind, choices = KEYS[name]
        assert isinstance(default, TYPES[kind]), name
        assert not choices or {default, *TABLE["choices"].get(name, [])} <= set(choices), name


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], {"zero": 3, "data": 8, "global_batch": 8, "recompute": "selective", "dtype": "bf16", "kv_heads": 8}),
        (["training.global_batch_size = 32"], {"microbatch": 1, "global_batch": 32}),
        (["parallelism.tensor_parallel_degree = 8"], {"zero": 0, "dtype": "fp32", "sequence_parallel": True}),
        (["parallelism.tensor_parallel_degree = 2"], {"zero": 3, "dtype": "bf16", "data": 4}),
        (["parallelism.data_parallel_replicate_degree = 2"], {"zero": 3, "replicas": 2, "data": 8}),
        (["parallelism.data_parallel_replicate_degree = 8"], {"zero": 0, "overlapped": True, "gradient_dtype": "fp32"}),
        (["parallelism.context_parallel_degree = 2"], {"context": 2, "data": 4, "weight_holders": 8}),
        (["activation_checkpoint.selective_ac_option = '1'"], {"recompute": "full"}),
        (["model.converters = ['float8']", "quantize.linear.float8.filter_fqns = ['output']"], {"linear_dtype": "fp8"}),
        (
            ["parallelism.pipeline_parallel_degree = 4", "training.local_batch_size = 8"],
            {"stages": (9, 9, 8, 8), "microbatch": 1, "data": 2, "global_batch": 16, "zero": 1, "interleave": 1},
        ),
        (
            [
                "parallelism = {pipeline_parallel_degree = 4, pipeline_parallel_schedule = 'Interleaved1F1B'}",
                "training.local_batch_size = 8",
            ],
            {"stages": (9, 9, 8, 8), "interleave": 2},
        ),
    ],
)
def test_a_key_says_a_field_of_the_run(read, keys, expected):
    run = read(*keys).run
    assert {name: getattr(run, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ([], "fsdp"),
        (["compile.enable = true"], "fsdp-compiled-loss"),
        (["compile = {enable = true, components = ['model']}"], "fsdp-compiled"),
    ],
)
def test_what_is_compiled_names_the_software(read, keys, name):
    assert read(*keys).software.name == name


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["model.name = 'deepseek_v3'"], "model.name = 'deepseek_v3' cannot be predicted; llama3, qwen3 can"),
        (["model.flavor = '8B_flex'"], "model.flavor = '8B_flex' of llama3 cannot be predicted"),
        (["training.local_batch_sise = 1"], "(2026-02-20); did you mean 'training.local_batch_size'"),
        (["training.local_batch_size = '1'"], 'training.local_batch_size = "1" is no int, such as 8'),
        (["training.local_batch_size = 0"], "training.local_batch_size = 0; set it to a whole number above 0"),
        (["training.global_batch_size = 9"], "training.global_batch_size = 9 is no multiple of local_batch_size 1"),
        (["training.enable_cpu_offload = true"], "what is moved to host memory cannot be predicted"),
        (["activation_checkpoint.selective_ac_option = '2'"], "recomputing of one block in 2 cannot be predicted"),
        (["parallelism.tensor_parallel_degree = 3"], "are not the 8 devices of the cluster"),
        (["parallelism.data_parallel_shard_degree = 4"], "x shard 4 are not the 8 devices"),
        (
            ["parallelism.pipeline_parallel_schedule = 'ZBVZeroBubble'"],
            "of its values 1F1B, GPipe, Interleaved1F1B can",
        ),
        (
            ["parallelism.pipeline_parallel_degree = 2", "training.global_batch_size = 32"],
            "accumulated 8 times: a pipeline that is emptied several times a step cannot be predicted",
        ),
        (
            ["parallelism = {tensor_parallel_degree = 2, data_parallel_replicate_degree = 4}"],
            "without shards: torchtitan has it alone",
        ),
        (["model.converters = ['float8']"], "set it to ['output']"),
        (["training.seq_len = 8190", "parallelism.tensor_parallel_degree = 4"], "is not divisible by tensor 4"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_one_line(read, keys, message):
    with pytest.raises(JobError) as error:
        read(*keys)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_better_keys_are_faster_and_are_read_back(read):
    own = read("parallelism.tensor_parallel_degree = 8", "training.global_batch_size = 32")
    slow = own.run.predict(own.software)
    better = better_flags(own, slow)
    assert better and better.prediction.step_seconds < 0.9 * slow.step_seconds
    words = [each.partition(" ") for each in better.flags.split(" (without")[0].removeprefix("--").split(" --")]
    assert all(key in READ for key, _, _ in words)
    keys = [f"{key} = {value if KEYS[key][0] == 'int' else repr(value)}" for key, _, value in words]
    found = read("training.global_batch_size = 32", *keys)
    assert found.run.predict(found.software).step_seconds == pytest.approx(better.prediction.step_seconds)


JOB = load_job(
    "mixed",
    [
        "model.preset=llama-8b",
        "model.num_layers=32",
        "model.hidden_size=4096",
        "model.ffn_size=14336",
        "model.vocab_size=128256",
        "model.rope_scaling={kind = 'llama3', factor = 8.0}",
    ],
)
SHARDS = TensorGrid(z=4)


def plan_of(tensor: TensorGrid, pipeline: int, data: int, microbatches: int = 2, **more) -> Plan:
    return even_plan(
        JOB.model.num_items, tensor, pipeline, data, microbatches, 8, **{"family": "H100", "zero": 0} | more
    )


def _uneven(plan: Plan) -> Plan:
    cut = {0: Interval(0, 21), 33: Interval(21, 66)}
    return replace(plan, tiles=tuple(replace(tile, items=cut[tile.items.start]) for tile in plan.tiles))


def _inside(plan: Plan) -> Plan:
    cut = {0: Interval(0, 22), 33: Interval(22, 66)}
    return replace(plan, tiles=tuple(replace(tile, items=cut[tile.items.start]) for tile in plan.tiles))


TWO_STAGES = plan_of(TensorGrid(y=2), 2, 2, zero=1)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (plan_of(TensorGrid(z=8), 1, 1), {"data_parallel_shard_degree": 8, "fsdp_reshard_after_forward": "default"}),
        (plan_of(SHARDS, 1, 2), {"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": 2}),
        (plan_of(TensorGrid(y=2, z=4), 1, 1), {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 4}),
        (plan_of(TensorGrid(), 1, 8, 1, zero=1), {"fsdp_reshard_after_forward": "never"}),
        (plan_of(TensorGrid(), 1, 8, 1, zero=3), {"fsdp_reshard_after_forward": "default"}),
        (plan_of(TensorGrid(), 1, 8, 1), {"data_parallel_replicate_degree": 8, "data_parallel_shard_degree": 1}),
        (TWO_STAGES, {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 4}),
        (plan_of(SHARDS, 2, 1, recompute="full"), {"fsdp_reshard_after_forward": "always"}),
        (plan_of(TensorGrid(), 2, 4, virtual_stages=2, zero=1), {"pipeline_parallel_schedule": "Interleaved1F1B"}),
        (_uneven(TWO_STAGES), {"pipeline_parallel_degree": 2}),
    ],
)
def test_a_plan_is_a_configuration_whose_keys_torchtitan_has(plan, expected):
    text, own = titan_config(JOB, "bf16", plan, machine())
    tree = tomllib.loads(text)
    assert tree["model"] == {"name": "llama3", "flavor": "8B"} and tree["optimizer"]["beta2"] == JOB.train.beta2
    assert {key: tree["parallelism"][key] for key in expected} == expected
    assert own.run.global_batch == plan.rows * plan.microbatches
    for section, keys in tree.items():
        for key, value in keys.items():
            kind, choices = KEYS[f"{section}.{key}"]
            assert isinstance(value, TYPES[kind]) and (not choices or value in choices), key
    layers = Counter(len(part) for part in tree["parallelism"].get("module_fqns_per_model_part", []))
    assert sum(size * count for size, count in layers.items()) in (0, 32 + 3)
    stages = {tile.items: (tile.items.size + 2) // 2 for tile in plan.first_tiles}
    if own.run.interleave == 1 and own.run.pipeline > 1:
        assert own.run.stages == tuple(stages[items] for items in sorted(stages))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (plan_of(TensorGrid(x=2), 1, 4), "torchtitan is written with a tensor grid of y and z alone"),
        (plan_of(TensorGrid(), 1, 8, 4, zero=1), "sums gradients after each of 4 microbatches"),
        (plan_of(SHARDS, 1, 2, zero=1), "whole, or in shards: ZeRO 1 and z = 4"),
        (_inside(TWO_STAGES), "a stage of this plan begins inside of one"),
        (plan_of(TensorGrid(), 1, 4), "the plan is for 4 ranks"),
    ],
)
def test_what_torchtitan_cannot_do_is_refused(plan, message):
    with pytest.raises(PlanError, match=message):
        titan_config(JOB, "bf16", plan, machine())


def test_a_model_that_torchtitan_does_not_have_is_refused():
    job: Job = load_job("tiny", ["model.vocab_size=32000"])
    with pytest.raises(JobError, match="has models of fixed sizes. The nearest, .* has model.* in place of"):
        titan_config(job, "bf16", plan_of(SHARDS, 1, 2), machine())
    with pytest.raises(JobError, match="compute.dtype = 'fp16' is none of torchtitan"):
        titan_config(JOB, "fp16", plan_of(SHARDS, 1, 2), machine())
