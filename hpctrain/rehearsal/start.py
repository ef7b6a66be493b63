"""Makes ranks into the devices of a described cluster."""

from hpctrain.comm.topology import Topology, places_of
from hpctrain.comm.world import World
from hpctrain.config.cluster import Cluster
from hpctrain.config.errors import LaunchError, TopologyError
from hpctrain.config.truth import Truth
from hpctrain.rehearsal.accelerator import RehearsedAccelerator
from hpctrain.rehearsal.clock import Clock
from hpctrain.rehearsal.fabric import network_of
from hpctrain.rehearsal.shaped import RehearsedNetwork, ShapedNetwork


def rehearse(world: World, cluster: Cluster, truth: Truth) -> RehearsedAccelerator:
    """Let this rank be the device of its number, in groups made from now on; return the device. All ranks must call.

    Raises LaunchError if there are not as many ranks as devices, TopologyError where the truth of a family is missing
    or the ranks are on several hosts.
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
    if len({place.host for place in world.topology.places}) > 1:
        raise TopologyError("a rehearsal runs on one host: its ranks see each other's messages in its memory")
    mpi, clock = world.raw_mpi, Clock()
    network = ShapedNetwork(mpi, mpi.COMM_WORLD.Dup(), network_of(cluster, truth.time_scale))
    device = RehearsedAccelerator(own.family, truth.devices[own.family], clock, truth.time_scale, world.rank)
    world.configure(
        topology=Topology(tuple(places_of(cluster)), shares_memory=False),
        rehearsal=RehearsedNetwork(network, clock),
        accelerator=device,
    )
    device.bind()
    return device
