"""Reads a configuration of torchtitan: each key is read, known to change neither speed nor memory, or refused."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Self

from hpctrain.config.bounds import MOST_NUMBER
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.errors import JobError, did_you_mean
from hpctrain.config.tables import parse_toml, read_text, toml_value
from hpctrain.software.launched import LaunchedRun
from hpctrain.software.run import DescribedRun, cut_layers, stages_of
from hpctrain.software.torch_fsdp import FSDP, FSDP_COMPILED, FSDP_COMPILED_LOSS

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
"""What each key means for a prediction; the file says how it is read."""
READ: dict[str, Any] = TABLE["read"]
NO_EFFECT = re.compile("|".join(TABLE["no_effect"]["keys"]))
REFUSED = {key: (why, harmless) for why, keys in TABLE["refused"].items() for key, harmless in keys.items()}
VERSION = "torchtitan v0.2.2 (2026-02-20)"
FLOAT8 = ("float8", "quantize.linear.float8")
"""The names of the converter of linear layers to fp8."""
LOOPED = "Interleaved1F1B"
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class TitanConfig:
    """The keys that are read of a configuration, with torchtitan's values for those that it leaves out."""

    values: Mapping[str, Any]
    where: str

    def count(self, key: str) -> int:
        """Return a whole number above 0. Raises JobError where it is none."""
        value = self.values[key]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MOST_NUMBER:
            raise JobError(f"{self.where}: {key} = {value}; set it to a whole number above 0")
        return value

    @property
    def compiled(self) -> frozenset[str]:
        """The parts that are compiled."""
        components = self.values["compile.components"]
        return frozenset(components) if self.values["compile.enable"] is True else frozenset()


def read_config(path: str) -> TitanConfig:
    """Return the keys of a configuration. Raises JobError for a key that is unknown or refused, with the reason."""
    given = dict(_flat(parse_toml(read_text(Path(path), JobError), path, JobError)))
    values = READ | given
    _flavor(values["model.name"], values["model.flavor"], path)  # the first reason that a person would name
    for key, value in given.items():
        why, harmless = REFUSED.get(key, ("", [value]))
        if value not in harmless:
            raise JobError(f"{path}: {key} = {toml_value(value)}: {why} cannot be predicted")
        if key in READ:
            if type(value) is not type(READ[key]):
                kind = type(READ[key]).__name__
                raise JobError(f"{path}: {key} = {toml_value(value)} is no {kind}, such as {toml_value(READ[key])}")
            known = TABLE["choices"].get(key, [value])
            if value not in known:
                raise JobError(f"{path}: {key} = '{value}' cannot be predicted; of its values {', '.join(known)} can")
        elif key not in REFUSED and not NO_EFFECT.fullmatch(key):
            near = get_close_matches(key, READ, 1)
            raise JobError(f"{path}: {key} is no key of {VERSION}{did_you_mean(key, near) if near else ''}")
    return TitanConfig(values, path)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Sequence[tuple[str, Any]]:
    result: list[tuple[str, Any]] = []
    for key, value in tree.items():
        result += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return result


