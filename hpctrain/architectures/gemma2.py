"""Gemma 2 (Gemma Team 2024): GeGLU, norms of (1 + weight) before and after each part, capped scores and logits, scaled
embeddings. Layers with a window alternate with layers that see all positions."""

import math

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
)
from hpctrain.architectures.huggingface import (
    LLAMA_KEYS,
    LLAMA_PARTS,
    ROPE_KEYS,
    HuggingFace,
    Keys,
    UnknownConfigError,
    read_layer_pattern,
    read_rope,
    whole,
    write_layer_pattern,
    write_rope,
)


def describe(shape: ModelShape) -> Description:
    norm = Norm(shape.norm_epsilon, offset=1.0)

    def block(layer: int) -> Layer:
        attention = Attention(
            shape.num_heads,
            kv_heads_of(shape),
            head_size_of(shape),
            norm,
            rotary=Rotary(shape.rope_base, shape.rope_scaling),
            window=None if is_global(shape, layer) else shape.window,
            score_divisor=shape.score_divisor,
            score_cap=shape.score_cap,
            out_norm=norm,
        )
        return Layer(attention, Mlp(inner_of(shape), norm, activation="gelu", out_norm=norm))

    return Description(
        shape.hidden_size,
        tuple(map(block, range(shape.num_layers))),
        norm,
        tied_head=shape.tie_head,
        embedding_scale=math.sqrt(shape.hidden_size),
        logit_cap=shape.logit_cap,
    )


_GEMMA2 = {
    "vocab_size": 256000,
    "max_positions": 8192,
    "norm_epsilon": 1e-6,
    "tie_head": True,
    "window": 4096,
    "global_every": 2,
    "score_cap": 50.0,
    "logit_cap": 30.0,
    "head_size": 256,
    "score_divisor": 256.0,
}
PRESETS = {
    "gemma2-2b": _GEMMA2 | {"num_layers": 26, "hidden_size": 2304, "num_heads": 8, "num_kv_heads": 4, "ffn_size": 9216},
    "gemma2-9b": _GEMMA2
    | {"num_layers": 42, "hidden_size": 3584, "num_heads": 16, "num_kv_heads": 8, "ffn_size": 14336},
}
KEYS = LLAMA_KEYS | {
    "score_divisor": "query_pre_attn_scalar",
    "score_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
}
PARTS = LLAMA_PARTS | {
    "attention_out_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_out_norm": "post_feedforward_layernorm",
}
DEFAULTS: Keys = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_parameters": None,
}
NULLABLE = ("attn_logit_softcapping", "final_logit_softcapping")
BY_RULE = (*ROPE_KEYS, "layer_types", "sliding_window")
WITHOUT_EFFECT = ("hidden_act", "sliding_window_size")
"""hidden_activation and sliding_window are read in their place."""


def check_divisor(config: Keys) -> None:
    """Raise UnknownConfigError for a divisor of scores that is no whole number, which the library refuses."""
    if not isinstance(config["query_pre_attn_scalar"], int):
        raise UnknownConfigError(f"query_pre_attn_scalar = {config['query_pre_attn_scalar']!r} is no whole number")


def _read_more(config: Keys) -> Keys:
    check_divisor(config)
    return read_rope(config) | read_layer_pattern(config, 2)


def write_more(model: ModelShape) -> Keys:
    divisor = whole(model.score_divisor or head_size_of(model))
    return write_rope(model) | write_layer_pattern(model) | {"query_pre_attn_scalar": divisor}


HUGGING_FACE = HuggingFace(
    "gemma2",
    "Gemma2ForCausalLM",
    keys=KEYS,
    defaults=DEFAULTS
    | {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    nullable=NULLABLE,
    must_be={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "use_bidirectional_attention": False,
    },
    read_by_rule=BY_RULE,
    without_effect=WITHOUT_EFFECT,
    whole_heads=True,
    parts=PARTS,
    read_more=_read_more,
    write_more=write_more,
)
