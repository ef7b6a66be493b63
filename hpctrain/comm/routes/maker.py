"""Makes what a group communicates by: on the host as `Topology.route` says, on devices as `device_route` says."""

from collections.abc import Sequence
from functools import partial

from hpctrain.comm.accelerators.kinds import KINDS
from hpctrain.comm.collectives.flat import FlatCollectives
from hpctrain.comm.collectives.hierarchical import Collectives, HierarchicalCollectives
from hpctrain.comm.collectives.shared import SharedCollectives
from hpctrain.comm.communicator import Backend
from hpctrain.comm.routes.abilities import Ability, Devices, device_route, message_route
from hpctrain.comm.routes.device_transport import DeviceTransport
from hpctrain.comm.routes.native import NativeCollectives, connect_native
from hpctrain.comm.routes.nccl import NcclCollectives
from hpctrain.comm.routes.peer_memory import PeerMemory, connect_peers
from hpctrain.comm.routes.streamed import ByMemory, StreamedCollectives
from hpctrain.comm.routes.torch_groups import load_library
from hpctrain.comm.routes.transport import HostTransport, Transport
from hpctrain.comm.settings import Pace, Settings


def sub_communicator(mpi, parent, ranks: Sequence[int]):
    """Make an MPI communicator of these ranks alone, in this order; only they call."""
    group = parent.group.Incl(list(ranks))
    made = parent.Create_group(group)
    group.Free()
    return made


