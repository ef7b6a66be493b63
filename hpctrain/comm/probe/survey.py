"""The whole probe: all ranks measure, rank 0 gets the cluster and the comments of its file."""

import os
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.accelerators.kinds import FAMILY_VARIABLE
from hpctrain.comm.probe.device_timing import DeviceFigures, measure_device, measure_overlap
from hpctrain.comm.probe.link_timing import ACROSS, MeasuredLinks, measure_messages, pair_classes
from hpctrain.comm.probe.load import MOST_SPREAD, LoadWatch, looks_at_load
from hpctrain.comm.start.launcher import free_host_bytes
from hpctrain.comm.topology import Place
from hpctrain.comm.world import World
from hpctrain.config.clusters.cluster import (
    Cluster,
    Fabric,
    Family,
    LinkClass,
    MessageTiming,
    Nic,
    Nodes,
    ProductSpeed,
    check_name,
)
from hpctrain.config.errors import TopologyError

# The name of the fabric that a rank's host is on. MPI does not know it; without it all hosts are taken to be on one.
FABRIC_VARIABLE = "HPCTRAIN_FABRIC"
FABRIC = "network"
SHARE_FOR_DEVICES, SHARE_FOR_OVERLAP = 0.55, 0.1


class Survey(NamedTuple):
    """The result of a probe."""

    cluster: Cluster
    comments: dict[str, str]
    """Comments for the cluster's file, by key."""
    disturbance: str
    """The reason why the figures are not those of a quiet machine; empty: they are."""


def probe_cluster(
    world: World,
    accelerator: Accelerator,
    seconds: float,
    environment: Mapping[str, str] = os.environ,
    with_overlap: bool = True,
) -> Survey | None:
    """Measure for about so many seconds; return the survey on rank 0, None on others.

    `with_overlap` says whether to measure the slowdown of computing by communication, which takes half a second or
    more. All ranks must call. Raises TopologyError on all of them where the ranks of a host name different fabrics.
    """
    places, watch = world.topology.places, LoadWatch()
    fabrics = world.all_objects(environment.get(FABRIC_VARIABLE, FABRIC))
    with world.all_or_none():
        check_names(places, fabrics)
    comm = world.group(range(world.size), "probe", overlapped=world.has_threads)
    classes = pair_classes(places, fabrics)
    for_devices, for_overlap = (SHARE_FOR_DEVICES, SHARE_FOR_OVERLAP) if classes else (1.0, 0.0)
    if not with_overlap:
        for_devices, for_overlap = for_devices + for_overlap, 0.0
    ranks_on_host = world.topology.ranks_on_host(world.rank)
    every = world.all_objects(accelerator.measured_dtypes)
    dtypes = list(dict.fromkeys(name for names in every for name in names))
    family = world.place.family
    figures = measure_device(comm, accelerator, family, ranks_on_host, seconds * for_devices, dtypes)
    if with_overlap:
        times = measure_overlap(comm, accelerator, figures.memory_bytes, seconds * for_overlap)
        figures = figures._replace(overlap_slowdown=times)
    if accelerator.kind != "cpu":
        figures = figures._replace(free_host_bytes=free_host_bytes())
    measured = measure_messages(world, comm, accelerator, classes, seconds * (1 - for_devices - for_overlap))
    disturbance = watch.disturbance(world)
    gathered = world.gather_objects(figures)
    if not gathered:
        return None
    cluster, comments = describe(places, fabrics, gathered, measured)
    return Survey(cluster, comments, disturbance or (unequal_ranks(gathered) if looks_at_load() else ""))


def unequal_ranks(figures: Sequence[DeviceFigures]) -> str:
    """Say by what factor ranks of a family differ where one of them was disturbed; empty: none was. Pure."""
    for family in dict.fromkeys(each.family for each in figures):
        spread = statistics.median(_spreads([each for each in figures if each.family == family]))
        if spread > MOST_SPREAD:
            return f"ranks of family {family} differ by {spread:.1f} times"
    return ""


def _spreads(figures: Sequence[DeviceFigures]) -> list[float]:
    """Return the ratio of the fastest rank to the slowest, for each figure that all of them have."""
    shapes = [of for of in figures[0].flops_per_second if all(of in other.flops_per_second for other in figures)]
    by_figure = [
        [other.memory_bytes_per_second for other in figures],
        *([other.flops_per_second[of] for other in figures] for of in shapes),
    ]
    return [max(of_ranks) / min(of_ranks) for of_ranks in by_figure]


