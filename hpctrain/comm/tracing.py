"""The hook by which a run is traced: who computes or communicates reports spans of time to a `Tracer`.

Times are seconds of `time.monotonic`; a rehearsal's are pretended ones.
"""


class Tracer:
    """Takes spans of what one rank does. This one drops them: for runs that nobody traces."""

    def now(self) -> float:
        """Return where the rank is in what it computes. To be called by the thread that computes."""
        return 0.0

    def computed(self, name: object, since: float) -> None:
        """What the rank did until now, with all that it waited for; `str(name)` is asked for later, if at all."""

    def exposed(self, group: str, lane: str, operation: str, num_bytes: int, since: float) -> None:
        """The rank communicated until now, and did nothing else.

        `lane` is the group's name and its ranks, such as `y 0-3`.
        """

    def waited(self, group: str, operation: str, since: float) -> None:
        """The rank waited until now for an overlapped operation."""

    def overlapped(self, group: str, lane: str, operation: str, num_bytes: int, begin: float, end: float) -> None:
        """A lane of a group moved something; may be called by any thread."""


UNTRACED = Tracer()
