"""Makes the backend of a group: on the host as `Topology.route` says, on devices as `device_route` says."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hpctrain.comm.accelerators.kinds import Ability
from hpctrain.comm.collectives.flat import Collectives, FlatCollectives
from hpctrain.comm.collectives.hierarchical import HierarchicalCollectives
from hpctrain.comm.collectives.native import NativeCollectives, connect_native
from hpctrain.comm.collectives.shared import SharedCollectives
from hpctrain.comm.collectives.streamed import StreamedCollectives
from hpctrain.comm.groups.group import Backend, BackendPart
from hpctrain.comm.groups.settings import Settings
from hpctrain.comm.progress.instruments import RehearsedTiming
from hpctrain.comm.transports.abilities import UNPLANNED, UNPLANNED_SUMS, Devices, device_route, message_route
from hpctrain.comm.transports.members import GroupMessages, MessageSpace
from hpctrain.comm.transports.peer_memory import PeerMemory, connect_peers
from hpctrain.comm.transports.transport import DeviceTransport, HostTransport, Transport


class RouteMaker:
    """Makes backends for groups of one world. Ranks of a group must call in the same order of calls."""

    def __init__(self, space: MessageSpace, settings: Settings, groups: Any = None):
        """`groups` replaces torch's class of process groups, for tests."""
        self.space, self.rank = space, space.rank
        self._topology, self._settings = settings.topology, settings
        self._known_devices, self._rehearsal, self._groups = settings.devices, settings.rehearsal, groups
        self._parts: list[BackendPart] = []
        """Resources of the last group, in the order in which they were made."""
        self._has_pairs = False
        self._bridge = UNPLANNED_SUMS
        """The ability of the last group's messages between families; see `Devices`."""

    @property
    def _devices(self) -> Devices:
        assert self._known_devices is not None, "only groups with devices ask for them"
        return self._known_devices

    def shares_memory(self, ranks: Sequence[int]) -> bool:
        """Say whether these ranks' tensors are on one host, in memory that they may share."""
        return self._topology.route(ranks).kind == "shared" and not self._has_devices(ranks)

    def backend(
        self, ranks: Sequence[int], for_host: bool = False, pace: RehearsedTiming | None = None, has_pairs: bool = False
    ) -> Backend | None:
        """Return a group's backend; None for a single rank.

        With `for_host` it is for tensors of the host alone: no connection is made that takes device memory. `pace` is
        that of a rehearsed group. `has_pairs` is as for `NativeCollectives`.
        """
        if len(ranks) == 1:
            return None
        if for_host and self._known_devices is not None:
            as_hosts = replace(self._settings, devices=None)
            return RouteMaker(self.space, as_hosts).backend(ranks, pace=pace)
        self._parts, self._has_pairs = [], has_pairs
        if self._known_devices is not None:  # of sums: a library works while their messages move
            bridge = self._known_devices.bridge
            self._bridge = UNPLANNED_SUMS if bridge == UNPLANNED else bridge
        transport = self.transport(ranks, pace)
        collectives = self._collectives(ranks, transport, pace)
        if not isinstance(transport, DeviceTransport):
            return Backend(
                collectives, transport, self._topology.route(ranks).reason, self._parts, self.space.communicators.kept
            )
        natives = [part for part in self._parts if isinstance(part, NativeCollectives)]
        streamed = StreamedCollectives(collectives, self._devices.accelerator, transport, natives)
        return Backend(streamed, transport, self._device_reason(ranks), self._parts, self.space.communicators.kept)

    def message_backend(self, ranks: Sequence[int], pace: RehearsedTiming | None = None) -> Backend:
        """Return a backend for sends and receives; its collectives are for small tensors, and cost nothing to make."""
        self._parts = []
        peers, reason = None, self._topology.route(ranks).reason
        if self._has_devices(ranks):
            self._bridge = self._devices.bridge
            peers = self._connect_peers(ranks)
            reason = message_route(self._family(ranks[0]), self._family(ranks[-1]), self._bridge)[1]
            reason = f"{reason}; {peers.reason}" if isinstance(peers, Ability) else reason
        if isinstance(peers, PeerMemory):
            self._parts.append(peers)
        transport = self.transport(ranks, pace, peers if isinstance(peers, PeerMemory) else None)
        return Backend(self._flat(ranks, transport), transport, reason, self._parts, self.space.communicators.kept)

    def _connect_peers(self, ranks: Sequence[int]) -> PeerMemory | Ability | None:
        """Return how two ranks' devices copy from each other's memory, or why they cannot.

        None where that is no better than MPI. It is better on one host, with an MPI that is not given device memory.
        """
        places = [self._topology.places[rank] for rank in ranks]
        if len(ranks) != 2 or places[0].host != places[1].host or any(place.kind == "cpu" for place in places):
            return None
        one, other = (self._family(rank) for rank in ranks)
        if message_route(one, other, self._bridge)[0] == "direct":
            return None
        return connect_peers(self.space.members(ranks), self._devices.accelerator)

    def transport(
        self, ranks: Sequence[int], pace: RehearsedTiming | None = None, peers: PeerMemory | None = None
    ) -> Transport:
        """Return messages among `ranks`. All of them must call. `peers` are two devices that copy from each other's
        memory."""
        messages = GroupMessages(self.space.members(ranks))
        self._parts.append(messages)
        if self._has_devices(ranks):
            own = self._family(self.rank)
            direct = [
                position
                for position, rank in enumerate(ranks)
                if rank != self.rank and message_route(own, self._family(rank), self._bridge)[0] == "direct"
            ]
            under_way = self._settings.bytes_under_way(ranks)
            return DeviceTransport(messages, self._devices.accelerator, direct, peers, under_way)
        if self._rehearsal is None:
            return HostTransport(messages)
        return self._rehearsal.transport(messages, pace)

    def _collectives(
        self, ranks: Sequence[int], transport: Transport, pace: RehearsedTiming | None = None
    ) -> Collectives:
        """Make the collectives of a group over its transport; its domains have their own collectives."""
        if not isinstance(transport, DeviceTransport):
            route = self._topology.route(ranks)
            if route.kind == "shared":
                on_host = self._topology.ranks_on_host(self.rank)
                shared = SharedCollectives(self.space.members(ranks), on_host)
                self._parts.append(shared)
                return shared
            domains = route.domains
        else:
            own, accelerator = self._family(self.rank), self._devices.accelerator
            families = self._topology.domains(ranks, "family")
            if len(families) == 1 and device_route(own, own)[0] == "native":
                members, store = self.space.members(ranks), self._devices.store
                host = self._flat(ranks, transport)
                native = connect_native(members, accelerator, store, host, self._has_pairs, self._groups)
                self._parts.append(native)
                return native
            hosts = self._topology.domains(ranks, "host")
            domains = next((d for d in (families, hosts) if 1 < len(d) < len(ranks)), ())
        if not domains:
            return self._flat(ranks, transport)
        own_domain = next(domain for domain in domains if ranks.index(self.rank) in domain)
        members, inner = [ranks[position] for position in own_domain], None
        if len(members) > 1:
            inner = self._collectives(members, self.transport(members, pace), pace)
        return HierarchicalCollectives(inner, self._flat(ranks, transport, by_domains=True), domains)

    def _flat(self, ranks: Sequence[int], transport: Transport, by_domains: bool = False) -> FlatCollectives:
        algorithm, under_way = (
            self._settings.algorithm_by_bytes(ranks, by_domains),
            self._settings.bytes_under_way(ranks),
        )
        return FlatCollectives(transport, algorithm, under_way)

    def _has_devices(self, ranks: Sequence[int]) -> bool:
        return self._known_devices is not None and any(self._topology.places[rank].kind != "cpu" for rank in ranks)

    def _family(self, rank: int):
        return self._devices.families[self._topology.places[rank].family]

    def _device_reason(self, ranks: Sequence[int]) -> str:
        names = dict.fromkeys(self._topology.places[rank].family for rank in ranks)
        one = self._devices.families[next(iter(names))]
        if len(names) == 1:
            return device_route(one, one)[1]
        reasons = ((n, device_route(one, self._devices.families[n], self._bridge)[1]) for n in names)
        return "; ".join(f"{name}: {reason}" for name, reason in reasons if name != one.name)
