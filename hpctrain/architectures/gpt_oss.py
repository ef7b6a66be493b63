"""gpt-oss (OpenAI 2025): heads with sinks, every other layer in a window, experts with biases and a clamped activation.

A token's weights are the softmax of the logits of its own experts: those of all, divided by their sum.
"""

from dataclasses import replace

from hpctrain.architectures.description import (
    Attention,
    Description,
    Layer,
    Mlp,
    ModelShape,
    Norm,
    Rotary,
    head_size_of,
    inner_of,
    is_global,
    kv_heads_of,
    with_experts,
)
from hpctrain.architectures.huggingface import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    LLAMA_PARTS,
    ROPE_KEYS,
    HuggingFace,
    Keys,
    UnknownConfigError,
    read_layer_pattern,
    read_rope,
    write_layer_pattern,
    write_rope,
)
from hpctrain.architectures.mixtral import ROUTER_KEYS


def describe(shape: ModelShape) -> Description:
    norm = Norm(shape.norm_epsilon)
    attention = Attention(
        shape.num_heads,
        kv_heads_of(shape),
        head_size_of(shape),
        norm,
        bias=True,
        out_bias=True,
        rotary=Rotary(shape.rope_base, shape.rope_scaling),
        sinks=True,
    )
    windows = [None if is_global(shape, layer) else shape.window for layer in range(shape.num_layers)]
    blocks = tuple(Layer(replace(attention, window=window), Mlp(inner_of(shape), norm)) for window in windows)
    dense = Description(shape.hidden_size, blocks, norm, tied_head=shape.tie_head)
    return with_experts(dense, shape, inner_of(shape), activation="clamped", bias=True)


_ROPE = {"kind": "yarn", "factor": 32.0, "original_positions": 4096, "truncate": False}
_GPT_OSS = {
    "hidden_size": 2880,
    "num_heads": 64,
    "num_kv_heads": 8,
    "head_size": 64,
    "ffn_size": 2880,
    "vocab_size": 201088,
    "max_positions": 131072,
    "rope_base": 150000.0,
    "rope_scaling": _ROPE,
    "window": 128,
    "global_every": 2,
    "norm_epsilon": 1e-5,
    "experts_per_token": 4,
}
PRESETS = {
    "gpt-oss-20b": _GPT_OSS | {"num_layers": 24, "num_experts": 32},
    "gpt-oss-120b": _GPT_OSS | {"num_layers": 36, "num_experts": 128},
}


def _read_more(config: Keys) -> Keys:
    if quantised := config.get("quantization_config"):
        raise UnknownConfigError(
            f"quantization_config says {quantised.get('quant_method') if isinstance(quantised, dict) else quantised!r},"
            " and only whole weights are read; save the model in bf16 first, which transformers does with"
            " Mxfp4Config(dequantize=True)"
        )
    if config["rope_parameters"] is None and config.get("rope_scaling") is None:
        raise UnknownConfigError("rope_parameters = null, and the library would take those of the published models")
    return read_rope(config) | read_layer_pattern(config, 2)


HUGGING_FACE = HuggingFace(
    "gpt_oss",
    "GptOssForCausalLM",
    keys=LLAMA_KEYS | {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    defaults=LLAMA_DEFAULTS
    | {
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 4,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    also_named={"num_experts": "num_local_experts"},
    must_be={
        "hidden_act": "silu",
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "output_router_logits": False,
    },
    read_by_rule=(*ROPE_KEYS, "sliding_window", "layer_types", "quantization_config"),
    without_effect=(*ROUTER_KEYS, "initial_context_length", "experts_per_token"),
    parts=LLAMA_PARTS | {"router": "mlp.router", "attention.sinks.weight": "self_attn.sinks"},
    packed={
        "experts.up.weight": "mlp.experts.gate_up_proj",
        "experts.up.bias": "mlp.experts.gate_up_proj_bias",
        "experts.down.weight": "mlp.experts.down_proj",
        "experts.down.bias": "mlp.experts.down_proj_bias",
    },
    read_more=_read_more,
    write_more=lambda model: write_rope(model) | write_layer_pattern(model),
)
