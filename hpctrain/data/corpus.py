"""Makes a token file of files of text, for `hpctrain prepare`."""

import codecs
import hashlib
import json
import os
import sysconfig
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from hpctrain.config.errors import DataError, describe_os_error
from hpctrain.config.paths import open_file, refused_as
from hpctrain.data.tokenizer import ByteTokenizer, Tokenizer, train_bpe
from hpctrain.data.tokens import HDF5_SIGNATURE, TokenWriter, open_tokens

JSON_LINES, PARQUET = (".jsonl", ".ndjson"), (".parquet",)
RECORD_FILES = JSON_LINES + PARQUET
MAX_LINE_BYTES = 100_000_000


class Texts(NamedTuple):
    """The texts of one record."""

    prompt: str
    """The context, which the loss leaves out; empty where a file has none."""
    text: str


class Fields(NamedTuple):
    """The names of a record's texts."""

    text: str = "text"
    prompt: str | None = None

    @property
    def names(self) -> list[str]:
        return [self.text, self.prompt] if self.prompt else [self.text]


PLAIN = Fields()
"""Texts alone, which are called `text`."""


class RecordPlace(NamedTuple):
    """The place of a record in its file."""

    group: int
    """What is read together with it; groups are shuffled, and not the records of one."""
    row: int = 0


class Records(ABC):
    """The texts of one file, one by one or each by its place. Close it, or use it in a `with`."""

    _file: Any

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[RecordPlace, Texts]]:
        """Yield the place and the texts of each record."""

    @abstractmethod
    def texts(self, place: RecordPlace) -> Texts:
        """Return the texts of a record."""

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def open_records(path: Path, fields: Fields) -> Records:
    """Open a file whose records have their texts in fields. Raises DataError, then and while it is read."""
    with refused_as(DataError, f"{path}: cannot be read"):
        return (JsonLines if path.suffix in JSON_LINES else Parquet)(path, fields)


def _texts_of(record: Any, fields: Fields, where: str) -> Texts:
    """Return the texts of a record. Raises DataError, with where it is, for one that has not all of them."""
    there, texts = record if isinstance(record, dict) else {}, {}
    for name in fields.names:
        if name not in there:
            names = ", ".join(there) if isinstance(record, dict) else type(record).__name__
            raise DataError(f"{where}: has no field '{name}' (it has: {names:.80}); name one with --field")
        if not isinstance(value := there[name], str):
            raise DataError(f"{where}: '{name}' is {value!r:.60} and no text; name another with --field")
        # JSON may name halves of characters, which no text has.
        texts[name] = value.encode(errors="replace").decode()
    return Texts(texts[fields.prompt] if fields.prompt else "", texts[fields.text])


class JsonLines(Records):
    """One JSON object a line. A line is a group, whose number is where it begins, in bytes."""

    def __init__(self, path: Path, fields: Fields):
        self._path, self._fields = path, fields
        self._file = open_file(path)

    def __iter__(self) -> Iterator[tuple[RecordPlace, Texts]]:
        at = 0
        for number, line in enumerate(iter(lambda: self._file.readline(MAX_LINE_BYTES), b""), 1):
            if len(line) == MAX_LINE_BYTES:
                raise DataError(f"{self._path}, line {number}: has {MAX_LINE_BYTES:,} bytes or more; divide it")
            if line.strip():
                yield RecordPlace(at), self._parse(line, f"{self._path}, line {number}")
            at += len(line)

    def texts(self, place: RecordPlace) -> Texts:
        self._file.seek(place.group)
        return self._parse(self._file.readline(), f"{self._path}, byte {place.group}")

    def _parse(self, line: bytes, where: str) -> Texts:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not valid JSON: {error}") from None
        return _texts_of(record, self._fields, where)


