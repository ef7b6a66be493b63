"""Converts files that cannot be read directly: compressed ones, and JSON files whose objects are records.

They are written as text or JSON Lines, into a folder that is removed at the end.
"""

import gzip
import json
import shutil
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

from hpctrain.config.errors import DataError, describe_os_error
from hpctrain.config.paths import open_file
from hpctrain.data.records import MAX_LINE_BYTES, PLAIN, Fields, field_of_chat

COMPRESSED = (".gz", ".zst")
MOST_LIST_BYTES = 2_000_000_000
"""Most bytes of a JSON file that is one list of records, since such a file is read whole."""


class Unpacked:
    """The folder of converted files; use it in a `with`."""

    def __init__(self, parent: Path):
        """`parent` is a folder with free space: that of the token file."""
        self._parent = parent
        self._folder: Path | None = None
        self._originals: dict[Path, Path] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _, error: BaseException | None, *more) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        if isinstance(error, DataError):  # it names the user's file, not a copy that is gone
            text = str(error)
            for copy, path in self._originals.items():
                text = text.replace(str(copy), str(path))
            error.args = (text,)

    def replace(self, path: Path, name: str, fields: Fields) -> tuple[Path, str]:
        """Return the file to read instead of `path`, and its name. Raises DataError for a damaged file."""
        result = path
        if path.suffix in COMPRESSED:
            result, name = self._decompress(path), name.removesuffix(path.suffix)
        if result.suffix == ".json" and (records := _is_list_or_lines(result, fields)):
            result = self._as_lines(result, records)
        self._originals[result] = path
        return result, name

    def original(self, path: Path) -> Path:
        """Return the file that a file of the folder was made from; any other path as it is."""
        return self._originals.get(path, path)

    def _place(self, name: str) -> Path:
        try:
            if self._folder is None:
                self._parent.mkdir(parents=True, exist_ok=True)
                self._folder = Path(tempfile.mkdtemp(prefix=".hpctrain-prepare-", dir=self._parent))
            folder = Path(tempfile.mkdtemp(dir=self._folder))
        except OSError as error:
            raise DataError(f"{self._parent}: cannot be written: {describe_os_error(error)}") from None
        return folder / name

    def _decompress(self, path: Path) -> Path:
        target = self._place(path.name.removesuffix(path.suffix))
        try:
            with _open_compressed(path) as file, target.open("wb") as out:
                shutil.copyfileobj(file, out)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path}: is damaged: {error}; copy it again") from None
        except OSError as error:
            raise DataError(f"{path}: cannot be unpacked: {describe_os_error(error)}; copy it again") from None
        return target

    def _as_lines(self, path: Path, kind: str) -> Path:
        target = self._place(f"{path.name}l")
        try:
            if kind == "lines":
                target.symlink_to(path.resolve())
            else:
                records = json.loads(path.read_bytes())
                with target.open("w", encoding="utf-8") as out:
                    out.writelines(json.dumps(record) + "\n" for record in records)
        except OSError as error:
            raise DataError(f"{target}: cannot be written: {describe_os_error(error)}") from None
        return target


def _open_compressed(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=open_file(path))  # type: ignore[return-value]
    try:
        import pyarrow
    except ImportError:
        raise DataError(f"{path}: zstd needs pyarrow; pip install 'hpctrain[parquet]', or unpack it") from None
    open_file(path).close()
    return pyarrow.input_stream(str(path), compression="zstd")


def _is_list_or_lines(path: Path, fields: Fields) -> str:
    """Say whether a JSON file is `lines` of objects, a `list` of them, or neither: a document of text, ''."""
    with suppress(OSError, ValueError, RecursionError):
        with open_file(path) as file:
            lines = (line for line in iter(lambda: file.readline(MAX_LINE_BYTES), b"") if line.strip())
            first, second = next(lines, b""), next(lines, b"")
        if first.lstrip().startswith(b"{"):
            objects = [json.loads(line) for line in (first, second) if line]
            return "lines" if len(objects) > 1 or _has_field(objects[0], fields) else ""
        if first.lstrip().startswith(b"[") and path.stat().st_size <= MOST_LIST_BYTES:
            records = json.loads(path.read_bytes())
            are_records = all(isinstance(each, dict) for each in records) and (
                fields != PLAIN or any(_has_field(each, fields) for each in records)
            )
            return "list" if records and are_records else ""
    return ""


def _has_field(record: dict, fields: Fields) -> bool:
    return field_of_chat(fields, record) in record
