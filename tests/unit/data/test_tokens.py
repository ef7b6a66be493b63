import errno
import fcntl
import math
import os
import resource
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.config.errors import DataError
from hpctrain.data.tokenizer import ByteTokenizer, train_bpe
from hpctrain.data.tokens import BLOCK_BYTES, TokenWriter, open_tokens
from hpctrain.sharding.intervals import Interval

IN_A_FIXTURE = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def write(path: Path, ids: np.ndarray, vocab_size: int = 256, documents: int = 1, tokenizer=None) -> Path:
    with TokenWriter(path, vocab_size, tokenizer) as writer:
        for part in np.array_split(ids, documents):
            writer.begin_document()
            writer.append(part)
    return path


def random_ids(count: int, vocab_size: int = 256) -> np.ndarray:
    return np.random.default_rng(count).integers(0, vocab_size, count)


@pytest.fixture(scope="module")
def three_blocks(tmp_path_factory) -> Path:
    """A token file of 2.5 MiB of uint16 tokens."""
    ids = random_ids(5 * BLOCK_BYTES // 4, 1000)
    return write(tmp_path_factory.mktemp("tokens") / "three.h5", ids, 1000, documents=10)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> bytes:
    """The bytes of a token file with everything in it."""
    path = tmp_path_factory.mktemp("tokens") / "small.h5"
    return write(path, random_ids(900, 270), 270, 5, train_bpe(["to be or not to be " * 9], 270)).read_bytes()


def everything(path: Path) -> tuple:
    with open_tokens(path) as source:
        source.verify()
        ids = source.read(0, source.num_tokens)
        return (
            ids.tobytes(),
            source.documents.tobytes(),
            source.counts.tobytes(),
            source.tokenizer_json,
            source.vocab_size,
        )


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(2, "u1"), (256, "u1"), (257, "u2"), (65536, "u2"), (65537, "u4"), (200_000, "u4")]
)
def test_tokens_round_trip_in_the_smallest_dtype(tmp_path, vocab_size, dtype):
    ids = random_ids(5000, vocab_size)
    ids[:2] = 0, vocab_size - 1
    path = write(tmp_path / "t.h5", ids, vocab_size, documents=7)
    with open_tokens(path) as source:
        read = source.read(0, 5000)
        assert read.dtype == np.int64
        assert type(read) is np.ndarray
        assert np.array_equal(read, ids)
        assert (source.num_tokens, source.vocab_size, source.largest_token) == (5000, vocab_size, vocab_size - 1)
        assert source.documents.tolist() == [0, *np.cumsum([len(part) for part in np.array_split(ids, 7)])[:-1]]
        assert np.array_equal(source.counts, np.bincount(ids, minlength=vocab_size))
        assert source.tokenizer is None
    with h5py.File(path) as file:
        assert file["tokens"].dtype == dtype
        assert file["tokens"].chunks is None
        assert file["tokens"].id.get_offset() is not None
        assert file["checksums"][0] == zlib.crc32(file["tokens"][:])


@settings(max_examples=60, deadline=None)
@given(start=st.integers(0, 5 * BLOCK_BYTES // 4), count=st.integers(0, BLOCK_BYTES))
def test_any_part_can_be_read(three_blocks, start, count):
    ids = random_ids(5 * BLOCK_BYTES // 4, 1000)
    count = min(count, len(ids) - start)
    with open_tokens(three_blocks) as source:
        assert source.num_blocks == 3
        assert np.array_equal(source.read(start, count), ids[start : start + count])


@pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, 11), (10, 1), (5, -1), (11, 0)])
def test_tokens_that_are_not_there_are_refused(tmp_path, start, count):
    with (
        open_tokens(write(tmp_path / "t.h5", np.arange(10))) as source,
        pytest.raises(DataError, match=rf"t\.h5: asked for tokens {start} to {start + count}, and it has 10;"),
    ):
        source.read(start, count)


def test_the_tokenizer_travels_with_the_tokens(tmp_path):
    tokenizer = train_bpe(["über " * 50], 300)
    ids = tokenizer.encode("über über")
    with open_tokens(write(tmp_path / "t.h5", ids, tokenizer.vocab_size, tokenizer=tokenizer)) as source:
        assert source.tokenizer.decode(source.read(0, source.num_tokens)) == "über über"
        assert source.tokenizer_json == tokenizer.to_json()


def test_a_tokenizer_larger_than_an_hdf5_attribute_used_to_be_travels_too(tmp_path):
    class Large(ByteTokenizer):
        def to_json(self):
            return '{"type": "byte", "padding": "' + "ä" * 3_000_000 + '"}'

    with open_tokens(write(tmp_path / "t.h5", np.arange(9), 256, tokenizer=Large())) as source:
        assert source.tokenizer_json == Large().to_json()
        assert source.tokenizer.vocab_size == 256