class RouteMaker:
    """Makes backends for groups of one world. Ranks of a group must call in the same order of calls."""

    def __init__(self, mpi, parent, settings: Settings, nccl=None):
        """`parent` is the communicator of all ranks. `nccl` replaces CuPy's module, for tests."""
        self.mpi, self.rank = mpi, parent.rank
        self._parent = parent
        self._topology, self._settings = settings.topology, settings
        self._known_devices, self._rehearsal, self._nccl = settings.devices, settings.rehearsal, nccl
        self._natives: list[NativeCollectives] = []
        """Of the last group."""

    @property
    def _devices(self) -> Devices:
        assert self._known_devices is not None, "only groups with devices ask for them"
        return self._known_devices

    def sub_communicator(self, ranks: Sequence[int]):
        return sub_communicator(self.mpi, self._parent, ranks)

    def shares_memory(self, ranks: Sequence[int]) -> bool:
        """Say whether these ranks' tensors are on one host, in memory that they may share."""
        equivalent = self._topology.route(ranks).kind == "shared"
        return equivalent and not self._has_devices(ranks)

    def backend(self, ranks: Sequence[int], for_host: bool = False) -> Backend | None:
        """Return what the group communicates by; None for a single rank. With `for_host` it is for tensors of the host
        alone, as if no rank had a device: nothing is connected that takes memory of devices."""
        if len(ranks) == 1:
            return None
        on_host = self._topology.ranks_on_host(self.rank)
        if self._has_devices(ranks) and not for_host:
            self._natives = []
            transport = self._device_transport(ranks)
            inner = self._device_collectives(ranks, transport)
            collectives = StreamedCollectives(inner, self._devices.accelerator, transport, self._natives)
            return Backend(collectives, transport, self._device_reason(ranks), on_host)
        route, pace = self._topology.route(ranks), self._pace()
        transport = self.transport(ranks, pace)
        collectives = self._collectives(ranks, transport, pace)
        return Backend(collectives, transport, route.reason, on_host, pace)

    def message_backend(self, ranks: Sequence[int]) -> Backend:
        """Return what a group sends and receives by; its collectives are for small things, and cost nothing to make."""
        pace = self._pace()
        if not self._has_devices(ranks):
            transport, reason = self.transport(ranks, pace), self._topology.route(ranks).reason
        else:
            peers = self._connect_peers(ranks)
            transport = self._device_transport(ranks, peers if isinstance(peers, PeerMemory) else None)
            reason = message_route(self._family(ranks[0]), self._family(ranks[-1]))[1]
            reason = f"{reason}; {peers.reason}" if isinstance(peers, Ability) else reason
        flat = self._flat(ranks, transport)
        return Backend(flat, transport, reason, self._topology.ranks_on_host(self.rank), pace)

    def _connect_peers(self, ranks: Sequence[int]) -> PeerMemory | Ability | None:
        """Return how two ranks' devices copy from each other's memory, or why not, where that is better than MPI: on
        one host, with an MPI that is not given memory of devices."""
        places = [self._topology.places[rank] for rank in ranks]
        if len(ranks) != 2 or places[0].host != places[1].host or any(place.kind == "cpu" for place in places):
            return None
        one, other = (self._family(rank) for rank in ranks)
        if message_route(one, other, self._devices.bridge)[0] == "direct":
            return None
        return connect_peers(self.mpi, self.sub_communicator(ranks), self._devices.accelerator)

    def _pace(self) -> Pace | None:
        return self._rehearsal.pace() if self._rehearsal else None

    def transport(self, ranks: Sequence[int], pace: Pace | None = None) -> Transport:
        comm = self.sub_communicator(ranks)
        if self._rehearsal is None:
            return HostTransport(comm)
        return self._rehearsal.transport(comm, ranks, pace)

    def _collectives(self, ranks: Sequence[int], transport: Transport, pace: Pace | None = None) -> Collectives:
        """Make the collectives of a group over its transport; those of its domains have their own."""
        route = self._topology.route(ranks)
        if route.kind == "shared":
            return SharedCollectives(self.mpi, self.sub_communicator(ranks))
        if route.kind == "messages":
            return self._flat(ranks, transport)
        members = self._members(ranks, route.domains)
        inner = None
        if len(members) > 1:
            inner = self._collectives(members, self.transport(members, pace), pace)
        flat = self._flat(ranks, transport, by_domains=True)
        return HierarchicalCollectives(inner, flat, route.domains)

    def _flat(self, ranks: Sequence[int], transport: Transport, by_domains: bool = False) -> FlatCollectives:
        return FlatCollectives(transport, self._settings.algorithm_by_bytes(ranks, by_domains))

    def _members(self, ranks: Sequence[int], domains: Sequence[Sequence[int]]) -> list[int]:
        """Return the ranks of this rank's domain."""
        domain = next(d for d in domains if ranks.index(self.rank) in d)
        return [ranks[position] for position in domain]

    def _has_devices(self, ranks: Sequence[int]) -> bool:
        return self._known_devices is not None and any(self._topology.places[rank].kind != "cpu" for rank in ranks)

    def _family(self, rank: int):
        return self._devices.families[self._topology.places[rank].family]

    def _device_transport(self, ranks: Sequence[int], peers: PeerMemory | None = None) -> DeviceTransport:
        own = self._family(self.rank)
        direct = [
            position
            for position, rank in enumerate(ranks)
            if rank != self.rank and message_route(own, self._family(rank), self._devices.bridge)[0] == "direct"
        ]
        comm = self.sub_communicator(ranks)
        return DeviceTransport(self.mpi, comm, self._devices.accelerator, direct, peers=peers)

    def _device_collectives(self, ranks: Sequence[int], transport: DeviceTransport) -> Collectives:
        """Make the collectives of a group with devices: its families' own inside, messages across."""
        families = self._topology.domains(ranks, "family")
        if len(families) == 1:
            own = self._family(self.rank)
            if device_route(own, own)[0] == "native":
                accelerator = self._devices.accelerator
                make = partial(NcclCollectives, self._nccl) if self._nccl else load_library(KINDS[own.kind]).make
                self._natives.append(connect_native(make, transport.comm, accelerator))
                return ByMemory(self._natives[-1], self._flat(ranks, transport), accelerator)
        hosts = self._topology.domains(ranks, "host")
        domains = next((d for d in (families, hosts) if 1 < len(d) < len(ranks)), None)
        if domains is None:
            return self._flat(ranks, transport)
        flat = self._flat(ranks, transport, by_domains=True)
        return HierarchicalCollectives(self._inside(self._members(ranks, domains)), flat, domains)

    def _inside(self, members: Sequence[int]) -> Collectives | None:
        if len(members) == 1:
            return None
        if self._has_devices(members):
            return self._device_collectives(members, self._device_transport(members))
        return self._collectives(members, self.transport(members))

    def _device_reason(self, ranks: Sequence[int]) -> str:
        names = dict.fromkeys(self._topology.places[rank].family for rank in ranks)
        one = self._devices.families[next(iter(names))]
        if len(names) == 1:
            return device_route(one, one)[1]
        reasons = ((n, device_route(one, self._devices.families[n], self._devices.bridge)[1]) for n in names)
        return "; ".join(f"{name}: {reason}" for name, reason in reasons if name != one.name)
