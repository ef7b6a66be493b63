"""The settings by which groups of ranks are made: places, network, devices, tracer, rehearsal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from hpctrain.comm.progress.instruments import UNTRACED, RehearsedTiming, Tracer
from hpctrain.comm.topology import Topology, candidates

if TYPE_CHECKING:
    from hpctrain.comm.accelerators.base import Accelerator
    from hpctrain.comm.transports.abilities import Devices
    from hpctrain.comm.transports.members import GroupMessages
    from hpctrain.comm.transports.transport import Transport

KEPT_CHOICES = 256


class Network(Protocol):
    """Knows the links between the ranks. The planner's prices implement it. All ranks get the same answers."""

    def algorithm(self, operation: str, num_bytes: int, ranks: Sequence[int], by_domains: bool = True) -> str:
        """Return which of the `candidates` takes a group the least time."""
        ...

    def is_near(self, one: int, other: int) -> bool:
        """Say whether a message between two ranks uses fast links only."""
        ...

    def bytes_under_way(self, ranks: Sequence[int]) -> int:
        """Return the bytes that a rank of a group must have posted to each peer, for a full link."""
        ...


class Rehearsal(Protocol):
    """The pretended cluster on which groups communicate. The package `rehearsal` implements it."""

    def pace(self, group: str = "") -> RehearsedTiming:
        """Return the pace of a new group of this name."""
        ...

    def transport(self, messages: "GroupMessages", pace: RehearsedTiming | None) -> "Transport":
        """Return a transport that delivers these messages as late as the pretended network would. All of them must
        call."""
        ...

    def close(self) -> None:
        """Free shared resources. All ranks must call."""
        ...


@dataclass(frozen=True)
class Settings:
    """Everything that decides how a group communicates. Frozen: `World.configure` replaces it as a whole."""

    topology: Topology
    network: Network | None = None
    """The network of the cluster that the ranks are; None until it is known. It chooses algorithms, which can change a
    bit of the result, so it is the same on all ranks."""
    accelerator: "Accelerator | None" = None
    devices: "Devices | None" = None
    """The devices of all ranks. None: groups are for tensors of the host."""
    tracer: Tracer = UNTRACED
    rehearsal: Rehearsal | None = None

    def bytes_under_way(self, ranks: Sequence[int]) -> int:
        return self.network.bytes_under_way(ranks) if self.network and len(ranks) > 1 else 0

    def algorithm_by_bytes(self, ranks: Sequence[int], by_domains: bool = False) -> Callable[[int], str]:
        """Return a function that names a group's all-reduce algorithm by its bytes; `by_domains` as in `candidates`.

        It names the same one on all ranks of the group.
        """
        ranks, network = tuple(ranks), self.network

        @lru_cache(KEPT_CHOICES)
        def choose(num_bytes: int) -> str:
            if network is None:
                return candidates("all_reduce", num_bytes, len(ranks), by_domains)[0]
            return network.algorithm("all_reduce", num_bytes, ranks, by_domains)

        return choose