def check_names(places: Sequence[Place], fabrics: Sequence[str]) -> None:
    """Refuse invalid names, and hosts on several fabrics. Raises TopologyError. Pure."""
    of_host: dict[str, str] = {}
    for rank, (place, fabric) in enumerate(zip(places, fabrics, strict=True)):
        for variable, name in ((FAMILY_VARIABLE, place.family), (FABRIC_VARIABLE, fabric)):
            try:
                check_name(name)
            except ValueError as error:
                raise TopologyError(f"{variable} on rank {rank}: {error}") from None
        if fabric == ACROSS:
            raise TopologyError(
                f"{FABRIC_VARIABLE}={fabric} on rank {rank}: that is what the connection of several fabrics is called;"
                " choose another name"
            )
        if of_host.setdefault(place.host, fabric) != fabric:
            raise TopologyError(
                f"{FABRIC_VARIABLE}={fabric} on rank {rank}, but other ranks of host {place.host} say"
                f" '{of_host[place.host]}'; give all ranks of a host the same"
            )


DIGITS = 4
"""Significant digits of measured figures; more would only be noise."""
WIDE = 1.2
"""Ratio of figures within a family above which a comment reports the difference."""


def describe(
    places: Sequence[Place], fabrics: Sequence[str], figures: Sequence[DeviceFigures], measured: Sequence[MeasuredLinks]
) -> tuple[Cluster, dict[str, str]]:
    """Return the cluster and comments by its keys; places, names of fabrics and figures are by rank."""
    comments: dict[str, str] = {}
    families = {}
    for family in dict.fromkeys(place.family for place in places):
        ranks = [rank for rank, place in enumerate(places) if place.family == family]
        at_once = max(sum(place.host == places[rank].host for place in places) for rank in ranks)
        families[family] = _family([figures[rank] for rank in ranks], at_once, f"families.{family}", comments)
    across: dict[str, list[MeasuredLinks]] = {}
    for m in measured:
        if m.pairs.fabric:
            across.setdefault(m.pairs.fabric, []).append(m)
    described = {}
    for name, result in across.items():
        described[name] = Fabric(origin="measured", latency_seconds=_short(min(m.latency_seconds for m in result)))
        comments[f"fabrics.{name}"] = "Between nodes. The latency is that of an empty message, of the nearest families."
    inside = [m for m in measured if m.pairs.fabric is None]
    nodes = _nodes(places, fabrics, [each.free_host_bytes for each in figures], inside, across, comments)
    links = tuple(_link(m, f"links.{i}", comments) for i, m in enumerate(measured))
    return Cluster(families=families, fabrics=described, nodes=nodes, links=links), comments


def _family(figures: Sequence[DeviceFigures], at_once: int, key: str, comments: dict[str, str]) -> Family:
    first = figures[0]
    measured_by_all = [of for of in first.flops_per_second if all(of in other.flops_per_second for other in figures)]
    speeds = {of: statistics.median(other.flops_per_second[of] for other in figures) for of in measured_by_all}
    best: dict[str, float] = {}
    for (dtype, _), speed in speeds.items():
        best[dtype] = max(best.get(dtype, 0.0), speed)
    copies = [other.host_copy_bytes_per_second for other in figures if other.host_copy_bytes_per_second]
    spread = max(_spreads(figures))
    differ = f" They differ by up to {spread:.2f}x." if spread > WIDE else ""
    comments[key] = (
        f"{len(figures)} rank{'s' if len(figures) > 1 else ''}; figures are the median rank's.{differ}"
        f" {at_once} rank{'s' if at_once > 1 else ''} of a host measured at once."
    )
    comments[f"{key}.memory_bytes"] = (
        "The host's, shared evenly among its ranks." if first.kind == "cpu" else "A rank's share of the device."
    )
    reserved = max(other.reserved_bytes for other in figures)
    if reserved:
        comments[f"{key}.reserved_bytes"] = (
            "Context and other users, as measured; 1 GiB for a library of collectives and 4% for fragmentation."
        )
    comments[f"{key}.memory_bytes_per_second"] = "Of a large copy, bytes read and bytes written."
    comments[f"{key}.sustained_flops_per_second"] = "Of the fastest product below."
    comments[f"{key}.products"] = (
        "[m, k] @ [k, n]; shapes that would have taken too long are left out. Each the best of some rounds."
    )
    started = [other.operation_seconds for other in figures if other.operation_seconds]
    if started:
        comments[f"{key}.operation_seconds"] = "Of small operations of a forward and a backward pass: the host's time."
    slowed = [other.overlap_slowdown for other in figures if other.overlap_slowdown]
    if slowed:
        comments[f"{key}.overlap_slowdown"] = "A product while an all-reduce of all ranks is in flight, of one without."
    return Family(
        origin="measured",
        kind=first.kind,
        model=first.model,
        memory_bytes=min(other.memory_bytes for other in figures),
        reserved_bytes=reserved or None,
        memory_bytes_per_second=_short(statistics.median(other.memory_bytes_per_second for other in figures)),
        host_copy_bytes_per_second=_short(statistics.median(copies)) if copies else None,
        sustained_flops_per_second={dtype: _short(speed) for dtype, speed in best.items()},
        products=tuple(
            ProductSpeed(dtype=dtype, shape=shape, flops_per_second=_short(speed))
            for (dtype, shape), speed in speeds.items()
        ),
        operation_seconds=_short(statistics.median(started)) if started else None,
        overlap_slowdown=_short(statistics.median(slowed)) if slowed else None,
        measured_at_once=at_once,
    )


