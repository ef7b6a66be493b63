"""Answers about paths that people type, and reads files that others made.

A path that the operating system refuses, such as a name of 300 letters or a link to itself, counts as missing; the
reader reports why. A file is checked before it is opened: opening a pipe waits, and a device has no end.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from hpctrain.config.errors import HpctrainError, describe_os_error


@contextmanager
def refused_as(kind: type[HpctrainError], what: str, remedy: str = "") -> Iterator[None]:
    """Turn an OSError of the block into a `kind` that says what failed, why, and what to do."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {describe_os_error(error)}{remedy and '; '}{remedy}") from None


def is_file(path: Path) -> bool:
    """Say whether a path is a regular file that exists."""
    return _answer(path.is_file)


def is_folder(path: Path) -> bool:
    """Say whether a path is a folder that exists."""
    return _answer(path.is_dir)


def exists(path: Path) -> bool:
    """Say whether there is anything under a path."""
    return _answer(path.exists)


MOST_READ_BYTES = 1_000_000_000
"""Of a file that is read whole; those of hpctrain have far less."""
KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def look_at(path: Path, most_bytes: int | None = None) -> os.stat_result:
    """Return the status of a regular file. Raises OSError where it is another thing, or has more bytes."""
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder and no file", str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"is no regular file, but {kind}", str(path))
    if most_bytes is not None and status.st_size > most_bytes:
        text = f"has {status.st_size:,} bytes, and no file of this kind has more than {most_bytes:,}"
        raise OSError(errno.EFBIG, text, str(path))
    return status


def open_file(path: Path, most_bytes: int | None = None) -> BinaryIO:
    """Open a regular file to read it. Raises OSError, as `look_at` does too."""
    look_at(path, most_bytes)
    return open(path, "rb")


def read_bytes(path: Path, most_bytes: int = MOST_READ_BYTES) -> bytes:
    """Return the bytes of a regular file. Raises OSError, as `look_at` does too."""
    with open_file(path, most_bytes) as file:
        return file.read()


def read_json(path: Path, kind: type[HpctrainError], what: str) -> Any:
    """Return the content of a JSON file of ours; `what` says what it should be. Raises `kind` where it is none."""
    with refused_as(kind, f"{path}: cannot be read"):
        data = read_bytes(path)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise kind(f"{path}: is damaged, and no {what.removeprefix('a ')}: {error}; remove it") from None


def write_text(path: Path, text: str, kind: type[HpctrainError], remedy: str, synced: bool = False) -> None:
    """Write a file so that it is there whole or not at all. Raises `kind`, with what to do, where the disk refuses."""
    with refused_as(kind, f"{path}: cannot be written", remedy):
        replace_text(path, text, synced)


def replace_text(path: Path, text: str, synced: bool = False) -> None:
    """Write a file so that it is there whole or not at all. Raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)  # what is there may be a pipe
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Have the operating system put a file, or a folder's entries, on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _answer(question) -> bool:
    try:
        return question()
    except (OSError, ValueError):
        return False
