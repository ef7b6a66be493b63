"""Text written with a cache is that written without; the loss on a token file is that of the model."""

import json
import math

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from hpctrain.checkpoint.convert import import_model
from hpctrain.checkpoint.folder import locate_checkpoint
from hpctrain.cli import root
from hpctrain.config.errors import JobError
from hpctrain.data.tokenizer import train_bpe
from hpctrain.engine.decode import Generator, Sampling, choose, evaluate

transformers = pytest.importorskip("transformers")
TEXT = "the cat sat on the mat and the dog sat on the log; " * 20
POSITIONS, VOCAB = 24, 320
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": POSITIONS}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=POSITIONS),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=16, sliding_window=5),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=5, sliding_window_pattern=2),
}


@pytest.fixture(params=CONFIGS)
def run(request, tmp_path):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]())
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text(train_bpe([TEXT], VOCAB).to_json())
    import_model(tmp_path / "theirs", tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_cache_changes_no_token(run, temperature):
    """Also beyond the model's positions, where the older half of the context is dropped."""
    generator = Generator(locate_checkpoint(run))
    sampling = Sampling(temperature, seed=3, ignores_end=True)
    texts = [generator.text("the cat", 60, sampling, cached=cached) for cached in (True, False)]
    assert texts[0] == texts[1]
    assert generator.text("the cat", 60, sampling) == texts[0], "the same again"


def test_text_ends_before_what_it_is_to_stop_at(run):
    generator = Generator(locate_checkpoint(run))
    whole = generator.text("the", 20, Sampling(0.0, ignores_end=True))
    stop = whole[len(whole) // 2 :][:2]
    assert generator.text("the", 20, Sampling(0.0, stop=(stop,), ignores_end=True)) == whole[: whole.index(stop)]


def test_top_p_leaves_out_what_is_unlikely():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    drawn = {choose(logits, Sampling(1.0, top_p=0.7), torch.Generator().manual_seed(i)) for i in range(100)}
    assert drawn == {0, 1}
    assert choose(logits, Sampling(1.0, top_p=0.01), torch.Generator()) == 0


def test_the_loss_on_a_file_is_that_of_the_whole_model(run, tmp_path, monkeypatch):
    tokens = np.random.default_rng(0).integers(VOCAB, size=100).astype("<u2")
    tokens.tofile(tmp_path / "data.bin")
    result = evaluate(locate_checkpoint(run), tmp_path / "data.bin", sequence_length=20)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", attn_implementation="eager").eval()
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(
                theirs(torch.from_numpy(part[None, :-1].astype("int64"))).logits[0],
                torch.from_numpy(part[1:].astype("int64")),
            ).item()
            for part in (tokens[i * 20 : i * 20 + 21] for i in range(4))
        ]
    assert result.loss == pytest.approx(sum(losses) / 4, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(result.loss)) and result.tokens == 80
    with pytest.raises(JobError, match="is more than the model's 24 positions"):
        evaluate(locate_checkpoint(run), tmp_path / "data.bin", sequence_length=25)
    monkeypatch.chdir(tmp_path)
    arguments = ["evaluate", "run", "--data", "data.bin", "--sequence-length", "20", "--json"]
    done = CliRunner().invoke(root, arguments, catch_exceptions=False)
    assert json.loads(done.output)["loss"] == result.loss
