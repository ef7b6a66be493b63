"""Scaled rotary positions of Hugging Face models: logits, export and keys, compared with the transformers library."""

import json

import pytest
import torch

from hpctrain.checkpoint.convert import export_model, import_model
from hpctrain.checkpoint.folder import locate_checkpoint
from hpctrain.config.errors import CheckpointError
from hpctrain.engine.decode import WholeModel

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}
SIZES |= {"max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
MSCALES = {"mscale": 0.7, "mscale_all_dim": 1.5}
ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
    "yarn": YARN,
    "all keys": YARN | {"beta_fast": 2.5, "beta_slow": 0.5, "attention_factor": 1.7, "truncate": False},
    "mscale": YARN | MSCALES,
    "one mscale": YARN | {"mscale": 0.7},
}


def make_theirs(rope, folder, family=transformers.LlamaConfig, **more):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(family(**SIZES, **more, rope_parameters=rope))
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("name", ROPES)
def test_a_scaled_llama_comes_in_and_goes_out_as_it_is(name, tmp_path):
    theirs = make_theirs(dict(ROPES[name]), tmp_path / "theirs")
    imported = import_model(tmp_path / "theirs", tmp_path / "run")
    ids = torch.arange(60)[None] * 7 % 40
    with torch.no_grad():
        expected = theirs(ids).logits
    logits = WholeModel(locate_checkpoint(tmp_path / "run")).logits(ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

    export_model(imported.checkpoint, tmp_path / "out", "fp32")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    before, after = theirs.state_dict(), again.state_dict()
    assert [key for key in before if not torch.equal(before[key], after[key])] == []
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert import_model(tmp_path / "out", tmp_path / "again").model == imported.model
    written = json.loads((tmp_path / "out/config.json").read_text())["rope_parameters"]
    assert {key: written[key] for key in ROPES[name] if "mscale" not in key}.items() <= ROPES[name].items()


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        pytest.param("mscale", 10**400, "is not a config of llama", id="a number beyond float64"),
        ("factor", None, "a rope of type yarn has no factor"),
        ("factor", 0.5, "factor = 0.5"),
        ("beta_fast", 0.25, "beta_fast = 0.25 is below beta_slow = 1.0; exchange them"),
        ("attention_factor", -1.0, "attention_factor = -1.0"),
        ("low_freq_factor", 1.0, "low_freq_factor = 1.0 is not known in a rope of type yarn"),
    ],
)
def test_a_bad_value_is_refused(key, value, text, tmp_path):
    (tmp_path / "theirs").mkdir()
    config = {"model_type": "llama", **SIZES, "rope_parameters": YARN | MSCALES | {key: value}}
    (tmp_path / "theirs/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        import_model(tmp_path / "theirs", tmp_path / "run")
    assert text in str(error.value) and "\n" not in str(error.value)


def test_a_gemma_whose_library_would_round_is_refused(tmp_path):
    ropes = {"full_attention": YARN | {"truncate": False}, "sliding_attention": {"rope_type": "default"}}
    make_theirs(ropes, tmp_path / "theirs", transformers.Gemma3TextConfig, head_dim=16, num_key_value_heads=1)
    with pytest.raises(CheckpointError, match="truncate = false, and the library rounds"):
        import_model(tmp_path / "theirs", tmp_path / "run")
