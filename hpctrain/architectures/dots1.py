"""dots.llm1 (Huo et al. 2025): the form of Qwen 3, with the router of DeepSeek V3 and a shared expert.

Scores are sigmoids, experts are in groups, a bias of each balances the choice. The first layers are dense.
"""

from hpctrain.architectures import qwen3
from hpctrain.architectures.description import Description, ModelShape, expert_size_of, with_experts
from hpctrain.architectures.huggingface import LLAMA_KEYS, HuggingFace, Keys, UnknownConfigError, write_rope
from hpctrain.architectures.mixtral import ROUTER_KEYS
from hpctrain.architectures.qwen2 import read_more
from hpctrain.architectures.qwen3_moe import EXPERTS


def describe(shape: ModelShape) -> Description:
    return with_experts(
        qwen3.describe(shape),
        shape,
        expert_size_of(shape),
        shape.dense_layers,
        scores="sigmoid",
        normalised=shape.normalise_scores,
        scale=shape.score_scale,
        groups=shape.expert_groups,
        chosen_groups=shape.groups_per_token,
        shared_inner=shape.shared_experts * expert_size_of(shape),
        balances=True,
    )


PRESETS = {
    "tiny-moe": {
        "num_layers": 4,
        "hidden_size": 192,
        "num_heads": 6,
        "num_kv_heads": 2,
        "ffn_size": 512,
        "max_positions": 2048,
        "num_experts": 8,
        "experts_per_token": 2,
        "expert_size": 192,
        "shared_experts": 1,
        "dense_layers": 1,
    },
    "dots.llm1": {
        "num_layers": 62,
        "hidden_size": 4096,
        "num_heads": 32,
        "num_kv_heads": 32,
        "head_size": 128,
        "ffn_size": 10944,
        "vocab_size": 152064,
        "max_positions": 32768,
        "rope_base": 10000000.0,
        "norm_epsilon": 1e-5,
        "num_experts": 128,
        "experts_per_token": 6,
        "expert_size": 1408,
        "shared_experts": 2,
        "dense_layers": 1,
        "score_scale": 2.5,
    },
}


def _read_more(config: Keys) -> Keys:
    if not config["n_shared_experts"]:
        raise UnknownConfigError("n_shared_experts = 0, and the library would have experts without features")
    layers, first = config["num_hidden_layers"], config["max_window_layers"]
    has_default_window = "sliding_window" not in config and config.get("layer_types") is None
    if has_default_window and isinstance(layers, int) and (first is None or layers > first):
        raise UnknownConfigError(
            f"num_hidden_layers = {layers}, max_window_layers = {first} and no sliding_window: later layers have the"
            " library's window of 4096 positions, which cannot be followed; set sliding_window to null if there is none"
        )
    return read_more(config)


HUGGING_FACE = HuggingFace(
    "dots1",
    "Dots1ForCausalLM",
    keys=LLAMA_KEYS
    | {
        "num_experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_size": "moe_intermediate_size",
        "shared_experts": "n_shared_experts",
        "dense_layers": "first_k_dense_replace",
        "expert_groups": "n_group",
        "groups_per_token": "topk_group",
        "normalise_scores": "norm_topk_prob",
        "score_scale": "routed_scaling_factor",
    },
    defaults=qwen3.HUGGING_FACE.defaults
    | {
        "head_dim": None,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "max_position_embeddings": 2048,
        "max_window_layers": 62,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    read_by_rule=qwen3.HUGGING_FACE.read_by_rule,
    without_effect=ROUTER_KEYS,
    must_be={"hidden_act": "silu", "attention_bias": False, "output_router_logits": False, "sliding_window": None},
    parts=qwen3.HUGGING_FACE.parts
    | {"router": "mlp.gate", "router.balance": "mlp.gate.e_score_correction_bias"}
    | {f"shared.{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
    experts=EXPERTS,
    read_more=_read_more,
    write_more=write_rope,
)
