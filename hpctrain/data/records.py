"""Files of many documents: JSON Lines, and Parquet where pyarrow is installed."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpctrain.config.errors import DataError, describe_os_error

JSON_LINES, PARQUET = (".jsonl", ".ndjson"), (".parquet",)
RECORD_FILES = JSON_LINES + PARQUET


class Records(ABC):
    """The texts of one file, one by one or each by its number. Close it, or use it in a `with`."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[int, int, str]]:
        """Yield of each record its number, what is read together with it, and its text."""

    @abstractmethod
    def text(self, number: int) -> str:
        """Return the text of a record."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def open_records(path: Path, field: str) -> Records:
    """Open a file whose records have their text in a field. Raises DataError, then and while it is read."""
    try:
        return (JsonLines if path.suffix in JSON_LINES else Parquet)(path, field)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {describe_os_error(error)}") from None


def _text_of(value: Any, where: str, field: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: '{field}' is {value!r:.60} and no text; name another with --field")
    return value


class JsonLines(Records):
    """One JSON object a line. A record's number is where its line begins, in bytes."""

    def __init__(self, path: Path, field: str):
        self._path, self._field = path, field
        self._file = open(path, "rb")

    def __iter__(self) -> Iterator[tuple[int, int, str]]:
        at = 0
        for number, line in enumerate(self._file, 1):
            if line.strip():
                yield at, at, self._parse(line, f"{self._path}, line {number}")
            at += len(line)

    def text(self, number: int) -> str:
        self._file.seek(number)
        return self._parse(self._file.readline(), f"{self._path}, byte {number}")

    def _parse(self, line: bytes, where: str) -> str:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not valid JSON: {error}") from None
        if not isinstance(record, dict) or self._field not in record:
            there = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise DataError(f"{where}: has no field '{self._field}' (it has: {there:.80}); name one with --field")
        return _text_of(record[self._field], where, self._field)

    def close(self) -> None:
        self._file.close()


class Parquet(Records):
    """A column of text. Row groups are read whole, so their rows stay together."""

    def __init__(self, path: Path, field: str):
        try:
            from pyarrow import ArrowException
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise DataError(f"{path}: Parquet needs pyarrow; pip install 'hpctrain[parquet]'") from None
        self._path, self._field, self._error = path, field, ArrowException
        self._group, self._texts = -1, []
        try:
            self._file = ParquetFile(path)
        except ArrowException as error:
            raise DataError(f"{path}: is damaged or no Parquet file: {error}") from None
        names = self._file.schema_arrow.names
        if field not in names:
            raise DataError(f"{path}: has no column '{field}' (it has: {', '.join(names)}); name one with --field")
        counts = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._starts = [sum(counts[:i]) for i in range(len(counts) + 1)]

    def __iter__(self) -> Iterator[tuple[int, int, str]]:
        for group, start in enumerate(self._starts[:-1]):
            for row, text in enumerate(self._read(group), start):
                yield row, group, text

    def text(self, number: int) -> str:
        group = next(i for i, stop in enumerate(self._starts[1:]) if number < stop)
        return self._read(group)[number - self._starts[group]]

    def _read(self, group: int) -> list[str]:
        if group != self._group:
            try:
                values = self._file.read_row_group(group, columns=[self._field]).column(0).to_pylist()
            except (self._error, OSError) as error:
                raise DataError(f"{self._path}: row group {group} is damaged: {error}") from None
            where = f"{self._path}, row group {group}"
            self._texts = [_text_of(value, where, self._field) for value in values]
            self._group = group
        return self._texts

    def close(self) -> None:
        self._file.close()
