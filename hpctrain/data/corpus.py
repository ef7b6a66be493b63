"""Makes a token file of files of text, for `hpctrain prepare`."""

import codecs
import hashlib
import os
import sysconfig
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np

from hpctrain.config.errors import DataError, describe_os_error
from hpctrain.config.paths import is_file, is_folder, open_file
from hpctrain.data.chat import Chat, ChatTemplate, read_template
from hpctrain.data.indexed import index_of
from hpctrain.data.records import PLAIN, RECORD_FILES, Fields, RecordPlace, Records, open_records
from hpctrain.data.tokenizer import ByteTokenizer, Tokenizer, train_bpe
from hpctrain.data.tokens import HDF5_SIGNATURE, TokenSource, TokenWriter, open_tokens
from hpctrain.data.unpacked import Unpacked

TOKENIZER_FILE = "tokenizer.json"
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
    """The vocabulary size that was asked for: more than `vocab_size` if BPE had no more pairs to merge."""
    text_bytes: int
    unigram_entropy_nats: float
    file_bytes: int
    special_tokens: int
    """Number of times that the text of a special token occurs in plain text."""
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
    """The place in a file of records or of tokens; None for a file of text."""


class NotTextError(Exception):
    """The error that a file is not UTF-8 text, with the position of the first wrong byte."""


def prepare(
    paths: Sequence[Path],
    out: Path,
    *,
    tokenizer: str = "byte",
    vocab_size: int | None = None,
    globs: Sequence[str] = (),
    stdlib: bool = False,
    fields: Fields = PLAIN,
    keeps_special: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Write the token file `out` from text files and folders of them, each file a document.

    In JSON Lines and Parquet files each record is one, whose texts are in `fields`: a prompt, which is not learnt, and
    what follows; or a chat, of which the assistant's tokens are learnt. In Megatron's `.bin` each document is one. What
    is compressed by gzip or zstd is unpacked beside `out` meanwhile.

    Documents are shuffled by a hash of their relative path, so every machine gets the same file. The end of the file,
    which becomes validation, is then a fair sample. `tokenizer` is `byte`, `bpe` (trained here, to
    `vocab_size`), a `tokenizer.json` or a folder with it, or a token file whose tokenizer to use again. With
    `keeps_special` the text of a special token becomes that token. `on_progress` is called with (bytes done, bytes in
    all). Raises DataError if there is nothing to prepare, or it cannot be written.
    """
    if vocab_size is not None and tokenizer != "bpe":
        raise DataError(f"--vocab-size {vocab_size} is for --tokenizer bpe; --tokenizer {tokenizer} brings its own")
    files, skipped = list_files(paths, globs, stdlib)
    with Unpacked(Path(out).parent) as unpacked:
        files = [unpacked.replace(path, name, fields) for path, name in files]
        named = frozenset(path for path, _ in files if unpacked.original(path) in set(map(Path, paths)))
        documents = shuffled(_documents(files, skipped, fields, named))
        _refuse_to_overwrite(Path(out), {unpacked.original(each.path) for each in documents} | {Path(tokenizer)})
        if not documents:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
            raise DataError(f"nothing to prepare: no text in the {len(files)} files seen ({reasons}); give UTF-8 text")
        if tokenizer == "bpe":
            vocab_size = DEFAULT_BPE_VOCABULARY if vocab_size is None else vocab_size
            encoder = train_bpe(_sample(documents, fields), vocab_size)
        else:
            encoder = ByteTokenizer() if tokenizer == "byte" else load_tokenizer(Path(tokenizer))
        _refuse_to_prepare_with(encoder, tokenizer)
        template = read_template(Path(tokenizer)) if is_folder(Path(tokenizer)) else None
        with TokenWriter(out, encoder.vocab_size, encoder) as writer:
            num_special = _encode(documents, _Reader(fields, template), encoder, writer, keeps_special, on_progress)
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
            special_tokens=num_special,
            skipped=dict(skipped),
        )


def _refuse_to_prepare_with(encoder: Tokenizer, name: str) -> None:
    """Raise DataError for a tokenizer that cannot end a document, or whose tokens do not say what the text was."""
    if encoder.separator is None:
        raise DataError(
            f"{name}: the tokenizer has no token to end a document with; add '<|endoftext|>' to its added_tokens"
        )
    if encoder.is_lossy:
        raise DataError(
            f"{name}: is a WordPiece tokenizer, as BERT's: it drops blanks and line ends, so a model cannot learn to"
            " write them; give one of byte-level BPE or of SentencePiece's kinds"
        )


def _refuse_to_overwrite(out: Path, read: Iterable[Path]) -> None:
    """Raise DataError where the token file would take the place of a file that it is made from."""
    for path in read:
        with suppress(OSError, ValueError):
            if os.path.samefile(path, out):
                raise DataError(f"{out}: --out is one of the files to read, and would replace it; name another --out")


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a `tokenizer.json`, in a folder with one, or in a token file. Raises DataError."""
    if is_folder(path):
        if not is_file(path / TOKENIZER_FILE):
            raise DataError(
                f"{path}: has no {TOKENIZER_FILE}; write one by AutoTokenizer.from_pretrained(…).save_pretrained(…) of"
                " the transformers library"
            )
        return Tokenizer.load(path / TOKENIZER_FILE)
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
    """Yield the files of a folder, those of linked folders last; each folder once, whatever leads to it."""

    def unreadable(error: OSError) -> None:
        skipped["unreadable"] += 1

    waiting, seen = deque([root]), set()
    while waiting:
        for folder, subfolders, names in os.walk(waiting.popleft(), onerror=unreadable):
            if (real := os.path.realpath(folder)) in seen:
                subfolders.clear()
                continue
            seen.add(real)
            subfolders[:] = sorted(name for name in subfolders if name not in pruned and not name.startswith("."))
            waiting += [path for name in subfolders if (path := Path(folder, name)).is_symlink()]
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
                for place, content in records:
                    if content.messages if isinstance(content, Chat) else content.text:
                        yield Document(path, f"{name}#{place.group}", content.num_bytes, place)
                    else:
                        skipped["empty"] += 1
            continue
        if path.suffix == ".idx" and is_file(path.with_suffix(".bin")):
            continue  # the index is read with its .bin
        if path.suffix == ".bin" and index_of(path):
            with open_tokens(path) as tokens:
                ends = [*tokens.documents.tolist()[1:], tokens.num_tokens]
                for start, stop in zip(tokens.documents.tolist(), ends, strict=True):
                    yield Document(path, f"{name}#{start}", 2 * (stop - start), RecordPlace(start, stop))
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
            try:  # a character that the cut would split goes to the next part
                text, num_bytes = codecs.utf_8_decode(data[:cut], "strict", is_last)
            except UnicodeDecodeError as error:
                raise NotTextError(at + error.start) from None
            if text:
                yield text
            at, rest = at + num_bytes, data[num_bytes:]


class Passage(NamedTuple):
    """A part of a document that is encoded in one piece."""

    text: str
    begins_document: bool = False
    is_learnt: bool = True
    ids: np.ndarray | None = None
    """Token ids, where the file has tokens already."""
    spans: list[tuple[int, int]] | None = None
    """Spans of characters that the model learns; for chats."""
    ends_document: bool = False

    @property
    def size(self) -> int:
        """Number of characters, or of tokens where the file has tokens already."""
        return len(self.text) if self.ids is None else len(self.ids)

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode(errors="replace")) if self.ids is None else 2 * len(self.ids)


