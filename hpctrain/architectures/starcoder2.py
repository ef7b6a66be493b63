"""StarCoder 2 (Lozhkov et al. 2024): norms, GELU and biases of GPT-2; rotary positions and grouped queries of Llama."""

from dataclasses import replace

from hpctrain.architectures import gpt2, llama
from hpctrain.architectures.description import Description, ModelShape
from hpctrain.architectures.huggingface import ATTENTION, LLAMA_KEYS, ROPE_KEYS, HuggingFace, read_rope, write_rope


def describe(shape: ModelShape) -> Description:
    plain, block = gpt2.describe(shape), gpt2.describe(shape).blocks[0]
    rotary = llama.describe(shape).blocks[0].attention.rotary
    block = replace(block, attention=replace(block.attention, rotary=rotary, window=shape.window))
    return replace(plain, blocks=(block,) * shape.num_layers, learned_positions=None)


_SIZES = {"vocab_size": 49152, "max_positions": 16384, "window": 4096, "tie_head": True, "norm_epsilon": 1e-5}
PRESETS = {
    "starcoder2-3b": _SIZES
    | {
        "num_layers": 30,
        "hidden_size": 3072,
        "num_heads": 24,
        "num_kv_heads": 2,
        "ffn_size": 12288,
        "rope_base": 999999.4420358813,
    },
    "starcoder2-7b": _SIZES
    | {
        "num_layers": 32,
        "hidden_size": 4608,
        "num_heads": 36,
        "num_kv_heads": 4,
        "ffn_size": 18432,
        "rope_base": 1000000.0,
    },
}
HUGGING_FACE = HuggingFace(
    "starcoder2",
    "Starcoder2ForCausalLM",
    keys=LLAMA_KEYS | {"norm_epsilon": "norm_epsilon"},
    defaults={
        "num_key_value_heads": 2,
        "head_dim": None,
        "intermediate_size": 12288,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "initializer_range": 0.018042,
        "norm_epsilon": 1e-5,
        "rope_parameters": None,
        "sliding_window": None,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    nullable=("head_dim",),
    read_by_rule=ROPE_KEYS,
    without_effect=(
        *("residual_dropout", "embedding_dropout", "rms_norm_eps", "layer_norm_epsilon", "activation_function"),
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "mlp_type", "norm_type"),
        "scale_attn_weights",
    ),
    must_be={"hidden_act": "gelu_pytorch_tanh", "use_bias": True},
    parts=ATTENTION
    | {
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn.up": "mlp.c_fc",
        "ffn.down": "mlp.c_proj",
    },
    read_more=lambda config: read_rope(config) | {"window": config["sliding_window"]},
    write_more=lambda model: write_rope(model) | {"sliding_window": model.window},
)
