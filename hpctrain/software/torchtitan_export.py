"""Writes the configuration of torchtitan for a job and a plan, or refuses what it cannot say. Pure."""

import itertools
from typing import Any

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.errors import JobError, PlanError
from hpctrain.config.job import Job, RopeScaling
from hpctrain.config.tables import toml_value
from hpctrain.plan.tiling import Plan
from hpctrain.sharding.items import block_of, layers
from hpctrain.software.launched import check_exportable, check_places, shared_value
from hpctrain.software.torchtitan import DTYPES, LOOPED, READ, TABLE, TitanConfig, TitanRun, titan_run

NAME = "torchtitan"


def titan_config(job: Job, dtype: str, plan: Plan, cluster: Cluster) -> tuple[str, TitanRun]:
    """Return the configuration by which torchtitan runs a plan of a job on all devices of a cluster, and its run.

    It is read back by `titan_run`. Raises JobError for a model that torchtitan does not have, and PlanError for a plan
    that it cannot run.
    """
    check_exportable(NAME, plan, cluster)
    if dtype not in DTYPES.values():
        raise JobError(f"compute.dtype = '{dtype}' is none of torchtitan; bf16 and fp32 are")
    keys = _model_keys(job) | _layout_keys(plan) | _optimizer_keys(job)
    keys["training.mixed_precision_param"] = {own: name for name, own in DTYPES.items()}[dtype]
    text = "".join(
        f"\n[{section}]\n" + "".join(f"{key.partition('.')[2]} = {toml_value(keys[key])}\n" for key in named)
        for section in dict.fromkeys(key.partition(".")[0] for key in keys)
        if (named := [key for key in keys if key.startswith(f"{section}.")])
    ).lstrip()
    own = titan_run(TitanConfig(READ | {key: keys[key] for key in READ if key in keys}, "the plan"), cluster)
    check_places(NAME, plan, own.run.plan)
    return text, own


def _model_keys(job: Job) -> dict[str, Any]:
    model = job.model
    ours = {
        "architecture": model.architecture,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads or model.num_heads,
        "head_size": model.description.blocks[0].attention.head_size,
        "ffn_size": model.description.blocks[0].mlp.inner,
        "vocab_size": model.num_ids,
        "tie_head": model.tie_head,
        "rope_base": model.rope_base,
        "norm_epsilon": model.norm_epsilon,
        "rope_scaling": model.rope_scaling,
    }
    nearest: list[str] = list(ours)
    title = ""
    for name, flavors in TABLE["flavors"].items():
        for flavor in flavors:
            theirs = TABLE["shared"][name] | flavors[flavor]
            heads = theirs["num_heads"]
            usual = {"num_kv_heads": heads, "head_size": theirs["hidden_size"] // heads, "tie_head": False}
            theirs = usual | {"rope_scaling": None} | theirs
            if theirs["rope_scaling"]:
                theirs["rope_scaling"] = RopeScaling(**theirs["rope_scaling"])
            different = [
                f"model.{key} = {theirs[key]} in place of {ours[key]}" for key in ours if theirs[key] != ours[key]
            ]
            if not different:
                return {"model.name": name, "model.flavor": flavor, "training.seq_len": job.data.sequence_length}
            if len(different) < len(nearest):
                nearest, title = different, f"{name} {flavor}"
    raise JobError(f"torchtitan has models of fixed sizes. The nearest, {title}, has {'; '.join(nearest)}")


def _optimizer_keys(job: Job) -> dict[str, Any]:
    train = job.train
    if train.optimizer != "adamw":
        raise JobError(f"train.optimizer = '{train.optimizer}' is not written for torchtitan; adamw is")
    return {
        "optimizer.name": "AdamW",
        "optimizer.lr": train.learning_rate,
        "optimizer.beta1": train.beta1,
        "optimizer.beta2": train.beta2,
        "optimizer.eps": train.epsilon,
        "optimizer.weight_decay": train.weight_decay,
        "training.max_norm": train.clip_norm,
        "training.steps": train.steps,
    }


def _layout_keys(plan: Plan) -> dict[str, Any]:
    """Return the keys of a plan. Raises PlanError where it has what torchtitan has not."""
    grid = shared_value(NAME, "tensor grids", (tile.tensor for tile in plan.tiles))
    zero = shared_value(NAME, "ZeRO stages", (tile.zero for tile in plan.tiles))
    recompute = shared_value(NAME, "recompute", (tile.recompute for tile in plan.tiles))
    rows = shared_value(NAME, "numbers of rows", (tile.rows.size for tile in plan.tiles))
    virtual = shared_value(NAME, "numbers of virtual stages", (len(plan.virtual_stages(tile)) for tile in plan.tiles))
    if any(size > 1 for axis, size in grid.sizes.items() if axis not in "yz"):
        raise PlanError(f"torchtitan is written with a tensor grid of y and z alone, and this plan has {grid}")
    chunks = sorted({tile.items for tile in plan.tiles})
    if any(one.stop != other.start for one, other in itertools.pairwise(chunks)):
        raise PlanError("torchtitan has replicas of equal stages, and those of this plan are cut at different items")
    last = chunks[-1].stop - 1
    if any(part.start % 2 == 0 and part.start not in (0, last) for part in chunks):
        raise PlanError("torchtitan cuts between whole blocks, and a stage of this plan begins inside of one")
    is_cut, microbatches, data = len(chunks) > virtual, plan.microbatches, plan.rows // rows
    if zero and grid.z > 1:
        raise PlanError(f"torchtitan keeps the weights of replicas whole, or in shards: ZeRO {zero} and z = {grid.z}")
    shards, replicas = (data, 1) if zero else (grid.z, data)
    if shards > 1 and is_cut and (zero == 3 or grid.z > 1):
        reshard = "always"
    else:
        reshard = "never" if zero in (1, 2) else "default"
    if shards > 1 and reshard == "never" and not is_cut and microbatches > 1:
        raise PlanError(
            f"torchtitan sums gradients after each of {microbatches} microbatches, and ZeRO {zero} of this plan once a"
            " step: set tensor.z, or one microbatch"
        )
    local = rows // grid.z
    keys: dict[str, Any] = {
        "training.local_batch_size": local * microbatches if is_cut else local,
        "training.global_batch_size": plan.rows * microbatches,
        "parallelism.data_parallel_replicate_degree": replicas,
        "parallelism.data_parallel_shard_degree": shards,
        "parallelism.fsdp_reshard_after_forward": reshard,
        "parallelism.tensor_parallel_degree": grid.y,
        "parallelism.pipeline_parallel_degree": len(chunks) // virtual,
        "activation_checkpoint.mode": recompute,
    }
    if is_cut:
        names = {0: ["tok_embeddings"], last: ["norm", "output"]}
        keys |= {
            "parallelism.pipeline_parallel_schedule": LOOPED if virtual > 1 else "1F1B",
            "parallelism.pipeline_parallel_microbatch_size": local,
            "parallelism.module_fqns_per_model_part": [
                [n for each in layers(part) for n in names.get(each.start, [f"layers.{block_of(each.start)}"])]
                for part in chunks
            ],
        }
    return keys | ({"activation_checkpoint.selective_ac_option": "op"} if recompute == "selective" else {})
