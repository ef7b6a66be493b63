"""GPT-2 (Radford et al. 2019): LayerNorm, learned positions, GELU, biases.

gpt-5b … gpt-80b are the shapes of AxoNN 4D (arXiv 2305.13525, table of models).
"""

from hpctrain.architectures.description import (
    Attention,
    Description,
    Layer,
    Mlp,
    ModelShape,
    Norm,
    head_size_of,
    inner_of,
    kv_heads_of,
)
from hpctrain.architectures.huggingface import HuggingFace


def describe(shape: ModelShape) -> Description:
    norm = Norm(shape.norm_epsilon, kind="layer")
    attention = Attention(shape.num_heads, kv_heads_of(shape), head_size_of(shape), norm, bias=True, out_bias=True)
    block = Layer(attention, Mlp(inner_of(shape), norm, gated=False, activation="gelu", bias=True))
    return Description(
        shape.hidden_size,
        (block,) * shape.num_layers,
        norm,
        learned_positions=shape.max_positions,
        tied_head=shape.tie_head,
    )


def _size(layers: int, hidden: int, heads: int, **more) -> dict:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "tie_head": True}
    return sizes | {"vocab_size": 50257, "max_positions": 1024} | more


_AXONN = {"vocab_size": 51200, "max_positions": 2048}
PRESETS = {
    "tiny-gpt2": _size(4, 192, 6, vocab_size=None),
    "gpt2-124m": _size(12, 768, 12),
    "gpt2-1.5b": _size(48, 1600, 25),
    "gpt-5b": _size(24, 4096, 32, **_AXONN),
    "gpt-10b": _size(32, 5120, 40, **_AXONN),
    "gpt-20b": _size(32, 7168, 56, **_AXONN),
    "gpt-40b": _size(38, 9216, 72, **_AXONN),
    "gpt-80b": _size(42, 12288, 96, **_AXONN),
}
HUGGING_FACE = HuggingFace(
    "gpt2",
    "GPT2LMHeadModel",
    keys={
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_heads": "n_head",
        "ffn_size": "n_inner",
        "vocab_size": "vocab_size",
        "max_positions": "n_positions",
        "tie_head": "tie_word_embeddings",
        "norm_epsilon": "layer_norm_epsilon",
        "init_std": "initializer_range",
    },
    defaults={
        "n_positions": 1024,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
    nullable=("n_inner",),
    without_effect=(
        *("resid_pdrop", "embd_pdrop", "attn_pdrop", "n_ctx", "reorder_and_upcast_attn"),
        *("n_special", "predict_special_tokens", "output_past"),
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    ),
    must_be={
        "activation_function": "gelu_new",
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "add_cross_attention": False,
    },
    parts={
        "attention_norm": "ln_1",
        "attention.o": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn.up": "mlp.c_fc",
        "ffn.down": "mlp.c_proj",
    },
    ends={
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    blocks="transformer.h",
    transposes=True,
    fused={"attn.c_attn": ("attention.q", "attention.k", "attention.v")},
)
