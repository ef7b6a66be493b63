"""Qwen 2 and 2.5 (Yang et al. 2024): the form of Llama, with biases of queries, keys and values."""

from dataclasses import replace

from hpctrain.architectures import llama
from hpctrain.architectures.description import Description, ModelShape
from hpctrain.architectures.huggingface import (
    LLAMA_DEFAULTS,
    ROPE_KEYS,
    HuggingFace,
    Keys,
    UnknownConfigError,
    read_rope,
    write_rope,
)


def describe(shape: ModelShape) -> Description:
    plain = llama.describe(shape)
    block = replace(plain.blocks[0], attention=replace(plain.blocks[0].attention, bias=True))
    return replace(plain, blocks=(block,) * shape.num_layers)


_QWEN25 = {"vocab_size": 151936, "max_positions": 32768, "rope_base": 1000000.0, "norm_epsilon": 1e-6}
PRESETS = {
    "qwen2.5-0.5b": _QWEN25
    | {"num_layers": 24, "hidden_size": 896, "num_heads": 14, "num_kv_heads": 2, "ffn_size": 4864, "tie_head": True},
    "qwen2.5-1.5b": _QWEN25
    | {"num_layers": 28, "hidden_size": 1536, "num_heads": 12, "num_kv_heads": 2, "ffn_size": 8960, "tie_head": True},
    "qwen2.5-7b": _QWEN25
    | {
        "num_layers": 28,
        "hidden_size": 3584,
        "num_heads": 28,
        "num_kv_heads": 4,
        "ffn_size": 18944,
        "vocab_size": 152064,
    },
}
QWEN_DEFAULTS = LLAMA_DEFAULTS | {
    "num_key_value_heads": 32,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
}
WINDOW_SIZES = ("sliding_window", "max_window_layers", "use_mrope")
"""Keys that have a meaning only with use_sliding_window."""


def read_more(config: Keys) -> Keys:
    """Return the rotary positions. Raises UnknownConfigError where layers have a window."""
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise UnknownConfigError("layer_types has others than full_attention, which cannot be followed")
    return read_rope(config)


HUGGING_FACE = HuggingFace(
    "qwen2",
    "Qwen2ForCausalLM",
    defaults=QWEN_DEFAULTS,
    must_be={"hidden_act": "silu", "use_sliding_window": False},
    read_by_rule=(*ROPE_KEYS, "layer_types"),
    without_effect=WINDOW_SIZES,
    read_more=read_more,
    write_more=write_rope,
)
