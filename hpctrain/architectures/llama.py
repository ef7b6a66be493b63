"""Llama 2 and 3 (Touvron et al. 2023, Grattafiori et al. 2024) and what has their form, TinyLlama for one.

RMSNorm, rotary positions, SwiGLU, no biases. Sizes are those of the published config files.
"""

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
    kv_heads_of,
)
from hpctrain.architectures.huggingface import LLAMA_DEFAULTS, ROPE_KEYS, HuggingFace, read_rope, write_rope


def describe(shape: ModelShape) -> Description:
    norm = Norm(shape.norm_epsilon)
    rotary = Rotary(shape.rope_base, shape.rope_scaling)
    attention = Attention(shape.num_heads, kv_heads_of(shape), head_size_of(shape), norm, rotary=rotary)
    block = Layer(attention, Mlp(inner_of(shape), norm))
    return Description(shape.hidden_size, (block,) * shape.num_layers, norm, tied_head=shape.tie_head)


_LLAMA3 = {"vocab_size": 128256, "max_positions": 8192, "rope_base": 500000.0, "num_kv_heads": 8}
_LLAMA32 = _LLAMA3 | {
    "max_positions": 131072,
    "tie_head": True,
    "rope_scaling": {"kind": "llama3", "factor": 32.0},
}
PRESETS = {
    "tiny": {
        "num_layers": 4,
        "hidden_size": 192,
        "num_heads": 6,
        "num_kv_heads": 2,
        "ffn_size": 512,
        "max_positions": 2048,
    },
    "llama-1b": {  # TinyLlama
        "num_layers": 22,
        "hidden_size": 2048,
        "num_heads": 32,
        "num_kv_heads": 4,
        "ffn_size": 5632,
        "vocab_size": 32000,
        "max_positions": 2048,
    },
    "llama-8b": _LLAMA3 | {"num_layers": 32, "hidden_size": 4096, "num_heads": 32, "ffn_size": 14336},
    "llama-70b": _LLAMA3 | {"num_layers": 80, "hidden_size": 8192, "num_heads": 64, "ffn_size": 28672},
    "llama-3.2-1b": _LLAMA32 | {"num_layers": 16, "hidden_size": 2048, "num_heads": 32, "ffn_size": 8192},
    "llama-3.2-3b": _LLAMA32 | {"num_layers": 28, "hidden_size": 3072, "num_heads": 24, "ffn_size": 8192},
}
HUGGING_FACE = HuggingFace(
    "llama",
    "LlamaForCausalLM",
    defaults=LLAMA_DEFAULTS | {"intermediate_size": 11008, "max_position_embeddings": 2048},
    read_by_rule=ROPE_KEYS,
    without_effect=("is_llama_config", "rope_interleaved"),
    whole_heads=True,
    must_be={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    read_more=read_rope,
    write_more=write_rope,
)