class _Reader:
    """The content of documents in any order; files of many records stay open, some at a time."""

    MAX_OPEN = 16

    def __init__(self, fields: Fields, template: ChatTemplate | None = None):
        self._fields, self._template = fields, template
        self._open: dict[Path, Records | TokenSource] = {}

    def passages(self, document: Document) -> Iterator[Passage]:
        """Yield the parts of a document that was text when it was checked; of a record with a prompt the prompt first.

        Raises DataError where it changed meanwhile.
        """
        path, place = document.path, document.place
        if place is None:
            try:
                for number, text in enumerate(texts_in(path)):
                    yield Passage(text, number == 0)
            except (NotTextError, OSError) as error:
                reason = describe_os_error(error) if isinstance(error, OSError) else "it is no longer text"
                raise DataError(f"{path}: changed while it was being read: {reason}; run it again") from None
            return
        file = self._opened(path)
        if isinstance(file, TokenSource):
            yield Passage("", True, ids=file.read(place.group, place.row - place.group))
        elif isinstance(content := file.read(place), Chat):
            if self._template is None:
                raise DataError(
                    f"{path}: has chats, and no chat template is known: give --tokenizer FOLDER, a folder with"
                    " tokenizer.json and chat_template.jinja (or tokenizer_config.json)"
                )
            text, spans = self._template.render(content, f"{path}, record at {place.group}")
            yield Passage(text, True, spans=spans)
        elif self._fields.prompt:
            yield Passage(content.prompt, True, is_learnt=False)
            yield Passage(content.text)
        else:
            yield Passage(content.text, True)

    def _opened(self, path: Path) -> Records | TokenSource:
        file = self._open.pop(path, None)
        if file is None:
            file = open_tokens(path) if path.suffix == ".bin" else open_records(path, self._fields)
        if len(self._open) >= self.MAX_OPEN:
            self._open.pop(next(iter(self._open))).close()
        self._open[path] = file  # the last one used is the last to be closed
        return file


