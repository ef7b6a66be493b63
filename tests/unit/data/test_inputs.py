"""Files in other forms: compressed, JSON of records, links, Megatron's tokens; each is read, or refused."""

import gzip
import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hpctrain.config.errors import DataError
from hpctrain.data.corpus import list_files, prepare
from hpctrain.data.records import Fields
from hpctrain.data.tokens import open_tokens
from tests.unit.data.test_indexed import ANSWERS, FOLDER

TEXTS = [f"text {i}\nof record" for i in range(20)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def documents(path: Path) -> list[str]:
    with open_tokens(path) as source:
        bounds = [*source.documents.tolist(), source.num_tokens]
        return [source.tokenizer.decode(source.read(a, b - a)).removesuffix("\0") for a, b in pairwise(bounds)]


def zstd(data: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as out:
        out.write(data)
    return sink.getvalue().to_pybytes()


FORMS = {
    "a.jsonl.gz": lambda: gzip.compress(LINES),
    "a.jsonl.zst": lambda: zstd(LINES),
    "a.json": lambda: LINES,
    "a.json.gz": lambda: gzip.compress(LINES),
    "b.json": lambda: json.dumps([json.loads(line) for line in LINES.splitlines()], indent=1).encode(),
}


@pytest.mark.parametrize("name", FORMS)
def test_records_are_read_in_every_form(tmp_path, name):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(FORMS[name]())
    assert prepare([tmp_path / "in"], tmp_path / "out.h5").documents == 20
    assert sorted(documents(tmp_path / "out.h5")) == sorted(TEXTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.h5"], "what was unpacked is gone"


def test_compressed_lines_make_the_same_file(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "z").mkdir()
    (tmp_path / "z/a.jsonl.gz").write_bytes(gzip.compress(LINES))
    prepare([tmp_path / "a.jsonl"], tmp_path / "plain.h5")
    prepare([tmp_path / "z/a.jsonl.gz"], tmp_path / "packed.h5")
    assert (tmp_path / "plain.h5").read_bytes() == (tmp_path / "packed.h5").read_bytes()


def test_other_json_is_text_or_refused(tmp_path):
    (tmp_path / "config.json").write_text('{\n "a": 1\n}\n')
    (tmp_path / "one.json").write_text('{"a": 1}\n')
    (tmp_path / "list.json").write_text('[{"a": 1}, {"a": 2}]')
    prepare([tmp_path], tmp_path / "out.h5")
    assert sorted(documents(tmp_path / "out.h5")) == ['[{"a": 1}, {"a": 2}]', '{\n "a": 1\n}\n', '{"a": 1}\n']
    (tmp_path / "one.json").write_text('{"a": 1}\n{"a": 2}\n')
    with pytest.raises(DataError, match=r"has no field 'text' \(it has: a\); name one with --field"):
        prepare([tmp_path / "one.json"], tmp_path / "out.h5")
    prepare([tmp_path / "list.json"], tmp_path / "other.h5", fields=Fields("text"))


def test_a_list_of_records_without_the_field_that_is_named_is_refused(tmp_path):
    (tmp_path / "list.json").write_text('[{"a": "x"}, {"a": "y"}]')
    with pytest.raises(DataError, match=r"list.json, line 1: has no field 'b' \(it has: a\); name one with --field"):
        prepare([tmp_path / "list.json"], tmp_path / "out.h5", fields=Fields("b"))
    assert prepare([tmp_path / "list.json"], tmp_path / "out.h5", fields=Fields("a")).documents == 2


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.json"])
def test_a_mistake_in_what_was_unpacked_names_the_file_of_the_user(tmp_path, name):
    lines = b'{"text": "x"}\n{"text": 3}\n'
    (tmp_path / name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    with pytest.raises(DataError) as caught:
        prepare([tmp_path / name], tmp_path / "out.h5")
    assert str(caught.value).startswith(f"{tmp_path / name}, line 2: 'text' is 3 and no text")


def test_a_compressed_file_that_is_named_is_refused_where_it_is_no_text(tmp_path):
    """One in a folder is passed over, and counted."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt.gz").write_bytes(gzip.compress(b"\xff\xfe" * 20))
    (tmp_path / "in/b.txt").write_text("text")
    with pytest.raises(DataError, match=rf"{tmp_path}/in/a.txt.gz: is not UTF-8 text, by its byte 0; convert"):
        prepare([tmp_path / "in/a.txt.gz"], tmp_path / "out.h5")
    assert prepare([tmp_path / "in"], tmp_path / "out.h5").skipped == {"not text": 1}


def test_a_damaged_archive_is_refused_and_leaves_nothing(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES)[:-30])
    with pytest.raises(DataError, match=r"a.jsonl.gz: is damaged: .*copy it again"):
        prepare([tmp_path / "a.jsonl.gz"], tmp_path / "out.h5")
    (tmp_path / "a.jsonl.gz").write_bytes(b"no")
    with pytest.raises(DataError, match=r"a.jsonl.gz: is damaged: Not a gzipped file"):
        prepare([tmp_path / "a.jsonl.gz"], tmp_path / "out.h5")
    (tmp_path / "a.jsonl.zst").write_bytes(b"no")
    with pytest.raises(DataError, match=r"a.jsonl.zst: cannot be unpacked"):
        prepare([tmp_path / "a.jsonl.zst"], tmp_path / "out.h5")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl.gz", "a.jsonl.zst"]


def test_linked_folders_are_followed_once(tmp_path):
    for name in ("in/a.txt", "out/b.txt", "out/deep/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "in/more").symlink_to("../out")
    (tmp_path / "in/again").symlink_to("more")
    (tmp_path / "out/deep/up").symlink_to("../../in")
    (tmp_path / "in/gone").symlink_to("nowhere")
    assert [name for _, name in list_files([tmp_path / "in"])[0]] == ["a.txt", "again/b.txt", "again/deep/c.txt"]


@pytest.mark.parametrize("name", ["one", "several"])
def test_megatrons_documents_are_prepared_token_for_token(tmp_path, name):
    for ending in (".bin", ".idx"):
        shutil.copy(FOLDER / f"{name}{ending}", tmp_path)
    tree = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None}
    vocab = {f"t{i}": i for i in range(128_256)} | {"<|endoftext|>": 128_256}
    tree |= {"decoder": None, "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    made = prepare([tmp_path / f"{name}.bin"], tmp_path / "out.h5", tokenizer=str(tmp_path / "tokenizer.json"))
    assert made.documents == len(ANSWERS[name])
    with open_tokens(tmp_path / "out.h5") as source:
        bounds = [*source.documents.tolist(), source.num_tokens + 1]
        ids = np.append(source.read(0, source.num_tokens), 128_256).tolist()
        cut = [ids[start:stop] for start, stop in pairwise(bounds)]
    assert sorted(cut) == sorted([*document, 128_256] for document in ANSWERS[name])
    with pytest.raises(DataError, match="is not in the vocabulary of 256; is it another tokenizer's"):
        prepare([tmp_path / f"{name}.bin"], tmp_path / "bytes.h5")