class Parquet(Records):
    """A record a row. Row groups are read whole, so their rows stay together."""

    def __init__(self, path: Path, fields: Fields):
        try:
            from pyarrow import ArrowException
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise DataError(f"{path}: Parquet needs pyarrow; pip install 'hpctrain[parquet]'") from None
        self._path, self._error = path, ArrowException
        self._fields = fields
        self._group, self._texts = -1, []
        try:
            self._file = ParquetFile(path)
        except ArrowException as error:
            raise DataError(f"{path}: is damaged or no Parquet file: {error}") from None
        names = self._file.schema_arrow.names
        if lacking := [name for name in fields.names if name not in names]:
            raise DataError(f"{path}: has no column '{lacking[0]}' (it has: {', '.join(names)}); name one with --field")

    def __iter__(self) -> Iterator[tuple[RecordPlace, Texts]]:
        for group in range(self._file.num_row_groups):
            for row, texts in enumerate(self._read(group)):
                yield RecordPlace(group, row), texts

    def texts(self, place: RecordPlace) -> Texts:
        return self._read(place.group)[place.row]

    def _read(self, group: int) -> list[Texts]:
        if group != self._group:
            try:
                rows = self._file.read_row_group(group, columns=self._fields.names).to_pylist()
            except (self._error, OSError) as error:
                raise DataError(f"{self._path}: row group {group} is damaged: {error}") from None
            where = f"{self._path}, row group {group}"
            self._group, self._texts = group, [_texts_of(row, self._fields, where) for row in rows]
        return self._texts


PART_BYTES = 1 << 18  # large files are encoded in parts that end with a line
BATCH_CHARACTERS = 1 << 22  # at once, for all cores; an encoding takes about 100 times its tokens' bytes
TRAINING_BYTES = 1 << 28  # of text that BPE learns from: enough for its statistics, and bounds its time
DEFAULT_BPE_VOCABULARY = 1024
NOT_STANDARD = frozenset({"site-packages", "dist-packages"})  # others' packages, within the standard library's folder


@dataclass(frozen=True)
class Summary:
    """The figures of a token file that was prepared."""

    path: Path
    documents: int
    tokens: int
    vocab_size: int
    wanted_vocab_size: int
    """More than `vocab_size` if BPE has no more pairs to merge."""
    text_bytes: int
    unigram_entropy_nats: float
    file_bytes: int
    skipped: dict[str, int]
    """Number of files left out, by reason: "not text" (not UTF-8, or has zero bytes), "empty", "unreadable"."""

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / self.tokens


@dataclass(frozen=True)
class Document:
    path: Path
    name: str
    """Path relative to the folder that was searched: the same on another machine."""
    num_bytes: int
    place: RecordPlace | None = None
    """Where it is in a file of records; None where it is a file of text."""


class NotTextError(Exception):
    """A file is not UTF-8 text, from the byte that it names."""


