import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config.errors import DataError
from hpctrain.data.tokenizer import END_OF_TEXT, ByteTokenizer, LibraryTokenizer, Tokenizer, train_bpe

CORPUS = ["def add(first, second):\n    return first + second\n" * 20, "Grüße aus Köln, 你好 🙂\n" * 20]
BPE = train_bpe(CORPUS, 300)
BYTE = ByteTokenizer()
EVERY = pytest.mark.parametrize("tokenizer", [BYTE, BPE], ids=["byte", "bpe"])


def edited(**changes) -> str:
    return json.dumps(json.loads(BPE.to_json()) | changes)


@EVERY
@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert ids.ndim == 1
    assert ((ids >= 0) & (ids < tokenizer.vocab_size)).all()
    assert tokenizer.decode(ids) == text


@EVERY
def test_a_batch_is_its_texts_one_by_one(tokenizer):
    texts = [*CORPUS, "", " ", f"not an end: {END_OF_TEXT}"]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert np.array_equal(ids, tokenizer.encode(text))


@EVERY
def test_json_round_trips(tokenizer):
    again = Tokenizer.from_json(tokenizer.to_json())
    assert type(again) is type(tokenizer)
    assert again.to_json() == tokenizer.to_json()
    assert (again.vocab_size, again.separator) == (tokenizer.vocab_size, tokenizer.separator)
    assert np.array_equal(again.encode(CORPUS[1]), tokenizer.encode(CORPUS[1]))


def test_half_a_character_is_replaced():
    assert BYTE.decode(BYTE.encode("ok 🙂")[:-1]) == "ok \ufffd"
    assert BPE.decode(BPE.encode("é")[:1]) == "\ufffd"


@EVERY
def test_a_lone_surrogate_is_replaced(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\udc80b")) == "a?b"


@EVERY
@pytest.mark.parametrize("bad", [-1, 300, 2**40])
def test_ids_outside_the_vocabulary_are_refused(tokenizer, bad):
    with pytest.raises(DataError, match=f"token {bad} is not in the tokenizer's vocabulary of {tokenizer.vocab_size}"):
        tokenizer.decode([65, bad])


def test_bytes_are_bytes():
    assert BYTE.encode("aß").tolist() == [97, 0xC3, 0x9F]
    assert BYTE.separator == 0
    assert BYTE.vocab_size == 256


def test_bpe_merges_and_has_the_size_that_was_asked():
    assert BPE.vocab_size == 300
    assert len(BPE.encode(CORPUS[0])) < len(CORPUS[0]) / 3
    assert BPE.decode([BPE.separator]) == END_OF_TEXT


def test_the_written_name_of_the_separator_does_not_end_a_document():
    ids = BPE.encode(f"a{END_OF_TEXT}b")
    assert BPE.separator not in ids
    assert BPE.decode(ids) == f"a{END_OF_TEXT}b"


def test_bpe_of_a_tiny_text_is_smaller_than_asked():
    assert 257 <= train_bpe(["ab"], 5000).vocab_size < 300


@pytest.mark.parametrize("size", [-1, 0, 256])
def test_a_vocabulary_too_small_for_bytes_is_refused(size):
    with pytest.raises(DataError, match=f"vocabulary of {size} is too small.*set --vocab-size to at least 257"):
        train_bpe(CORPUS, size)


def test_bpe_does_not_depend_on_cores_or_process():
    code = (
        "import sys, json; from hpctrain.data.tokenizer import train_bpe;"
        "sys.stdout.write(train_bpe(json.loads(sys.stdin.read()), 400).to_json())"
    )
    texts = json.dumps([open(json.decoder.__file__).read(), open(subprocess.__file__).read()])
    made = [
        subprocess.run([sys.executable, "-c", code], input=texts, env=env, capture_output=True, text=True, check=True)
        for env in ({"RAYON_NUM_THREADS": "1"}, {"RAYON_NUM_THREADS": "4"}, {"TOKENIZERS_PARALLELISM": "false"})
    ]
    assert len({run.stdout for run in made}) == 1
    assert len(made[0].stdout) > 1000


def test_truncation_and_padding_of_a_file_made_for_inference_are_off():
    text = edited(
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 9000},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": END_OF_TEXT,
        },
    )
    assert np.array_equal(Tokenizer.from_json(text).encode(CORPUS[0]), BPE.encode(CORPUS[0]))


def test_a_post_processor_adds_nothing():
    template = [{"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [BPE.separator], "tokens": [END_OF_TEXT]}}
    processor = {"type": "TemplateProcessing", "single": template, "pair": template, "special_tokens": special}
    processor["pair"] = [*template, {"Sequence": {"id": "B", "type_id": 1}}]
    tokenizer = Tokenizer.from_json(edited(post_processor=processor))
    assert np.array_equal(tokenizer.encode("return"), BPE.encode("return"))


def test_ids_with_holes_count_up_to_the_largest():
    tree = json.loads(BPE.to_json())
    last = max(tree["model"]["vocab"], key=tree["model"]["vocab"].get)
    tree["model"]["vocab"][last] = 999
    assert Tokenizer.from_json(json.dumps(tree)).vocab_size == 1000


@pytest.mark.parametrize("name", ["</s>", "<|end_of_text|>", "<eos>"])
def test_other_tokenizers_separators_are_detected(name):
    assert LibraryTokenizer(BPE.to_json().replace(END_OF_TEXT, name)).separator == BPE.separator
    assert LibraryTokenizer(BPE.to_json().replace(END_OF_TEXT, "<other>")).separator is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "t.json: not a tokenizer: not valid JSON"),
        (b"[1]", "t.json: JSON, but not a tokenizer: it has no 'model'; give a Hugging Face tokenizer.json"),
        (b'{"vocab_size": 3}', "it has no 'model'.*not tokenizer_config.json"),
        (b'{"model": 5}', "t.json: not a tokenizer that the tokenizers library can read: "),
        (b"\xff\xfe", "t.json: not a tokenizer: not text"),
        (None, "t.json: no such tokenizer; give 'byte', 'bpe', the path of"),
    ],
)
def test_what_is_not_a_tokenizer_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        Tokenizer.load(tmp_path / "t.json")
    with pytest.raises(DataError, match="cannot be read: is a folder and no file; give a tokenizer.json"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_json_is_loaded(tmp_path):
    (tmp_path / "tokenizer.json").write_text(BPE.to_json(), encoding="utf-8")
    assert Tokenizer.load(tmp_path / "tokenizer.json").to_json() == BPE.to_json()
