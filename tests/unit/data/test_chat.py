"""Chats and special tokens: token for token what the transformers library gives, for each shape of tokenizers.

The tokenizers are made here, from made-up words: byte-level BPE as GPT-2's, one with added tokens and a template as
Qwen's, one with a post-processor as Llama 3's, one that puts a blank before each text as Llama 2's, and WordPiece.
"""

import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from hpctrain.config.errors import DataError
from hpctrain.data.corpus import prepare
from hpctrain.data.order import Sequences
from hpctrain.data.records import Fields
from hpctrain.data.tokens import open_tokens
from hpctrain.sharding.intervals import Interval

transformers = pytest.importorskip("transformers")
rng = random.Random(1)
WORDS = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 7))) for _ in range(200)]
CORPUS = [" ".join(rng.choices(WORDS, k=100)) for _ in range(60)]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|end_of_text|>{% endgeneration %}"
    "{% else %}[{{ message.role }}] {{ message.content }} {% endif %}{% endfor %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def train(library: tokenizers.Tokenizer, special: list[str], **options) -> tokenizers.Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False, **options)
    library.train_from_iterator(CORPUS, trainer)
    return library


def byte_level(special: list[str]) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return train(library, special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def like_gpt2() -> tuple:
    return byte_level(["<|endoftext|>"]), None, {"eos_token": "<|endoftext|>"}


def like_qwen() -> tuple:
    library = byte_level(["<|endoftext|>"])
    library.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return library, CHATML, {"eos_token": "<|im_end|>"}


def like_llama3() -> tuple:
    library = byte_level(["<|begin_of_text|>", "<|end_of_text|>"])
    one = library.token_to_id("<|begin_of_text|>")
    library.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A $B", special_tokens=[("<|begin_of_text|>", one)]
    )
    return library, MARKED, {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}


def like_llama2() -> tuple:
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    train(library, ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))])
    tree = json.loads(library.to_str())
    tree["added_tokens"] = tree["added_tokens"][:3]
    library = tokenizers.Tokenizer.from_str(json.dumps(tree))
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    return library, LLAMA2, {"bos_token": "<s>", "eos_token": "</s>"}