def test_entropy_is_in_nats(tmp_path):
    with open_tokens(write(tmp_path / "a.h5", np.array([0, 1, 2, 3] * 5))) as source:
        assert source.unigram_entropy() == pytest.approx(math.log(4))
    with open_tokens(write(tmp_path / "b.h5", np.array([0, 0, 0, 1]))) as source:
        assert source.unigram_entropy() == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    with open_tokens(write(tmp_path / "c.h5", np.array([7, 7]))) as source:
        assert str(source.unigram_entropy()) == "0.0"


def test_the_same_tokens_give_the_same_bytes(tmp_path):
    first, second = (write(tmp_path / name, random_ids(100), 256, 3, ByteTokenizer()) for name in ("a.h5", "b.h5"))
    assert first.read_bytes() == second.read_bytes()


def test_many_may_have_it_open_and_closing_lets_go(three_blocks):
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(three_blocks))

    before, descriptors = mapped(), len(os.listdir("/proc/self/fd"))
    sources = [open_tokens(three_blocks) for _ in range(3)]
    assert mapped() > before
    parts = [source.read(10, 5).tolist() for source in sources]
    assert parts[0] == parts[1] == parts[2]
    for source in sources:
        source.close()
        source.close()
    assert mapped() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(ValueError, match="was closed"):
        sources[0].read(0, 1)


def test_a_locked_file_is_read_all_the_same(three_blocks):
    """Readers take no locks, since parallel file systems may have none, so they do not mind those of others."""
    with open(three_blocks) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with open_tokens(three_blocks) as source:
            assert source.verify() == 3


def test_a_file_rewritten_in_chunks_is_refused(three_blocks, tmp_path):
    path = tmp_path / "chunked.h5"
    with h5py.File(three_blocks) as old, h5py.File(path, "w") as new:
        new.attrs.update(old.attrs)
        for name in old:
            new.create_dataset(name, data=old[name], chunks=(10_000,) if name == "tokens" else None, compression=1)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DataError, match="its tokens are in chunks, which somebody else has made; copy it again"):
        open_tokens(path)
    assert len(os.listdir("/proc/self/fd")) == descriptors


# Damage


