"""What watches over a rank: a flight recorder, a watchdog for those who wait too long, a guardian for the killed."""

import time
from collections.abc import Sequence
from pathlib import Path

from hpctrain.comm.topology import Place
from hpctrain.comm.waiting import Patience
from hpctrain.comm.watchdog.guarded import Guarded
from hpctrain.comm.watchdog.recorder import Recorder
from hpctrain.comm.watchdog.watchdog import Watchdog

# A waiting operation leaves the word to the watchdog, which knows more, for this long after its patience has ended.
GRACE_SECONDS = 30.0


class Oversight:
    """Records what this rank communicates, and sees to it that a rank that is missing is named, once."""

    def __init__(self, mpi, comm, places: Sequence[Place], patience: Patience, watched: bool):
        """All ranks must call. Without `watched` it records in memory, and nobody looks."""
        self._comm = comm
        host, family = places[comm.rank].host, places[comm.rank].family
        self.recorder = Recorder(None, comm.rank, comm.size, host, family, comm.bcast(time.time_ns()))
        self.recorder.note_phase(patience.phase.name)
        self._guarded = self._watchdog = None
        if watched and comm.size > 1:
            self._guarded = Guarded(comm, host)
            hosts = [place.host for place in places]
            self._watchdog = Watchdog(mpi, comm, self.recorder, hosts, patience, self._abort)
            self._watchdog.start()
            patience.grace_seconds = 0.0 if self._watchdog.reason else GRACE_SECONDS

    def announce_folder(self, folder: Path) -> None:
        """Say where the records are kept, after all ranks have moved theirs there. All ranks must call."""
        if self._guarded:
            self._guarded.announce_folder(folder)

    def _abort(self, code: int) -> None:
        if self._guarded:
            self._guarded.say_goodbye(reports_error=True)
        self._comm.Abort(code)

    def note_failure(self, error: BaseException) -> bool:
        """Stop watching: this rank ends with an error. Return False where another one reports what happened."""
        if self._watchdog:
            self._watchdog.abandon()
        self.recorder.close(f"{type(error).__name__}: {error}")
        return self._guarded.say_goodbye(reports_error=True) if self._guarded else True

    def close(self) -> None:
        """End in order. All ranks must call, before MPI is ended."""
        if self._watchdog:
            self._watchdog.stop()
        self.recorder.close()
        if self._guarded:
            self._guarded.say_goodbye()
