"""Writes the launch line of Megatron-LM for a job and a plan, or refuses what such a line cannot say. Pure."""

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.errors import JobError, PlanError
from hpctrain.config.job import Job, Model
from hpctrain.config.training.train import Train
from hpctrain.plan.tiling import Plan
from hpctrain.software.launched import check_exportable, check_places, shared_value
from hpctrain.software.megatron_flags import MegatronRun, read_flags, run_of

NAME = "Megatron-LM"
ARCHITECTURES = {
    "gpt2": {},
    "llama": {"swiglu": "", "normalization": "RMSNorm", "position-embedding-type": "rope", "disable-bias-linear": ""},
}
ARCHITECTURES["qwen2"] = ARCHITECTURES["llama"] | {"add-qkv-bias": ""}
ARCHITECTURES["qwen3"] = ARCHITECTURES["llama"] | {"qk-layernorm": ""}
"""The families of models that Megatron-LM has too, and the flags of each."""
DTYPES = {"bf16": {"bf16": ""}, "fp16": {"fp16": ""}, "fp32": {}}


def launch_line(job: Job, dtype: str, plan: Plan, cluster: Cluster) -> tuple[str, MegatronRun]:
    """Return the flags of Megatron-LM by which it runs a plan of a job on all devices of a cluster, and their run.

    The flags are read back by the reader of launch lines. Raises JobError for a model that Megatron-LM does not have,
    and PlanError for a plan that it cannot run.
    """
    flags = _model_flags(job) | DTYPES[dtype] | _layout_flags(plan, job.model.num_layers) | _optimizer_flags(job.train)
    check_exportable(NAME, plan, cluster)
    line = " ".join(f"--{name} {value}".rstrip() for name, value in flags.items())
    own = run_of(read_flags(line), cluster)
    wrong = {name for name, value in own.words().items() if flags.get(name) != value}
    assert not wrong, f"read back otherwise: {sorted(wrong)}"
    check_places(NAME, plan, own.run.plan)
    return line, own


def _model_flags(job: Job) -> dict[str, str]:
    model: Model = job.model
    if model.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise JobError(f"model.architecture = '{model.architecture}' has no flags of Megatron-LM; {known} have")
    if model.window or model.rope_scaling:
        raise JobError("model.window and model.rope_scaling are not written as flags of Megatron-LM; leave them out")
    flags = {
        "num-layers": model.num_layers,
        "hidden-size": model.hidden_size,
        "num-attention-heads": model.num_heads,
        "ffn-hidden-size": model.description.blocks[0].mlp.inner,
        "kv-channels": model.description.blocks[0].attention.head_size,
        "seq-length": job.data.sequence_length,
        "max-position-embeddings": model.max_positions,
        "vocab-size": model.num_ids,
        "norm-epsilon": f"{model.norm_epsilon:g}",
        "hidden-dropout": 0,  # 0.1 by default, as the other one
        "attention-dropout": 0,
    }
    if model.architecture != "gpt2":
        flags["rotary-base"] = int(model.rope_base)
    result = {name: str(value) for name, value in flags.items()} | ARCHITECTURES[model.architecture]
    if model.num_kv_heads and model.num_kv_heads != model.num_heads:
        result |= {"group-query-attention": "", "num-query-groups": str(model.num_kv_heads)}
    return result if model.tie_head else result | {"untie-embeddings-and-output-weights": ""}


def _optimizer_flags(train: Train) -> dict[str, str]:
    if train.optimizer != "adamw":
        raise JobError(f"train.optimizer = '{train.optimizer}' is not written as flags of Megatron-LM; adamw is")
    values = {
        "lr": train.learning_rate,
        "weight-decay": train.weight_decay,
        "adam-beta1": train.beta1,
        "adam-beta2": train.beta2,
        "adam-eps": train.epsilon,
        "clip-grad": train.clip_norm,
    }
    return {name: f"{value:g}" for name, value in values.items()} | {"train-iters": str(train.steps)}


def _layout_flags(plan: Plan, num_layers: int) -> dict[str, str]:
    """Return the flags of a plan. Raises PlanError where it is not even, or has what Megatron-LM has not."""
    grid = shared_value(NAME, "tensor grids", (tile.tensor for tile in plan.tiles))
    zero = shared_value(NAME, "ZeRO stages", (tile.zero for tile in plan.tiles))
    recompute = shared_value(NAME, "recompute", (tile.recompute for tile in plan.tiles))
    if grid.size > grid.y:
        raise PlanError(
            f"Megatron-LM has no tensor grid of {grid}, but y alone, and context parallelism of another kind than c:"
            " set tensor.x, tensor.z and tensor.c to 1"
        )
    if zero > 1:
        raise PlanError(f"Megatron-LM has no ZeRO {zero} with such plans, but 0 and 1: set zero to one of these")
    rows = shared_value(NAME, "numbers of rows", (tile.rows.size for tile in plan.tiles))
    chunks = sorted({tile.items for tile in plan.tiles})
    virtual = shared_value(NAME, "numbers of virtual stages", (len(plan.virtual_stages(tile)) for tile in plan.tiles))
    layers, rest = divmod(num_layers, len(chunks))
    even = [1 + 2 * layers * number for number in range(1, len(chunks))]
    if rest or [items.start for items in chunks[1:]] != even:
        raise PlanError(
            f"Megatron-LM cuts {num_layers} blocks evenly, and this plan's stages begin with items"
            f" {[items.start for items in chunks]}: make stages of equal numbers of whole blocks"
        )
    flags = {
        "tensor-model-parallel-size": grid.y,
        "pipeline-model-parallel-size": len(chunks) // virtual,
        "context-parallel-size": 1,
        "micro-batch-size": rows,
        "global-batch-size": plan.rows * plan.microbatches,
    }
    result = {name: str(value) for name, value in flags.items()}
    result |= {"num-virtual-stages-per-pipeline-rank": str(virtual)} if virtual > 1 else {}
    result |= {"recompute-granularity": recompute} if recompute != "none" else {}
    result |= {"recompute-method": "uniform", "recompute-num-layers": "1"} if recompute == "full" else {}
    result |= {"sequence-parallel": ""} if grid.y > 1 else {}
    return result | ({"use-distributed-optimizer": ""} if zero else {}) | {"overlap-grad-reduce": ""}