@settings(max_examples=40, **IN_A_FIXTURE)
@given(token=st.integers(0, 5 * BLOCK_BYTES // 4 - 1), bit=st.integers(0, 15))
def test_a_flipped_bit_in_any_token_is_detected_when_its_block_is_touched(three_blocks, tmp_path, token, bit):
    content = bytearray(three_blocks.read_bytes())
    with h5py.File(three_blocks) as file:
        at = file["tokens"].id.get_offset() + 2 * token + bit // 8
        expected = int(file["checksums"][token * 2 // BLOCK_BYTES])
    content[at] ^= 1 << bit % 8
    path = tmp_path / "flipped.h5"
    path.write_bytes(content)
    block = token * 2 // BLOCK_BYTES
    message = (
        rf"flipped\.h5: block {block} of 3 .* is damaged: its CRC-32 is 0x[0-9a-f]{{8}} and should be {expected:#010x}"
    )
    with open_tokens(path) as source:
        with pytest.raises(DataError, match=message + "; copy the file again, or prepare it again"):
            source.read(block * BLOCK_BYTES // 2, 1)
        source.read((block + 1) % 3 * BLOCK_BYTES // 2, 1)  # the others are still good
        with pytest.raises(DataError, match=message):
            source.verify()
        assert source.verify(Interval(block + 1, 3)) == 2 - block
        with pytest.raises(DataError, match=message):
            source.verify(Interval(block, block + 1))


def test_verify_looks_again_at_what_was_good(three_blocks, tmp_path):
    path = tmp_path / "later.h5"
    path.write_bytes(three_blocks.read_bytes())
    with open_tokens(path) as source:
        assert source.verify() == 3
        with open(path, "r+b") as file:
            file.seek(3 * BLOCK_BYTES // 2)
            file.write(b"damage")
        source.read(BLOCK_BYTES // 2, BLOCK_BYTES // 2)  # reading looks at the first touch only
        with pytest.raises(DataError, match="block 1 of 3"):
            source.verify()


@settings(max_examples=250, **IN_A_FIXTURE)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_harmless_or_detected(small, tmp_path, data):
    """Not only in tokens: HDF5's own structures, the documents, the counts and the tokenizer as well."""
    whole = tmp_path / "whole.h5"
    whole.write_bytes(small)
    at = data.draw(st.integers(0, 8 * len(small) - 1))
    flipped = bytearray(small)
    flipped[at // 8] ^= 1 << at % 8
    path = tmp_path / "flipped.h5"
    path.write_bytes(flipped)
    try:
        result = everything(path)
    except DataError as error:
        assert str(path) in str(error)
    else:
        assert result == everything(whole)


@settings(max_examples=150, **IN_A_FIXTURE)
@given(data=st.data())
def test_a_file_cut_short_anywhere_is_refused_with_its_sizes(small, tmp_path, data):
    size = data.draw(st.integers(0, len(small) - 1))
    path = tmp_path / "cut.h5"
    path.write_bytes(small[:size])
    with pytest.raises(DataError, match=rf"cut\.h5: is (cut short: it has {size} |damaged \({size} bytes)") as caught:
        open_tokens(path)
    assert "copy it again, or prepare it again" in str(caught.value)
    assert size < 100 or f"{size} of {len(small)} bytes" in str(caught.value)


@pytest.mark.parametrize("part", ["documents", "counts", "checksums"])
def test_a_flipped_bit_in_what_describes_the_tokens_is_detected_at_once(small, tmp_path, part):
    path = tmp_path / "t.h5"
    path.write_bytes(small)
    with h5py.File(path) as file:
        at = small.index(file[part][:].tobytes()) + (8 if part == "documents" else 0)
    path.write_bytes(small[:at] + bytes([small[at] ^ 1]) + small[at + 1 :])
    with pytest.raises(DataError, match=r"t\.h5: is damaged \(\d+ bytes\): .*copy it again, or prepare it again"):
        open_tokens(path)


def test_a_token_outside_the_vocabulary_is_detected(tmp_path):
    path = write(tmp_path / "t.h5", np.arange(200), 200)
    with h5py.File(path, "r+") as file:
        file["tokens"][150] = 200
        file["checksums"][0] = zlib.crc32(file["tokens"][:])
    with (
        open_tokens(path) as source,
        pytest.raises(DataError, match="token 150 is 200, and the vocabulary ends at 199; prepare the file again"),
    ):
        source.read(0, 10)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.h5", None, "a.h5: no such token file; make it with: hpctrain prepare PATH… --out .*a.h5$"),
        ("a.bin", None, "a.bin: no such token file; make it with: hpctrain prepare PATH… --out .*a.bin$"),
        ("a.txt", b"It was the best", "its 15 bytes start with b'It was t'.* hpctrain prepare .*a.txt --out .*a.h5"),
        ("a.h5", b"", "a.h5: is cut short: it has 0 bytes; copy it again"),
        ("a.bin", b"", "a.bin: has 0 bytes, and a .bin without an .idx beside it holds"),
        ("a.bin", b"abc", "a.bin: has 3 bytes, and a .bin without an .idx beside it holds"),
    ],
)
def test_what_is_not_a_token_file_is_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_tokens(tmp_path / name)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"is a folder; make a token file .* hpctrain prepare .* --out .*\.h5"):
        open_tokens(tmp_path)


def test_a_file_without_permission_is_refused(tmp_path):
    path = write(tmp_path / "t.h5", np.arange(9))
    path.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read everything
    try:
        with pytest.raises(DataError, match="cannot be read: Permission denied; check its path and permissions"):
            open_tokens(path)
    finally:
        os.seteuid(user)


def test_other_hdf5_is_refused(tmp_path):
    path = tmp_path / "other.h5"
    with h5py.File(path, "w") as file:
        file["weights"] = 1
    with pytest.raises(DataError, match=r"other\.h5: is HDF5, but not a token file: .* \(it holds weights\)"):
        open_tokens(path)
    with h5py.File(path, "w") as file:
        file.attrs["format"] = 5
    with pytest.raises(DataError, match=r"not a token file: .* \(it holds nothing\)"):
        open_tokens(path)


def test_another_version_is_refused(tmp_path):
    path = write(tmp_path / "t.h5", np.arange(9))
    with h5py.File(path, "r+") as file:
        file.attrs["version"] = 2
    with pytest.raises(DataError, match="of version 2, and this hpctrain reads version 1; prepare it again"):
        open_tokens(path)


@pytest.mark.parametrize("gone", ["tokens", "documents", "counts", "checksums", "vocab_size", "version"])
def test_a_missing_part_is_refused(tmp_path, gone):
    path = write(tmp_path / "t.h5", np.arange(9))
    with h5py.File(path, "r+") as file:
        del (file if gone in file else file.attrs)[gone]
    with pytest.raises(DataError, match=rf"t\.h5: is damaged \(\d+ bytes\): .*{gone}"):
        open_tokens(path)


@pytest.mark.parametrize("part", ["documents", "counts", "checksums", "tokens"])
def test_parts_that_contradict_each_other_are_refused(tmp_path, part):
    path = write(tmp_path / "t.h5", np.arange(9), documents=2)
    with h5py.File(path, "r+") as file:
        values = file[part][:]
        del file[part]
        file[part] = np.append(values, values[-1])
    with pytest.raises(DataError, match="its parts contradict each other"):
        open_tokens(path)


# nanoGPT


def test_a_nanogpt_bin_is_read(tmp_path):
    ids = random_ids(BLOCK_BYTES, 50257)  # two blocks
    ids[-1] = 50256
    ids.astype("<u2").tofile(tmp_path / "train.bin")
    with open_tokens(tmp_path / "train.bin") as source:
        assert (source.num_tokens, source.vocab_size, source.largest_token) == (len(ids), 50304, 50256)
        assert not source.declares_vocabulary and source.least_vocabulary == 50257
        assert source.tokenizer is None
        assert source.documents.tolist() == [0]
        assert np.array_equal(source.read(BLOCK_BYTES // 2 - 5, 10), ids[BLOCK_BYTES // 2 - 5 :][:10])
        assert np.array_equal(source.counts, np.bincount(ids, minlength=50304))
        assert source.unigram_entropy() == pytest.approx(math.log(50257), abs=0.05)
        assert source.verify() == 0


def test_hdf5_under_the_name_of_a_bin_is_hdf5(tmp_path):
    with open_tokens(write(tmp_path / "t.bin", np.arange(9))) as source:
        assert source.declares_vocabulary


# Writing


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "t.h5"
    path.write_bytes(b"precious")
    with pytest.raises(KeyboardInterrupt), TokenWriter(path, 256) as writer:
        writer.append(np.arange(9))
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["t.h5"]
    assert path.read_bytes() == b"precious"


@pytest.mark.parametrize("when", ["while tokens come", "while the file is put together"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, when):
    path = tmp_path / "t.h5"
    path.write_bytes(b"precious")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with (
            pytest.raises(DataError, match=r"t\.h5: cannot be written: .*File too large.*; free some space there"),
            TokenWriter(path, 256) as writer,
        ):
            if when == "while tokens come":
                resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
            for _ in range(3):
                writer.append(np.zeros(1_000_000, np.int64))
            writer._spool.flush()
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["t.h5"]
    assert path.read_bytes() == b"precious"
    assert everything(write(path, np.arange(9)))[0] == np.arange(9).tobytes()


def test_nothing_appears_under_the_name_before_it_is_whole(tmp_path, monkeypatch):
    seen = []
    replace, fsync = os.replace, os.fsync

    def look_first(source, target):
        seen.append((sorted(os.listdir(tmp_path)), everything(source)[0]))
        replace(source, target)

    def note(descriptor):
        seen.append(f"synced {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    monkeypatch.setattr(os, "replace", look_first)
    monkeypatch.setattr(os, "fsync", note)
    write(tmp_path / "t.h5", np.arange(9))
    whole = (["t.h5.partial"], np.arange(9).tobytes())
    assert seen == ["synced t.h5.partial", whole, f"synced {tmp_path.name}"]
    assert os.listdir(tmp_path) == ["t.h5"]


def test_a_failure_to_rename_is_reported_and_leaves_nothing(tmp_path, monkeypatch):
    def fail(source, target):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(DataError, match=r"t\.h5: cannot be written: Disk quota exceeded; free some space there, or"):
        write(tmp_path / "t.h5", np.arange(9))
    assert os.listdir(tmp_path) == []


def test_the_writer_makes_folders_but_not_over_files(tmp_path):
    assert write(tmp_path / "a" / "b" / "t.h5", np.arange(9)).is_file()
    with pytest.raises(DataError, match="cannot be written: (File exists|Not a directory); .*choose another place"):
        write(tmp_path / "a" / "b" / "t.h5" / "u.h5", np.arange(9))
    with pytest.raises(DataError, match="a/b: cannot be written: is a folder"):
        write(tmp_path / "a" / "b", np.arange(9))


@pytest.mark.parametrize("bad", [-1, 100, 356])
def test_the_writer_refuses_what_is_not_in_the_vocabulary(tmp_path, bad):
    with pytest.raises(DataError, match=rf"t\.h5: token {bad} is not in the vocabulary of 100"):
        write(tmp_path / "t.h5", np.array([1, bad]), 100)
    assert os.listdir(tmp_path) == []


def test_the_writer_refuses_no_tokens(tmp_path):
    with pytest.raises(DataError, match=r"t\.h5: there are no tokens to write"):
        write(tmp_path / "t.h5", np.arange(0))
    assert os.listdir(tmp_path) == []


def test_empty_documents_leave_no_trace(tmp_path):
    with TokenWriter(tmp_path / "t.h5", 256) as writer:
        for ids in ([], [1, 2], [], [], [3], []):
            writer.begin_document()
            writer.append(np.array(ids, np.int64))
    with open_tokens(tmp_path / "t.h5") as source:
        assert source.documents.tolist() == [0, 2]
