import json
import os
import subprocess
import sys
import sysconfig
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.config.errors import DataError
from hpctrain.data import corpus as module
from hpctrain.data.corpus import Summary, list_files, prepare
from hpctrain.data.tokenizer import ByteTokenizer, train_bpe
from hpctrain.data.tokens import TokenWriter, open_tokens
from hpctrain.jobs.prepare import command

TEXTS = {"a.py": "print('a')\n", "b.md": "# b\n", "sub/c.py": "c = 'ü'\n", "sub/deep/d.txt": "d" * 50}


@pytest.fixture
def corpus(tmp_path) -> Path:
    return make(tmp_path / "corpus", TEXTS)


def make(root: Path, texts: dict[str, str | bytes]) -> Path:
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


def documents(path: Path) -> list[str]:
    """The documents of a token file, separators included."""
    with open_tokens(path) as source:
        bounds = [*source.documents.tolist(), source.num_tokens]
        return [source.tokenizer.decode(source.read(start, stop - start)) for start, stop in pairwise(bounds)]


def names(*arguments, **options) -> list[str]:
    return [name for _, name in list_files(*arguments, **options)[0]]


# Finding


def test_folders_are_walked_and_hidden_things_left_out(corpus):
    make(corpus, {".git/config": "x", ".hidden": "x", "sub/.hidden/x.py": "x"})
    assert names([corpus]) == ["a.py", "b.md", "sub/c.py", "sub/deep/d.txt"]
    assert names([corpus / ".hidden", corpus / ".git"]) == [".hidden", "config"]


@pytest.mark.parametrize(
    ("globs", "expected"),
    [
        (["*.py"], ["a.py", "sub/c.py"]),
        (["*.py", "*.md"], ["a.py", "b.md", "sub/c.py"]),
        (["sub/*.py"], ["sub/c.py"]),
        (["deep/*"], ["sub/deep/d.txt"]),
    ],
)
def test_globs_say_which(corpus, globs, expected):
    assert names([corpus], globs) == expected
    assert names([corpus, corpus / "b.md"], globs) == list(dict.fromkeys([*expected, "b.md"]))  # named: taken anyway


def test_every_file_is_taken_once(corpus):
    (corpus / "link.py").symlink_to("a.py")
    (corpus / "broken").symlink_to("nowhere")
    (corpus / "loop").symlink_to(".")
    assert names([corpus, corpus / "a.py", corpus / "sub"]) == list(TEXTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([Path("/nowhere/at/all")],), "/nowhere/at/all: no such file or folder; check the path"),
        (([Path("/dev/null")],), "/dev/null: neither a file nor a folder"),
        (([],), "nothing to prepare: no path was given: no file is there; give files, folders, or --stdlib"),
    ],
)
def test_paths_that_cannot_be(arguments, message):
    with pytest.raises(DataError, match=message):
        list_files(*arguments)


def test_globs_that_match_nothing(corpus):
    with pytest.raises(DataError, match=r"nothing to prepare: .*corpus: no file matches --glob '\*.c' '\*.h'; give"):
        list_files([corpus], ["*.c", "*.h"])


def test_a_pipe_in_a_folder_is_not_waited_for(corpus):
    os.mkfifo(corpus / "pipe")
    assert names([corpus]) == list(TEXTS)


def test_the_standard_library_is_that_without_other_packages():
    result = names([], stdlib=True)
    assert {"json/decoder.py", "typing.py"} <= set(result)
    assert all(name.endswith(".py") for name in result)
    assert not any("site-packages" in name for name in result)
    outside = Path(sysconfig.get_path("stdlib"), "site-packages")
    assert (outside.is_dir() and any(outside.rglob("*.py"))) or sys.prefix != sys.base_prefix


# Preparing


def test_documents_are_whole_with_a_separator_between_two(corpus, tmp_path):
    summary = prepare([corpus], tmp_path / "t.h5")
    result = documents(tmp_path / "t.h5")
    assert sorted(text.removesuffix("\0") for text in result) == sorted(TEXTS.values())
    assert [text.endswith("\0") for text in result] == [True, True, True, False]
    size = sum(len(text.encode()) for text in TEXTS.values())
    assert summary == Summary(
        path=tmp_path / "t.h5",
        documents=4,
        tokens=size + 3,
        vocab_size=256,
        wanted_vocab_size=256,
        text_bytes=size,
        unigram_entropy_nats=summary.unigram_entropy_nats,
        file_bytes=(tmp_path / "t.h5").stat().st_size,
        special_tokens=0,
        skipped={},
    )
    with open_tokens(tmp_path / "t.h5") as source:
        assert summary.unigram_entropy_nats == source.unigram_entropy()


