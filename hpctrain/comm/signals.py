"""The signals that ask a run to end in order. Light: a command listens to them before it imports anything heavy."""

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Remembers a signal, and leaves it to the run to end where its ranks agree to.

    A second SIGINT raises KeyboardInterrupt at once.
    """

    def __init__(self):
        self.received: str | None = None

    def listen(self) -> "StopSignals":
        """Replace the handlers of `STOP_SIGNALS`, in the main thread."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)
        return self

    def _note(self, number: int, _frame) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
