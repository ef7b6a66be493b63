"""A rank as a process: signals ask it to end in order, and it does not end where nobody takes what it says.

Light: a command listens to signals before it imports anything heavy.
"""

import os
import signal
import sys
from typing import TextIO

from hpctrain.config.errors import describe_os_error

STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGXCPU,
)
"""What people, batch systems and limits send to end a process: all that would end it without a word but those of
defects, and SIGQUIT, which asks for an end at once."""


class StopSignals:
    """Remembers a signal, and leaves it to the run to end where its ranks agree to.

    A second SIGINT raises KeyboardInterrupt at once.
    """

    def __init__(self):
        self.received: str | None = None

    def listen(self) -> "StopSignals":
        """Replace the handlers of `STOP_SIGNALS`, in the main thread. What nohup ignores, SIGHUP, stays ignored."""
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)
        return self

    def _note(self, number: int, _frame) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name


class LastingStream:
    """A stream of text that may be lost: a closed pipe, a full disk. From then on its text is dropped.

    It is used in place of the stream that it is made of, and has its other attributes.
    """

    def __init__(self, stream: TextIO | None, name: str, other: "LastingStream | None" = None):
        """`stream` is None where the process was started without it. A loss is said on the `other`, if there is one."""
        self._name, self._other = name, other
        self.losses: list[str] = []
        """Sentences about the loss, for who takes them away to write them elsewhere."""
        # The next file that is opened would have its number, and get what others print.
        self._stream = stream or open(os.devnull, "w")
        if stream is None:
            self._note("is closed")

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    @property
    def stream(self) -> "LastingStream":
        """The stream below a `PlainStream`, for a progress bar, which draws by control characters of its own."""
        result = LastingStream(self._stream.stream, self._name, self._other)  # pyright: ignore[reportAttributeAccessIssue]
        result.losses = self.losses
        return result

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())  # what is kept in buffers goes there too
        os.close(null)
        self._note(f"cannot be written: {describe_os_error(error)}")

    def _note(self, what: str) -> None:
        text = f"{self._name} {what}; training continues, and writes to its run folder"
        self.losses.append(text)
        if self._other is not None:
            print(f"hpctrain: {text}", file=self._other, flush=True)  # pyright: ignore[reportArgumentType] - writes and flushes


def keep_output(speaks: bool) -> None:
    """Replace standard output and error by streams that this process may lose; it says so if it `speaks` for all."""
    error = LastingStream(sys.stderr, "standard error")
    sys.stdout = LastingStream(sys.stdout, "standard output", error if speaks else None)  # pyright: ignore[reportAttributeAccessIssue]
    sys.stderr = error  # pyright: ignore[reportAttributeAccessIssue]


def take_losses() -> list[str]:
    """Return what is to be said of streams that were lost since the last call."""
    taken = []
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, LastingStream):
            taken += stream.losses
            stream.losses.clear()
    return taken
