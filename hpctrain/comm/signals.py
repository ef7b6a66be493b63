"""The signals that ask a run to end in order. Light: a command listens to them before it imports anything heavy."""

import signal

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
