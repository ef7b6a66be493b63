"""Finds out, by trying, what the devices of all ranks can do with each other."""

from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.device.native import find_native_library
from hpctrain.comm.device.probe import probe_direct
from hpctrain.comm.device.table import ON_HOST, Ability, Devices, combine
from hpctrain.comm.world import World


def learn_devices(world: World, accelerator: Accelerator, sharing: bool) -> Devices:
    """Find out what each family's devices can do. All ranks must call, with their devices bound.

    Native libraries refuse several ranks on one device (`sharing`).

    The first rank of each host with devices probes MPI, in a child process, which takes seconds.
    """
    places, rank = world.topology.places, world.rank
    native, direct = ON_HOST, None
    if accelerator.kind != "cpu":
        native = Ability(False, "ranks share devices") if sharing else find_native_library().ability
        if rank == min(r for r, p in enumerate(places) if p.host == places[rank].host and p.kind != "cpu"):
            direct = probe_direct(accelerator.kind, accelerator.device.index)
    found = world.broadcast_object(world.gather_objects((native, direct)))
    return Devices(accelerator, combine(world.topology, found))
