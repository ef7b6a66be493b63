"""Token files: one long row of token ids in HDF5, with what is needed to trust and understand it.

Datasets: `tokens` (contiguous, so that it can be memory-mapped; uint8, uint16 or uint32 by vocabulary size),
`documents` (int64, where each starts), `counts` (int64 per token id), `checksums` (CRC-32 of every MiB of `tokens`)
and, where documents have prompts, `answers` (int64, where the answer of each starts). Where documents have several
turns, each a prompt and an answer, `turns` (int64) has where these start, and `answers` is by turn.
Attributes: `format`, `version`, `vocab_size` and `tokenizer` (JSON), strings as bytes of fixed length. Everything but
`tokens` is small and guarded by HDF5's own checksums.

Megatron's `.bin` files with their `.idx` are read too, and nanoGPT's (little-endian uint16, nothing else). They do not
say how large their vocabulary is. It is taken to be the largest token + 1, rounded up to a multiple of 64 as nanoGPT
does (50304 for GPT-2). That takes a pass over the file when first asked for.
"""

import errno
import os
import re
import tempfile
import zlib
from array import array
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Self

import h5py
import numpy as np

from hpctrain.config.errors import DataError, describe_os_error
from hpctrain.config.paths import is_file, open_file, sync
from hpctrain.data.indexed import LOOKED_AT, index_of, open_indexed, refuse_other_kinds
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.sharding.intervals import Interval

FORMAT = "hpctrain tokens"
VERSION = 1
BLOCK_BYTES = 1 << 20
HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
HDF5_VERSIONS = ("v110", "v110")  # the first file format whose metadata is checksummed
BIN_VOCABULARY_MULTIPLE = 64
# What h5py raises for metadata that is missing, of another type, or damaged.
H5PY_ERRORS = (OSError, KeyError, ValueError, TypeError, RuntimeError, AttributeError, IndexError, OverflowError)


