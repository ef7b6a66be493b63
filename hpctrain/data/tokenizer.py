"""Text to token ids and back: bytes as they are, or byte-level BPE (trained here, or any `tokenizer.json`).

A tokenizer travels inside the token file as JSON, so that whoever has the tokens can read them. The `tokenizers`
library is imported where it is used: ranks that only train never load it.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from hpctrain.config.bounds import MOST_WIDTH
from hpctrain.config.errors import DataError, describe_os_error
from hpctrain.config.paths import read_bytes

END_OF_TEXT = "<|endoftext|>"
MIN_BPE_VOCABULARY = 257  # 256 bytes and END_OF_TEXT
# Names for the end of a document in well-known tokenizers: GPT-2, Llama 3, Llama 2 and T5, Gemma, Qwen, BERT.
SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
ANCHOR = "\n"
"""Text put before a text that continues another one, where the tokenizer would otherwise insert a blank."""
ENCODING_PARTS = ("normalizer", "pre_tokenizer", "model")
"""The parts of a `tokenizer.json` that decide which ids a text becomes."""


class Tokenizer(ABC):
    """Turns text into token ids in `range(vocab_size)` and back.

    The text of a special token is text like any other, unless one asks for it: `<|endoftext|>` written in a document
    does not end it.
    Characters that UTF-8 cannot hold (lone surrogates) become `?`.
    """

    vocab_size: int
    separator: int | None
    """The id between two documents; None: this tokenizer has none."""
    begin: tuple[int, ...] = ()
    """The ids with which its post-processor begins a text."""
    end: tuple[int, ...] = ()
    """The ids with which its post-processor ends a text."""
    is_lossy: bool = False
    """Whether blanks are lost, as in WordPiece."""
    special: re.Pattern[str] | None = None
    """Finds the special tokens that are written in a text; None: it has none."""

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int64 [tokens]."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], keeps_special: bool = False) -> list[np.ndarray]:
        """Return the ids of several texts, int64 [tokens] each; on several cores where the library can.

        With `keeps_special` the text of a special token is that token.
        """

    def encode_next(self, texts: Sequence[str], keeps_special: bool = False) -> list[np.ndarray]:
        """Return the ids of texts that follow others: without the blank that some tokenizers put before a text."""
        return self.encode_batch(texts, keeps_special)

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the ids of texts with special tokens, and of which characters each is, int64 [tokens, 2].

        Raises DataError where the tokenizer cannot say.
        """
        raise DataError("a chat needs the tokenizer of its model: --tokenizer FOLDER, which has its template too")

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, separators included; what is not UTF-8 (a character cut in two) becomes U+FFFD.

        Raises DataError for an id outside the vocabulary.
        """
        ids = np.fromiter(ids, np.int64)
        outside = (ids < 0) | (ids >= self.vocab_size)
        if outside.any():
            raise DataError(
                f"token {ids[outside][0]} is not in the tokenizer's vocabulary of {self.vocab_size};"
                " decode with the tokenizer that encoded"
            )
        return self._decode(ids)

    @abstractmethod
    def _decode(self, ids: np.ndarray) -> str: ...

    @abstractmethod
    def to_json(self) -> str:
        """Return the whole tokenizer as text, for `from_json`."""

    @abstractmethod
    def encoding_rules(self) -> object:
        """Return what decides the ids of a text; equal for tokenizers whose ids mean the same."""

    @staticmethod
    def from_json(text: str, origin: str = "tokenizer") -> "Tokenizer":
        """Read what `to_json` wrote, or the text of a Hugging Face `tokenizer.json`.

        `origin` is what an error calls it. Raises DataError if it is neither.
        """
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{origin}: not a tokenizer: not valid JSON: {error}") from None
        if isinstance(tree, dict) and tree.get("type") == "byte":
            return ByteTokenizer()
        if isinstance(tree, dict) and "model" in tree:
            return LibraryTokenizer(text, origin)
        raise DataError(
            f"{origin}: JSON, but not a tokenizer: it has no 'model'; give a Hugging Face tokenizer.json"
            " (not tokenizer_config.json, vocab.json or config.json)"
        )

    @staticmethod
    def load(path: Path) -> "Tokenizer":
        """Read a `tokenizer.json`. Raises DataError if there is none, or it is not one."""
        try:
            text = read_bytes(path).decode()
        except FileNotFoundError:
            raise DataError(
                f"{path}: no such tokenizer; give 'byte', 'bpe', the path of a Hugging Face tokenizer.json,"
                " or that of a token file whose tokenizer to use again"
            ) from None
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {describe_os_error(error)}; give a tokenizer.json") from None
        except UnicodeDecodeError:
            raise DataError(f"{path}: not a tokenizer: not text; give a Hugging Face tokenizer.json") from None
        return Tokenizer.from_json(text, str(path))


class ByteTokenizer(Tokenizer):
    """A token is a byte of UTF-8; byte 0, which no text file holds, separates documents."""

    vocab_size = 256
    separator = 0

    def encode_batch(self, texts: Sequence[str], keeps_special: bool = False) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(errors="replace"), np.uint8).astype(np.int64) for text in texts]

    def _decode(self, ids: np.ndarray) -> str:
        return ids.astype(np.uint8).tobytes().decode(errors="replace")

    def to_json(self) -> str:
        return json.dumps({"type": "byte"})

    def encoding_rules(self) -> object:
        return "bytes"


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, from the text of its `tokenizer.json`."""

    def __init__(self, text: str, origin: str = "tokenizer"):
        from tokenizers import Tokenizer as Library

        try:
            self._library = Library.from_str(text)
        except Exception as error:  # the library raises bare Exception for whatever it does not understand
            raise DataError(f"{origin}: not a tokenizer that the tokenizers library can read: {error}") from None
        self._library.no_truncation()  # files made for inference may cut or fill texts, which would lose tokens
        self._library.no_padding()
        self._library.encode_special_tokens = True
        ids = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1  # not their number: ids may have holes
        if self.vocab_size > MOST_WIDTH:
            raise DataError(
                f"{origin}: has a token with the id {self.vocab_size - 1:,}, and the largest that a model can have is"
                f" {MOST_WIDTH - 1:,}; give another tokenizer"
            )
        self.separator = next((ids[name] for name in SEPARATORS if name in ids), None)
        self.is_lossy = type(self._library.model).__name__ == "WordPiece"
        self.begin, self.end = self._added_around()
        added = self._library.get_added_tokens_decoder().values()
        contents = sorted((token.content for token in added if token.special and token.content), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, contents))) if contents else None
        self._puts_blank = [ids.tolist() for ids in self.encode_batch(["a"])] != [
            ids.tolist() for ids in self._encode_behind_anchor(["a"], False)
        ]

    def _added_around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that the post-processor puts before and behind a text."""
        bare, full = (self._library.encode("a", add_special_tokens=adds).ids for adds in (False, True))
        if not bare:
            return (), ()
        before = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), None)
        return ((), ()) if before is None else (tuple(full[:before]), tuple(full[before + len(bare) :]))

    def encode_batch(self, texts: Sequence[str], keeps_special: bool = False) -> list[np.ndarray]:
        self._library.encode_special_tokens = not keeps_special
        encodings = self._library.encode_batch_fast(_clean(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def encode_next(self, texts: Sequence[str], keeps_special: bool = False) -> list[np.ndarray]:
        return (self._encode_behind_anchor if self._puts_blank else self.encode_batch)(texts, keeps_special)

    def _encode_behind_anchor(self, texts: Sequence[str], keeps_special: bool) -> list[np.ndarray]:
        """Return the ids of texts as they are behind a line end, whose own ids are left out."""
        self._library.encode_special_tokens = not keeps_special
        texts = [ANCHOR + text for text in _clean(texts)]
        encodings = self._library.encode_batch(texts, add_special_tokens=False)
        result = []
        for encoding in encodings:
            own = [id for id, (_, stop) in zip(encoding.ids, encoding.offsets, strict=True) if stop > len(ANCHOR)]
            result.append(np.array(own, np.int64))
        return result

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        self._library.encode_special_tokens = False
        encodings = self._library.encode_batch(_clean(texts), add_special_tokens=False)
        return [(np.array(e.ids, np.int64), np.array(e.offsets, np.int64).reshape(-1, 2)) for e in encodings]

    def _decode(self, ids: np.ndarray) -> str:
        return self._library.decode(ids.tolist(), skip_special_tokens=False)

    def to_json(self) -> str:
        return self._library.to_str()

    def encoding_rules(self) -> object:
        tree = json.loads(self.to_json())
        return [tree.get(key) for key in ENCODING_PARTS], self._library.get_vocab(with_added_tokens=True)


def _clean(texts: Sequence[str]) -> list[str]:
    return [text.encode(errors="replace").decode() for text in texts]


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE as in GPT-2; the same texts give the same tokenizer on any number of cores.

    The vocabulary is smaller than asked for if the texts have no more pairs to merge. Raises DataError if
    `vocab_size` is too small for the bytes and the separator.
    """
    if vocab_size < MIN_BPE_VOCABULARY:
        raise DataError(
            f"a BPE vocabulary of {vocab_size} is too small: 256 bytes and {END_OF_TEXT} need {MIN_BPE_VOCABULARY};"
            f" set --vocab-size to at least {MIN_BPE_VOCABULARY}, or use --tokenizer byte"
        )
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return LibraryTokenizer(library.to_str())
