"""What has no target, and what training leaves out: steps, validations and evaluations say so, or are refused."""

import numpy as np
import pytest
from click.testing import CliRunner
from pydantic import TypeAdapter

from hpctrain.cli import root
from hpctrain.config.errors import DataError
from hpctrain.config.job import Data, load_job
from hpctrain.data.order import Batch, check_targets, open_datasets
from hpctrain.data.tokens import TokenWriter
from hpctrain.engine.decode import evaluate
from hpctrain.observe.anomalies import JumpWatch
from hpctrain.observe.console import describe_loss, progress_parts
from hpctrain.observe.folder.schema import SavedMetrics
from tests.ranks.small_runs import Alone, make_trainer

VOCAB = 64
JOB = """
[model]
architecture = "llama"
num_layers = 1
hidden_size = 16
num_heads = 2
ffn_size = 32
vocab_size = {vocab_size}
[data]
tokens = "{folder}/train.h5"
validation = "{folder}/validation.h5"
sequence_length = 16
mask_documents = {masked}
[train]
steps = 6
learning_rate = 1e-2
global_batch = 2
validation_sequences = 1000
dtype = "fp32"
"""


def write(path, documents: int, prompt: int, answer: int, seed: int = 0) -> None:
    """Write documents of random prompts, whose answers are one token, many times."""
    rng = np.random.default_rng(seed)
    with TokenWriter(path, VOCAB) as writer:
        for _ in range(documents):
            writer.begin_document()
            if prompt:
                writer.append(rng.integers(1, VOCAB, prompt), learnt=False)
            writer.append(np.full(answer, 7) if prompt else rng.integers(1, VOCAB, answer))


@pytest.fixture
def trained(tmp_path, request):
    """A trainer, what it learns from and validates with, in a folder with both files."""
    masked, prompt = request.param
    write(tmp_path / "train.h5", 8, prompt and 9 * prompt, 4 if prompt else 13)
    write(tmp_path / "validation.h5", 40, prompt, 4, seed=1)
    text = JOB.format(masked=str(masked).lower(), folder=tmp_path, vocab_size=VOCAB)
    (tmp_path / "job.toml").write_text(text)
    job = load_job(str(tmp_path / "job.toml"))
    _, training, validation = open_datasets(job.data, job.train.seed)
    trainer = make_trainer(Alone(), job)
    trainer.initialise()
    return trainer, training, validation


@pytest.mark.parametrize("trained", [(False, 9), (True, 9), (True, 0)], indirect=True, ids=str)
def test_evaluate_has_the_validation_loss_of_training(trained, tmp_path, request):
    trainer, training, validation = trained
    masked, prompt = request.node.callspec.params["trained"]
    for _ in range(3):
        trainer.step(training)
    checkpoint = trainer.save(tmp_path / "run", {})
    found = evaluate(checkpoint, tmp_path / "validation.h5")
    assert found.loss == pytest.approx(trainer.validate(validation), rel=1e-5)
    assert found.left_out + found.tokens == found.sequences * 16 and found.left_out > 0
    assert found.masks == ("prompts",) * bool(prompt) + ("other documents",) * masked
    arguments = ["evaluate", str(checkpoint), "--data", str(tmp_path / "validation.h5")]
    said = CliRunner().invoke(root, arguments, catch_exceptions=False).output
    assert f"(without {found.left_out:,}: {' and '.join(found.masks)} left out)" in said


@pytest.mark.parametrize("trained", [(False, 20)], indirect=True, ids=str)
def test_a_step_without_targets_says_so_and_has_no_loss(trained):
    trainer, training, _ = trained
    counts = [Batch.of_step(training, step, 2).num_targets() for step in range(6)]
    steps = [trainer.step(training)[0] for _ in range(6)]
    assert 0 in counts and any(counts)
    assert ["loss" in step for step in steps] == [count > 0 for count in counts]
    assert all(step["loss"] > 0 for step in steps if "loss" in step)
    without = steps[counts.index(0)]
    assert progress_parts(without, {}, 6, 1.0, 0.0)[1] == "no targets: all tokens are of prompts"
    assert describe_loss(steps[counts.index(max(counts))]).startswith("loss 4.")
    TypeAdapter(SavedMetrics).validate_python(without)


def test_a_step_without_a_loss_is_no_jump():
    watch = JumpWatch(3.0)
    steps = [{"step": i, "loss": 1.0, "grad_norm": 1.0} for i in range(8)]
    del steps[3]["loss"]
    assert [watch.look(step) for step in steps] == [[]] * 8
    assert watch.look({"step": 9, "loss": 4.0, "grad_norm": 1.0})[0].median == 1.0


@pytest.mark.parametrize(
    ("training", "validation", "said"),
    [
        ((4, 200, 0), (9, 9, 4), "has no token to learn: every token is of a prompt"),
        ((9, 9, 4), (4, 900, 4), "the 8 sequences that a validation reads have no token to learn"),
    ],
)
def test_what_has_no_target_at_all_is_refused(tmp_path, training, validation, said):
    write(tmp_path / "train.h5", *training)
    write(tmp_path / "validation.h5", *validation)
    data = Data(tokens=tmp_path / "train.h5", validation=tmp_path / "validation.h5", sequence_length=16)
    _, train, held_out = open_datasets(data, seed=1)
    with pytest.raises(DataError, match=said):
        check_targets(data, train, held_out, 8)
