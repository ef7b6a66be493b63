"""Qwen 3 with experts (Yang et al. 2025): the form of Qwen 3, with a mixture of experts in each layer."""

from hpctrain.architectures import qwen3
from hpctrain.architectures.description import Description, ModelShape, expert_size_of, with_experts
from hpctrain.architectures.huggingface import LLAMA_KEYS, HuggingFace, Keys, UnknownConfigError, write_rope
from hpctrain.architectures.mixtral import ROUTER_KEYS
from hpctrain.architectures.qwen2 import WINDOW_SIZES, read_more

EXPERTS = {
    "experts.up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "experts.down": ("mlp.experts.{}.down_proj",),
}


def describe(shape: ModelShape) -> Description:
    inner, first = expert_size_of(shape), shape.dense_layers
    return with_experts(qwen3.describe(shape), shape, inner, first, normalised=shape.normalise_scores)


_QWEN3_MOE = {
    "vocab_size": 151936,
    "max_positions": 40960,
    "rope_base": 1000000.0,
    "norm_epsilon": 1e-6,
    "num_kv_heads": 4,
    "head_size": 128,
    "num_experts": 128,
    "experts_per_token": 8,
}
PRESETS = {
    "qwen3-30b-a3b": _QWEN3_MOE
    | {"num_layers": 48, "hidden_size": 2048, "num_heads": 32, "ffn_size": 6144, "expert_size": 768},
    "qwen3-235b-a22b": _QWEN3_MOE
    | {"num_layers": 94, "hidden_size": 4096, "num_heads": 64, "ffn_size": 12288, "expert_size": 1536},
}


def _read_more(config: Keys) -> Keys:
    dense = config["mlp_only_layers"] or []
    if dense != list(range(len(dense))):
        raise UnknownConfigError(f"mlp_only_layers = {dense}, and only the first layers may have no experts")
    return read_more(config) | {"dense_layers": len(dense)}


HUGGING_FACE = HuggingFace(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    keys=LLAMA_KEYS
    | {
        "num_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_size": "moe_intermediate_size",
        "normalise_scores": "norm_topk_prob",
    },
    defaults=qwen3.HUGGING_FACE.defaults
    | {
        "head_dim": None,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "mlp_only_layers": None,
    },
    also_named={"num_local_experts": "num_experts"},
    read_by_rule=(*qwen3.HUGGING_FACE.read_by_rule, "mlp_only_layers"),
    nullable=("head_dim",),
    without_effect=(*WINDOW_SIZES, *ROUTER_KEYS),
    must_be=qwen3.HUGGING_FACE.must_be | {"decoder_sparse_step": 1, "output_router_logits": False},
    parts=qwen3.HUGGING_FACE.parts | {"router": "mlp.gate"},
    experts=EXPERTS,
    read_more=_read_more,
    write_more=lambda model: write_rope(model) | {"mlp_only_layers": list(range(model.dense_layers))},
)
