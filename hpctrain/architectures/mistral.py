"""Mistral 7B (Jiang et al. 2023): the form of Llama, where tokens may attend to a window of positions."""

from dataclasses import replace

from hpctrain.architectures import llama
from hpctrain.architectures.description import Description, ModelShape
from hpctrain.architectures.huggingface import LLAMA_DEFAULTS, ROPE_KEYS, HuggingFace, read_rope, write_rope


def describe(shape: ModelShape) -> Description:
    plain = llama.describe(shape)
    block = replace(plain.blocks[0], attention=replace(plain.blocks[0].attention, window=shape.window))
    return replace(plain, blocks=(block,) * shape.num_layers)


_SIZES = {"num_layers": 32, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 14336}
PRESETS = {
    "mistral-7b": _SIZES | {"vocab_size": 32000, "max_positions": 32768, "window": 4096},
    "mistral-7b-v0.3": _SIZES | {"vocab_size": 32768, "max_positions": 32768, "rope_base": 1000000.0},
}
HUGGING_FACE = HuggingFace(
    "mistral",
    "MistralForCausalLM",
    defaults=LLAMA_DEFAULTS
    | {
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    must_be={"hidden_act": "silu"},
    read_by_rule=(*ROPE_KEYS, "sliding_window"),
    read_more=lambda config: read_rope(config) | {"window": config["sliding_window"]},
    write_more=lambda model: write_rope(model) | {"sliding_window": model.window},
)