@dataclass(frozen=True)
class TitanRun(LaunchedRun):
    """A configuration of torchtitan on a cluster."""

    compiled: frozenset[str]
    """The parts that are compiled: model, loss."""
    dtype: str
    """Of products, where weights are in shards or whole on each device."""

    recomputing: ClassVar[tuple[str, ...]] = ("none", "selective", "full")
    virtual_stages: ClassVar[tuple[int, ...]] = (1, 2)

    @classmethod
    def of(cls, run: DescribedRun, compiled: frozenset[str], dtype: str, assumed: Sequence[str] = ()) -> Self:
        """Return a run by the software that a configuration chooses, with its own way to hold weights.

        Stages keep gathered weights, and sum their gradients once, after the last microbatch: as ZeRO 1 does. Without
        shards, parts of a model are computed in fp32.
        """
        software = FSDP
        if "model" in compiled:
            software = FSDP_COMPILED_LOSS if "loss" in compiled else FSDP_COMPILED
        # cuDNN's attention comes first since March 2025.
        software = replace(software, native_attention=True, stores_halves=run.zero == 1)
        run = replace(
            run,
            dtype="fp32" if run.zero == 0 and run.tensor * run.pipeline > 1 else dtype,
            sequence_parallel=run.tensor > 1,
            overlaps_tensor=run.overlaps_tensor and run.tensor > 1,
        )
        if run.dtype != dtype:
            assumed = [*assumed, "training.mixed_precision_param: float32, as torchtitan computes without FSDP"]
        return cls(run, replace(software, sequence_parallel=run.tensor > 1), tuple(assumed), compiled, dtype)

    def with_layout(self, run: DescribedRun) -> Self:
        is_cut = run.pipeline > 1
        run = replace(run, zero=1 if is_cut else 3, replicas=1, overlapped=is_cut, gradient_dtype="fp32", gpipe=False)
        if run.weight_holders == 1:
            run = replace(run, zero=0, overlapped=False)
        if is_cut:
            run = replace(run, stages=stages_of(cut_layers(run.layers, run.pipeline * run.interleave), run.pipeline))
        return self.of(run, self.compiled, self.dtype, self.assumed)

    def words(self) -> dict[str, str]:
        run = self.run
        is_cut, shards = run.pipeline > 1, run.data // run.replicas if run.zero else 1
        keys: dict[str, Any] = {
            "training.local_batch_size": run.global_batch // run.data if is_cut else run.microbatch,
            "training.global_batch_size": run.global_batch,
            "parallelism.data_parallel_replicate_degree": run.data // shards,
            "parallelism.data_parallel_shard_degree": shards,
            "parallelism.fsdp_reshard_after_forward": "never" if run.zero == 1 else "always" if is_cut else "default",
            "parallelism.tensor_parallel_degree": run.tensor,
            "parallelism.context_parallel_degree": run.context,
            "parallelism.pipeline_parallel_degree": run.pipeline,
            "activation_checkpoint.mode": run.recompute,
        }
        if is_cut:
            schedule = "GPipe" if run.gpipe else LOOPED if run.interleave > 1 else "1F1B"
            keys["parallelism.pipeline_parallel_schedule"] = schedule
            keys["parallelism.pipeline_parallel_microbatch_size"] = run.microbatch
        if run.recompute == "selective":
            keys["activation_checkpoint.selective_ac_option"] = "op"
        if run.overlaps_tensor:
            keys["parallelism.enable_async_tensor_parallel"] = ""
        return {key: str(value) for key, value in keys.items()}


