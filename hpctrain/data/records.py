"""The records of JSON Lines and Parquet files: the texts, or the chat, that each has in its fields."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.config.errors import DataError
from hpctrain.config.paths import open_file, refused_as
from hpctrain.data.chat import FIELDS, Chat, chat_of

JSON_LINES, PARQUET = (".jsonl", ".ndjson"), (".parquet",)
RECORD_FILES = JSON_LINES + PARQUET
MAX_LINE_BYTES = 100_000_000


class Texts(NamedTuple):
    """The texts of one record."""

    prompt: str
    """The context, which does not count in the loss; empty where a file has none."""
    text: str

    @property
    def num_bytes(self) -> int:
        return len("".join(self).encode())


class Fields(NamedTuple):
    """The names of a record's texts, or of its chat."""

    text: str = "text"
    prompt: str | None = None

    @property
    def names(self) -> list[str]:
        return [self.text, self.prompt] if self.prompt else [self.text]


PLAIN = Fields()
"""Fields of records with plain texts, in a field called `text`."""


class RecordPlace(NamedTuple):
    """The place of a record in its file."""

    group: int
    """The unit that is read at once: groups are shuffled, records inside of one are not."""
    row: int = 0


class Records(ABC):
    """The texts of one file, one by one or each by its place. Close it, or use it in a `with`."""

    _file: Any

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[RecordPlace, Texts | Chat]]:
        """Yield the place and the content of each record."""

    @abstractmethod
    def read(self, place: RecordPlace) -> Texts | Chat:
        """Return the content of a record."""

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


def field_of_chat(fields: Fields, there: Any) -> str:
    """Return the field of the chat where records have no text: the one that is named, or the first usual one."""
    usual = [name for name in FIELDS if name in there]
    return usual[0] if fields == PLAIN and fields.text not in there and usual else fields.text


def _content_of(record: Any, fields: Fields, where: str) -> Texts | Chat:
    """Return the texts of a record, or its chat. Raises DataError, with where it is, where one is not there."""
    there, texts = record if isinstance(record, dict) else {}, {}
    if isinstance(chat := there.get(field_of_chat(fields, there)), list) and not fields.prompt:
        return chat_of(there, chat, where)
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

    def __iter__(self) -> Iterator[tuple[RecordPlace, Texts | Chat]]:
        at = 0
        for number, line in enumerate(iter(lambda: self._file.readline(MAX_LINE_BYTES), b""), 1):
            if len(line) == MAX_LINE_BYTES:
                raise DataError(f"{self._path}, line {number}: has {MAX_LINE_BYTES:,} bytes or more; divide it")
            if line.strip():
                yield RecordPlace(at), self._parse(line, f"{self._path}, line {number}")
            at += len(line)

    def read(self, place: RecordPlace) -> Texts | Chat:
        self._file.seek(place.group)
        return self._parse(self._file.readline(), f"{self._path}, byte {place.group}")

    def _parse(self, line: bytes, where: str) -> Texts | Chat:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not valid JSON: {error}") from None
        return _content_of(record, self._fields, where)


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
        self._group, self._contents = -1, []
        try:
            self._file = ParquetFile(path)
        except ArrowException as error:
            raise DataError(f"{path}: is damaged or no Parquet file: {error}") from None
        names = self._file.schema_arrow.names
        self._columns = [field_of_chat(fields, names), *fields.names[1:]]
        if "tools" in names:
            self._columns.append("tools")
        if lacking := [name for name in self._columns if name not in names]:
            raise DataError(f"{path}: has no column '{lacking[0]}' (it has: {', '.join(names)}); name one with --field")

    def __iter__(self) -> Iterator[tuple[RecordPlace, Texts | Chat]]:
        for group in range(self._file.num_row_groups):
            for row, content in enumerate(self._read(group)):
                yield RecordPlace(group, row), content

    def read(self, place: RecordPlace) -> Texts | Chat:
        return self._read(place.group)[place.row]

    def _read(self, group: int) -> list[Texts | Chat]:
        if group != self._group:
            try:
                rows = self._file.read_row_group(group, columns=self._columns).to_pylist()
            except (self._error, OSError) as error:
                raise DataError(f"{self._path}: row group {group} is damaged: {error}") from None
            where = f"{self._path}, row group {group}"
            self._group, self._contents = group, [_content_of(row, self._fields, where) for row in rows]
        return self._contents
