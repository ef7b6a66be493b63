"""Several sources: shares by weight, each source in its own order, the same whatever rows a rank asks for."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.errors import DataError
from hpctrain.config.job import Data, Source
from hpctrain.data.order import MIXED_AT_ONCE, Batch, Mixture, Sequences, open_datasets
from hpctrain.sharding.intervals import Interval

LENGTH = 4


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Path]:
    """Three files of 60, 35 and 110 sequences; a token says which file it is of and which sequence."""
    folder = tmp_path_factory.mktemp("mixed")
    paths = []
    for number, count in enumerate((60, 35, 110)):
        tokens = 1000 * number + np.arange(count * LENGTH + 1) // LENGTH
        paths.append(folder / f"{number}.bin")
        np.append(tokens, [2999]).astype("<u2").tofile(paths[-1])  # so that all have one vocabulary
    return paths


def data_of(files: list[Path], *weights: float, **more) -> Data:
    first, *others = zip(files, weights, strict=False)
    sources = tuple(Source(tokens=path, weight=weight) for path, weight in others)
    keys = {"validation_fraction": 0.0, "sequence_length": LENGTH} | more
    return Data(tokens=first[0], weight=first[1], more=sources, **keys)


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=5), st.integers(0, 2**31), st.integers(0, 10**6), st.data())
def test_every_group_has_the_shares_and_each_source_counts_on(weights, seed, first, data):
    mixture = Mixture([_Counted() for _ in weights], weights, seed)
    groups = data.draw(st.integers(1, 3))
    positions = np.arange(first * MIXED_AT_ONCE, (first + groups) * MIXED_AT_ONCE)
    sources, inner = mixture.place(positions)
    for number, weight in enumerate(weights):
        own = np.sort(inner[sources == number])
        expected = groups * MIXED_AT_ONCE * weight / sum(weights)
        assert abs(len(own) - expected) <= len(weights)
        if len(own):
            assert (own == np.arange(own[0], own[0] + len(own))).all(), "none twice, none left out"
            before = first * MIXED_AT_ONCE * weight / sum(weights)
            assert abs(own[0] - before) <= len(weights) + 1e-6 * before


class _Counted:
    sequence_length, num_sequences = LENGTH, 1
    masks_documents = has_loss_mask = False


def test_rows_are_the_same_however_they_are_asked_for(files):
    _, training, validation = open_datasets(data_of(files, 3.0, 1.0, 1.0), seed=5)
    assert isinstance(training, Mixture) and validation is None and training.num_sequences == 205
    whole = Batch.of_step(training, 2, 24).rows(Interval(0, 24))
    parts = [Batch.of_step(training, 2, 24).rows(Interval(i, i + 6)) for i in range(0, 24, 6)]
    assert (np.concatenate(parts) == whole).all()
    assert (Batch.of_step(training, 1, 48).rows(Interval(0, 24)) == whole).all(), "it is the position that counts"
    assert {int(each) for each in whole[:, 0] // 1000} == {0, 1, 2}
    other = open_datasets(data_of(files, 3.0, 1.0, 1.0), seed=6)[1]
    assert not (Batch.of_step(other, 2, 24).rows(Interval(0, 24)) == whole).all()


def test_an_epoch_of_a_source_has_each_of_its_sequences_once(files):
    _, training, _ = open_datasets(data_of(files, 1.0, 1.0), seed=1)
    assert isinstance(training, Mixture)
    sources, inner = training.place(np.arange(MIXED_AT_ONCE))
    rows = Batch.of_step(training, 0, MIXED_AT_ONCE).rows(Interval(0, MIXED_AT_ONCE))
    for epoch in range(3):
        of_second = rows[(sources == 1) & (inner // 35 == epoch), 0]
        assert sorted(of_second.tolist()) == list(range(1000, 1035))


def test_validation_is_the_end_of_each(files):
    _, training, validation = open_datasets(data_of(files, 1.0, 1.0, validation_fraction=0.2), seed=1)
    assert isinstance(validation, Mixture) and len(validation.sources) == 2
    assert [part.num_sequences for part in training.sources] == [48, 28]
    assert Batch.of_step(validation, 0, 4).rows(Interval(0, 4)).shape == (4, LENGTH + 1)


def test_what_is_mixed_is_part_of_what_a_run_is_of(files):
    identities = {open_datasets(data_of(files, *weights), 1)[1].identity for weights in [(1.0, 1.0), (2.0, 1.0)]}
    assert len(identities) == 2
    assert isinstance(open_datasets(data_of(files, 1.0), 1)[1], Sequences)


def test_files_of_different_vocabularies_are_not_mixed(files, tmp_path):
    np.arange(100).astype("<u2").tofile(tmp_path / "small.bin")
    np.append(np.arange(100), 4000).astype("<u2").tofile(tmp_path / "large.bin")
    with pytest.raises(DataError, match="data.more has a vocabulary of"):
        open_datasets(data_of([files[0], tmp_path / "large.bin"], 1.0, 1.0), 1)
