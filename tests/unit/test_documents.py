"""Documents packed into sequences: the loss is that of each document alone, and counts tokens that have a past."""

import itertools

import numpy as np
import pytest
import torch

from hpctrain.data.order import Sequences, open_datasets
from hpctrain.data.tokenizer import ByteTokenizer
from hpctrain.data.tokens import TokenWriter, open_tokens
from hpctrain.sharding.intervals import Interval
from tests.ranks.small_runs import Alone, make_job, make_trainer
from tests.unit.test_model import IGNORED, MODELS, make_stage

LENGTH = 12
SIZES = [5, 1, 9, 30, 2, 2, 7, 14, 3, 20, 4, 4, 6]
"""Of documents: some within a sequence, some over several."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "tokens.h5"
    rng = np.random.default_rng(0)
    with TokenWriter(path, 256, ByteTokenizer()) as writer:
        for size in SIZES:
            writer.begin_document()
            writer.append(rng.integers(17, size=size))
    return path


def pieces(document_starts: np.ndarray) -> list[tuple[int, int]]:
    """Cut a sequence, of which we know where each token's document starts, into documents."""
    bounds = [*np.unique(document_starts).tolist(), len(document_starts)]
    return list(itertools.pairwise(bounds))


def test_starts_are_those_of_the_file(tokens):
    with open_tokens(tokens) as source:
        sequences = Sequences(source, Interval(0, source.num_tokens), LENGTH, seed=3)
        positions = np.arange(2 * sequences.num_sequences)
        starts, first = sequences.document_starts(positions), sequences.first_tokens(positions)
        begins = np.concatenate([[0], np.cumsum(SIZES)])
        for row, at in zip(starts, first, strict=True):
            expected = [max(0, int(begins[begins <= at + i].max()) - int(at)) for i in range(LENGTH + 1)]
            assert row.tolist() == expected
        valid = sum(sum(stop - start - 1 for start, stop in pieces(row)) for row in starts)
        assert sequences.count_targets(positions) == valid < len(positions) * LENGTH


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_loss_and_gradients_are_those_of_each_document_alone(tokens, name, recompute):
    model = MODELS[name]
    packed, alone = make_stage(model, recompute), make_stage(model, "none")
    with open_tokens(tokens) as source:
        sequences = Sequences(source, Interval(0, source.num_tokens), LENGTH, seed=3)
        rows = torch.from_numpy(sequences.read(np.arange(4)))
        starts = torch.from_numpy(sequences.document_starts(np.arange(4)))
    targets = rows[:, 1:].masked_fill(starts[:, 1:] == torch.arange(1, LENGTH + 1), IGNORED)
    one = torch.tensor(1.0, dtype=torch.float64)
    loss, saved = packed.forward(rows[:, :-1], targets, True, starts[:, :-1])
    packed.backward(saved, one)
    expected = 0.0
    for row, cut in zip(rows, starts, strict=True):
        for start, stop in pieces(cut.numpy()):
            if stop - start > 1:
                part, kept = alone.forward(row[None, start : stop - 1], row[None, start + 1 : stop].clone(), True)
                alone.backward(kept, one)
                expected += part.item()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    ours, theirs = (stage.store.groups[0].own_grads() for stage in (packed, alone))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_mean_is_over_tokens_that_count(tokens):
    job = make_job(tokens, "llama", shape={"vocab_size": 256}, global_batch=6)
    losses = {}
    for masks in (False, True):
        data = job.data.model_copy(
            update={"mask_documents": masks, "sequence_length": LENGTH, "validation_fraction": 0.0}
        )
        masked = job.model_copy(update={"data": data})
        _, training, _ = open_datasets(data, 1)
        trainer = make_trainer(Alone(), masked)
        trainer.initialise()
        losses[masks] = [trainer.step(training)[0]["loss"], trainer.validate(training)]
    assert losses[True] != losses[False]
    assert losses[True] == pytest.approx([np.log(256)] * 2, rel=0.05), "the mean of a model that knows nothing"
