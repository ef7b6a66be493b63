"""Documents from JSON Lines and Parquet files: each record once, separators between, errors with the place."""

import itertools
import json

import pytest

from hpctrain.config.errors import DataError
from hpctrain.data import corpus
from hpctrain.data.corpus import prepare
from hpctrain.data.records import Fields
from hpctrain.data.tokens import open_tokens
from hpctrain.observe.folder.run_folder import START, note_event, note_failure, read_events
from hpctrain.observe.folder.schema import EVENTS

TEXTS = [f"text {i}\nof record {i}" for i in range(50)]


def documents_in(path) -> list[str]:
    with open_tokens(path) as source:
        tokens = source.read(0, source.num_tokens).tolist()
        assert source.tokenizer is not None
        starts = [*source.documents.tolist(), source.num_tokens + 1]
        cut = [tokens[a : b - 1] for a, b in itertools.pairwise(starts)]
        return [source.tokenizer.decode(ids) for ids in cut]


def test_each_line_is_a_document_in_an_order_of_its_own(tmp_path):
    lines = [json.dumps({"body": text, "id": i}) for i, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:30]) + "\n\n")
    (tmp_path / "b.ndjson").write_text("\n".join(lines[30:]))
    (tmp_path / "plain.txt").write_text("a file")
    summary = prepare([tmp_path], tmp_path / "out.h5", fields=Fields("body"))
    made = documents_in(tmp_path / "out.h5")
    assert summary.documents == 51 and sorted(made) == sorted([*TEXTS, "a file"])
    assert made != [*TEXTS, "a file"], "shuffled, so that the end is a fair sample"
    prepare([tmp_path / "a.jsonl", tmp_path / "b.ndjson"], tmp_path / "bpe.h5", fields=Fields("body"), tokenizer="bpe")
    assert sorted(documents_in(tmp_path / "bpe.h5")) == sorted(TEXTS)


def test_each_row_is_a_document(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": TEXTS, "n": range(50)}), tmp_path / "a.parquet", row_group_size=7)
    assert prepare([tmp_path / "a.parquet"], tmp_path / "out.h5").documents == 50
    assert sorted(documents_in(tmp_path / "out.h5")) == sorted(TEXTS)
    with pytest.raises(DataError, match=r"has no column 'body' \(it has: text, n\); name one with --field"):
        prepare([tmp_path / "a.parquet"], tmp_path / "other.h5", fields=Fields("body"))
    with pytest.raises(DataError, match="'n' is 0 and no text"):
        prepare([tmp_path / "a.parquet"], tmp_path / "other.h5", fields=Fields("n"))
    (tmp_path / "a.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match="is damaged or no Parquet file"):
        prepare([tmp_path / "a.parquet"], tmp_path / "other.h5")
    assert not (tmp_path / "other.h5").exists()


@pytest.mark.parametrize(
    "line, text",
    [
        ('{"body": "x"}', r"a.jsonl, line 2: has no field 'text' \(it has: body\); name one with --field"),
        ('{"text": 3}', "line 2: 'text' is 3 and no text"),
        ("{", "line 2: not valid JSON"),
        ("[1]", r"has no field 'text' \(it has: list\)"),
        ('"\\ud800', "not valid JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, text):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(DataError, match=text):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out.h5")
    assert not (tmp_path / "out.h5").exists()


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_prompts_come_before_what_is_learnt(tmp_path, suffix):
    records = [{"ask": f"ask {i}? ", "text": text} for i, text in enumerate(TEXTS)]
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        path.write_text("\n".join(map(json.dumps, records)))
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    prepare([path], tmp_path / "out.h5", fields=Fields(prompt="ask"), tokenizer="bpe")
    assert sorted(documents_in(tmp_path / "out.h5")) == sorted(record["ask"] + record["text"] for record in records)
    with open_tokens(tmp_path / "out.h5") as source:
        tokenizer = source.tokenizer
        for start, answer in zip(source.documents, source.answers, strict=True):
            prompt = tokenizer.decode(source.read(start, answer - start).tolist())
            assert prompt.startswith("ask ") and prompt.endswith("? ")
    with pytest.raises(DataError, match="has no (field|column) 'question'"):
        prepare([path], tmp_path / "other.h5", fields=Fields(prompt="question"))


def test_a_file_of_text_has_no_prompt(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PART_BYTES", 8)
    (tmp_path / "a.jsonl").write_text(json.dumps({"ask": "1 + 1 = ", "text": "2"}))
    (tmp_path / "long.txt").write_text("a line\n" * 5)
    prepare([tmp_path], tmp_path / "out.h5", fields=Fields(prompt="ask"))
    with open_tokens(tmp_path / "out.h5") as source:
        assert sorted(source.answers - source.documents) == [0, len("1 + 1 = ")]


@pytest.mark.parametrize("line", [b"\xff\xfe", b"3", b"true", b'{"event": 3}', b"[" * 100_000, b'{"event": "end"'])
def test_damaged_events_are_left_out(tmp_path, line):
    note_event(tmp_path, START, 0, "a start")
    path = tmp_path / EVENTS.name
    path.write_bytes(line + b"\n" + path.read_bytes() + line + b"\n")
    assert [event["text"] for event in read_events(tmp_path)] == ["a start"]
    note_failure(tmp_path, tmp_path / "flight")
    assert read_events(tmp_path)[-1]["event"] == "failure"