def prepare(
    paths: Sequence[Path],
    out: Path,
    *,
    tokenizer: str = "byte",
    vocab_size: int | None = None,
    globs: Sequence[str] = (),
    stdlib: bool = False,
    fields: Fields = PLAIN,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Write the token file `out` from text files and folders of them, each file a document.

    In JSON Lines and Parquet files each record is one, whose texts are in `fields`: a prompt, which is not learnt, and
    what follows.

    Documents are shuffled by a hash of their relative path, so every machine gets the same file. The end of the file,
    which becomes validation, is then a fair sample. `tokenizer` is `byte`, `bpe` (trained here, to
    `vocab_size`), a `tokenizer.json`, or a token file whose tokenizer to use again. `on_progress` is called with
    (bytes done, bytes in all). Raises DataError if there is nothing to prepare, or it cannot be written.
    """
    if vocab_size is not None and tokenizer != "bpe":
        raise DataError(f"--vocab-size {vocab_size} is for --tokenizer bpe; --tokenizer {tokenizer} brings its own")
    files, skipped = list_files(paths, globs, stdlib)
    documents = shuffled(_documents(files, skipped, fields, frozenset(map(Path, paths))))
    _refuse_to_overwrite(Path(out), {document.path for document in documents} | {Path(tokenizer)})
    if not documents:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        raise DataError(f"nothing to prepare: no text in the {len(files)} files seen ({reasons}); give UTF-8 text")
    if tokenizer == "bpe":
        vocab_size = DEFAULT_BPE_VOCABULARY if vocab_size is None else vocab_size
        encoder = train_bpe(_sample(documents, fields), vocab_size)
    else:
        encoder = ByteTokenizer() if tokenizer == "byte" else load_tokenizer(Path(tokenizer))
    if encoder.separator is None:
        raise DataError(
            f"{tokenizer}: the tokenizer has no token to end a document with; add '<|endoftext|>' to its added_tokens"
        )
    with TokenWriter(out, encoder.vocab_size, encoder) as writer:
        _encode(documents, fields, encoder, writer, on_progress)
    with open_tokens(out) as source:
        return Summary(
            path=Path(out),
            documents=len(documents),
            tokens=source.num_tokens,
            vocab_size=source.vocab_size,
            wanted_vocab_size=vocab_size or source.vocab_size,
            text_bytes=sum(document.num_bytes for document in documents),
            unigram_entropy_nats=source.unigram_entropy(),
            file_bytes=Path(out).stat().st_size,
            skipped=dict(skipped),
        )


def _refuse_to_overwrite(out: Path, read: Iterable[Path]) -> None:
    """Raise DataError where the token file would take the place of a file that it is made from."""
    for path in read:
        with suppress(OSError, ValueError):
            if os.path.samefile(path, out):
                raise DataError(f"{out}: --out is one of the files to read, and would replace it; name another --out")


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a `tokenizer.json` or in a token file. Raises DataError if it has none."""
    try:
        with open_file(path) as file:
            is_token_file = file.read(len(HDF5_SIGNATURE)) == HDF5_SIGNATURE
    except OSError:
        is_token_file = False  # Tokenizer.load says what is wrong
    if not is_token_file:
        return Tokenizer.load(path)
    with open_tokens(path) as source:
        if source.tokenizer is None:
            raise DataError(f"{path}: this token file does not say what tokenizer made it; give a tokenizer.json")
        return source.tokenizer


def list_files(
    paths: Sequence[Path], globs: Sequence[str] = (), stdlib: bool = False
) -> tuple[list[tuple[Path, str]], Counter[str]]:
    """Return the (path, relative name) of every file asked for, each file once, and how many folders were unreadable.

    In folders, hidden files and folders (`.git`) are left out. If there are globs, so is what none of them matches
    (`*.py` by name, `docs/*.md` by the end of the path). A file given by name is taken whatever it is called.
    `stdlib` adds the sources of the running interpreter's standard library. Raises DataError for a path that does
    not exist, and if there is nothing.
    """
    result: dict[str, tuple[Path, str]] = {}
    skipped: Counter[str] = Counter()
    for path in map(Path, paths):
        if path.is_dir():
            files = _walk(path, globs, frozenset(), skipped)
        elif path.is_file():
            files = [(path, path.name)]
        elif path.exists():
            raise DataError(f"{path}: neither a file nor a folder; write what comes out of it to a file first")
        else:
            raise DataError(f"{path}: no such file or folder; check the path")
        for file, name in files:
            result.setdefault(os.path.realpath(file), (file, name))
    if stdlib:
        for file, name in _walk(Path(sysconfig.get_path("stdlib")), ("*.py",), NOT_STANDARD, skipped):
            result.setdefault(os.path.realpath(file), (file, name))
    if not result:
        where = " ".join(map(str, paths)) or "no path was given"
        matching = " matches --glob " + " ".join(f"'{glob}'" for glob in globs) if globs else " is there"
        raise DataError(f"nothing to prepare: {where}: no file{matching}; give files, folders, or --stdlib")
    return list(result.values()), skipped


def _walk(
    root: Path, globs: Sequence[str], pruned: frozenset[str], skipped: Counter[str]
) -> Iterator[tuple[Path, str]]:
    def unreadable(error: OSError) -> None:
        skipped["unreadable"] += 1

    for folder, subfolders, names in os.walk(root, onerror=unreadable):
        subfolders[:] = sorted(name for name in subfolders if name not in pruned and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            relative = path.relative_to(root)
            wanted = not globs or any(PurePath(relative).match(glob) for glob in globs)
            if wanted and not name.startswith(".") and path.is_file():  # a pipe would never end
                yield path, relative.as_posix()


def _documents(
    files: Iterable[tuple[Path, str]], skipped: Counter[str], fields: Fields, named: frozenset[Path]
) -> Iterator[Document]:
    """Yield the files that are text, and the records of others; count what is left out by reason.

    Raises DataError for a file that is no text and was `named`, not found in a folder.
    """
    for path, name in files:
        if path.suffix in RECORD_FILES:
            with open_records(path, fields) as records:
                for place, texts in records:
                    if texts.text:
                        yield Document(path, f"{name}#{place.group}", len("".join(texts).encode()), place)
                    else:
                        skipped["empty"] += 1
            continue
        try:
            num_bytes = sum(len(text.encode()) for text in texts_in(path))
        except NotTextError as error:
            if path in named:
                raise DataError(
                    f"{path}: is not UTF-8 text, by its byte {error}; convert it to UTF-8, or leave it out"
                ) from None
            skipped["not text"] += 1
        except OSError:
            skipped["unreadable"] += 1
        else:
            if num_bytes:
                yield Document(path, name, num_bytes)
            else:
                skipped["empty"] += 1


def shuffled(documents: Iterable[Document]) -> list[Document]:
    """Return the documents in the order of digests of their names."""

    def key(document: Document) -> tuple[bytes, str, str, RecordPlace]:
        name = os.fsencode(document.name)
        digest = hashlib.blake2b(name, digest_size=16).digest()
        return digest, document.name, str(document.path), document.place or RecordPlace(0)

    return sorted(documents, key=key)


def texts_in(path: Path) -> Iterator[str]:
    """Yield the text of a file in parts of whole lines, where lines are not longer than a part."""
    at, rest, is_last = 0, b"", False
    with open_file(path) as file:
        while not is_last:
            more = file.read(PART_BYTES)
            data, is_last = rest + more, len(more) < PART_BYTES
            if 0 in more:
                raise NotTextError(at + data.index(0))
            cut = len(data) if is_last else data.rfind(b"\n") + 1 or len(data)
            try:  # a character that the cut is in stays for the next part
                text, num_bytes = codecs.utf_8_decode(data[:cut], "strict", is_last)
            except UnicodeDecodeError as error:
                raise NotTextError(at + error.start) from None
            if text:
                yield text
            at, rest = at + num_bytes, data[num_bytes:]


class _Reader:
    """The texts of documents in any order; files of many records stay open, some at a time."""

    MAX_OPEN = 16

    def __init__(self, fields: Fields):
        self._fields = fields
        self._open: dict[Path, Records] = {}

    def parts(self, document: Document) -> Iterator[str]:
        """Yield the parts of a document that was text when it was checked; of a record with a prompt the prompt first.

        Raises DataError where it changed meanwhile.
        """
        path = document.path
        if document.place is not None:
            records = self._open.pop(path, None) or open_records(path, self._fields)
            if len(self._open) >= self.MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[path] = records  # the last one used is the last to be closed
            yield from records.texts(document.place)
            return
        try:
            yield from texts_in(path)
        except (NotTextError, OSError) as error:
            reason = describe_os_error(error) if isinstance(error, OSError) else "it is no longer text"
            raise DataError(f"{path}: changed while it was being read: {reason}; run it again") from None


def _sample(documents: Iterable[Document], fields: Fields) -> Iterator[str]:
    """Yield the text that BPE learns from: that of the first documents in their shuffled order."""
    num_bytes, reader = 0, _Reader(fields)
    for document in documents:
        for text in reader.parts(document):
            if num_bytes >= TRAINING_BYTES:
                return
            yield text
            num_bytes += len(text.encode())


def _encode(
    documents: Sequence[Document],
    fields: Fields,
    tokenizer: Tokenizer,
    writer: TokenWriter,
    on_progress: Callable[[int, int], None],
) -> None:
    """Write all documents, a separator between two, a batch of parts at a time."""
    total, done = sum(document.num_bytes for document in documents), 0
    for batch in _batches(documents, fields):
        encoded = tokenizer.encode_batch([part.text for part in batch])
        for part, ids in zip(batch, encoded, strict=True):
            if part.begins_document:
                if writer.num_tokens:
                    writer.append(np.array([tokenizer.separator]))
                writer.begin_document()
            if part.begins_answer:
                writer.begin_answer()
            writer.append(ids)
            done += len(part.text.encode())
        on_progress(done, total)


class DocumentPart(NamedTuple):
    """Text of a document that is encoded at once."""

    text: str
    begins_document: bool
    begins_answer: bool


def _batches(documents: Iterable[Document], fields: Fields) -> Iterator[list[DocumentPart]]:
    """Yield lists of parts that together have about BATCH_CHARACTERS."""
    batch, size, reader = [], 0, _Reader(fields)
    for document in documents:
        has_prompt = document.place is not None and fields.prompt is not None
        for number, text in enumerate(reader.parts(document)):
            batch.append(DocumentPart(text, number == 0, number == 1 and has_prompt))
            size += len(text)
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
