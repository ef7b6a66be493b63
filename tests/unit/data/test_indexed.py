"""Megatron's .bin and .idx are read as by its own reader, by the answers of `megatron/make.py`; others are refused."""

import json
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hpctrain.config.errors import DataError
from hpctrain.data.tokens import open_tokens

FOLDER = Path(__file__).parent / "megatron"
ANSWERS = json.loads((FOLDER / "answers.json").read_text())


@pytest.mark.parametrize("name", ANSWERS)
def test_documents_are_those_of_megatrons_reader(name):
    with open_tokens(FOLDER / f"{name}.bin") as source:
        bounds = [*source.documents.tolist(), source.num_tokens]
        assert [source.read(start, stop - start).tolist() for start, stop in pairwise(bounds)] == ANSWERS[name]
        assert source.largest_token == max(max(document) for document in ANSWERS[name])


def write(folder: Path, tokens: np.ndarray, code: int, *, lengths=None, pointers=None, version=1, size=None) -> Path:
    path = folder / "x.bin"
    path.write_bytes(tokens.tobytes()[:size])
    lengths = [len(tokens)] if lengths is None else lengths
    starts = np.concatenate([[0], np.cumsum(lengths)])
    pointers = starts[:-1] * tokens.itemsize if pointers is None else pointers
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, code, len(lengths), 2)
    body = np.array(lengths, "<i4").tobytes() + np.array(pointers, "<i8").tobytes()
    (folder / "x.idx").write_bytes(head + body + np.array([0, len(lengths)], "<i8").tobytes())
    return path


IDS = np.arange(100, dtype="<i4")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"size": 399}, "has 399 bytes, and x.idx says 100 tokens of 4"),
        ({"version": 2}, "is damaged or of another version: version 2"),
        ({"lengths": [50, 50], "pointers": [200, 0]}, "has sequences in another order than x.bin"),
    ],
)
def test_an_index_that_contradicts_its_tokens_is_refused(tmp_path, options, said):
    with pytest.raises(DataError, match=said):
        open_tokens(write(tmp_path, IDS, 4, **options))


def test_other_elements_than_ids_are_refused(tmp_path):
    with pytest.raises(DataError, match="has elements of float32, and ids are whole"):
        open_tokens(write(tmp_path, IDS.astype("<f4"), 7))
    with open_tokens(write(tmp_path, IDS - 5, 4)) as source, pytest.raises(DataError, match="has a token -5"):
        source.vocab_size  # noqa: B018 - its value is found by a pass over the file
    (tmp_path / "x.idx").write_bytes(b"other")
    with pytest.raises(DataError, match=r"lies beside x.bin and is no index of Megatron"):
        open_tokens(tmp_path / "x.bin")


def random_ids(dtype: str, most: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, most, 5000).astype(dtype)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (random_ids("<i4", 128_000).tobytes(), "looks like tokens of 4 bytes"),
        (random_ids("<u4", 300).tobytes(), "looks like tokens of 4 bytes"),
        (struct.pack("<ii", 20240520, 1) + bytes(1016) + random_ids("<u2", 50257).tobytes(), "of llm.c or modded-nan"),
        (b"\x93NUMPY\x01\x00" + random_ids("<u2", 50257).tobytes(), "is an array of numpy"),
        (b"some text\n" * 100, "is text, and a .bin without an .idx"),
        (b"abc", "has 3 bytes, and a .bin without"),
    ],
)
def test_other_files_called_bin_are_refused(tmp_path, data, said):
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(DataError, match=said):
        open_tokens(tmp_path / "x.bin")


@pytest.mark.parametrize("most", [4, 100, 50257, 65536])
def test_plain_tokens_of_two_bytes_are_read(tmp_path, most):
    tokens = random_ids("<u2", most)
    tokens.tofile(tmp_path / "x.bin")
    with open_tokens(tmp_path / "x.bin") as source:
        assert (source.read(0, 5000) == tokens).all()


def test_a_name_without_its_ending_gets_a_hint(tmp_path):
    path = write(tmp_path, IDS, 4)
    with pytest.raises(DataError, match=r"but there is .*x\.bin: name that"):
        open_tokens(path.with_suffix(""))
    with pytest.raises(DataError, match=r"is the index of tokens; name .*x\.bin"):
        open_tokens(path.with_suffix(".idx"))
