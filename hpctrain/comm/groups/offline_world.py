"""One rank of many, alone: it runs its part of a plan and holds its memory, without communication.

It is for measurements of a single device: what it computes, and how much fits. An error on one rank, such as running
out of memory, leaves no other rank waiting.
"""

from collections.abc import Sequence

from hpctrain.comm.collectives.flat import SilentCollectives
from hpctrain.comm.groups.group import Backend, Group
from hpctrain.comm.groups.settings import Rehearsal
from hpctrain.comm.progress.instruments import UNTRACED, Instruments
from hpctrain.comm.progress.lanes import ProgressEngine
from hpctrain.config.errors import CommError


class OfflineWorld:
    """Replaces the world where a layout is built (`hpctrain.engine.step.layout`). It involves no other ranks."""

    tracer = UNTRACED

    def __init__(self, rank: int, size: int, rehearsal: Rehearsal | None = None):
        """A `rehearsal` paces operations; the pretended device is not charged for collectives."""
        self.rank, self.size = rank, size
        self._rehearsal = rehearsal

    def is_near(self, one: int, other: int) -> bool:
        return True  # nothing is sent

    def group(self, ranks: Sequence[int], name: str = "", overlapped: bool = False, on_host: bool = False) -> Group:
        """Return a group that leaves in memory what real collectives would, without communication.

        With `overlapped` it has a lane, since overlapped operations need buffers of their own.
        """
        if len(ranks) == 1:
            return Group(ranks)
        silent = SilentCollectives(tuple(ranks).index(self.rank), len(ranks))
        instruments = Instruments(pace=self._rehearsal.pace(name) if self._rehearsal else None)
        lane = ProgressEngine(threaded=False).add_lane() if overlapped else None
        return Group(ranks, Backend(silent, None, "alone"), instruments=instruments, lane=lane)

    def channel(self, peer: int, num_bytes: int, depth: int, name: str = ""):
        """Refuse: a part of a pipeline cannot run without the tensors that it receives."""
        raise CommError(f"rank {self.rank} runs alone, and has no rank {peer} to exchange activations with")
