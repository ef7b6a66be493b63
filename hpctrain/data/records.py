"""Files of many documents: JSON Lines, and Parquet where pyarrow is installed."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.config.errors import DataError, describe_os_error

JSON_LINES, PARQUET = (".jsonl", ".ndjson"), (".parquet",)
RECORD_FILES = JSON_LINES + PARQUET


class Texts(NamedTuple):
    """Of one record."""

    prompt: str
    """What is given, and not learnt; empty where a file has none."""
    text: str


class Fields(NamedTuple):
    """What the texts of a record are called."""

    text: str = "text"
    prompt: str | None = None


PLAIN = Fields()
"""Texts alone, which are called `text`."""


class Records(ABC):
    """The texts of one file, one by one or each by its number. Close it, or use it in a `with`."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[int, int, Texts]]:
        """Yield of each record its number, what is read together with it, and its texts."""

    @abstractmethod
    def texts(self, number: int) -> Texts:
        """Return the texts of a record."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def open_records(path: Path, fields: Fields) -> Records:
    """Open a file whose records have their texts in fields. Raises DataError, then and while it is read."""
    try:
        return (JsonLines if path.suffix in JSON_LINES else Parquet)(path, fields)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {describe_os_error(error)}") from None


def _text_of(value: Any, where: str, field: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: '{field}' is {value!r:.60} and no text; name another with --field")
    return value.encode(errors="replace").decode()  # JSON may name halves of characters, which no text has


class JsonLines(Records):
    """One JSON object a line. A record's number is where its line begins, in bytes."""

    def __init__(self, path: Path, fields: Fields):
        self._path, self._fields = path, fields
        self._file = open(path, "rb")

    def __iter__(self) -> Iterator[tuple[int, int, Texts]]:
        at = 0
        for number, line in enumerate(self._file, 1):
            if line.strip():
                yield at, at, self._parse(line, f"{self._path}, line {number}")
            at += len(line)

    def texts(self, number: int) -> Texts:
        self._file.seek(number)
        return self._parse(self._file.readline(), f"{self._path}, byte {number}")

    def _parse(self, line: bytes, where: str) -> Texts:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not valid JSON: {error}") from None
        there = record if isinstance(record, dict) else {}
        for name in self._fields:
            if name is not None and name not in there:
                names = ", ".join(there) if isinstance(record, dict) else type(record).__name__
                raise DataError(f"{where}: has no field '{name}' (it has: {names:.80}); name one with --field")
        prompt = _text_of(there[self._fields.prompt], where, self._fields.prompt) if self._fields.prompt else ""
        return Texts(prompt, _text_of(there[self._fields.text], where, self._fields.text))

    def close(self) -> None:
        self._file.close()


class Parquet(Records):
    """A column of text. Row groups are read whole, so their rows stay together."""

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
        if lacking := [name for name in fields if name is not None and name not in names]:
            raise DataError(f"{path}: has no column '{lacking[0]}' (it has: {', '.join(names)}); name one with --field")
        counts = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._starts = [sum(counts[:i]) for i in range(len(counts) + 1)]

    def __iter__(self) -> Iterator[tuple[int, int, Texts]]:
        for group, start in enumerate(self._starts[:-1]):
            for row, texts in enumerate(self._read(group), start):
                yield row, group, texts

    def texts(self, number: int) -> Texts:
        group = next(i for i, stop in enumerate(self._starts[1:]) if number < stop)
        return self._read(group)[number - self._starts[group]]

    def _read(self, group: int) -> list[Texts]:
        if group != self._group:
            try:
                names = [name for name in self._fields if name is not None]
                table = self._file.read_row_group(group, columns=names)
                columns = {name: table.column(name).to_pylist() for name in names}
            except (self._error, OSError) as error:
                raise DataError(f"{self._path}: row group {group} is damaged: {error}") from None
            where = f"{self._path}, row group {group}"
            checked = {name: [_text_of(value, where, name) for value in values] for name, values in columns.items()}
            texts = checked[self._fields.text]
            prompts = checked[self._fields.prompt] if self._fields.prompt else [""] * len(texts)
            self._texts = [Texts(*pair) for pair in zip(prompts, texts, strict=True)]
            self._group = group
        return self._texts

    def close(self) -> None:
        self._file.close()
