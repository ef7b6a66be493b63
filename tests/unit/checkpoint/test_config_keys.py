"""Each key of a config.json, removed, changed, set to null or added: the library's logits, or a refusal."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from hpctrain.architectures.huggingface import WITHOUT_EFFECT, UnknownConfigError
from hpctrain.architectures.registry import EVERYTHING, OPTIONAL, families, keys_read
from hpctrain.checkpoint.convert import check_form, export_model, import_model, names_of
from hpctrain.checkpoint.folder import locate_checkpoint
from hpctrain.config.errors import CheckpointError, JobError
from hpctrain.config.job import Job, Model
from hpctrain.config.other_names import OTHER_NAMES
from hpctrain.config.saved import saved_job
from hpctrain.engine.decode import WholeModel
from tests.examples import costly

transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-4
VOCAB, LENGTH = 40, 24
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
FULL_YARN = YARN | {"rope_theta": 100.0, "beta_fast": 2.5, "beta_slow": 0.5, "truncate": False}
FULL_YARN |= {"mscale": 0.7, "mscale_all_dim": 1.5, "attention_factor": None}
GEMMA = {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 12}
ROPES = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
DOTS = {
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "sliding_window": None,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=32),
    "llama": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3, rms_norm_eps=1e-3),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True, rope_parameters=FULL_YARN),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=8, rope_parameters=LINEAR),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=6),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, head_dim=8, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=12, mlp_only_layers=[0]
    ),
    "dots1": lambda: transformers.Dots1Config(**SMALL, **DOTS),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SMALL, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6, rope_parameters=FULL_YARN
    ),
    "starcoder2": lambda: transformers.Starcoder2Config(**SMALL, sliding_window=6),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, **GEMMA, attn_logit_softcapping=2.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, **GEMMA, sliding_window_pattern=2, rope_parameters=ROPES),
}
KIND = {"architectures", "model_type"}
"""Keys that say of which family a model is."""
KINDS = [["full_attention", "sliding_attention"] * 2, ["full_attention"] * 4, ["sliding_attention"] * 4]
ADDED: dict[str, list] = {
    "rope_scaling": [YARN, LINEAR, {"type": "linear", "factor": 3.0}, {"rope_type": "llama3", "factor": 2.0}],
    "rope_parameters": [YARN, {"rope_theta": 77.0}, {"factor": 3.0}, {}],
    "rope_theta": [77.0],
    "partial_rotary_factor": [0.5],
    "attention_factor": [1.7],
    "original_max_position_embeddings": [8],
    "layer_types": [*KINDS, [*KINDS[0]][:3], KINDS[0][::-1]],
    "sliding_window": [3, None],
    "sliding_window_pattern": [3],
    "use_sliding_window": [True],
    "max_window_layers": [1],
    "rope_local_base_freq": [77.0],
    "head_dim": [4, 8, None],
    "attention_bias": [True],
    "mlp_bias": [True],
    "use_bias": [False],
    "hidden_act": ["relu", "gelu"],
    "final_logit_softcapping": [1.0, None],
    "attn_logit_softcapping": [1.0, None],
    "query_pre_attn_scalar": [7, 7.5],
    "n_inner": [32],
    "scale_attn_by_inverse_layer_idx": [True],
    "quantization_config": [{"quant_method": "fp8"}],
    "use_bidirectional_attention": [True],
    "some_key_of_another_program": [1],
}


def variants(config: dict, prefix: tuple[str, ...] = ()) -> list[tuple[str, dict]]:
    """Return configs that differ in one key, each with what was done."""
    result = []
    for key, value in config.items():
        name = ".".join((*prefix, key))
        result += [(f"{name} removed", {k: v for k, v in config.items() if k != key})]
        result += [(f"{name} = {other!r}", config | {key: other}) for other in [*others(value), *ADDED.get(key, [])]]
        if isinstance(value, dict) and "rope" in name:
            result += [(what, config | {key: inner}) for what, inner in variants(value, (*prefix, key))]
    if not prefix:
        added = {key: values for key, values in ADDED.items() if key not in config}
        result += [(f"{key} = {value!r}", config | {key: value}) for key, values in added.items() for value in values]
    return result


def tried(changes: list[tuple[str, dict]]) -> list[tuple[str, dict]]:
    """Return the removals of keys with an effect, and as many other changes as a costly rule is tried on."""
    removed = [change for change in changes if change[0].endswith("removed")]
    other = [change for change in changes if not change[0].endswith("removed")]
    has_effect = [change for change in removed if change[0].split()[0] not in WITHOUT_EFFECT - KIND]
    return [*has_effect, *other[:: len(other) // costly(len(other))]]


def others(value) -> list:
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int):
        return [value + 1, 2 * value, None]
    if isinstance(value, float):
        return [1.5 * value + 0.01, None]
    if isinstance(value, list) and len(value) > 1:
        return [value[::-1], None]
    return ["other", None]


def save_small(family: str, folder: Path) -> dict:
    """Write a model whose logits depend on all that its config says; return the config."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]())
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def their_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor | None:
    """Return the library's logits; None where it refuses the folder, or would take weights that are not there."""
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        with torch.no_grad():
            return None if any(info.values()) else model.eval()(ids).logits
    except Exception:  # the library has no common one
        return None


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.mark.parametrize("family", CONFIGS)
def test_each_key_is_followed_or_refused(family, tmp_path):
    config, ids = save_small(family, tmp_path / "theirs"), torch.arange(LENGTH)[None] * 7 % VOCAB
    count, wrong = Counter(), []
    plain = {key: value for key, value in config.items() if key not in WITHOUT_EFFECT - KIND}
    cases = [("nothing", config), ("keys without effect removed", plain), *tried(variants(config))]
    for number, (what, changed) in enumerate(cases):
        folder, run = tmp_path / f"{number}", tmp_path / f"{number}-run"
        folder.mkdir()
        os.link(tmp_path / "theirs/model.safetensors", folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(changed))
        try:
            import_model(folder, run)
            ours = WholeModel(locate_checkpoint(run)).logits(ids)
        except CheckpointError:
            count["refused"] += 1
            continue
        count["followed"] += 1
        theirs = their_logits(folder, ids)
        if theirs is None:
            count["refused by the library alone"] += 1
        elif (difference := (ours - theirs).abs().max().item()) > TOLERANCE:
            wrong.append(f"{what}: {difference:.3g}")
    assert not wrong
    assert count["followed"] > 15 and count["refused"] > 15


