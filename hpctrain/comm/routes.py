"""Makes what a group communicates by, as `Topology.route` says."""

from collections.abc import Sequence

from hpctrain.comm.communicator import Backend
from hpctrain.comm.costs import cheapest_flat
from hpctrain.comm.flat import Choose, FlatCollectives
from hpctrain.comm.hierarchy import Collectives, HierarchicalCollectives
from hpctrain.comm.shared import SharedCollectives
from hpctrain.comm.topology import Preferences, Topology
from hpctrain.comm.transport import HostTransport, Transport


def sub_communicator(mpi, parent, ranks: Sequence[int]):
    """Make an MPI communicator of these ranks alone, in this order; only they call."""
    group = parent.group.Incl(list(ranks))
    made = parent.Create_group(group)
    group.Free()
    return made


class RouteMaker:
    """Makes backends for groups of one world. Ranks of a group must call in the same order of calls."""

    def __init__(self, mpi, parent, topology: Topology, preferences: Preferences):
        self._mpi, self._parent = mpi, parent
        self._topology, self._preferences = topology, preferences

    def backend(self, ranks: Sequence[int]) -> Backend | None:
        """Return what the group communicates by; None for a single rank."""
        if len(ranks) == 1:
            return None
        route = self._topology.route(ranks, self._preferences.route)
        transport = self.transport(ranks)
        on_host = self._topology.ranks_on_host(self._parent.rank)
        return Backend(self._collectives(ranks, transport, self._preferences.route), transport, route.reason, on_host)

    def transport(self, ranks: Sequence[int]) -> Transport:
        return HostTransport(sub_communicator(self._mpi, self._parent, ranks))

    def _collectives(self, ranks: Sequence[int], transport: Transport, asked: str) -> Collectives:
        """Make the collectives of a group over its transport; those of its domains have their own."""
        route = self._topology.route(ranks, asked)
        if route.kind == "shared":
            return SharedCollectives(self._mpi, sub_communicator(self._mpi, self._parent, ranks))
        flat = FlatCollectives(transport, self._chooser(ranks))
        if route.kind == "messages":
            return flat
        domain = next(d for d in route.domains if ranks.index(self._parent.rank) in d)
        inner = None
        if len(domain) > 1:
            members = [ranks[position] for position in domain]
            inner = self._collectives(members, self.transport(members), "auto")
        return HierarchicalCollectives(inner, flat, transport, route.domains)

    def _chooser(self, ranks: Sequence[int]) -> Choose:
        preferences, num_ranks = self._preferences, len(ranks)
        asked = preferences.algorithm
        inside = len(self._topology.domains(ranks, "host")) == 1
        link = preferences.links.inside if inside else preferences.links.across

        def choose(operation: str, num_bytes: int) -> str:
            if asked == "doubling" and operation != "all_reduce":
                return "exchange"
            if asked != "auto":
                return asked
            return cheapest_flat(operation, num_bytes, num_ranks, link, preferences.links.overhead_seconds)

        return choose
