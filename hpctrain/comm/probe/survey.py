"""The probe from end to end: all ranks measure, rank 0 has the cluster."""

import os
from collections.abc import Mapping, Sequence

from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.accelerators.detect import FAMILY_VARIABLE
from hpctrain.comm.probe.describe import describe
from hpctrain.comm.probe.device_timing import measure_device
from hpctrain.comm.probe.link_timing import ACROSS, measure_messages, pair_classes
from hpctrain.comm.probe.overlap_slowdown import measure_overlap
from hpctrain.comm.topology import Place
from hpctrain.comm.world import World
from hpctrain.config.cluster import Cluster, check_name
from hpctrain.config.errors import TopologyError

# The name of the fabric that a rank's host is on. MPI does not know it; without it all hosts are taken to be on one.
FABRIC_VARIABLE = "HPCTRAIN_FABRIC"
FABRIC = "network"
SHARE_FOR_DEVICES, SHARE_FOR_OVERLAP = 0.55, 0.1


def probe_cluster(
    world: World,
    accelerator: Accelerator,
    seconds: float,
    environment: Mapping[str, str] = os.environ,
    with_overlap: bool = True,
) -> tuple[Cluster, dict[str, str]] | None:
    """Measure for about so many seconds; return the cluster and comments on its keys on rank 0, None on others.

    `with_overlap` says whether to measure by how much communication slows down computing; that takes half a second at
    the least. All ranks must call. Raises TopologyError on all of them where the ranks of a host say that it is on
    different fabrics.
    """
    places = world.topology.places
    fabrics = world.broadcast_object(world.gather_objects(environment.get(FABRIC_VARIABLE, FABRIC)))
    with world.all_or_none():
        check_names(places, fabrics)
    comm = world.group(range(world.size), "probe", overlapped=world.has_threads)
    classes = pair_classes(places, fabrics)
    for_devices, for_overlap = (SHARE_FOR_DEVICES, SHARE_FOR_OVERLAP) if classes else (1.0, 0.0)
    if not with_overlap:
        for_devices, for_overlap = for_devices + for_overlap, 0.0
    ranks_on_host = world.topology.ranks_on_host(world.rank)
    figures = measure_device(comm, accelerator, world.place.family, ranks_on_host, seconds * for_devices)
    if with_overlap:
        times = measure_overlap(comm, accelerator, figures.memory_bytes, seconds * for_overlap)
        figures = figures._replace(overlap_slowdown=times)
    measured = measure_messages(world, comm, accelerator, classes, seconds * (1 - for_devices - for_overlap))
    gathered = world.gather_objects(figures)
    return describe(places, fabrics, gathered, measured) if gathered else None


def check_names(places: Sequence[Place], fabrics: Sequence[str]) -> None:
    """Refuse names that a cluster cannot have, and hosts that are on several fabrics. Raises TopologyError. Pure."""
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
