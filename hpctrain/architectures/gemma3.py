"""Gemma 3 (Gemma Team 2025), its text model: as Gemma 2, with norms of queries and keys in the place of capped scores.
For each layer that sees all positions there are five with a window, which have a rotary base of their own."""

from dataclasses import replace

from hpctrain.architectures import gemma2
from hpctrain.architectures.description import Description, Layer, ModelShape, Norm, Rotary
from hpctrain.architectures.huggingface import (
    HuggingFace,
    Keys,
    UnknownConfigError,
    read_layer_pattern,
    rotary_keys,
    write_rope,
)


def describe(shape: ModelShape) -> Description:
    plain = gemma2.describe(shape)
    head_norm = Norm(shape.norm_epsilon, offset=1.0)

    def with_own(block: Layer) -> Layer:
        rotary = block.attention.rotary
        if block.attention.window is not None and shape.rope_local_base is not None:
            rotary = Rotary(shape.rope_local_base)
        return replace(block, attention=replace(block.attention, head_norm=head_norm, rotary=rotary))

    return replace(plain, blocks=tuple(map(with_own, plain.blocks)))


_GEMMA3 = {
    "vocab_size": 262144,
    "norm_epsilon": 1e-6,
    "tie_head": True,
    "global_every": 6,
    "rope_base": 1000000.0,
    "rope_local_base": 10000.0,
    "head_size": 256,
    "score_divisor": 256.0,
}
PRESETS = {
    "gemma3-1b": _GEMMA3
    | {
        "num_layers": 26,
        "hidden_size": 1152,
        "num_heads": 4,
        "num_kv_heads": 1,
        "ffn_size": 6912,
        "max_positions": 32768,
        "window": 512,
    },
    "gemma3-4b": _GEMMA3
    | {
        "num_layers": 34,
        "hidden_size": 2560,
        "num_heads": 8,
        "num_kv_heads": 4,
        "ffn_size": 10240,
        "vocab_size": 262208,
        "max_positions": 131072,
        "window": 1024,
        "rope_scaling": {"kind": "linear", "factor": 8.0},
    },
}


def _read_more(config: Keys) -> Keys:
    gemma2.check_divisor(config)
    given, longest = config.get("rope_parameters") or {}, config["max_position_embeddings"]
    if odd := [key for key in given if key not in ("full_attention", "sliding_attention")]:
        raise UnknownConfigError(f"rope_parameters has {odd[0]!r}, and a table for each kind of layer is expected")
    whole = (given.get("full_attention") or {}) | (config.get("rope_scaling") or {})
    keys = rotary_keys(whole, config.get("rope_theta") or 1000000.0, longest)
    if not keys.get("rope_scaling", {}).get("truncate", True):
        raise UnknownConfigError("truncate = false, and the library rounds in a model with two ropes all the same")
    local = rotary_keys(given.get("sliding_attention") or {}, config.get("rope_local_base_freq") or 10000.0, longest)
    if "rope_scaling" in local:
        raise UnknownConfigError("rope_parameters scales layers with a window, which cannot be followed")
    layers = read_layer_pattern(config, 6)
    return keys | layers | ({"rope_local_base": local["rope_base"]} if layers else {})


def _write_more(model: ModelShape) -> Keys:
    rope, base = write_rope(model), model.rope_local_base or model.rope_base
    local = {"rope_type": "default", "rope_theta": base}
    kinds = {"full_attention": rope["rope_parameters"], "sliding_attention": local}
    return gemma2.write_more(model) | {"rope_parameters": kinds, "rope_local_base_freq": base}


HUGGING_FACE = HuggingFace(
    "gemma3_text",
    "Gemma3ForCausalLM",
    keys=gemma2.KEYS,
    defaults=gemma2.DEFAULTS | {"max_position_embeddings": 131072},
    nullable=gemma2.NULLABLE,
    must_be={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
    },
    read_by_rule=(
        *("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq"),
        *("layer_types", "sliding_window", "sliding_window_pattern"),
    ),
    without_effect=(*gemma2.WITHOUT_EFFECT, "_sliding_window_pattern"),
    whole_heads=True,
    parts=gemma2.PARTS | {f"attention.{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    read_more=_read_more,
    write_more=_write_more,
)