SHAPES = {"gpt2": like_gpt2, "qwen": like_qwen, "llama3": like_llama3, "llama2": like_llama2}
CHATS = [
    [("user", f"{WORDS[0]} ?"), ("assistant", f"{WORDS[1]} {WORDS[2]}.")],
    [("user", "one"), ("assistant", WORDS[3]), ("user", "two  lines\nhere"), ("assistant", f"{WORDS[4]}\n x")],
    [("user", "x"), ("assistant", "yes"), ("user", "and not answered")],
    [("assistant", f"{WORDS[7]}, may I"), ("user", "z"), ("assistant", WORDS[8])],
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The folder of each tokenizer, as the library saves it."""
    result = {}
    for name, make in SHAPES.items():
        library, template, special = make()
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library, **special)
        theirs.chat_template = template
        result[name] = tmp_path_factory.mktemp(name)
        theirs.save_pretrained(result[name])
        library.save(str(result[name] / "tokenizer.json"))
    return result


def load(folder: Path):
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def documents_of(path: Path) -> list[list[int]]:
    with open_tokens(path) as source:
        bounds = [*source.documents.tolist(), source.num_tokens]
        return [source.read(start, stop - start).tolist() for start, stop in pairwise(bounds)]


def learnt_of(path: Path) -> np.ndarray:
    """Return for each token but the first whether the loss is of it."""
    with open_tokens(path) as source:
        everything = Sequences(source, Interval(0, source.num_tokens), source.num_tokens - 1, shuffle=False)
        assert everything.count_targets(np.array([0])) == everything.loss_mask(np.array([0])).sum()
        return everything.loss_mask(np.array([0]))[0]


def write_chats(path: Path, form: str) -> None:
    keys = {"messages": ("role", "content"), "conversations": ("from", "value")}[form]
    names = {"user": "human", "assistant": "gpt"} if form == "conversations" else {}
    records = [
        {form: [dict(zip(keys, (names.get(role, role), text), strict=True)) for role, text in chat]} for chat in CHATS
    ]
    if path.suffix == ".json":
        path.write_text(json.dumps(records, indent=1))
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize(("file", "form"), [("a.jsonl", "messages"), ("a.json", "conversations")])
@pytest.mark.parametrize("name", ["qwen", "llama3", "llama2"])
def test_chats_are_those_of_the_library_and_the_assistant_alone_is_learnt(folders, tmp_path, name, file, form):
    write_chats(tmp_path / file, form)
    prepare([tmp_path / file], tmp_path / "chat.h5", tokenizer=str(folders[name]))
    theirs = load(folders[name])
    expected = []
    for chat in CHATS:
        messages = [{"role": role, "content": text} for role, text in chat]
        expected.append(list(theirs.apply_chat_template(messages, tokenize=True, return_dict=False)))
    separator = open_tokens(tmp_path / "chat.h5").tokenizer.separator
    made = documents_of(tmp_path / "chat.h5")
    stripped = [ids[:-1] if ids not in expected and ids[-1] == separator else ids for ids in made]
    assert sorted(stripped) == sorted(expected)

    learnt = [False, *learnt_of(tmp_path / "chat.h5").tolist()]
    for ids, whole in zip(stripped, made, strict=True):
        own, learnt = learnt[: len(whole)], learnt[len(whole) :]
        chat = CHATS[expected.index(ids)]
        answers = [text for role, text in chat if role == "assistant"]
        runs = "".join("1" if is_learnt else "0" for is_learnt in own).split("0")
        assert len([run for run in runs if run]) == len(answers)
        said = theirs.decode([id for id, is_learnt in zip(whole, own, strict=True) if is_learnt])
        assert said.replace(" ", "") == "".join(text + END[name] for text in answers).replace(" ", "")
        if name == "llama3":  # its template marks them, so the library says the same
            messages = [{"role": role, "content": text} for role, text in chat]
            mask = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            assert [int(each) for each in own[: len(ids)]] == list(mask["assistant_masks"])


END = {"qwen": "<|im_end|>", "llama3": "<|end_of_text|>", "llama2": "</s>"}


@pytest.mark.parametrize("name", SHAPES)
def test_plain_text_has_the_tokens_of_the_library(folders, tmp_path, name):
    """Also the begin and end tokens of the post-processor, once a document."""
    texts = [f"{WORDS[i]} and  {WORDS[i + 1]}\n\tend ü🙂" for i in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([tmp_path / "a.jsonl"], tmp_path / "a.h5", tokenizer=str(folders[name]))
    separator = open_tokens(tmp_path / "a.h5").tokenizer.separator
    made = [ids[:-1] if ids[-1] == separator else ids for ids in documents_of(tmp_path / "a.h5")]
    assert sorted(made) == sorted(load(folders[name]).encode(text) for text in texts)


@pytest.mark.parametrize("name", SHAPES)
def test_prompt_and_answer_are_together_what_was_written(folders, tmp_path, name):
    pairs = [("abc: ", "def"), ("x", "y"), ("a\n", " b"), (f"{WORDS[5]} ", WORDS[6])]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in pairs))
    prepare([tmp_path / "a.jsonl"], tmp_path / "a.h5", tokenizer=str(folders[name]), fields=Fields("a", "q"))
    theirs, separator = load(folders[name]), open_tokens(tmp_path / "a.h5").tokenizer.separator
    special = {*theirs.all_special_ids, separator}
    decoded = [theirs.decode([id for id in ids if id not in special]) for ids in documents_of(tmp_path / "a.h5")]
    assert sorted(decoded) == sorted(q + a for q, a in pairs)


def test_a_long_text_has_no_blanks_between_its_parts(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("hpctrain.data.corpus.PART_BYTES", 64)
    text = "\n".join(WORDS)
    (tmp_path / "a.txt").write_text(text)
    prepare([tmp_path / "a.txt"], tmp_path / "a.h5", tokenizer=str(folders["llama2"]))
    (ids,) = documents_of(tmp_path / "a.h5")
    assert load(folders["llama2"]).decode(ids[1:]) == text and ids[0] == load(folders["llama2"]).bos_token_id


def test_special_tokens_of_plain_text_are_counted_and_kept_where_asked(folders, tmp_path):
    text = "<|im_start|>user\nabc<|im_end|>"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    theirs = load(folders["qwen"])
    for keeps in (False, True):
        made = prepare([tmp_path / "a.jsonl"], tmp_path / "a.h5", tokenizer=str(folders["qwen"]), keeps_special=keeps)
        assert made.special_tokens == 2
        (ids,) = documents_of(tmp_path / "a.h5")
        assert (ids == theirs.encode(text)) == keeps and theirs.decode(ids) == text


def refuse(folder: Path, record: dict, tokenizer: Path | str, said: str, **options) -> None:
    (folder / "a.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError, match=said):
        prepare([folder / "a.jsonl"], folder / "a.h5", tokenizer=str(tokenizer), **options)
    assert [path.name for path in folder.iterdir()] == ["a.jsonl"]


def test_what_is_no_chat_or_has_no_template_is_refused(folders, tmp_path):
    chat = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    refuse(tmp_path, chat, folders["gpt2"], "has chats, and no chat template is known: give --tokenizer FOLDER")
    refuse(tmp_path, chat, "byte", "no chat template is known")
    refuse(tmp_path, {"messages": [3]}, folders["qwen"], "message 1 is 3, and no table with role and content")
    refuse(tmp_path, {"messages": [{"text": "x"}]}, folders["qwen"], "message 1 has neither role nor from and value")
    system = {"messages": [{"role": "system", "content": "x"}, *chat["messages"]]}
    refuse(tmp_path, system, folders["llama2"], "cannot write this chat: no system")
    changing = tmp_path.with_name(f"{tmp_path.name}-changing")
    library, _, special = like_qwen()
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library, **special)
    theirs.chat_template = "{{ messages | length }}" + CHATML
    theirs.save_pretrained(changing)
    refuse(tmp_path, {"messages": [*chat["messages"], *chat["messages"]]}, changing, "writes message 2 in another way")


def test_tools_are_read_as_a_list_or_as_its_text(folders, tmp_path):
    tools = [{"type": "function", "function": {"name": WORDS[0], "parameters": {"type": "object", "properties": {}}}}]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    library, template, special = like_qwen()
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library, **special)
    theirs.chat_template = (
        "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}" + template
    )
    theirs.save_pretrained(tmp_path / "folder")
    expected = theirs.apply_chat_template(messages, tools=tools, return_dict=False)
    for number, written in enumerate((tools, json.dumps(tools))):
        (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages, "tools": written}) + "\n")
        prepare([tmp_path / "a.jsonl"], tmp_path / f"{number}.h5", tokenizer=str(tmp_path / "folder"))
        (ids,) = documents_of(tmp_path / f"{number}.h5")
        assert ids[: len(expected)] == expected
    said = {"{": "tools is text and no JSON: {", '{"a": 1}': "tools is {'a': 1} and no list"}
    for text, what in said.items():
        (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages, "tools": text}) + "\n")
        with pytest.raises(DataError, match=what):
            prepare([tmp_path / "a.jsonl"], tmp_path / "no.h5", tokenizer=str(tmp_path / "folder"))


def test_wordpiece_is_refused(tmp_path):
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    library.train_from_iterator(CORPUS, trainer)
    folder = tmp_path.with_name(f"{tmp_path.name}-wordpiece")
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    refuse(tmp_path, {"text": "abc"}, folder, "is a WordPiece tokenizer, as BERT's: it drops blanks")
    refuse(tmp_path, {"text": "abc"}, tmp_path, "has no tokenizer.json; write one by AutoTokenizer")
