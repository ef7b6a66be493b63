"""Documents packed into sequences: the loss is that of each document alone, and counts tokens that have a past."""

import itertools
import json

import numpy as np
import pytest
import torch

from hpctrain.data.corpus import prepare
from hpctrain.data.order import Sequences, open_datasets
from hpctrain.data.records import Fields
from hpctrain.data.tokenizer import ByteTokenizer
from hpctrain.data.tokens import TokenWriter, open_tokens
from hpctrain.model.operators import attention
from hpctrain.sharding.intervals import Interval
from tests.ranks.small_runs import Alone, make_job, make_trainer
from tests.unit.model.test_model import IGNORED, MODELS, make_stage

LENGTH = 12
VISIBLE = attention.visible
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


def opened(tokens):
    source = open_tokens(tokens)
    return source, Sequences(source, Interval(0, source.num_tokens), LENGTH, seed=3, mask_documents=True)


def document_spans(document_starts: np.ndarray) -> list[tuple[int, int]]:
    """Cut the inputs of a sequence, of which we know where each one's document starts, into documents."""
    bounds = [*np.unique(document_starts).tolist(), len(document_starts)]
    return list(itertools.pairwise(bounds))


def test_starts_are_those_of_the_file(tokens):
    source, sequences = opened(tokens)
    with source:
        positions = np.arange(2 * sequences.num_sequences)
        starts, first = sequences.document_starts(positions), sequences.first_tokens(positions)
        counted = sequences.loss_mask(positions)
        begins = np.concatenate([[0], np.cumsum(SIZES)])
        for row, valid, at in zip(starts, counted, first, strict=True):
            expected = [max(0, int(begins[begins <= at + i].max()) - int(at)) for i in range(LENGTH)]
            assert row.tolist() == expected
            assert valid.tolist() == [at + i not in begins for i in range(1, LENGTH + 1)]
        assert sequences.count_targets(positions) == counted.sum() < counted.size


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_loss_and_gradients_are_those_of_each_document_alone(tokens, name, recompute):
    model = MODELS[name]
    packed, alone = make_stage(model, recompute), make_stage(model, "none")
    source, sequences = opened(tokens)
    with source:
        rows = torch.from_numpy(sequences.read(np.arange(4)))
        starts, counted = (
            torch.from_numpy(of(np.arange(4))) for of in (sequences.document_starts, sequences.loss_mask)
        )
    targets = rows[:, 1:].masked_fill(~counted, IGNORED)
    one = torch.tensor(1.0, dtype=torch.float64)
    loss, saved = packed.forward(rows[:, :-1], targets, True, attention.Documents(starts))
    packed.backward(saved, one)
    expected = 0.0
    for row, cut, wanted in zip(rows, starts, targets, strict=True):
        for start, stop in document_spans(cut.numpy()):
            part, kept = alone.forward(row[None, start:stop], wanted[None, start:stop].clone(), True)
            alone.backward(kept, one)
            expected += part.item()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    ours, theirs = (stage.store.groups[0].own_grads() for stage in (packed, alone))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(("recompute", "passes"), [("none", 1), ("selective", 1), ("full", 2)])
def test_masks_are_made_once_for_all_layers_of_a_pass(monkeypatch, tokens, name, recompute, passes):
    made = []

    def counted(queries, *rest):
        made.append(rest)
        return VISIBLE(queries, *rest)

    monkeypatch.setattr(attention, "visible", counted)
    model = MODELS[name].model_copy(update={"num_layers": 4})
    stage = make_stage(model, recompute)
    windows = {block.attention.window for block in model.description.blocks}
    source, sequences = opened(tokens)
    with source:
        rows = torch.from_numpy(sequences.read(np.arange(4)))
        starts = torch.from_numpy(sequences.document_starts(np.arange(4)))
    _, saved = stage.forward(rows[:, :-1], rows[:, 1:], True, attention.Documents(starts))
    assert len(made) == len(windows) < model.num_layers
    stage.backward(saved, torch.tensor(1.0, dtype=torch.float64))
    assert len(made) == passes * len(windows)


def test_the_mean_is_over_tokens_that_count(tokens):
    job = make_job(tokens, "llama", shape={"vocab_size": 256}, global_batch=6)
    losses = {}
    for masks in (False, True):
        data = job.data.model_copy(
            update={"mask_documents": masks, "sequence_length": LENGTH, "validation_fraction": 0.0}
        )
        masked = job.model_copy(update={"data": data})
        losses[masks] = first_losses(masked)
    assert losses[True] != losses[False]
    assert losses[True] == pytest.approx([np.log(256)] * 2, rel=0.05), "the mean of a model that knows nothing"


def first_losses(job) -> list[float]:
    """Return the training loss of the first step, and the loss over all of it afterwards."""
    _, training, _ = open_datasets(job.data, 1)
    trainer = make_trainer(Alone(), job)
    trainer.initialise()
    return [trainer.step(training)[0]["loss"], trainer.validate(training)]


@pytest.mark.parametrize("masks", [False, True])
def test_prompts_are_read_and_not_learnt(tmp_path, masks):
    """The targets that count are the answers' tokens and what ends them; the loss is their mean."""
    records = [{"ask": "?" * (5 + i % 7), "answer": "abc"[i % 3] * (3 + i % 5)} for i in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    prepare([tmp_path / "a.jsonl"], tmp_path / "a.h5", fields=Fields("answer", "ask"))
    source = open_tokens(tmp_path / "a.h5")
    with source:
        end = ByteTokenizer().separator
        sequences = Sequences(source, Interval(0, source.num_tokens), LENGTH, seed=3, mask_documents=masks)
        positions = np.arange(2 * sequences.num_sequences)
        targets, counted = sequences.read(positions)[:, 1:], sequences.loss_mask(positions)
        assert (counted == (np.isin(targets, np.frombuffer(b"abc", np.uint8)) | (targets == end))).all()
        assert sequences.count_targets(positions) == counted.sum() < counted.size

    job = make_job(tmp_path / "a.h5", "llama", shape={"vocab_size": source.vocab_size}, global_batch=6)
    data = job.data.model_copy(update={"mask_documents": masks, "sequence_length": LENGTH, "validation_fraction": 0.0})
    trained = first_losses(job.model_copy(update={"data": data}))
    assert trained == pytest.approx([np.log(source.vocab_size)] * 2, rel=0.05)
