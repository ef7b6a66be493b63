"""The members of a group, and what they agree on while it is made."""

from collections.abc import Callable
from typing import TypeVar

from hpctrain.config.errors import CommError

T = TypeVar("T")


def on_all(comm, attempt: Callable[[], T]) -> T:
    """Return what this rank's attempt returns. Where that of any rank fails, all raise CommError with the first reason,
    and from its own failure those that had one.

    All ranks must call. Whatever a library raises is a failure: CuPy raises KeyError for errors that are new to it.
    """
    result, failure, cause = None, None, None
    try:
        result = attempt()
    except Exception as error:
        failure, cause = str(error) if isinstance(error, CommError) else f"{type(error).__name__}: {error}", error
    failures = [text for text in comm.allgather(failure) if text is not None]
    if failures:
        raise CommError(failures[0]) from cause
    return result  # pyright: ignore[reportReturnType] - the attempt succeeded