def test_bpe_documents_are_whole_too(corpus, tmp_path):
    summary = prepare([corpus], tmp_path / "t.h5", tokenizer="bpe", vocab_size=280)
    result = documents(tmp_path / "t.h5")
    assert sorted(text.removesuffix("<|endoftext|>") for text in result) == sorted(TEXTS.values())
    assert sum("<|endoftext|>" in text for text in result) == 3
    assert 257 < summary.vocab_size <= 280
    assert summary.wanted_vocab_size == 280


def test_the_order_is_shuffled_and_does_not_depend_on_where_the_folder_is(tmp_path):
    texts = {f"{i:02}.txt": f"{i:02}" for i in range(40)}
    for place in ("one", "other/place"):
        prepare([make(tmp_path / place, texts)], tmp_path / f"{place[:3]}.h5")
    result = documents(tmp_path / "one.h5")
    assert (tmp_path / "one.h5").read_bytes() == (tmp_path / "oth.h5").read_bytes()
    assert [text[:2] for text in result] != sorted(texts.values())
    prepare([tmp_path / "one"], tmp_path / "half.h5", globs=["[02468]*.txt", "1*.txt"])
    kept = [text[:2] for text in documents(tmp_path / "half.h5")]
    assert kept == [text[:2] for text in result if text[:2] in kept]  # one file more or less moves no other
    late = sum(int(text[:2]) >= 20 for text in result[20:])
    assert 5 <= late <= 15


def test_what_is_not_text_is_skipped_and_counted(corpus, tmp_path):
    make(corpus, {"x.png": b"\x89PNG\xff", "zero.txt": b"a\0b", "cut.txt": "ü".encode()[:1], "empty.py": b""})
    (corpus / "b.md").chmod(0)
    summary = prepare([corpus], tmp_path / "t.h5")
    readable = os.geteuid() == 0
    assert summary.skipped == {"not text": 3, "empty": 1} | ({} if readable else {"unreadable": 1})
    assert summary.documents == (4 if readable else 3)


def test_folders_and_files_that_vanish_are_skipped(corpus, tmp_path, monkeypatch):
    def vanish(*arguments):
        result, skipped = list_files(*arguments)
        (corpus / "a.py").unlink()
        return result, skipped

    monkeypatch.setattr(module, "list_files", vanish)
    assert prepare([corpus], tmp_path / "t.h5").skipped == {"unreadable": 1}


