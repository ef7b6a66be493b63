"""What watches over a rank: a flight recorder, and a watchdog for those who wait too long."""

import time
from collections.abc import Sequence

from hpctrain.comm.recorder import Recorder
from hpctrain.comm.topology import Place
from hpctrain.comm.waiting import Patience
from hpctrain.comm.watchdog import Watchdog

# A waiting operation leaves the word to the watchdog, which knows more, for this long after its patience has ended.
GRACE_SECONDS = 30.0


class Oversight:
    """Records what this rank communicates, and sees to it that a rank that is missing is named, once."""

    def __init__(self, mpi, comm, places: Sequence[Place], patience: Patience, watched: bool):
        """All ranks must call. Without `watched` it records in memory, and nobody looks."""
        host, family = places[comm.rank].host, places[comm.rank].family
        self.recorder = Recorder(None, comm.rank, comm.size, host, family, comm.bcast(time.time_ns()))
        self._watchdog = None
        if watched and comm.size > 1:
            hosts = [place.host for place in places]
            self._watchdog = Watchdog(mpi, comm, self.recorder, hosts, lambda: patience.seconds, comm.Abort)
            self._watchdog.start()
            patience.grace_seconds = 0.0 if self._watchdog.reason else GRACE_SECONDS

    def note_failure(self, error: BaseException) -> None:
        """Stop watching because this rank ends with an error that it tells."""
        if self._watchdog:
            self._watchdog.abandon()
        self.recorder.close(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End in order. All ranks must call, before MPI is ended."""
        if self._watchdog:
            self._watchdog.stop()
        self.recorder.close()