def _nodes(
    places: Sequence[Place],
    fabrics: Sequence[str],
    left_on_hosts: Sequence[int | None],
    inside: Sequence[MeasuredLinks],
    across: dict[str, list[MeasuredLinks]],
    comments: dict[str, str],
) -> tuple[Nodes, ...]:
    """Return the hosts, equal ones together, in the order in which each kind first appears.

    `left_on_hosts` is by rank: the bytes of the host's memory that its job may fill.
    """
    hosts: dict[str, dict[str, list[int]]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(place.host, {}).setdefault(place.family, []).append(rank)
    equivalent: dict[tuple, list[str]] = {}
    for host, families in hosts.items():
        own = fabrics[min(rank for ranks in families.values() for rank in ranks)]
        counts = tuple((family, len(ranks)) for family, ranks in families.items())
        equivalent.setdefault((own, counts), []).append(host)
    order = [rank for kind in equivalent.values() for host in kind for ranks in hosts[host].values() for rank in ranks]
    result = []
    for (own, counts), kind in equivalent.items():
        devices = dict(counts)
        pairs = [m for m in inside if set(m.pairs.families) <= set(devices)]
        slowest = max(pairs, key=lambda m: -m.bytes_per_second(1), default=None)
        several = sum(devices.values()) > 1 and slowest is not None
        key = f"nodes.{len(result)}"
        comments[key] = f"{', '.join(kind[:4])}{' and others' if len(kind) > 4 else ''}."
        if several:
            comments[f"{key}.link_latency_seconds"] = "Of the slowest pair of families on the node."
        nics = tuple(_nic(name, across[name]) for name in (own, ACROSS) if name in across)
        if nics:
            comments[f"{key}.nics"] = "What all flows of a node got together, through however many NICs it has."
        ranks = tuple(rank for host in kind for of_family in hosts[host].values() for rank in of_family)
        free = [num_bytes for rank in ranks if (num_bytes := left_on_hosts[rank])]
        if free:
            comments[f"{key}.host_memory_bytes"] = "What the host, the job's cgroup or Slurm's limit left when probed."
        result.append(
            Nodes(
                origin="measured" if several else None,
                count=len(kind),
                devices=devices,
                link_latency_seconds=_short(slowest.latency_seconds) if several and slowest else None,
                link_bytes_per_second=_short(slowest.bytes_per_second(1)) if several and slowest else None,
                nics=nics,
                host_memory_bytes=min(free, default=None),
                ranks=None if order == sorted(order) else ranks,
            )
        )
    return tuple(result)


def _nic(fabric: str, measured: Sequence[MeasuredLinks]) -> Nic:
    together = _short(max(m.bytes_per_second(flows) for m in measured for flows in m.pairs.flows))
    return Nic(origin="measured", fabric=fabric, send_bytes_per_second=together, receive_bytes_per_second=together)


def _link(measured: MeasuredLinks, key: str, comments: dict[str, str]) -> LinkClass:
    pairs = measured.pairs
    where = f"between nodes, by {pairs.fabric}" if pairs.fabric else "inside a node"
    flows = f", and up to {len(pairs.pairs)} such pairs at once" if len(pairs.pairs) > 1 else ", which represent all"
    source, target = next(iter(pairs.pairs))
    comments[key] = f"{pairs.families[0]} to {pairs.families[1]}, {where}: from rank {source} to rank {target}{flows}."
    comments[f"{key}.latency_seconds"] = "Half of what an empty message takes there and back."
    comments[f"{key}.bytes_per_second"] = "Of the largest message, once it is in flight."
    comments[f"{key}.times"] = (
        "Per direction, the slowest flow; the best of some rounds. What would have taken too long is left out."
    )
    times = [
        MessageTiming(message_bytes=size, flows=flows, seconds=_short(seconds))
        for (flows, size), seconds in measured.seconds.items()
    ]
    return LinkClass(
        origin="measured",
        families=pairs.families,
        fabric=pairs.fabric,
        latency_seconds=_short(measured.latency_seconds),
        bytes_per_second=_short(measured.bytes_per_second(1)),
        times=tuple(times),
    )


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
