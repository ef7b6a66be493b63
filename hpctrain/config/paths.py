"""Questions about paths that people type, answered also where the operating system refuses the path itself.

A name of 300 letters, a link to itself, a zero byte: such a path is nothing, and who reads it says why.
"""

from pathlib import Path


def is_file(path: Path) -> bool:
    """Say whether a path is a regular file that can be found."""
    return _answer(path.is_file)


def is_folder(path: Path) -> bool:
    """Say whether a path is a folder that can be found."""
    return _answer(path.is_dir)


def exists(path: Path) -> bool:
    """Say whether there is anything under a path."""
    return _answer(path.exists)


def _answer(question) -> bool:
    try:
        return question()
    except (OSError, ValueError):
        return False
