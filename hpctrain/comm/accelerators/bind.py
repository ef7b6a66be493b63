"""Which device each rank takes, and what all of them compute well in."""

import os
from collections.abc import Sequence

import torch

from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.comm.accelerators.detect import DEVICE_VARIABLE, FAMILY_VARIABLE, family_of
from hpctrain.comm.routes.abilities import ON_HOST, Ability, Devices, combine
from hpctrain.comm.routes.cuda_aware import probe_direct
from hpctrain.comm.routes.nccl import load_nccl
from hpctrain.comm.topology import Topology
from hpctrain.comm.world import World
from hpctrain.config.errors import TopologyError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Set to 1: several ranks may use one device, for tests and on laptops. NCCL refuses that; messages do not.
SHARE_VARIABLE = "HPCTRAIN_SHARE_DEVICES"
KINDS = ("cpu", "cuda", "rocm")


def bind_accelerator(world: World) -> Accelerator:
    """Take this rank's device, and use it from now on, in groups made from now on too. All ranks must call.

    A second call returns the same. A rank takes the device with its place among the ranks of its host that use devices,
    among the visible ones; where the launcher shows each rank its own, that one. Raises TopologyError on all ranks
    where there are too few.
    """
    if world.accelerator is not None:
        return world.accelerator
    kind = world.place.kind
    visible: list[str] = []
    with world.all_or_none():
        if kind != "cpu":
            visible = _visible_devices(kind)
    everywhere = world.broadcast_object(world.gather_objects(tuple(visible)))
    accelerator: Accelerator = CpuAccelerator(world.place.family)
    sharing = os.environ.get(SHARE_VARIABLE) == "1"
    with world.all_or_none():
        if kind != "cpu":
            accelerator = _gpu(choose_device(world.topology, everywhere, world.rank, sharing), world.place.family)
        accelerator.bind()
    threads_per_core = _threads_per_core(world)
    if isinstance(accelerator, CpuAccelerator):
        accelerator.threads_per_core = threads_per_core
    devices = _learn_devices(world, accelerator, sharing) if world.topology.has_devices else None
    world.configure(accelerator=accelerator, devices=devices)
    return accelerator


def _learn_devices(world: World, accelerator: Accelerator, sharing: bool) -> Devices:
    """Find out what each family's devices can do. All ranks must call, with their devices bound.

    Native libraries refuse several ranks on one device (`sharing`).

    The first rank of each host with devices probes MPI, in a child process, which takes seconds.
    """
    places, rank = world.topology.places, world.rank
    native, direct = ON_HOST, None
    if accelerator.kind != "cpu":
        native = Ability(False, "ranks share devices") if sharing else load_nccl().ability
        if rank == min(r for r, p in enumerate(places) if p.host == places[rank].host and p.kind != "cpu"):
            direct = probe_direct(accelerator.kind, accelerator.device.index)
    result = world.broadcast_object(world.gather_objects((native, direct)))
    return Devices(accelerator, combine(world.topology, result))


def _visible_devices(kind: str) -> list[str]:
    if kind not in KINDS:
        raise TopologyError(f"{DEVICE_VARIABLE}={kind}: no such kind of device; set it to {', '.join(KINDS)} or auto")
    from hpctrain.comm.accelerators.cuda import visible_devices

    if not torch.cuda.is_available() or not (visible := visible_devices()):
        built = [f"{name} {v}" for name, v in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)) if v]
        raise TopologyError(
            f"{DEVICE_VARIABLE}={kind}, but torch {torch.__version__}, built for {' and '.join(built) or 'CPUs alone'},"
            " sees no such device; install torch for the devices of this host, ask the batch system for some"
            f" (--gres=gpu:N), or set {DEVICE_VARIABLE}=cpu"
        )
    return visible


def _gpu(index: int, family: str) -> Accelerator:
    from hpctrain.comm.accelerators.cuda import CudaAccelerator

    result = CudaAccelerator(index, family)
    if FAMILY_VARIABLE not in os.environ and family_of(result.model) != family:
        raise TopologyError(
            f"this rank was taken for one of family '{family}', but its device {index} is a {result.model}: the host"
            f" has devices of several kinds; set {FAMILY_VARIABLE} for each rank"
        )
    return result


def choose_device(topology: Topology, visible: Sequence[Sequence[str]], rank: int, sharing: bool = False) -> int:
    """Return which of the devices visible to `rank` it takes; `visible` is by rank what each sees. Pure.

    Ranks of a host choose in their order, each the first it sees that is not taken. Raises TopologyError if none is
    left, unless they are `sharing`.
    """
    host = topology.places[rank].host
    peers = [r for r, place in enumerate(topology.places) if place.host == host and place.kind != "cpu"]
    if sharing:
        return peers.index(rank) % len(visible[rank])
    taken: set[str] = set()
    for peer in peers:
        free = [index for index, name in enumerate(visible[peer]) if name not in taken]
        if not free:
            num_devices = len(set().union(*(visible[r] for r in peers)))
            raise TopologyError(
                f"host {host} has {len(peers)} ranks for {num_devices} visible devices: rank {peer} finds all of its"
                f" {len(visible[peer])} taken; start {num_devices} ranks a host (--ntasks-per-node={num_devices}), show"
                f" them more devices (--gpus-per-node={len(peers)}), let some ranks use {DEVICE_VARIABLE}=cpu, or set"
                f" {SHARE_VARIABLE}=1 for a test"
            )
        if peer == rank:
            return free[0]
        taken.add(visible[peer][free[0]])
    raise AssertionError(f"rank {rank} is not among those with a device")


def _of_all(world: World, value) -> list:
    return world.broadcast_object(world.gather_objects(value))


def _threads_per_core(world: World) -> float:
    """Return how many computing threads of this host's CPU ranks share a core. All ranks must call."""
    own = world.place.kind == "cpu", torch.get_num_threads(), os.sched_getaffinity(0)
    here = [
        result
        for place, result in zip(world.topology.places, _of_all(world, own), strict=True)
        if place.host == world.place.host and result[0]
    ]
    cores = set().union(*(cores for _, _, cores in here))
    return max(1.0, sum(threads for _, threads, _ in here) / max(1, len(cores)))