def _sample(documents: Iterable[Document], fields: Fields) -> Iterator[str]:
    """Yield the text that BPE is trained on: the first documents in their shuffled order."""
    num_bytes, reader = 0, _Reader(fields)
    for document in documents:
        for passage in reader.passages(document):
            if num_bytes >= TRAINING_BYTES:
                return
            yield passage.text
            num_bytes += passage.num_bytes


def _encode(
    documents: Sequence[Document],
    reader: _Reader,
    tokenizer: Tokenizer,
    writer: TokenWriter,
    keeps_special: bool,
    on_progress: Callable[[int, int], None],
) -> int:
    """Write all documents, a separator between two, a batch of passages at a time.

    Return how often the text of a special token stands in plain text.
    """
    total, done, special = sum(document.num_bytes for document in documents), 0, 0
    last, is_chat = -1, False
    for batch in _batches(documents, reader):
        if tokenizer.special:
            plain = (passage.text for passage in batch if passage.spans is None)
            special += sum(1 for text in plain for _ in tokenizer.special.finditer(text))
        encoded = _encode_passages(batch, tokenizer, keeps_special)
        for passage, runs in zip(batch, encoded, strict=True):
            if passage.begins_document:
                if writer.num_tokens and last != tokenizer.separator:
                    writer.append(np.array([tokenizer.separator]), learnt=not is_chat)
                writer.begin_document()
                is_chat = passage.spans is not None
            for ids, is_learnt in runs:
                writer.append(ids, is_learnt)
                last = int(ids[-1]) if len(ids) else last
            done += passage.num_bytes
        on_progress(min(done, total), total)  # text that a template adds is not in the files
    return special


def _encode_passages(
    batch: Sequence[Passage], tokenizer: Tokenizer, keeps_special: bool
) -> Iterator[list[tuple[np.ndarray, bool]]]:
    """Yield the ids of each passage, cut where learnt ones begin and end, with a flag on each piece."""
    first = [passage.text for passage in batch if passage.begins_document and passage.ids is passage.spans is None]
    later = [passage.text for passage in batch if not passage.begins_document]
    chats = [passage.text for passage in batch if passage.spans is not None]
    begun = iter(tokenizer.encode_batch(first, keeps_special))
    following = iter(tokenizer.encode_next(later, keeps_special))
    rendered = iter(tokenizer.encode_spans(chats) if chats else ())
    for passage in batch:
        if passage.ids is not None:
            yield [(passage.ids, True)]
        elif passage.spans is not None:
            yield _cut_at_spans(*next(rendered), passage.spans)
        else:
            ids = next(begun if passage.begins_document else following)
            before = tokenizer.begin if passage.begins_document else ()
            after = tokenizer.end if passage.ends_document else ()
            whole = np.concatenate([before, ids, after]).astype(np.int64) if before or after else ids
            yield [(whole, passage.is_learnt)]


def _cut_at_spans(ids: np.ndarray, offsets: np.ndarray, spans: list[tuple[int, int]]) -> list[tuple[np.ndarray, bool]]:
    """Return runs of ids, each learnt or not. A token is learnt if one of its characters is in a span."""
    learnt = np.zeros(len(ids), bool)
    for start, stop in spans:
        learnt |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
    cuts = np.flatnonzero(np.diff(learnt)) + 1
    parts = zip(np.split(ids, cuts), np.split(learnt, cuts), strict=True)
    runs = [(part, bool(is_learnt[0])) for part, is_learnt in parts if len(part)]
    return [(ids[:0], False), *runs]


def _batches(documents: Iterable[Document], reader: _Reader) -> Iterator[list[Passage]]:
    """Yield lists of passages that together have about BATCH_CHARACTERS."""
    batch, size = [], 0
    for document in documents:
        last = None
        for passage in reader.passages(document):
            if last is not None:
                batch.append(last)
                size += last.size
            last = passage
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
        if last is not None:
            batch.append(last._replace(ends_document=True))
            size += last.size
    if batch:
        yield batch
