"""Which device each rank takes, and what all of them compute well in."""

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.comm.accelerators.detect import DEVICE_VARIABLE, FAMILY_VARIABLE, MIG_PATTERN, family_of
from hpctrain.comm.accelerators.kinds import KINDS, DeviceKind
from hpctrain.comm.routes.abilities import ON_HOST, UNPLANNED, Ability, Devices, FamilyAbilities, all_of, combine
from hpctrain.comm.routes.cuda_aware import asked_direct, exchange_in_ring, probe_direct
from hpctrain.comm.routes.torch_groups import load_library
from hpctrain.comm.topology import Topology
from hpctrain.comm.world import World
from hpctrain.config.errors import TopologyError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Set to 1: several ranks may use one device, for tests and on laptops. NCCL refuses that; messages do not.
SHARE_VARIABLE = "HPCTRAIN_SHARE_DEVICES"
ALONE = Ability(False, "a single rank sends no messages")
"""Not probed: that starts torch and the device once more, which takes seconds."""


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
    everywhere = _of_all(world, tuple(visible))
    accelerator: Accelerator = CpuAccelerator(world.place.family)
    sharing = os.environ.get(SHARE_VARIABLE) == "1"
    identity, sharers = "", 1
    with world.all_or_none():
        if kind != "cpu":
            every = resolved_devices(world.topology, everywhere, sharing)
            index, identity = every[world.rank]
            sharers = sum(other == identity for _, other in every.values())
            accelerator = _device(KINDS[kind], index, world.place.family, sharers)
        accelerator.bind()
    threads_per_core = _threads_per_core(world)
    if isinstance(accelerator, CpuAccelerator):
        accelerator.threads_per_core = threads_per_core
    devices = learn_devices(world, accelerator, sharers) if world.topology.has_devices else None
    world.configure(accelerator=accelerator, devices=devices)
    return accelerator


def resolved_devices(topology: Topology, visible: Sequence[Sequence[str]], sharing: bool) -> dict[int, tuple[int, str]]:
    """Return by rank, of those with devices, the index of its device and a name of that, unique over hosts. Pure.

    Raises TopologyError as `choose_device`.
    """
    result = {}
    for rank, place in enumerate(topology.places):
        if place.kind != "cpu":
            index = choose_device(topology, visible, rank, sharing)
            result[rank] = index, f"{place.host} {visible[rank][index]}"
    return result


def learn_devices(world: World, accelerator: Accelerator, sharers: int) -> Devices:
    """Detect what each family's devices can do. All ranks must call, with their devices bound.

    `sharers` is how many ranks use this rank's device. The first rank of each host with devices probes MPI, in a child
    process, which takes seconds; then ranks that can be given device memory prove it by messages between them.
    """
    places, rank = world.topology.places, world.rank
    native, direct = ON_HOST, None
    if accelerator.kind != "cpu":
        native = native_ability(accelerator, sharers)
        if rank == min(r for r, p in enumerate(places) if p.host == places[rank].host and p.kind != "cpu"):
            index = accelerator.device.index or 0
            direct = asked_direct() or (probe_direct(accelerator.kind, index) if len(places) > 1 else ALONE)
    families = combine(world.topology, _of_all(world, (native, direct)))
    if asked_direct() is None:
        families = confirm_direct(world, accelerator, families)
    return Devices(accelerator, families, bridge=asked_direct() or UNPLANNED)


def native_ability(accelerator: Accelerator, sharers: int) -> Ability:
    """Say whether this rank can use its maker's library of collectives, and why not where it cannot."""
    kind = KINDS.get(accelerator.kind)
    if kind is None or not kind.library:
        return Ability(False, f"no library of collectives is used on {accelerator.kind}")
    if sharers > 1:
        return Ability(False, f"{sharers} ranks share a device, which {kind.library} refuses")
    if re.search(MIG_PATTERN, accelerator.model.lower()):
        return Ability(False, f"{accelerator.model} is a part of a device (MIG), which {kind.library} refuses")
    return load_library(kind).ability


def confirm_direct(
    world: World, accelerator: Accelerator, families: Mapping[str, FamilyAbilities]
) -> dict[str, FamilyAbilities]:
    """Return the abilities, where a family is `direct` only if messages between processes show it. All ranks must call.

    A message of a rank to itself, which a child process has tried, goes by another road than one between ranks. Of two
    families between whose first ranks messages fail, one is not `direct`: the one that has no messages of its own to
    show, or else the later one.
    """
    result = dict(families)
    members = {name: world.topology.ranks_of(name) for name in families}

    def exchanged(ranks: Sequence[int]) -> Ability:
        own = None
        if world.rank in ranks:
            own = exchange_in_ring(world.raw_mpi, world.raw_mpi.COMM_WORLD, accelerator, ranks, world.rank)
        return all_of([each for each in _of_all(world, own) if each is not None])

    for name, family in families.items():
        if family.direct.works and len(members[name]) > 1:
            result[name] = replace(family, direct=exchanged(members[name]))
    for one, other in itertools.combinations(families, 2):
        if result[one].direct.works and result[other].direct.works:
            across = exchanged([members[one][0], members[other][0]])
            if not across.works:
                name = one if len(members[one]) == 1 else other
                reason = f"messages between {one} and {other}: {across.reason}"
                result[name] = replace(result[name], direct=Ability(False, reason))
    return result


def _visible_devices(name: str) -> list[str]:
    kind = KINDS.get(name)
    if kind is None:
        known = ", ".join(KINDS)
        raise TopologyError(f"{DEVICE_VARIABLE}={name}: no such kind of device; set it to cpu, {known} or auto")
    from hpctrain.comm.accelerators.torch_device import visible_devices

    if not (visible := visible_devices(kind)):
        built = [f"{title} {v}" for title, v in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)) if v]
        raise TopologyError(
            f"{DEVICE_VARIABLE}={name}, but torch {torch.__version__}, built for {' and '.join(built) or 'CPUs alone'},"
            " sees no such device; install torch for the devices of this host, ask the batch system for some"
            f" (--gres=gpu:N), or set {DEVICE_VARIABLE}=cpu"
        )
    return visible


def _device(kind: DeviceKind, index: int, family: str, sharers: int) -> Accelerator:
    from hpctrain.comm.accelerators.torch_device import TorchAccelerator

    result = TorchAccelerator(kind, index, family, sharers)
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
                f"host {host} has {len(peers)} ranks for {num_devices} visible devices: all {len(visible[peer])} that"
                f" rank {peer} sees are taken; start {num_devices} ranks a host (--ntasks-per-node={num_devices}), show"
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