def test_a_head_of_its_own_under_a_tied_config_is_refused(tmp_path):
    save_small("llama", tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    (tmp_path / "theirs/config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match="lm_head.weight differs from model.embed_tokens.weight, and config.json"):
        import_model(tmp_path / "theirs", tmp_path / "run")
    tensors = load_file(tmp_path / "theirs/model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "theirs/model.safetensors", metadata={"format": "pt"})
    assert import_model(tmp_path / "theirs", tmp_path / "run").model.tie_head


SIZES = {"num_layers": 3, "hidden_size": 16, "num_heads": 4, "vocab_size": VOCAB, "max_positions": 32}
VALUES = {
    "num_kv_heads": 2,
    "head_size": 8,
    "ffn_size": 24,
    "rope_base": 77.0,
    "rope_scaling": {"kind": "linear", "factor": 2.0},
    "rope_local_base": 55.0,
    "window": 5,
    "global_every": 2,
    "score_divisor": 5.0,
    "score_cap": 2.0,
    "logit_cap": 2.0,
    "num_experts": 12,
    "experts_per_token": 1,
    "expert_size": 12,
    "shared_experts": 2,
    "dense_layers": 1,
    "expert_groups": 2,
    "groups_per_token": 2,
    "normalise_scores": False,
    "score_scale": 1.5,
}
OWN_SIZES = {
    "mixtral": {"num_experts": 6, "experts_per_token": 2},
    "qwen3_moe": {"num_experts": 6, "experts_per_token": 2},
    "gpt_oss": {"num_experts": 6, "experts_per_token": 2},
    "dots1": {"num_experts": 6, "experts_per_token": 2, "expert_groups": 3, "shared_experts": 1},
}


def sizes_of(family: str) -> dict:
    return {"architecture": family, **SIZES, **OWN_SIZES.get(family, {})}


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("key", OPTIONAL)
def test_each_key_of_a_model_changes_it_or_is_refused(family, key):
    needed = {"global_every": {"window": 5}, "rope_local_base": {"window": 5}}.get(key, {})
    if key in keys_read(family, EVERYTHING):
        plain = Model.model_validate(sizes_of(family) | needed)
        assert Model.model_validate({**plain.model_dump(), key: VALUES[key]}).description != plain.description
        if needed:
            with pytest.raises(ValidationError, match=f"{key} = .* has no effect on a {family} without window"):
                Model.model_validate(sizes_of(family) | {key: VALUES[key]})
        return
    having = [name for name in families() if key in keys_read(name, EVERYTHING)]
    with pytest.raises(ValidationError, match=rf"{key} = .* has no effect on a {family}.*{', '.join(having)}"):
        Model.model_validate(sizes_of(family) | {key: VALUES[key]})


@pytest.mark.parametrize(
    "keys",
    [
        {"max_window_layers": 4},
        {"max_window_layers": 3},
        {"max_window_layers": 3, "sliding_window": None},
        {"max_window_layers": 3, "layer_types": ["full_attention"] * 4},
        {"num_hidden_layers": 63},
    ],
)
def test_layers_of_dots1_that_have_a_window_by_default_are_refused(keys):
    config = {key: value for key, value in (SMALL | DOTS).items() if key != "sliding_window"} | keys
    has_windows = "sliding_attention" in transformers.Dots1Config(**config).layer_types
    assert has_windows == (keys in ({"max_window_layers": 3}, {"num_hidden_layers": 63}))
    family = families()["dots1"].HUGGING_FACE
    if has_windows:
        with pytest.raises(UnknownConfigError, match="num_hidden_layers = .* and no sliding_window"):
            family.model_keys(config)
    else:
        assert family.model_keys(config)["num_layers"] == 4


@pytest.mark.parametrize("family", ["llama", "mixtral", "dots1"])
def test_a_rate_of_balance_is_refused_where_nothing_is_balanced(family):
    data = {"tokens": "tokens.bin", "sequence_length": 8}
    job = {"name": "x", "model": sizes_of(family), "data": data, "train": {"balance_rate": 0.5}}
    if family == "dots1":
        assert Job.model_validate(job).train.balance_rate == 0.5
        return
    with pytest.raises(ValidationError, match=rf"train.balance_rate = 0.5 has no effect on a {family}.*: dots1"):
        Job.model_validate(job)
    Job.model_validate(job | {"train": {"balance_rate": 0.001}})


def test_an_auxiliary_loss_is_refused_without_experts_and_over_a_microbatch():
    data = {"tokens": "tokens.bin", "sequence_length": 8}
    job = {"name": "x", "model": sizes_of("llama"), "data": data, "train": {"balance_loss": 0.5}}
    with pytest.raises(ValidationError, match=r"train.balance_loss = 0.5 has no effect on a llama, which has no exp"):
        Job.model_validate(job)
    Job.model_validate(job | {"model": sizes_of("mixtral")})
    assert "one over a micro-batch would depend on the plan" in OTHER_NAMES["moe_aux_loss_coeff"]


def test_a_key_without_effect_is_passed_over_in_a_saved_job():
    job = {"model": {"architecture": "llama", **SIZES, "window": 5, "rope_base": 10000.0}}
    said: list[str] = []
    assert "window" not in saved_job(job, Job, "step-1", CheckpointError, said.append)["model"]
    assert "step-1: model.window = 5 is passed over: it has no effect on a llama" in said[0]
    assert (
        saved_job({"model": {"architecture": "none", "window": 5}}, Job, "step-1", CheckpointError)["model"]["window"]
        == 5
    )


def divisor_of(model: Model) -> dict:
    return {"score_divisor": model.score_divisor} if model.architecture.startswith("gemma") else {}


def has_form(model: Model) -> bool:
    try:
        check_form(model)
    except JobError:
        return False
    return True


@settings(max_examples=costly(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_what_is_exported_is_loaded_and_imported_as_the_same(tmp_path_factory, data):
    """A random model is refused at the start of a training, or the library and the import take it for what it is."""
    family = data.draw(st.sampled_from(sorted(families())))
    keys = {key: value for key, value in VALUES.items() if key in keys_read(family, EVERYTHING)}
    chosen = {key: value for key, value in keys.items() if data.draw(st.booleans())}
    if "window" not in chosen:
        chosen = {key: value for key, value in chosen.items() if key not in ("global_every", "rope_local_base")}
    tied = data.draw(st.booleans())
    model = Model.model_validate(sizes_of(family) | {"tie_head": tied, **chosen})
    if not has_form(model):
        # Without a base of its own a layer with a window has the scaled positions too, and theirs has not.
        scales_windows = {"rope_scaling", "window"} <= set(chosen) and "rope_local_base" not in chosen
        is_known = family == "gpt2" or "score_cap" in chosen or (family == "gemma3" and scales_windows)
        assert is_known, "what has no form is known"
        event("refused")
        return
    event("exported")
    folder = tmp_path_factory.mktemp("model")
    config = transformers.AutoConfig.for_model(**names_of(model).config(model))
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in theirs.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape))
    theirs.save_pretrained(folder / "theirs")
    imported = import_model(folder / "theirs", folder / "run")
    assert imported.model.description == model.model_copy(update=divisor_of(imported.model)).description
    export_model(imported.checkpoint, folder / "out", "fp32")
    assert import_model(folder / "out", folder / "again").model == imported.model
    ids = torch.arange(LENGTH)[None] * 7 % VOCAB
    loaded = their_logits(folder / "out", ids)
    assert loaded is not None
    torch.testing.assert_close(WholeModel(imported.checkpoint).logits(ids), loaded, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            {"architecture": "gpt2", "num_kv_heads": 2},
            "the family gpt2 has no form for num_kv_heads = 2 at Hugging Face",
        ),
        ({"architecture": "llama", "hidden_size": 18, "head_size": 4}, "hidden_size = 18 is no multiple of"),
        ({"architecture": "gemma2", "score_divisor": 7.5}, "query_pre_attn_scalar = 7.5 is no whole number"),
    ],
)
def test_what_could_not_be_exported_is_refused_at_the_start(model, said):
    with pytest.raises(JobError, match=said):
        check_form(Model.model_validate({**SIZES, **model}))


@pytest.mark.parametrize("family", families())
def test_a_model_whose_vocabulary_is_not_known_yet_has_a_form(family):
    check_form(Model.model_validate(sizes_of(family) | {"vocab_size": None}))