class TokenSource:
    """The tokens of one file, read-only; from `open_tokens`. Close it, or use it in a `with`.

    Many ranks may open the same file. The file must not be truncated while it is open: it is mapped into memory.
    """

    def __init__(
        self,
        path: Path,
        tokens: np.ndarray,
        documents: np.ndarray,
        vocab_size: int | None = None,
        tokenizer_json: str | None = None,
        counts: np.ndarray | None = None,
        checksums: np.ndarray | None = None,
        answers: np.ndarray | None = None,
        turns: np.ndarray | None = None,
    ):
        self.path = path
        self.num_tokens = len(tokens)
        self.documents = documents
        """int64, ascending: where each document starts; [0] where the file does not say."""
        self.answers = answers
        """int64: the position in each turn where the answer starts. Only answers are learnt; None: everything is."""
        self.turns = documents if turns is None else turns
        """int64, ascending: where each turn starts. A turn is a prompt and its answer, or a whole document."""
        self.declares_vocabulary = vocab_size is not None
        self.tokenizer_json = tokenizer_json
        self._tokens: np.ndarray | None = tokens
        self._checksums = checksums
        self._block_tokens = BLOCK_BYTES // tokens.dtype.itemsize
        self.num_blocks = -(-self.num_tokens // self._block_tokens)
        self._verified = np.full(self.num_blocks, checksums is None)
        if vocab_size is not None:
            self.vocab_size = vocab_size
        if counts is not None:
            self.counts = counts

    @property
    def identity(self) -> str:
        """Identifies the tokens of a file: their number, and a CRC of the checksums (of a sample for `.bin`)."""
        sample = self._fetch(step=max(1, self.num_tokens // 65536)) if self._checksums is None else self._checksums
        identity = f"{self.num_tokens} tokens {zlib.crc32(sample.tobytes()):08x}"
        if self.answers is None:
            return identity
        identity += f" answers {zlib.crc32(self.answers.tobytes()):08x}"
        return identity if self.turns is self.documents else f"{identity} turns {zlib.crc32(self.turns.tobytes()):08x}"

    @cached_property
    def vocab_size(self) -> int:
        """Number of token ids; every token is smaller."""
        return -(-(self.largest_token + 1) // BIN_VOCABULARY_MULTIPLE) * BIN_VOCABULARY_MULTIPLE

    @cached_property
    def largest_token(self) -> int:
        """The largest token that occurs. Raises DataError where one is negative."""
        if self.declares_vocabulary:
            return int(np.flatnonzero(self.counts)[-1])
        signed = self._fetch(0, 1).dtype.kind == "i"
        if signed and (least := min(int(self._block(i).min()) for i in range(self.num_blocks))) < 0:
            raise DataError(f"{self.path}: has a token {least}, and ids are 0 or more; write the file again")
        return max(int(self._block(i).max()) for i in range(self.num_blocks))

    @property
    def least_vocabulary(self) -> int:
        """The smallest vocabulary of a model for these tokens: the tokenizer's, or in a `.bin` the largest token +
        1."""
        return self.vocab_size if self.declares_vocabulary else self.largest_token + 1

    @cached_property
    def counts(self) -> np.ndarray:
        """The number of times that each token id occurs, int64 [vocab_size]; takes a pass over a `.bin` file."""
        blocks = (np.bincount(self._block(i), minlength=self.vocab_size) for i in range(self.num_blocks))
        return np.sum(list(blocks), axis=0)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that made the tokens; None: the file does not say."""
        return Tokenizer.from_json(self.tokenizer_json, str(self.path)) if self.tokenizer_json else None

    def unigram_entropy(self) -> float:
        """Entropy of the token frequencies, in nats: the loss of the best model that ignores all context."""
        shares = self.counts[self.counts > 0] / self.num_tokens
        return float(-(shares * np.log(shares)).sum()) + 0.0  # not -0.0, for a single token id

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens `start` to `start + count`, int64 [count]; the first touch of each MiB verifies it.

        Raises DataError for a damaged block, and for tokens that the file does not have.
        """
        if not 0 <= start <= start + count <= self.num_tokens:
            raise DataError(
                f"{self.path}: asked for tokens {start} to {start + count}, and it has {self.num_tokens};"
                " is it still the file that this run began with?"
            )
        for i in range(start // self._block_tokens, -(-(start + count) // self._block_tokens)):
            if not self._verified[i]:
                self._verify_block(i)
        return self._fetch(start, start + count).astype(np.int64)

    def verify(self, block_interval: Interval | None = None) -> int:
        """Check blocks, all by default, whether or not they were read before; return how many.

        A `.bin` file has nothing to check against: 0. Raises DataError for the first damaged block.
        """
        blocks = Interval(0, self.num_blocks).intersect(block_interval or Interval(0, self.num_blocks))
        if self._checksums is None:
            return 0
        for i in range(*blocks):
            self._verify_block(i)
        return blocks.size

    def close(self) -> None:
        """Close the file; reading afterwards raises ValueError."""
        self._tokens = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _fetch(self, start: int = 0, stop: int | None = None, step: int = 1) -> np.ndarray:
        if self._tokens is None:
            raise ValueError(f"{self.path} was closed")
        return self._tokens[start:stop:step]

    def _block(self, i: int) -> np.ndarray:
        return self._fetch(i * self._block_tokens, (i + 1) * self._block_tokens)

    def _verify_block(self, i: int) -> None:
        assert self._checksums is not None, "only files with checksums are verified"
        block = self._block(i)
        result, expected = zlib.crc32(block.data), int(self._checksums[i])
        if result != expected:
            raise DataError(
                f"{self.path}: block {i} of {self.num_blocks} (tokens from {i * self._block_tokens}) is damaged:"
                f" its CRC-32 is {result:#010x} and should be {expected:#010x};"
                " copy the file again, or prepare it again"
            )
        if block.max() >= self.vocab_size:
            at = int(np.argmax(block >= self.vocab_size))
            raise DataError(
                f"{self.path}: token {i * self._block_tokens + at} is {block[at]}, and the vocabulary ends at"
                f" {self.vocab_size - 1}; prepare the file again"
            )
        self._verified[i] = True


def open_tokens(path: Path | str) -> TokenSource:
    """Open a token file of `hpctrain prepare`, Megatron's `.bin` and `.idx`, or nanoGPT's `.bin`.

    Raises DataError if it is missing, cut short, damaged, or something else, saying which and what to do.
    """
    path = Path(path)
    try:
        with open_file(path) as file:
            head = file.read(len(HDF5_SIGNATURE))
            size = os.fstat(file.fileno()).st_size
            begins_with_hole = size > 0 and _begins_with_hole(file.fileno())
    except FileNotFoundError:
        if is_file(binary := path.with_name(f"{path.name}.bin")):
            raise DataError(f"{path}: no such token file, but there is {binary}: name that") from None
        raise DataError(f"{path}: no such token file; make it with: hpctrain prepare PATH… --out {path}") from None
    except IsADirectoryError:
        raise DataError(
            f"{path}: is a folder; make a token file of the texts in it:"
            f" hpctrain prepare {path} --out {path.resolve().name}.h5"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {describe_os_error(error)}; check its path and permissions") from None
    if head == HDF5_SIGNATURE:
        return _open_hdf5(path, size)
    if begins_with_hole:
        raise DataError(f"{path}: has {size:,} bytes, of which the first were never written; copy it again")
    if path.suffix == ".bin":
        return _open_bin(path, size)
    if path.suffix == ".idx":
        raise DataError(f"{path}: is the index of tokens; name {path.with_suffix('.bin')}, and it is read too")
    if HDF5_SIGNATURE.startswith(head):  # an empty file, too
        raise DataError(f"{path}: is cut short: it has {size} bytes; copy it again, or prepare it again")
    raise DataError(
        f"{path}: is not a token file: its {size} bytes start with {head!r}, not as HDF5 does (nor is it a .bin);"
        f" if it is text, make a token file of it: hpctrain prepare {path} --out {path.with_suffix('.h5')}"
    )


def _begins_with_hole(file: int) -> bool:
    """Say whether the disk has nothing for the beginning of a file, which then reads as zeros without an end."""
    try:
        return os.lseek(file, 0, os.SEEK_DATA) > 0
    except OSError as error:  # there is no data at all; other errors are of file systems that do not know
        return error.errno == errno.ENXIO


def _open_bin(path: Path, size: int) -> TokenSource:
    if index := index_of(path):
        return TokenSource(path, *open_indexed(path, index, size))
    with open_file(path) as file:
        refuse_other_kinds(path, file.read(4 * LOOKED_AT), size)
    return TokenSource(path, np.memmap(path, "<u2", mode="r").view(np.ndarray), np.zeros(1, np.int64))


def _open_hdf5(path: Path, size: int) -> TokenSource:
    try:
        # Locks fail on some parallel file systems; readers need none.
        with h5py.File(path, "r", locking=False) as file:
            return _read_hdf5(path, file)
    except H5PY_ERRORS as error:
        cut = re.search(r"stored_eof = (\d+)", str(error))
        damage = f"is damaged ({size} bytes): {error.args[0] if error.args else error}"
        what = f"is cut short: it has {size} of {cut[1]} bytes" if cut else damage
        raise DataError(f"{path}: {what}; copy it again, or prepare it again") from None


def _read_hdf5(path: Path, file: h5py.File) -> TokenSource:
    attributes: dict[str, Any] = dict(file.attrs)
    if not isinstance(name := attributes.get("format"), bytes) or name.decode() != FORMAT:
        names = ", ".join(sorted(file)[:5]) or "nothing"
        raise DataError(
            f"{path}: is HDF5, but not a token file: no attribute format = '{FORMAT}' (it holds {names});"
            " make a token file with: hpctrain prepare PATH… --out OTHER.h5"
        )
    version = int(attributes["version"])
    if version != VERSION:
        raise DataError(
            f"{path}: is a token file of version {version}, and this hpctrain reads version {VERSION};"
            " prepare it again with this one"
        )
    tokens, *others = (_dataset(file, name) for name in ("tokens", "documents", "counts", "checksums"))
    documents, counts, checksums = map(np.asarray, others)
    answers, turns = (np.asarray(_dataset(file, name)) if name in file else None for name in ("answers", "turns"))
    vocab_size, named = int(attributes["vocab_size"]), attributes.get("tokenizer")
    tokenizer = named.decode() if isinstance(named, bytes) else None
    offset = tokens.id.get_offset()
    consistent = (
        tokens.ndim == 1
        and tokens.dtype == _dtype(vocab_size)
        and len(tokens) > 0
        and len(checksums) == -(-tokens.nbytes // BLOCK_BYTES)
        and len(counts) == vocab_size
        and counts.sum() == len(tokens)
        and _ascend_from_zero(documents, len(tokens))
        and (turns is None or (_ascend_from_zero(turns, len(tokens)) and np.isin(documents, turns).all()))
        and (answers is None or _are_within(answers, documents if turns is None else turns, len(tokens)))
    )
    if not consistent:
        raise ValueError("its parts contradict each other")
    if offset is None:
        raise ValueError("its tokens are in chunks, which somebody else has made")
    mapped = np.memmap(path, tokens.dtype, mode="r", offset=offset, shape=tokens.shape).view(np.ndarray)
    return TokenSource(path, mapped, documents, vocab_size, tokenizer, counts, checksums, answers, turns)


def _ascend_from_zero(starts: np.ndarray, num_tokens: int) -> bool:
    return bool(starts[0] == 0 and starts[-1] < num_tokens and (np.diff(starts) > 0).all())


def _are_within(answers: np.ndarray, turns: np.ndarray, num_tokens: int) -> bool:
    ends = np.append(turns[1:], num_tokens)
    return answers.shape == turns.shape and bool(((answers >= turns) & (answers <= ends)).all())


def _dataset(file: h5py.File, name: str) -> h5py.Dataset:
    part = file[name]
    if not isinstance(part, h5py.Dataset):
        raise ValueError(f"{name} is no dataset")
    return part


def _dtype(vocab_size: int) -> np.dtype:
    """Return the smallest little-endian dtype that holds every token."""
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


class TokenWriter:
    """Writes a token file as the tokens come; use it in a `with`.

    Nothing appears under `path` until the file is whole and on the disk; if anything fails, what was there before
    stays. The tokens go to a nameless temporary file in its folder first, since a contiguous dataset needs to know its
    size: the disk must briefly hold them twice. Raises DataError if the file cannot be written.
    """

    def __init__(self, path: Path | str, vocab_size: int, tokenizer: Tokenizer | None = None):
        self.path = Path(path)
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.num_tokens = 0
        self._dtype = _dtype(vocab_size)
        self._documents, self._turns, self._answers = array("q"), array("q"), array("q")
        self._has_answers = False
        self._counts = np.zeros(vocab_size, np.int64)
        self._spool: BinaryIO

    @property
    def partial(self) -> Path:
        """The temporary path of the file while it is incomplete."""
        return self.path.with_name(self.path.name + ".partial")

    def __enter__(self) -> Self:
        try:
            if self.path.is_dir():
                raise IsADirectoryError(None, "is a folder")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._spool = tempfile.TemporaryFile(dir=self.path.parent)
        except OSError as error:
            self._refuse(error)
        return self

    def begin_document(self) -> None:
        """Say that the next token starts a document."""
        if not self._documents or self._documents[-1] != self.num_tokens:
            self._documents.append(self.num_tokens)
            self._begin_turn()

    def _begin_turn(self) -> None:
        self._turns.append(self.num_tokens)
        self._answers.append(self.num_tokens)

    def append(self, ids: np.ndarray, learnt: bool = True) -> None:
        """Add token ids, integers [tokens], which count in the loss or not. A prompt after an answer begins a new turn.

        Raises DataError for an id that is not in the vocabulary.
        """
        self._has_answers |= not learnt
        if len(ids) == 0:
            return
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise DataError(
                f"{self.path}: token {ids.min() if ids.min() < 0 else ids.max()} is not in the vocabulary of"
                f" {self.vocab_size}; is it another tokenizer's?"
            )
        if not self._documents:
            self.begin_document()
        if not learnt and self._answers[-1] < self.num_tokens:
            self._begin_turn()
        self._counts += np.bincount(ids, minlength=self.vocab_size)
        try:
            self._spool.write(ids.astype(self._dtype).tobytes())
        except OSError as error:
            self._refuse(error)
        self.num_tokens += len(ids)
        if not learnt:
            self._answers[-1] = self.num_tokens

    def __exit__(self, kind: type | None, *exception: object) -> None:
        with self._spool:
            if kind is not None:
                return
            if self.num_tokens == 0:
                raise DataError(f"{self.path}: there are no tokens to write; give texts that are not empty")
            try:
                self._assemble()
                sync(self.partial)
                os.replace(self.partial, self.path)
                sync(self.path.parent)
            except (OSError, RuntimeError) as error:  # RuntimeError: HDF5 fails to close a file that it cannot write
                self._refuse(error)
            finally:
                self.partial.unlink(missing_ok=True)

    def _assemble(self) -> None:
        """Write the whole HDF5 file under its partial name, from the spooled tokens."""
        self._spool.seek(0)
        checksums = array("I")
        if self._documents[-1] == self.num_tokens:
            for starts in (self._documents, self._turns, self._answers):
                starts.pop()  # begun, and left empty
        with h5py.File(self.partial, "w", libver=HDF5_VERSIONS, locking=False) as file:
            # Bytes, not str: HDF5 keeps strings of variable length where it has no checksums, and may loop for ever on
            # a flipped bit there.
            file.attrs.update({"format": np.bytes_(FORMAT), "version": VERSION, "vocab_size": self.vocab_size})
            if self.tokenizer is not None:
                file.attrs["tokenizer"] = np.bytes_(self.tokenizer.to_json().encode())
            tokens = file.create_dataset("tokens", (self.num_tokens,), self._dtype, fill_time="never")
            at = 0
            while data := self._spool.read(BLOCK_BYTES):
                block = np.frombuffer(data, self._dtype)
                tokens[at : at + len(block)] = block
                checksums.append(zlib.crc32(data))
                at += len(block)
            parts = {"documents": self._documents, "counts": self._counts, "checksums": checksums}
            if self._has_answers:
                parts["answers"] = self._answers
                if len(self._turns) > len(self._documents):
                    parts["turns"] = self._turns
            for name, values in parts.items():
                file.create_dataset(name, data=np.asarray(values), fletcher32=True)

    def _refuse(self, error: Exception) -> NoReturn:
        reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
        raise DataError(f"{self.path}: cannot be written: {reason}; free some space there, or choose another place")
