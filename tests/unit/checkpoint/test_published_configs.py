"""Configs as the makers of models publish them, some keys of older versions and other programs included.

The keys were written by hand. Each is read as the model it is: with as many parameters as its maker says, and with the
logits of the transformers library where its sizes are made small.
"""

import json

import pytest
import torch

from hpctrain.checkpoint.convert import import_model, known_names
from hpctrain.config.job import Model
from hpctrain.engine.decode import WholeModel
from hpctrain.sharding.parameters import count_parameters

transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-4
COMMON = {"torch_dtype": "bfloat16", "transformers_version": "4.46.0", "use_cache": True, "attention_dropout": 0.0}
SILU = {"hidden_act": "silu", "initializer_range": 0.02, **COMMON}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "pretraining_tp": 1, **SILU}
LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
GEMMA = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "cache_implementation": "hybrid", **COMMON}


def sizes(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, positions: int, vocab: int) -> dict:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "max_position_embeddings": positions,
        "vocab_size": vocab,
    }


CONFIGS: dict[str, dict] = {
    "Llama-2-7b": LLAMA
    | sizes(32, 4096, 32, 32, 11008, 4096, 32000)
    | {"rms_norm_eps": 1e-5, "rope_scaling": None, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2},
    "Llama-3.1-8B": LLAMA
    | sizes(32, 4096, 32, 8, 14336, 131072, 128256)
    | {"rms_norm_eps": 1e-5, "rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0, "tie_word_embeddings": False}
    | {"attention_bias": False, "mlp_bias": False, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]},
    "Llama-3.2-1B": LLAMA
    | sizes(16, 2048, 32, 8, 8192, 131072, 128256)
    | {"rms_norm_eps": 1e-5, "rope_scaling": LLAMA3_ROPE | {"factor": 32.0}, "rope_theta": 500000.0, "head_dim": 64}
    | {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
    "SmolLM2-135M": LLAMA
    | sizes(30, 576, 9, 3, 1536, 8192, 49152)
    | {"rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True}
    | {"attention_bias": False, "mlp_bias": False, "is_llama_config": True, "rope_interleaved": False}
    | {"initializer_range": 0.041666666666666664},
    "Mistral-7B-v0.1": SILU
    | sizes(32, 4096, 32, 8, 14336, 32768, 32000)
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "bos_token_id": 1, "eos_token_id": 2}
    | {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False},
    "Mistral-7B-v0.3": SILU
    | sizes(32, 4096, 32, 8, 14336, 32768, 32768)
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "rms_norm_eps": 1e-5}
    | {"rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False},
    "Qwen2.5-0.5B": SILU
    | sizes(24, 896, 14, 2, 4864, 32768, 151936)
    | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}
    | {"max_window_layers": 24, "sliding_window": 32768, "use_sliding_window": False, "use_mrope": False}
    | {"tie_word_embeddings": True, "bos_token_id": 151643, "eos_token_id": 151643},
    "Qwen3-0.6B": SILU
    | sizes(28, 1024, 16, 8, 3072, 40960, 151936)
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "attention_bias": False}
    | {"rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": True}
    | {"max_window_layers": 28, "sliding_window": None, "use_sliding_window": False},
    "gemma-2-2b": GEMMA
    | sizes(26, 2304, 8, 4, 9216, 8192, 256000)
    | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 256, "query_pre_attn_scalar": 256}
    | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention_bias": False}
    | {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096},
    "gemma-3-1b-pt": GEMMA
    | sizes(26, 1152, 4, 1, 6912, 32768, 262144)
    | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 256, "attention_bias": False}
    | {"hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02, "query_pre_attn_scalar": 256}
    | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "rms_norm_eps": 1e-6, "rope_scaling": None}
    | {"rope_local_base_freq": 10000, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6},
    "gpt2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
    "Mixtral-8x7B-v0.1": COMMON
    | sizes(32, 4096, 32, 8, 14336, 32768, 32000)
    | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu", "rms_norm_eps": 1e-5}
    | {"num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False, "router_aux_loss_coef": 0.02}
    | {"rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False},
    "Qwen3-30B-A3B": COMMON
    | sizes(48, 2048, 32, 4, 6144, 40960, 151936)
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128, "hidden_act": "silu"}
    | {"attention_bias": False, "decoder_sparse_step": 1, "max_window_layers": 48, "mlp_only_layers": []}
    | {"moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8}
    | {"output_router_logits": False, "router_aux_loss_coef": 0.001, "rms_norm_eps": 1e-6, "rope_scaling": None}
    | {"rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False},
    "starcoder2-3b": COMMON
    | sizes(30, 3072, 24, 2, 12288, 16384, 49152)
    | {"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "attention_dropout": 0.1}
    | {"attention_softmax_in_fp32": True, "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True}
    | {"embedding_dropout": 0.1, "residual_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh", "use_bias": True}
    | {"initializer_range": 0.018042, "mlp_type": "default", "norm_type": "layer_norm", "norm_epsilon": 1e-5}
    | {"rope_theta": 999999.4420358813, "sliding_window": 4096, "bos_token_id": 0, "eos_token_id": 0},
}
PARAMETERS = {
    "Llama-2-7b": 6_738_415_616,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400,
    "SmolLM2-135M": 134_515_008,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen3-0.6B": 596_049_920,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b-pt": 999_885_952,
    "gpt2": 124_439_808,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen3-30B-A3B": 30_532_122_624,
    "starcoder2-3b": 3_030_371_328,
}
"""As their makers publish them."""


SMALL = {"num_hidden_layers": 7, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
SMALL_GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 64}
LENGTH = 24


def small(config: dict) -> dict:
    """Return a config with small sizes and a short window; all else stays as it was published."""
    if config["model_type"] == "gpt2":
        return config | SMALL_GPT2
    has_all_heads = config["num_key_value_heads"] == config["num_attention_heads"]
    shorter = {key: size for key, size in {"head_dim": 8, "sliding_window": 6}.items() if config.get(key)}
    return config | SMALL | {"num_key_value_heads": 4 if has_all_heads else 2} | shorter


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_the_model_that_it_says(name):
    config = CONFIGS[name]
    (family, names) = next(each for each in known_names().items() if each[1].model_type == config["model_type"])
    model = Model.model_validate({"architecture": family, **names.model_keys(config)})
    assert count_parameters(model) == PARAMETERS[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_its_logits_are_those_of_transformers(name, tmp_path):
    config, folder = small(CONFIGS[name]), tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    own = transformers.AutoConfig.from_pretrained(folder)
    theirs = transformers.AutoModelForCausalLM.from_config(own, attn_implementation="eager", dtype=torch.float32).eval()
    for parameter in theirs.parameters():
        parameter.data.add_(0.2 * torch.randn(parameter.shape))
    theirs.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    ids = torch.arange(LENGTH)[None] * 7 % 64
    ours = WholeModel(import_model(folder, tmp_path / "run").checkpoint).logits(ids)
    with torch.no_grad():
        torch.testing.assert_close(ours, theirs(ids).logits, rtol=TOLERANCE, atol=TOLERANCE)
