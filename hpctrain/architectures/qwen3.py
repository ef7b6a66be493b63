"""Qwen 3 (Yang et al. 2025): the form of Llama, with norms of each head's queries and keys, and its own head size."""

from dataclasses import replace

from hpctrain.architectures import llama
from hpctrain.architectures.description import Description, ModelShape, Norm
from hpctrain.architectures.huggingface import LLAMA_PARTS, ROPE_KEYS, HuggingFace, write_rope
from hpctrain.architectures.qwen2 import QWEN_DEFAULTS, WINDOW_SIZES, read_more


def describe(shape: ModelShape) -> Description:
    plain = llama.describe(shape)
    attention = replace(plain.blocks[0].attention, head_norm=Norm(shape.norm_epsilon))
    return replace(plain, blocks=(replace(plain.blocks[0], attention=attention),) * shape.num_layers)


_QWEN3 = {
    "vocab_size": 151936,
    "max_positions": 40960,
    "rope_base": 1000000.0,
    "norm_epsilon": 1e-6,
    "num_kv_heads": 8,
    "head_size": 128,
}
PRESETS = {
    "qwen3-0.6b": _QWEN3 | {"num_layers": 28, "hidden_size": 1024, "num_heads": 16, "ffn_size": 3072, "tie_head": True},
    "qwen3-4b": _QWEN3 | {"num_layers": 36, "hidden_size": 2560, "num_heads": 32, "ffn_size": 9728, "tie_head": True},
    "qwen3-8b": _QWEN3 | {"num_layers": 36, "hidden_size": 4096, "num_heads": 32, "ffn_size": 12288},
}
HUGGING_FACE = HuggingFace(
    "qwen3",
    "Qwen3ForCausalLM",
    defaults=QWEN_DEFAULTS | {"head_dim": 128},
    nullable=("num_key_value_heads",),
    read_by_rule=(*ROPE_KEYS, "layer_types"),
    without_effect=WINDOW_SIZES,
    must_be={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    parts=LLAMA_PARTS | {f"attention.{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    read_more=read_more,
    write_more=write_rope,
)
