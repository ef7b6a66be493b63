import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config.errors import DataError
from hpctrain.config.job import Data
from hpctrain.data.order import NO_TOKEN, Batch, Sequences, open_datasets, permute, split
from hpctrain.data.tokenizer import ByteTokenizer, train_bpe
from hpctrain.data.tokens import TokenWriter, open_tokens
from hpctrain.sharding.intervals import Interval

SEEDS = st.integers(-(2**70), 2**70)


def write(path, ids, vocab_size=1000, starts=(0,), tokenizer=None):
    with TokenWriter(path, vocab_size, tokenizer) as writer:
        for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
            writer.begin_document()
            writer.append(ids[start:stop])
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """999 tokens that are their own positions."""
    with open_tokens(write(tmp_path_factory.mktemp("order") / "t.h5", np.arange(999))) as opened:
        yield opened


# Permutation


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 2**60))
def test_a_permutation_of_any_size_is_one(size, seed, epoch):
    assert sorted(permute(np.arange(size), size, seed, epoch).tolist()) == list(range(size))


@settings(max_examples=50, deadline=None)
@given(bits=st.integers(12, 62), more=st.integers(0, 2**62), seed=SEEDS)
def test_a_permutation_of_a_huge_size_stays_inside_and_repeats_nothing(bits, more, seed):
    size = 2**bits + more % 2**bits
    sent = permute(np.array([size * i // 500 for i in range(500)]), size, seed)
    assert sent.min() >= 0
    assert sent.max() < size
    assert len(set(sent.tolist())) == 500


@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_positions_outside_are_a_mistake_of_the_caller(bad):
    with pytest.raises(ValueError, match="of a permutation of 10"):
        permute(np.array([3, bad]), 10, 1)


@settings(max_examples=50, deadline=None)
@given(data=st.data(), size=st.integers(1, 100), seed=SEEDS)
def test_positions_and_epochs_are_independent_of_what_is_asked_along_with_them(data, size, seed):
    asked = data.draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 5)), min_size=1, max_size=20))
    positions, epochs = np.array(asked).T
    alone = [permute(np.array([position]), size, seed, epoch).item() for position, epoch in asked]
    assert permute(positions, size, seed, epochs).tolist() == alone


def test_the_order_never_changes_between_versions():
    """A resumed run continues in the same order: if this fails, old runs cannot be resumed."""
    assert permute(np.arange(10), 10, seed=1).tolist() == [9, 6, 7, 8, 4, 0, 2, 3, 5, 1]
    assert permute(np.arange(10), 10, seed=1, epochs=1).tolist() == [2, 9, 3, 7, 8, 1, 6, 4, 5, 0]
    assert permute(np.array([0, 1, 10**12 - 1]), 10**12, seed=-5, epochs=3).tolist() == [
        731361631769,
        536905940055,
        120441975929,
    ]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_order_of_few_is_as_likely_as_any_other(size):
    epochs = 100 * 120
    sent = permute(np.arange(size), size, 7, np.arange(epochs)[:, None])
    _, counts = np.unique(sent, axis=0, return_counts=True)
    orders = np.prod(np.arange(1, size + 1))
    assert len(counts) == orders
    chi_square = ((counts - epochs / orders) ** 2).sum() / (epochs / orders)
    assert chi_square / (orders - 1) < 1 + 4 * np.sqrt(2 / (orders - 1))


def test_every_position_goes_everywhere_as_often():
    sent = permute(np.arange(50), 50, 7, np.arange(5000)[:, None])
    counts = np.stack([np.bincount(sent[:, i], minlength=50) for i in range(50)])
    assert ((counts - 100) ** 2 / 100).sum() / 49**2 == pytest.approx(1, abs=0.1)
    assert abs(np.corrcoef(sent[:, 0], sent[:, 1])[0, 1]) < 0.06
    assert abs(np.corrcoef(sent[:-1, 0], sent[1:, 0])[0, 1]) < 0.06


