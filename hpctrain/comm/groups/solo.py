"""One rank of many, alone: its part of a plan runs, and holds what it would hold, while nothing is communicated.

For what is to be measured of one device by itself: what it computes, and how much fits. An error on one rank, such as
an overflow of its memory, leaves nobody waiting.
"""

from collections.abc import Sequence

import torch

from hpctrain.comm.groups.communicator import ENDLESS, Backend, Communicator, Lane
from hpctrain.comm.groups.settings import Rehearsal
from hpctrain.comm.progress.instruments import UNTRACED, Instruments
from hpctrain.comm.progress.lanes import Progress
from hpctrain.comm.progress.steps import Steps
from hpctrain.config.errors import CommError
from hpctrain.sharding.intervals import Interval


class SilentCollectives:
    """Collectives without others: they leave memory as the real ones would, with numbers that can be computed with.

    Sums are of this rank's part alone; what others would bring is this rank's part again.
    """

    name = "silent"

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def barrier(self) -> Steps:
        yield from ()

    def all_reduce(self, flat: torch.Tensor, op: str) -> Steps:
        yield from ()

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, op: str) -> Steps:
        out.copy_(flat[slice(*cuts[self.rank])])
        yield from ()

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[Interval]) -> Steps:
        own = flat[slice(*cuts[self.rank])].clone()
        if size := own.numel():
            times, rest = divmod(flat.numel(), size)
            flat[: times * size].view(times, size).copy_(own.expand(times, size))
            flat[times * size :] = own[:rest]
        yield from ()


class Solo:
    """Replaces the world where a layout is built (`hpctrain.engine.step.layout`). Nothing in it involves other
    ranks."""

    tracer = UNTRACED

    def __init__(self, rank: int, size: int, rehearsal: Rehearsal | None = None):
        """A `rehearsal` paces operations; the pretended device is not charged for what collectives move."""
        self.rank, self.size = rank, size
        self._rehearsal = rehearsal

    def is_near(self, one: int, other: int) -> bool:
        return True  # nothing is sent

    def group(
        self, ranks: Sequence[int], name: str = "", overlapped: bool = False, on_host: bool = False
    ) -> Communicator:
        """Return what the group's collectives leave in memory, without the group.

        If `overlapped` it has a lane, since overlapped operations need buffers of their own.
        """
        if len(ranks) == 1:
            return Communicator(ranks)
        silent = SilentCollectives(tuple(ranks).index(self.rank), len(ranks))
        backend = Backend(silent, None, "alone", 1)  # pyright: ignore[reportArgumentType] - nothing is sent
        lane = None
        if overlapped:
            lane = Lane(ranks, backend, Progress(threaded=False), ENDLESS, self._instruments(name))
        return Communicator(ranks, backend, instruments=self._instruments(name), lane=lane)

    def _instruments(self, name: str) -> Instruments:
        return Instruments(pace=self._rehearsal.pace(name) if self._rehearsal else None)

    def channel(self, peer: int, num_bytes: int, depth: int, name: str = ""):
        """Refuse: a part of a pipeline cannot run without what it receives."""
        raise CommError(f"rank {self.rank} runs alone, and has no rank {peer} to exchange activations with")