def test_only_what_is_not_text_is_refused(tmp_path):
    make(tmp_path / "bad", {"x": b"\xff", "y": b"\xfe", "z": b""})
    with pytest.raises(DataError, match=r"no text in the 3 files seen \(1 empty, 2 not text\); give UTF-8 text"):
        prepare([tmp_path / "bad"], tmp_path / "t.h5")
    assert not (tmp_path / "t.h5").exists()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.sampled_from("aü🙂\n\r "), min_size=1, max_size=60), min_size=1, max_size=4),
    part=st.integers(1, 9),
    batch=st.integers(1, 30),
)
def test_large_files_go_in_parts_and_come_out_whole(tmp_path_factory, texts, part, batch):
    folder = make(tmp_path_factory.mktemp("parts"), {f"{i}.txt": text for i, text in enumerate(texts)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PART_BYTES", part)
        patch.setattr(module, "BATCH_CHARACTERS", batch)
        seen = []
        prepare([folder], folder / "t.h5", on_progress=lambda done, total: seen.append((done, total)))
    assert sorted(text.removesuffix("\0") for text in documents(folder / "t.h5")) == sorted(texts)
    size = sum(len(text.encode()) for text in texts)
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)


@pytest.mark.parametrize("damage", [b"\xff" * 20, b"\0" * 20, b"ab\xc3"])
def test_what_is_not_text_is_seen_in_any_part(tmp_path, monkeypatch, damage):
    monkeypatch.setattr(module, "PART_BYTES", 8)
    folder = make(tmp_path / "c", {"good.txt": "good", "bad.txt": b"good so far\n" * 5 + damage})
    assert prepare([folder], tmp_path / "t.h5").skipped == {"not text": 1}


@pytest.mark.parametrize(
    ("damage", "byte"),
    [(b"\xff" * 20, 60), (b"\0" * 20, 60), (b"ab\xc3", 62), (b"ab\xc3(", 62), (b"abcd\xe2\x82(", 64)],
)
def test_a_named_file_that_is_not_text_is_refused_with_the_byte(tmp_path, monkeypatch, damage, byte):
    monkeypatch.setattr(module, "PART_BYTES", 8)
    make(tmp_path, {"good.txt": "good", "bad.txt": b"good so far\n" * 5 + damage})
    with pytest.raises(DataError, match=rf"bad.txt: is not UTF-8 text, by its byte {byte};"):
        prepare([tmp_path / "good.txt", tmp_path / "bad.txt"], tmp_path / "t.h5")


def test_what_is_read_is_not_overwritten(corpus, tmp_path):
    before = (corpus / "a.py").read_text()
    (tmp_path / "link").symlink_to(corpus / "a.py")
    for out in (corpus / "a.py", tmp_path / "link"):
        with pytest.raises(DataError, match="--out is one of the files to read"):
            prepare([corpus], out)
    assert (corpus / "a.py").read_text() == before
    for _ in range(2):  # a token file in a folder is no text, and is made again
        assert prepare([corpus], corpus / "t.h5").documents == 4


def test_no_more_is_encoded_at_once_than_a_batch_and_two_parts(tmp_path, monkeypatch):
    """An encoding takes about 100 times its tokens' bytes."""
    monkeypatch.setattr("hpctrain.data.corpus.PART_BYTES", 50)
    monkeypatch.setattr("hpctrain.data.corpus.BATCH_CHARACTERS", 200)
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text("some words of a line\n" * (number * number))
    sizes, encode = [], ByteTokenizer.encode_batch

    def encode_batch(self, texts, keeps_special=False):
        sizes.append(sum(map(len, texts)))
        return encode(self, texts, keeps_special)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", encode_batch)
    monkeypatch.setattr(ByteTokenizer, "encode_next", encode_batch)
    prepare([tmp_path], tmp_path / "out.h5")
    assert 100 < max(sizes) <= 200 + 2 * 50 and sum(sizes) == 21 * sum(number * number for number in range(9))


def test_parts_are_whole_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", 10)
    (tmp_path / "t.txt").write_text("one\ntwo\nthree\nlonger than a part!\nend")
    parts = ["one\ntwo\n", "three\n", "longer than a pa", "rt!\nend"]
    assert list(module.texts_in(tmp_path / "t.txt")) == parts


def test_bpe_learns_from_the_first_documents_only(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TRAINING_BYTES", 1)
    folder = make(tmp_path / "c", {f"{i}.txt": f"{c * 2} " * 50 for i, c in enumerate("abcdef")})
    prepare([folder], tmp_path / "t.h5", tokenizer="bpe", vocab_size=300)
    first = documents(tmp_path / "t.h5")[0][0]
    with open_tokens(tmp_path / "t.h5") as source:
        lengths = {c: len(source.tokenizer.encode(c * 2)) for c in "abcdef"}
    assert lengths == {c: 1 if c == first else 2 for c in "abcdef"}


@pytest.mark.parametrize("damage", ["not text", "gone"])
def test_a_file_that_changes_while_it_is_read_is_an_error(corpus, tmp_path, monkeypatch, damage):
    shuffled = module.shuffled

    def change(result):
        done = shuffled(result)
        (corpus / "a.py").write_bytes(b"\xff") if damage == "not text" else (corpus / "a.py").unlink()
        return done

    monkeypatch.setattr(module, "shuffled", change)
    reason = "it is no longer text" if damage == "not text" else "No such file or directory"
    with pytest.raises(DataError, match=rf"a\.py: changed while it was being read: {reason}; run it again"):
        prepare([corpus], tmp_path / "t.h5")
    assert os.listdir(tmp_path) == ["corpus"]


# Tokenizers


def test_the_tokenizer_of_a_file_can_be_used_again(corpus, tmp_path):
    prepare([corpus], tmp_path / "t.h5", tokenizer="bpe", vocab_size=280)
    prepare([corpus / "a.py"], tmp_path / "v.h5", tokenizer=str(tmp_path / "t.h5"))
    with open_tokens(tmp_path / "t.h5") as one, open_tokens(tmp_path / "v.h5") as other:
        assert one.tokenizer_json == other.tokenizer_json
        (tmp_path / "tokenizer.json").write_text(one.tokenizer_json)
    prepare([corpus / "a.py"], tmp_path / "w.h5", tokenizer=str(tmp_path / "tokenizer.json"))
    assert (tmp_path / "w.h5").read_bytes() == (tmp_path / "v.h5").read_bytes()


def test_tokenizers_that_cannot_be_used(corpus, tmp_path):
    def attempt(**options):
        prepare([corpus], tmp_path / "t.h5", **options)

    with pytest.raises(DataError, match="vocabulary of 256 is too small.* set --vocab-size to at least 257"):
        attempt(tokenizer="bpe", vocab_size=256)
    with pytest.raises(DataError, match="vocabulary of 0 is too small"):
        attempt(tokenizer="bpe", vocab_size=0)
    with pytest.raises(DataError, match="--vocab-size 500 is for --tokenizer bpe; --tokenizer byte brings its own"):
        attempt(vocab_size=500)
    with pytest.raises(DataError, match="bype: no such tokenizer; give 'byte', 'bpe', the path of"):
        attempt(tokenizer="bype")
    with TokenWriter(tmp_path / "bare.h5", 9) as writer:
        writer.append(np.arange(9))
    with pytest.raises(DataError, match=r"bare\.h5: this token file does not say what tokenizer made it"):
        attempt(tokenizer=str(tmp_path / "bare.h5"))
    (tmp_path / "open.json").write_text(train_bpe(["a"], 257).to_json().replace("<|endoftext|>", "<x>"))
    with pytest.raises(DataError, match=r"open\.json: the tokenizer has no token to end a document with; add"):
        attempt(tokenizer=str(tmp_path / "open.json"))
    assert not (tmp_path / "t.h5").exists()


# The command


def invoke(*arguments) -> str:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_prints_a_summary(corpus, tmp_path):
    make(corpus, {"x.bin": b"\xff"})
    printed = invoke(corpus, "--out", tmp_path / "t.h5", "--tokenizer", "bpe", "--glob", "*.py", "--glob", "*.bin")
    lines = printed.splitlines()
    assert lines[0] == str(tmp_path / "t.h5")
    fields = dict(line.strip().split("  ", 1) for line in lines[1:])
    assert fields["documents"].strip() == "2  (skipped: 1 not text)"
    assert "(of 1,024 asked for: the text has no more pairs to merge)" in fields["vocabulary"]
    assert fields["unigram entropy"].endswith(" nats")
    assert list(fields) == ["documents", "tokens", "vocabulary", "bytes per token", "unigram entropy", "file size"]


def test_the_command_prints_one_line_of_json(corpus, tmp_path):
    printed = invoke(corpus, "--out", tmp_path / "t.h5", "--json")
    assert printed.count("\n") == 1
    fields = json.loads(printed)
    assert fields["documents"] == 4
    assert fields["path"] == str(tmp_path / "t.h5")
    assert fields["bytes_per_token"] == pytest.approx(fields["text_bytes"] / fields["tokens"], abs=1e-4)


def test_the_command_raises_errors_for_the_command_line_to_print(tmp_path):
    result = CliRunner().invoke(command, [str(tmp_path / "nowhere"), "--out", str(tmp_path / "t.h5")])
    assert isinstance(result.exception, DataError)
    help_text = CliRunner().invoke(command, ["--help"]).stdout
    assert "hpctrain prepare --stdlib --out tokens/stdlib.h5 --tokenizer bpe\n" in help_text


def test_the_data_floor_needs_neither_torch_nor_mpi_nor_at_first_tokenizers():
    code = (
        "import sys, hpctrain.jobs.prepare; assert 'numpy' not in sys.modules;"
        "import hpctrain.data.order, hpctrain.data.corpus;"
        "print([name for name in ('torch', 'mpi4py', 'tokenizers') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