# Sequences


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    start=st.integers(0, 500),
    size=st.integers(20, 400),
    length=st.integers(1, 19),
    global_batch=st.integers(1, 60),
    step=st.integers(0, 10**6),
    seed=SEEDS,
    shuffle=st.booleans(),
)
def test_any_cut_of_the_rows_gives_the_same_global_batch(
    source, data, start, size, length, global_batch, step, seed, shuffle
):
    sequences = Sequences(source, Interval(start, start + size), length, seed, shuffle=shuffle)
    whole = Batch.of_step(sequences, step, global_batch).rows(Interval(0, global_batch))
    bounds = sorted({0, global_batch, *data.draw(st.lists(st.integers(0, global_batch), max_size=8))})
    parts = [Batch.of_step(sequences, step, global_batch).rows(Interval(*cut)) for cut in itertools.pairwise(bounds)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert whole.shape == (global_batch, length + 1)
    assert whole.dtype == np.int64
    assert whole.min() >= start
    assert whole.max() < start + size
    assert ((whole[:, 0] - start) % length == 0).all()
    assert (np.diff(whole, axis=1) == 1).all()


@settings(max_examples=50, deadline=None)
@given(size=st.integers(20, 400), length=st.integers(1, 19), global_batch=st.integers(1, 60), seed=SEEDS)
def test_an_epoch_has_every_sequence_once_however_large_the_batch(source, size, length, global_batch, seed):
    sequences = Sequences(source, Interval(7, 7 + size), length, seed)
    count = sequences.num_sequences
    steps = -(-2 * count // global_batch)
    rows = np.concatenate(
        [Batch.of_step(sequences, step, global_batch).rows(Interval(0, global_batch)) for step in range(steps)]
    )
    for epoch in rows[:count], rows[count : 2 * count]:
        assert sorted(epoch[:, 0].tolist()) == [7 + i * length for i in range(count)]
    targets = np.unique(rows[:count, 1:])
    assert targets.tolist() == list(range(8, 8 + count * length))
    assert size - 1 - count * length < length


def test_seeds_and_epochs_differ_in_order(source):
    def order(seed, step):
        return (
            Batch.of_step(Sequences(source, Interval(0, 999), 10, seed), step, 99).rows(Interval(0, 99))[:, 0].tolist()
        )

    orders = [order(1, 0), order(1, 1), order(2, 0), sorted(order(1, 0))]
    assert len({tuple(each) for each in orders}) == 4


def test_without_shuffle_sequences_are_in_order_in_every_epoch(source):
    sequences = Sequences(source, Interval(100, 151), 10, shuffle=False)
    assert sequences.num_sequences == 5
    assert Batch.of_step(sequences, 1, 4).rows(Interval(0, 4))[:, 0].tolist() == [140, 100, 110, 120]
    assert Batch.of_step(sequences, 0, 1).rows(Interval(0, 1)).tolist() == [list(range(100, 111))]


def test_the_smallest_part_is_one_sequence(source):
    assert Batch.of_step(Sequences(source, Interval(5, 16), 10), 3, 2).rows(Interval(1, 2)).tolist() == [
        list(range(5, 16))
    ]
    message = (
        r"t\.h5: data\.sequence_length = 10 needs 11 tokens, and its training part has 10;"
        r" set data\.sequence_length to at most 9, or give more text"
    )
    with pytest.raises(DataError, match=message):
        Sequences(source, Interval(5, 15), 10, part="its training part")
    for size in (0, 1):
        with pytest.raises(DataError, match=rf"the corpus has {size}; give more text"):
            Sequences(source, Interval(5, 5 + size), 10)


def test_rows_behind_the_batch_are_filled(source):
    batch = Batch.of_step(Sequences(source, Interval(0, 999), 10), 0, 4)
    rows = batch.rows(Interval(2, 6))
    assert (rows[:2] == batch.rows(Interval(2, 4))).all() and (rows[2:] == NO_TOKEN).all()
    assert (batch.rows(Interval(5, 6)) == NO_TOKEN).all() and batch.num_targets() == 40


@pytest.mark.parametrize("rows", [(-1, 2), (3, 2)])
def test_rows_before_the_batch_are_a_mistake_of_the_caller(source, rows):
    with pytest.raises(ValueError, match=f"rows {rows[0]} to {rows[1]} of a batch"):
        Batch.of_step(Sequences(source, Interval(0, 999), 10), 0, 4).rows(Interval(*rows))


# Splitting


@pytest.mark.parametrize(
    ("starts", "fraction", "cut"),
    [
        ((0, 300, 890, 920), 0.1, 890),  # 900 wanted, 890 nearest
        ((0, 300, 870, 920), 0.1, 920),
        ((0, 300, 900, 920), 0.1, 900),
        ((0, 890, 910), 0.1, 890),  # as near: the earlier
        ((0,), 0.1, 900),  # one document: the exact token
        ((0, 500), 0.1, 900),  # its boundary would make validation five times as large
        ((0, 990), 0.1, 900),  # or a tenth as large
        ((0, 500), 0.0, 1000),
        ((0, 500), 0.0001, 1000),
        ((0,), 0.9999, 0),
    ],
)
def test_validation_starts_with_a_document(tmp_path, starts, fraction, cut):
    with open_tokens(write(tmp_path / "t.h5", np.arange(1000), starts=starts)) as opened:
        assert split(opened, fraction) == (Interval(0, cut), Interval(cut, 1000))


@settings(max_examples=100, deadline=None)
@given(inner=st.sets(st.integers(1, 998), max_size=30), fraction=st.floats(0, 1, exclude_max=True))
def test_a_split_leaves_nothing_out_and_is_near_the_fraction(inner, fraction):
    class Source:
        num_tokens = 999
        documents = np.array([0, *sorted(inner)])

    train, validation = split(Source, fraction)
    assert train.start == 0
    assert train.stop == validation.start
    assert validation.stop == 999
    wanted = round(999 * fraction)
    assert wanted / 2 <= validation.size <= 2 * wanted
    exact = 999 - wanted
    nearest = min(inner, key=lambda start: abs(start - exact), default=exact)
    assert train.stop in (exact, nearest) or abs(train.stop - exact) == abs(nearest - exact)


# Datasets


def datasets(seed=1, **data):
    source, train, validation = open_datasets(Data(**data), seed)
    source.close()
    return train, validation


def test_validation_is_the_end_of_the_tokens(tmp_path):
    path = write(tmp_path / "t.h5", np.arange(1000), starts=(0, 300, 890, 920))
    source, train, validation = open_datasets(Data(tokens=path, validation_fraction=0.1, sequence_length=10), 5)
    with source:
        assert (train.source, train.interval, train.seed, train.shuffle) == (source, Interval(0, 890), 5, True)
        assert (validation.source, validation.interval, validation.shuffle) == (source, Interval(890, 1000), False)
        assert Batch.of_step(train, 0, 88).rows(Interval(0, 88)).max() < 890
        assert Batch.of_step(validation, 0, 1).rows(Interval(0, 1))[0].tolist() == list(range(890, 901))


def test_no_validation(tmp_path):
    train, validation = datasets(tokens=write(tmp_path / "t.h5", np.arange(1000)), validation_fraction=0)
    assert train.interval == Interval(0, 1000)
    assert validation is None


def test_validation_in_a_file_of_its_own(tmp_path):
    one, other = write(tmp_path / "t.h5", np.arange(1000)), write(tmp_path / "v.h5", np.arange(500))
    train, validation = datasets(tokens=one, validation=other, sequence_length=10)
    assert (train.source.path, train.interval) == (one, Interval(0, 1000))
    assert (validation.source.path, validation.interval, validation.shuffle) == (other, Interval(0, 500), False)


def test_parts_that_are_too_short_are_named(tmp_path):
    path = write(tmp_path / "t.h5", np.arange(1000))
    other = write(tmp_path / "v.h5", np.arange(50))
    with pytest.raises(
        DataError, match=r"needs 101 tokens, and its validation part .*= 0.05; 0 for none\) has 50; set"
    ):
        datasets(tokens=path, sequence_length=100)
    with pytest.raises(DataError, match=r"needs 951 tokens, and its training part .*= 0.05\) has 950; set .* most 949"):
        datasets(tokens=path, sequence_length=950)
    with pytest.raises(DataError, match=r"v\.h5: .* needs 101 tokens, and data.validation has 50; set .* at most 49"):
        datasets(tokens=path, validation=other, sequence_length=100)


def test_vocabularies_must_agree(tmp_path):
    one, other = write(tmp_path / "t.h5", np.arange(900)), write(tmp_path / "v.h5", np.arange(900), 999)
    message = (
        r"v\.h5: data\.validation has a vocabulary of 999, and data\.tokens \(.*t\.h5\) one of 1000;"
        r" prepare it with the same one: hpctrain prepare PATH… --tokenizer .*t\.h5 --out OTHER\.h5"
    )
    with pytest.raises(DataError, match=message):
        datasets(tokens=one, validation=other)


def test_tokenizers_must_agree(tmp_path):
    one, other = (train_bpe([text * 50], 257) for text in ("hello ", "other "))
    same = write(tmp_path / "a.h5", np.arange(257), 257, tokenizer=one)
    bytewise = write(tmp_path / "b.h5", np.arange(257), 257, tokenizer=ByteTokenizer())
    assert one.to_json() == other.to_json()  # 257 leave none for merges
    datasets(tokens=same, validation=write(tmp_path / "c.h5", np.arange(257), 257, tokenizer=other), sequence_length=9)
    with pytest.raises(
        DataError, match=r"b\.h5: .* made with another tokenizer .* though both have 257 tokens; prepare"
    ):
        datasets(tokens=same, validation=bytewise, sequence_length=9)


def test_a_bin_agrees_if_its_tokens_are_in_the_vocabulary(tmp_path):
    for name, top in ("train", 50256), ("good", 50303), ("bad", 50304):
        np.array([1, 2, 3, top], "<u2").tofile(tmp_path / f"{name}.bin")
    _, validation = datasets(tokens=tmp_path / "train.bin", validation=tmp_path / "good.bin", sequence_length=2)
    assert validation.num_sequences == 1
    with pytest.raises(DataError, match=r"bad\.bin: data\.validation has a vocabulary of 50368, .* one of 50304"):
        datasets(tokens=tmp_path / "train.bin", validation=tmp_path / "bad.bin", sequence_length=2)
    narrow = write(tmp_path / "narrow.h5", np.arange(900), 50300)
    with pytest.raises(DataError, match=r"good\.bin: "):
        datasets(tokens=narrow, validation=tmp_path / "good.bin", sequence_length=2)


def test_a_missing_file_says_how_to_make_it(tmp_path):
    with pytest.raises(DataError, match=r"no such token file; make it with: hpctrain prepare PATH… --out .*t\.h5"):
        datasets(tokens=tmp_path / "t.h5")
