"""The route of tensors between two families, and its reason. Each family's abilities are probed at the start."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.accelerators.kinds import Ability
from hpctrain.comm.topology import Topology


@dataclass(frozen=True)
class FamilyAbilities:
    """The abilities that all ranks of a family have."""

    name: str
    kind: str
    native: Ability
    """The maker's library (NCCL, RCCL, oneCCL, HCCL), and whether it works."""
    direct: Ability
    """Whether MPI accepts pointers to memory of the devices."""


UNPLANNED = Ability(
    True,
    "by plans of which it is proven that no rank waits in an operation of a library for one that waits in such a"
    " message; else staged",
)
"""The answer before there is a plan, for a probe: it times messages while no library works."""
UNPLANNED_SUMS = Ability(False, "staged before there is a plan: a library works meanwhile")


@dataclass(frozen=True)
class Devices:
    """This rank's device, and facts that are the same on all ranks: groups with devices in them are made with both."""

    accelerator: Accelerator
    families: Mapping[str, FamilyAbilities]
    bridge: Ability = UNPLANNED
    """Whether MPI moves device memory between families while one of them uses its library."""
    store: Any = None
    """Store by which ranks of a library's group find each other; None where no family uses one."""


class DescribedRoute(NamedTuple):
    """The route between the ranks of two families, and its reason."""

    family: str
    other: str
    route: str
    reason: str


ON_HOST = Ability(False, "host memory")


def device_route(one: FamilyAbilities, other: FamilyAbilities, bridge: Ability = UNPLANNED) -> tuple[str, str]:
    """Return the route between ranks of two families (or of one, given twice), and the reason. Pure.

    | families                | route  | collectives            | messages                       | if           |
    |-------------------------|--------|------------------------|--------------------------------|--------------|
    | cpu, cpu                | host   | `Topology.route`       | MPI on host memory             |              |
    | the same, of devices    | native | the maker's library    | as in the next two rows        | library      |
    | both of devices         | direct | ours over messages     | MPI on device memory           | probe of MPI |
    | both of devices         | staged | ours over messages     | MPI through pinned host memory |              |
    | cpu and one of devices  | staged | ours over messages     | ... at the device's end        |              |

    In a group of several families each uses its own route inside, and the slower ones carry shards across.

    MPI on device memory and a library may need the same devices at once, and wait for each other: NVIDIA's guide calls
    it "not guaranteed to be safe". So messages inside a family that has a library are never direct. Between families,
    of which one has a library, they are as `bridge` says.
    """
    if one.kind == other.kind == "cpu":
        return "host", "memory of the host: shared where ranks are on one, MPI across"
    if one.name == other.name and one.native.works:
        return "native", one.native.reason
    return message_route(one, other, bridge)


def message_route(one: FamilyAbilities, other: FamilyAbilities, bridge: Ability = UNPLANNED) -> tuple[str, str]:
    """Return the route of messages between ranks of two families, of which at least one has devices. Pure."""
    for family in (one, other):
        if family.kind == "cpu":
            return "staged", f"{family.name} has host memory, where the other's tensors go through pinned buffers"
        if not family.direct.works:
            why = "" if one.name != other.name or one.native.works else f"; no native library: {one.native.reason}"
            return "staged", f"MPI is not given memory of {family.name}: {family.direct.reason}{why}"
    names = ", ".join(dict.fromkeys((one.name, other.name)))
    reason = f"MPI moves memory of {names}: {one.direct.reason}"
    if not (one.native.works or other.native.works):
        return "direct", reason
    if one.name == other.name:
        return "staged", f"MPI is given no memory of {names} while its library uses the devices: that may deadlock"
    return ("direct", f"{reason}; {bridge.reason}") if bridge.works else ("staged", bridge.reason)


def bridged(names: Sequence[str], families: Mapping[str, FamilyAbilities]) -> frozenset[str]:
    """Return the families whose device memory MPI moves, where their messages depend on `Devices.bridge`. Pure."""
    known = {name: families[name] for name in names if name in families and families[name].direct.works}
    depends = len(known) > 1 and any(family.native.works for family in known.values())
    return frozenset(known) if depends else frozenset()


def describe_routes(
    topology: Topology, families: Mapping[str, FamilyAbilities], bridge: Ability = UNPLANNED
) -> list[DescribedRoute]:
    """Return the route of every pair of families, each with itself first. Pure.

    Families that are not in `families` have host memory.
    """
    names = topology.families
    known = {name: families.get(name, FamilyAbilities(name, "cpu", ON_HOST, ON_HOST)) for name in names}
    described = []
    for i, name in enumerate(names):
        for other in names[i:]:
            if name == other and len(topology.ranks_of(name)) == 1:
                described.append(DescribedRoute(name, other, "alone", "a single rank"))
            else:
                described.append(DescribedRoute(name, other, *device_route(known[name], known[other], bridge)))
    return described


def all_of(abilities: Sequence[Ability]) -> Ability:
    """Return the ability that several ranks share: the first rank that lacks it gives the reason. Pure."""
    return next((ability for ability in abilities if not ability.works), abilities[0])


def combine(topology: Topology, result: Sequence[tuple[Ability, Ability | None]]) -> dict[str, FamilyAbilities]:
    """Return the families' abilities from the ranks' reports. Pure.

    Each rank reports `native`. One rank of each host reports `direct`, the others None.
    """
    families = {}
    places = topology.places
    for name in topology.families:
        members = topology.ranks_of(name)
        kind = places[members[0]].kind
        if kind == "cpu":
            families[name] = FamilyAbilities(name, kind, ON_HOST, ON_HOST)
            continue
        hosts = {places[rank].host for rank in members}
        probed = [direct for place, (_, direct) in zip(places, result, strict=True) if direct and place.host in hosts]
        families[name] = FamilyAbilities(name, kind, all_of([result[rank][0] for rank in members]), all_of(probed))
    return families
