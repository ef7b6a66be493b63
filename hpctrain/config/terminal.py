"""Text for people: no control character of a name, a file or a message reaches a terminal.

A name may come from a file of someone else, from another host, or from a model. Escape codes in it could clear the
screen, or write over what was said before. All that a command prints passes a `PlainStream`, which shows them in place.
"""

import codecs
import io
import re
import sys
from typing import TextIO

UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""All control characters but tabs and ends of lines; marks that turn the direction of text; halves of characters."""


def printable(text: str) -> str:
    """Return a text with its control characters as Python writes them, such as `\\x1b`."""
    return UNPRINTABLE.sub(lambda character: character[0].encode("unicode_escape").decode(), text)


class PlainStream(io.TextIOWrapper):
    """A text stream to a person, in place of another one; what that cannot encode is shown in place too."""

    def __init__(self, stream: TextIO):
        encoding = "utf-8" if codecs.lookup(stream.encoding or "ascii").name == "ascii" else stream.encoding
        buffer = stream.buffer
        try:
            if buffer.seekable():
                buffer.seek(0, io.SEEK_CUR)
        except OSError:  # its file became a pipe after Python had looked at it
            buffer = open(stream.fileno(), "wb", closefd=False)
        super().__init__(buffer, encoding, "backslashreplace", line_buffering=True)
        if isinstance(stream, io.TextIOWrapper) and buffer is stream.buffer:
            stream.reconfigure(encoding=encoding, errors="backslashreplace")
        self.stream = stream
        """For a progress bar, which draws by control characters of its own."""

    def write(self, text: str) -> int:
        super().write(printable(text))
        return len(text)


def use_plain_streams() -> None:
    """Have all that this process prints from now on pass a `PlainStream`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, PlainStream):
            stream.flush()
            setattr(sys, name, PlainStream(stream))


def drawing(stream: TextIO) -> TextIO:
    """Return the stream on which a progress bar draws; what it shows of names is to be `printable`."""
    return getattr(stream, "stream", stream)
