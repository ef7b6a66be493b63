"""Numbers of all ranks in flight to rank 0, while everybody continues."""

from collections.abc import Sequence

import numpy as np

from hpctrain.comm.waiting import Patience, wait_until


class PendingNumbers:
    """A gather that is in flight. Made by `World.gather_numbers`; every rank must wait for its own sooner or later."""

    def __init__(self, comm, numbers: Sequence[float], patience: Patience):
        """Start it on a communicator of MPI that nothing else uses. All ranks must call, with equally many numbers."""
        self._sent = np.array(numbers, dtype=np.float64)  # MPI reads and writes both until it is done
        self._received = np.empty((comm.size if comm.rank == 0 else 0, len(self._sent)))
        self._request = comm.Igather(self._sent, self._received if comm.rank == 0 else None)
        self._patience = patience
        self._is_done = False

    def done(self) -> bool:
        """Say whether this rank's part of it is over; never waits."""
        self._is_done = self._is_done or self._request.Test()
        return self._is_done

    def wait(self) -> np.ndarray:
        """Return [ranks, numbers] (float64) on rank 0, and no rows on others, as soon as it is done."""
        wait_until(self.done, lambda: "all ranks in gather numbers", self._patience)
        return self._received
