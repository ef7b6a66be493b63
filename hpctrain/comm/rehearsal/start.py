"""Makes ranks into the devices of a described cluster."""

from hpctrain.cluster import Cluster
from hpctrain.comm.rehearsal.device import RehearsedAccelerator
from hpctrain.comm.rehearsal.network import network_of
from hpctrain.comm.topology import places_of
from hpctrain.comm.world import World
from hpctrain.errors import LaunchError, TopologyError
from hpctrain.truth import Truth


def rehearse(world: World, cluster: Cluster, truth: Truth) -> RehearsedAccelerator:
    """Let this rank be the device of its number, in groups made from now on; return the device. All ranks must call.

    Raises LaunchError if there are not as many ranks as devices, TopologyError where the truth of a family is missing.
    """
    if world.size != cluster.num_devices:
        raise LaunchError(
            f"the cluster has {cluster.num_devices} devices ({cluster.describe()}), but {world.size} ranks were"
            f" started; start it with mpirun -n {cluster.num_devices}"
        )
    for device in cluster.devices:
        if device.family not in truth.devices:
            raise TopologyError(
                f"truth.devices.{device.family}: missing; say how pretend devices of family '{device.family}' behave"
            )
    own = cluster.devices[world.rank]
    clock = world.rehearse(network_of(cluster, truth.time_scale), places_of(cluster))
    device = RehearsedAccelerator(own.family, truth.devices[own.family], clock, truth.time_scale, world.rank)
    world.accelerator = device
    device.bind()
    return device
