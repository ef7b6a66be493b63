"""Questions about paths that people type, also where the operating system refuses the path itself; small files.

A name of 300 letters, a link to itself, a zero byte: such a path is nothing, and who reads it says why.
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.config.errors import HpctrainError, describe_os_error


def is_file(path: Path) -> bool:
    """Say whether a path is a regular file that exists."""
    return _answer(path.is_file)


def is_folder(path: Path) -> bool:
    """Say whether a path is a folder that exists."""
    return _answer(path.is_dir)


def exists(path: Path) -> bool:
    """Say whether there is anything under a path."""
    return _answer(path.exists)


def read_json(path: Path, kind: type[HpctrainError], what: str) -> Any:
    """Return the content of a JSON file of ours; `what` says what it should be. Raises `kind` where it is none."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise kind(f"{path}: cannot be read: {describe_os_error(error)}") from None
    except (ValueError, RecursionError) as error:
        raise kind(f"{path}: is damaged, and no {what.removeprefix('a ')}: {error}; remove it") from None


def write_text(path: Path, text: str, kind: type[HpctrainError], remedy: str, synced: bool = False) -> None:
    """Write a file so that it is there whole or not at all. Raises `kind`, with what to do, where the disk refuses."""
    try:
        replace_text(path, text, synced)
    except OSError as error:
        raise kind(f"{path}: cannot be written: {describe_os_error(error)}; {remedy}") from None


def replace_text(path: Path, text: str, synced: bool = False) -> None:
    """Write a file so that it is there whole or not at all. Raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
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
