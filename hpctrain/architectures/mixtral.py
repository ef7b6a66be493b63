"""Mixtral (Jiang et al. 2024): the form of Mistral, with a mixture of experts in each layer."""

from hpctrain.architectures import mistral
from hpctrain.architectures.description import Description, ModelShape, inner_of, with_experts
from hpctrain.architectures.huggingface import (
    ATTENTION,
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    ROPE_KEYS,
    HuggingFace,
    read_rope,
    write_rope,
)


def describe(shape: ModelShape) -> Description:
    return with_experts(mistral.describe(shape), shape, inner_of(shape))


_SIZES = {"max_positions": 32768, "rope_base": 1000000.0, "vocab_size": 32000, "experts_per_token": 2}
PRESETS = {
    "mixtral-8x7b": _SIZES
    | {
        "num_layers": 32,
        "hidden_size": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "ffn_size": 14336,
        "num_experts": 8,
    },
    "mixtral-8x22b": _SIZES
    | {
        "num_layers": 56,
        "hidden_size": 6144,
        "num_heads": 48,
        "num_kv_heads": 8,
        "ffn_size": 16384,
        "num_experts": 8,
        "max_positions": 65536,
        "vocab_size": 32768,
    },
}
ROUTER_KEYS = ("router_aux_loss_coef",)
"""Keys of a config that are of an auxiliary loss, which the library adds with `output_router_logits` alone."""
HUGGING_FACE = HuggingFace(
    "mixtral",
    "MixtralForCausalLM",
    keys=LLAMA_KEYS | {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    defaults=LLAMA_DEFAULTS
    | {
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    must_be={"hidden_act": "silu", "router_jitter_noise": 0.0, "output_router_logits": False},
    read_by_rule=(*ROPE_KEYS, "sliding_window"),
    without_effect=ROUTER_KEYS,
    parts=ATTENTION
    | {
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "router": "block_sparse_moe.gate",
    },
    experts={
        "experts.up": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        "experts.down": ("block_sparse_moe.experts.{}.w2",),
    },
    read_more=lambda config: read_rope({"rope_theta": 1e6} | config) | {"window": config["sliding_window"]},
    write_more=lambda model: write_rope(model) | {"sliding_window": model.window},
)
