"""Hugging Face models in and out, compared with the transformers library: names, logits, training, weights."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from hpctrain.checkpoint.convert import export_model, import_model
from hpctrain.checkpoint.folder import locate_checkpoint
from hpctrain.checkpoint.index import Index
from hpctrain.checkpoint.resume import verify_checkpoint
from hpctrain.checkpoint.state import read_job
from hpctrain.cli import root
from hpctrain.config.errors import CheckpointError, DataError, HpctrainError
from hpctrain.data.tokenizer import Tokenizer, train_bpe
from hpctrain.engine.decode import WholeModel
from hpctrain.sharding.parameters import all_parameters
from tests.old_runs.make import HERE
from tests.ranks.small_runs import VOCAB, losses_from

transformers = pytest.importorskip("transformers")
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 12}
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
DOTS = {
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "sliding_window": None,
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=4, n_head=4, vocab_size=VOCAB, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
    "llama": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, head_dim=16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, mlp_only_layers=[0]
    ),
    "dots1": lambda: transformers.Dots1Config(**SMALL, **DOTS, routed_scaling_factor=1.5, norm_topk_prob=True),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SMALL, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=6, rope_parameters=GPT_OSS_ROPE
    ),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=6),
    "starcoder2": lambda: transformers.Starcoder2Config(
        **SMALL, sliding_window=6, residual_dropout=0.0, embedding_dropout=0.0
    ),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, **GEMMA, attn_logit_softcapping=2.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, **GEMMA, sliding_window_pattern=2, rope_parameters=ROPES),
}


@pytest.fixture(params=CONFIGS)
def family(request) -> str:
    return request.param


def make_theirs(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = CONFIGS[family]()
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # biases and norms too, and so that caps and windows count
        parameter.data.add_(0.2 * torch.randn(parameter.shape))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data.add_(0.2 * torch.randn(buffer.shape))
    return model.eval()


@pytest.fixture
def theirs(family, tmp_path):
    model = make_theirs(family)
    model.save_pretrained(tmp_path / "theirs")
    return model


def test_logits_are_those_of_transformers(theirs, tmp_path):
    import_model(tmp_path / "theirs", tmp_path / "run")
    ids = torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(ids).logits
        made = WholeModel(locate_checkpoint(tmp_path / "run")).logits(ids)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


def test_five_steps_have_the_losses_of_a_plain_loop(theirs, tmp_path, family):
    import_model(tmp_path / "theirs", tmp_path / "run")
    ours, batches, train = losses_from(tmp_path / "run" / "model.toml", tmp_path)
    decay = [(p, p.dim() > 1 and not name.endswith("bias")) for name, p in theirs.named_parameters()]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p, decays in decay if decays], "weight_decay": train.weight_decay},
            {"params": [p for p, decays in decay if not decays], "weight_decay": 0.0},
        ],
        lr=train.learning_rate,
        betas=(train.beta1, train.beta2),
        eps=train.epsilon,
    )
    theirs.train()
    expected = []
    for batch in batches:
        tokens = torch.from_numpy(batch)
        logits = theirs(tokens[:, :-1]).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), train.clip_norm)
        optimizer.step()
        expected.append(loss.item())
    assert len(expected) == 5 and ours == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("quantization_config", {"quant_method": "mxfp4"}, "quantization_config says 'mxfp4', and only whole weights"),
        ("swiglu_limit", 5.0, "swiglu_limit = 5.0, and only 7.0 can be followed"),
        ("rope_parameters", None, "rope_parameters = null"),
        ("attention_bias", False, "attention_bias = False, and only True can be followed"),
    ],
)
def test_configs_of_gpt_oss_that_would_change_its_numbers_are_refused(tmp_path, key, value, reason):
    make_theirs("gpt_oss").save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(CheckpointError, match=reason):
        import_model(tmp_path / "theirs", tmp_path / "run")


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_what_goes_out_is_bit_equal_to_what_came_in(theirs, tmp_path, shard_bytes):
    import_model(tmp_path / "theirs", tmp_path / "run")
    num_files, _, _ = export_model(locate_checkpoint(tmp_path / "run"), tmp_path / "out", "fp32", shard_bytes)
    assert (num_files > 1) == (shard_bytes < 10**9)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    before, after = theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    ids = torch.randint(VOCAB, (1, 40))
    again.config._attn_implementation = "eager"
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, again.eval()(ids).logits), "the config says the same"


def test_shards_come_in_too(theirs, tmp_path):
    import_model(tmp_path / "theirs", tmp_path / "run")
    theirs.save_pretrained(tmp_path / "cut", max_shard_size=30_000)
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 1
    import_model(tmp_path / "cut", tmp_path / "again")
    with Index(locate_checkpoint(tmp_path / "run")) as a, Index(locate_checkpoint(tmp_path / "again")) as b:
        names = list(all_parameters(read_job(a).model))
        assert names and all((a.whole("model", name) == b.whole("model", name)).all() for name in names)


def damage_config(change):
    def do(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(change(config)))

    return do


def damage_weights(change):
    def do(folder):
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return do


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def index(file: str):
    def do(folder):
        table = {"weight_map": {"model.norm.weight": file}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(table))

    return do


def without(folder):
    (folder / "model.safetensors").unlink()


def large_id(folder):
    tree = json.loads(train_bpe(["some text"], 260).to_json())
    tree["model"]["vocab"]["far"] = 4_000_000_000
    (folder / "tokenizer.json").write_text(json.dumps(tree))


BAD = {
    "unknown family": (damage_config(lambda c: c | {"model_type": "bert"}), "model_type = 'bert' is not known"),
    "a list for the family": (damage_config(lambda c: c | {"model_type": []}), "model_type = [] is not known"),
    "a table for the family": (damage_config(lambda c: c | {"model_type": {}}), "model_type = {} is not known"),
    "weights that are no numbers": (
        damage_weights(lambda t: t["model.norm.weight"].__setitem__(slice(2), float("nan"))),
        "model.norm.weight: 2 of 32 elements that were read are infinite or not a number",
    ),
    "infinite weights": (
        damage_weights(lambda t: t["lm_head.weight"][1].__setitem__(3, -float("inf"))),
        "lm_head.weight: 1 of",
    ),
    "whole numbers": (
        damage_weights(lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int8)})),
        "model.norm.weight has elements of I8, and only F32, BF16, F16 are read",
    ),
    "a token with a large id": (large_id, "has a token with the id 4,000,000,000, and the largest"),
    "a damaged generation config": (
        lambda folder: (folder / "generation_config.json").write_text("{"),
        "generation_config.json: cannot be read: not valid JSON",
    ),
    "no sizes": (damage_config(lambda c: {"model_type": "llama"}), "has no num_hidden_layers"),
    "another activation": (damage_config(lambda c: c | {"hidden_act": "relu"}), "hidden_act = 'relu', and only 'silu'"),
    "another rope": (
        damage_config(lambda c: c | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}),
        "rope_type = 'longrope', and only default, linear, llama3 and yarn can be followed",
    ),
    "not a number": (damage_config(lambda c: c | {"hidden_size": "many"}), "hidden_size = 'many'"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "is not a table of keys"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no such file"),
    "missing tensor": (damage_weights(lambda t: t.pop("model.norm.weight")), "has no tensor model.norm.weight"),
    "unknown tensor": (
        damage_weights(lambda t: t.update(extra=torch.ones(2))),
        "has a tensor extra, which a llama model of this config.json has not",
    ),
    "wrong shape": (
        damage_weights(lambda t: t.update({"model.norm.weight": torch.ones(31)})),
        "model.norm.weight has shape [31], and config.json asks for [32]",
    ),
    "truncated": (truncate, "is damaged or no safetensors file"),
    "missing shard": (index("model-00002.safetensors"), "model-00002.safetensors: is missing"),
    "outside": (index("../other.safetensors"), "names '../other.safetensors', which is no file of this folder"),
    "no weights": (without, "has neither model.safetensors nor"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good") / "theirs"
    make_theirs("llama").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("what", BAD)
def test_a_bad_folder_is_refused_with_one_message_and_nothing_is_written(good, tmp_path, what):
    shutil.copytree(good, tmp_path / "theirs")
    damage, text = BAD[what]
    damage(tmp_path / "theirs")
    with pytest.raises((CheckpointError, DataError)) as error:
        import_model(tmp_path / "theirs", tmp_path / "run")
    assert text in str(error.value)
    assert not (tmp_path / "run").exists()


def test_the_commands(good, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    done = runner.invoke(root, ["import", str(good), "--out", "run"], catch_exceptions=False)
    assert "llama, " in done.output and 'extends = "run/model.toml"' in done.output
    done = runner.invoke(root, ["import", str(good), "--out", "run"])
    assert isinstance(done.exception, HpctrainError) and "is there already" in str(done.exception)
    done = runner.invoke(root, ["export", "run", "--hf", "out", "--json"], catch_exceptions=False)
    assert json.loads(done.output)["files"] == 1
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    make_theirs("mixtral").save_pretrained(tmp_path / "sparse")
    done = runner.invoke(root, ["import", "sparse", "--out", "sparse-run"], catch_exceptions=False)
    assert "router_aux_loss_coef = 0.001 is not taken over" in done.output and "train.balance_loss" in done.output


def test_the_bias_that_balances_experts_is_never_rounded(tmp_path):
    theirs = make_theirs("dots1")
    theirs.save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "run")
    export_model(locate_checkpoint(tmp_path / "run"), tmp_path / "out", shard_bytes=10_000)
    buffers = {name: each for name, each in theirs.named_buffers() if name.endswith("e_score_correction_bias")}
    written = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    assert len(buffers) == 3 and all(torch.equal(each, written[name]) for name, each in buffers.items())
    assert {each.dtype for name, each in written.items() if name not in buffers} == {torch.bfloat16}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(each.numel() * each.itemsize for each in written.values())


KEPT = {
    "generation_config.json": '{"eos_token_id": [2, 7], "temperature": 0.6}',
    "chat_template.jinja": "{% for message in messages %}{{ message.content }} ä{% endfor %}",
    "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<x>"}',
    "special_tokens_map.json": '{"eos_token": "<x>"}',
}


def test_what_a_model_came_with_is_given_back(good, tmp_path):
    theirs = Path(shutil.copytree(good, tmp_path / "theirs"))
    damage_config(lambda config: config | {"bos_token_id": 5, "eos_token_id": [2, 7], "pad_token_id": None})(theirs)
    (theirs / "tokenizer.json").write_text(train_bpe(["some text"], 260).to_json())
    for name, text in KEPT.items():
        (theirs / name).write_text(text, encoding="utf-8")
    import_model(theirs, tmp_path / "run")
    export_model(locate_checkpoint(tmp_path / "run"), tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_text(encoding="utf-8") for name in KEPT} == KEPT
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (5, [2, 7], None)


def test_an_own_model_ends_with_the_token_of_its_own_tokenizer(tmp_path):
    run = tmp_path / "one"
    shutil.copytree(HERE / "2026-11-26" / "one", run)
    export_model(locate_checkpoint(run), tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    separator = Tokenizer.load(tmp_path / "out/tokenizer.json").separator
    assert config["eos_token_id"] == config["bos_token_id"] == separator


def test_numbers_beyond_fp16_are_refused_and_leave_nothing(good, tmp_path):
    theirs = Path(shutil.copytree(good, tmp_path / "theirs"))
    damage_weights(lambda tensors: tensors["model.norm.weight"].__setitem__(0, 1e6))(theirs)
    import_model(theirs, tmp_path / "run")
    with pytest.raises(CheckpointError, match="norm.weight has elements beyond the range of torch.float16"):
        export_model(locate_checkpoint(tmp_path / "run"), tmp_path / "out", "fp16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "theirs"]


def test_a_folder_whose_name_is_toml_writes_none(good, tmp_path):
    name = 'a"\nname = "x"\n[train]\nsteps = 9\n#\x07'
    folder = Path(shutil.copytree(good, tmp_path / name))
    made = import_model(folder, tmp_path / "run")
    tree = tomllib.loads(made.job_file.read_text())
    assert set(tree) == {"model", "train"} and tree["train"] == {"start_from": "."}
    verify_checkpoint(made.checkpoint)


def test_a_family_without_names_there_is_refused(good, tmp_path, monkeypatch):
    import_model(good, tmp_path / "run")
    monkeypatch.delattr("hpctrain.architectures.llama.HUGGING_FACE")
    with pytest.raises(CheckpointError, match="the family 'llama' has no HUGGING_FACE table in"):
        export_model(locate_checkpoint(tmp_path / "run"), tmp_path / "out")
    with pytest.raises(CheckpointError, match="model_type = 'llama' is not known; known are: dots1, gemma2"):
        import_model(good, tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("where", ["file", "file/under", "link", "full"])
def test_what_is_no_folder_to_make_is_refused(good, tmp_path, where):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("x")
    checkpoint = locate_checkpoint(Path(shutil.copytree(HERE / "2026-11-26" / "one", tmp_path / "run")))
    with pytest.raises(CheckpointError, match="choose another --out"):
        import_model(good, tmp_path / where)
    with pytest.raises(CheckpointError, match="choose another --hf"):
        export_model(checkpoint, tmp_path / where)
    assert (tmp_path / "file").read_text() == "x"