def titan_run(config: TitanConfig, cluster: Cluster) -> TitanRun:
    """Return the run of a configuration on all devices of a cluster. Raises JobError for what torchtitan refuses too,
    and for what cannot be predicted."""
    values, where, count, assumed = config.values, config.where, config.count, []
    model = _flavor(values["model.name"], values["model.flavor"], where)
    degrees = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel_replicate")
    tensor, pipeline, context, replicas = (count(f"parallelism.{each}_degree") for each in degrees)
    shards, rest = divmod(cluster.num_devices, tensor * pipeline * context * replicas)
    wanted = values["parallelism.data_parallel_shard_degree"]
    if rest or not shards or wanted not in (-1, shards):
        raise JobError(
            f"{where}: tensor {tensor} x pipeline {pipeline} x context {context} x replicate {replicas} x shard"
            f" {wanted} are not the {cluster.num_devices} devices of the cluster; set parallelism.*_degree"
        )
    data, local = replicas * shards, count("training.local_batch_size")
    batch = values["training.global_batch_size"]
    batch = local * data if batch == -1 else count("training.global_batch_size")
    accumulated, rest = divmod(batch, local * data)
    if rest or not accumulated:
        raise JobError(
            f"{where}: training.global_batch_size = {batch} is no multiple of local_batch_size {local} x data {data}"
        )
    is_cut, positions = pipeline > 1, count("training.seq_len")
    if positions % (tensor * (2 * context if context > 1 else 1)):
        raise JobError(f"{where}: training.seq_len = {positions} is not divisible by tensor {tensor} and 2 x context")
    microbatch = count("parallelism.pipeline_parallel_microbatch_size") if is_cut else local
    if local % microbatch or (is_cut and accumulated > 1):
        raise JobError(
            f"{where}: a local batch of {local} in microbatches of {microbatch}, accumulated {accumulated} times: a"
            " pipeline that is emptied several times a step cannot be predicted; set training.local_batch_size to"
            f" {batch // data}, and a divisor of it as the microbatch"
        )
    holders, reshard = shards * context, values["parallelism.fsdp_reshard_after_forward"]
    keeps = reshard == "never" or (reshard == "default" and is_cut)
    zero = 0 if holders == 1 else 1 if keeps else 3
    if zero == 1 and ((accumulated > 1 and not is_cut) or replicas > 1):
        raise JobError(
            f"{where}: parallelism.fsdp_reshard_after_forward = '{reshard}': weights that stay gathered through"
            f" {accumulated} exchanges a step, in {replicas} replicas, cannot be predicted; set 'always'"
        )
    if zero == 0 and replicas > 1 and (tensor * pipeline > 1 or accumulated > 1):
        raise JobError(
            f"{where}: parallelism.data_parallel_replicate_degree = {replicas} without shards: torchtitan has it"
            " alone, and it can be predicted with one exchange a step; set data_parallel_shard_degree"
        )
    recompute, option = values["activation_checkpoint.mode"], values["activation_checkpoint.selective_ac_option"]
    if recompute == "selective" and option != "op":
        if option != "1":
            raise JobError(
                f"{where}: activation_checkpoint.selective_ac_option = '{option}': recomputing of one block in"
                f" {option} cannot be predicted; set 'op' or '1'"
            )
        recompute = "full"
    unread = [each for each in values["model.converters"] if each not in FLOAT8]
    if unread:
        raise JobError(f"{where}: model.converters has '{unread[0]}', which cannot be predicted; float8 can")
    is_fp8 = bool(values["model.converters"])
    filtered = set(values["quantize.linear.float8.filter_fqns"]) - {"router.gate"}
    if is_fp8 and filtered != {"output"}:
        raise JobError(
            f"{where}: quantize.linear.float8.filter_fqns: fp8 of all linear layers but the output can be predicted;"
            " set it to ['output']"
        )
    if "loss" in config.compiled and "model" not in config.compiled:
        assumed.append("compile.components: none, as a compiled loss alone is not known")
    if is_fp8 and holders > 1:
        assumed.append("quantize.linear.float8.enable_fsdp_float8_all_gather: weights are gathered in bf16")
    run = DescribedRun(
        model["hidden_size"],
        model["num_layers"],
        model["num_heads"],
        positions,
        tensor,
        pipeline,
        data,
        microbatch,
        batch,
        next(iter(cluster.families)),
        vocabulary=model["vocab_size"],
        ffn=model["ffn_size"],
        linear_dtype="fp8" if is_fp8 else None,
        recompute=recompute,
        context=context,
        zero=zero,
        replicas=replicas if zero == 3 else 1,
        stack=FSDP.name,
        architecture=model["architecture"],
        kv_heads=model.get("num_kv_heads"),
        tie_head=model.get("tie_head", False),
        gpipe=values["parallelism.pipeline_parallel_schedule"] == "GPipe" and is_cut,
        overlapped=zero == 1 or (zero == 0 and data > 1),
        gradient_dtype="fp32",
        overlaps_tensor=values["parallelism.enable_async_tensor_parallel"] and "model" in config.compiled,
        head_size=model.get("head_size"),
        machine=cluster,
    )
    if is_cut:
        parts = _parts(config, run.layers, pipeline)
        run = replace(run, interleave=len(parts) // pipeline, stages=stages_of(parts, pipeline))
    return TitanRun.of(run, config.compiled, DTYPES[values["training.mixed_precision_param"]], assumed)


def _flavor(name: str, flavor: str, where: str) -> dict[str, Any]:
    """Return the keys of [model] of our jobs for a model of torchtitan."""
    flavors = TABLE["flavors"]
    if name not in flavors:
        raise JobError(f"{where}: model.name = '{name}' cannot be predicted; {', '.join(flavors)} can")
    if flavor not in flavors[name]:
        raise JobError(
            f"{where}: model.flavor = '{flavor}' of {name} cannot be predicted: experts, another attention, or none;"
            f" {', '.join(flavors[name])} can"
        )
    return TABLE["shared"][name] | flavors[name][flavor]


def _parts(config: TitanConfig, num_layers: int, pipeline: int) -> list[int]:
    """Return how many layers each virtual stage has, with embedding and head. Raises JobError as torchtitan does."""
    values, where = config.values, config.where
    less = (values[f"parallelism.pipeline_parallel_{end}_stage_less_layers"] for end in ("first", "last"))
    first, last = (max(0, each) for each in less)
    is_looped = values["parallelism.pipeline_parallel_schedule"] == LOOPED
    number, named = 1 + is_looped, values["parallelism.module_fqns_per_model_part"]
    if each := values["parallelism.pipeline_parallel_layers_per_stage"]:
        number, rest = divmod(-(-(num_layers + first + last) // max(1, each)), pipeline)
        if rest or (number > 1) != is_looped:
            raise JobError(
                f"{where}: parallelism.pipeline_parallel_layers_per_stage = {each} makes no number of stages for"
                f" {pipeline} ranks with this schedule; leave it out"
            )
    if not named:
        return cut_layers(num_layers, pipeline * number, first, last)
    expected = ["tok_embeddings", *(f"layers.{each}" for each in range(num_layers)), "norm", "output"]
    if [module for part in named for module in part] != expected or len(named) % pipeline:
        raise JobError(
            f"{where}: parallelism.module_fqns_per_model_part must be tok_embeddings, layers.0 to"
            f" layers.{num_layers - 1}, norm and output, in a multiple of {pipeline} lists"
        )
    return [sum(module != "norm" for module in part) for part in named]
