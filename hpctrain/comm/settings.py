"""What groups of ranks are made by: devices, routes, a tracer, and whether they are rehearsed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from hpctrain.comm.instruments import UNTRACED, Pace, Tracer
from hpctrain.comm.topology import Preferences, Topology

if TYPE_CHECKING:
    from hpctrain.comm.accelerators.base import Accelerator
    from hpctrain.comm.routes.abilities import Devices
    from hpctrain.comm.routes.transport import Transport


class Rehearsal(Protocol):
    """The pretended cluster on which groups communicate. The package `rehearsal` implements it."""

    def pace(self, group: str = "") -> Pace:
        """Return the pace of a new group."""
        ...

    def transport(self, comm, ranks: Sequence[int], pace: Pace | None) -> "Transport":
        """Return messages among `ranks`, as late as on the pretended network. All of them must call."""
        ...

    def close(self) -> None:
        """Free what is shared. All ranks must call."""
        ...


@dataclass(frozen=True)
class Settings:
    """Everything that decides how a group communicates. Frozen: `World.configure` replaces it as a whole."""

    topology: Topology
    preferences: Preferences = field(default_factory=Preferences)
    """Routes and algorithms, with the network that chooses them. The same on all ranks."""
    accelerator: "Accelerator | None" = None
    devices: "Devices | None" = None
    """The devices of all ranks. None: groups are for tensors of the host."""
    tracer: Tracer = UNTRACED
    rehearsal: Rehearsal | None = None
