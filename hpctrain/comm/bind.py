"""Ranks take their devices, and detect what the devices of all families can do."""

import itertools
import os
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.comm.accelerators.kinds import (
    DEVICE_VARIABLE,
    FAMILY_VARIABLE,
    KINDS,
    MIG_PATTERN,
    Ability,
    DeviceKind,
    driver_files,
    family_of,
)
from hpctrain.comm.collectives.native import NATIVE_VARIABLE, library_ability, open_store
from hpctrain.comm.topology import Topology
from hpctrain.comm.transports.abilities import ON_HOST, UNPLANNED, Devices, FamilyAbilities, all_of, combine
from hpctrain.comm.transports.cuda_aware import asked_direct, exchange_in_ring, probe_direct
from hpctrain.comm.transports.members import GroupMessages
from hpctrain.comm.world import World
from hpctrain.config.errors import TopologyError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Set to 1: several ranks may use one device, for tests and on laptops. They talk by messages, or by
# NCCL where HPCTRAIN_NATIVE=1 asks for it.
SHARE_VARIABLE = "HPCTRAIN_SHARE_DEVICES"
SHARED_LIBRARY = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
"""Variables with which NCCL serves ranks that share a device; for tests, with `HPCTRAIN_NATIVE=1`. NCCL refuses two
ranks on one host and one device, and takes the host from NCCL_HOSTID. These ranks then use sockets, slowly."""
ALONE = Ability(False, "a single rank sends no messages")
"""The answer for a single rank. It is not probed, since a probe starts torch and the device once more, for seconds."""


def bind_accelerator(world: World, in_one_order: bool = True) -> Accelerator:
    """Take this rank's device and use it from now on, also in new groups. All ranks must call.

    A second call returns the same. `in_one_order` says whether sums of the maker's library must have one order.
    `choose_devices` says which rank takes which device.

    Raises TopologyError on all ranks: where there are too few devices, where a rank would compute on its host without a
    request for that, and where a maker's library of collectives is missing.
    """
    if world.accelerator is not None:
        return world.accelerator
    kind = world.place.kind
    with world.all_or_none():
        visible = _visible_devices(kind) if kind != "cpu" else _no_devices()
    everywhere = world.all_objects(tuple(visible))
    accelerator: Accelerator = CpuAccelerator(world.place.family)
    sharing = os.environ.get(SHARE_VARIABLE) == "1"
    sharers = 1
    with world.all_or_none():
        if kind != "cpu":
            taken = choose_devices(world.topology, everywhere, sharing)
            index, identity = taken[world.rank]
            sharers = sum(other == identity for _, other in taken.values())
            accelerator = _device(KINDS[kind], index, world.place.family, sharers)
            if sharers > 1 and shares_library():
                os.environ.update(SHARED_LIBRARY, NCCL_HOSTID=f"{socket.gethostname()}-{world.rank}")
        accelerator.bind(in_one_order)
    threads_per_core = _threads_per_core(world)
    if isinstance(accelerator, CpuAccelerator):
        accelerator.threads_per_core = threads_per_core
    devices = learn_devices(world, accelerator, sharers) if world.topology.has_devices else None
    world.configure(accelerator=accelerator, devices=devices)
    return accelerator


def learn_devices(world: World, accelerator: Accelerator, sharers: int) -> Devices:
    """Detect what each family's devices can do. All ranks must call, with their devices bound.

    `sharers` is how many ranks use this rank's device. The first rank of each host with devices probes MPI, in a child
    process, which takes seconds; then ranks that can be given device memory prove it by messages between them.
    """
    places, rank = world.topology.places, world.rank
    native, direct = ON_HOST, None
    with world.all_or_none():
        if accelerator.kind != "cpu":
            native = native_ability(accelerator, sharers, len(world.topology.ranks_of(accelerator.family)))
    own_host = [r for r, place in enumerate(places) if place.host == places[rank].host and place.kind != "cpu"]
    if own_host and rank == own_host[0]:
        index = accelerator.device.index or 0
        direct = asked_direct() or (probe_direct(accelerator.kind, index) if len(places) > 1 else ALONE)
    families = combine(world.topology, world.all_objects((native, direct)))
    if asked_direct() is None:
        families = confirm_direct(world, accelerator, families)
    used = any(each.native.works and len(world.topology.ranks_of(name)) > 1 for name, each in families.items())
    store = open_store(world.space.members(range(world.size)), places[rank].host) if used else None
    return Devices(accelerator, families, asked_direct() or UNPLANNED, store)


def shares_library() -> bool:
    """Say whether ranks that share a device use the maker's library, which is a test of it."""
    return os.environ.get(NATIVE_VARIABLE) == "1"


def native_ability(accelerator: Accelerator, sharers: int, num_ranks: int = 1) -> Ability:
    """Say whether this rank can use its maker's library of collectives, and why not where it cannot.

    Raises TopologyError where its family has several ranks that could use the library if it were installed.
    """
    kind = KINDS.get(accelerator.kind)
    if kind is None or not kind.library:
        return Ability(False, f"no library of collectives is used on {accelerator.kind}")
    if sharers > 1 and not shares_library():
        return Ability(False, f"{sharers} ranks share a device, which {kind.library} refuses")
    if re.search(MIG_PATTERN, accelerator.model.lower()):
        return Ability(False, f"{accelerator.model} is a part of a device (MIG), which {kind.library} refuses")
    ability = library_ability(kind)
    if not ability.works and num_ranks > 1 and os.environ.get(NATIVE_VARIABLE) != "0":
        raise TopologyError(
            f"{num_ranks} ranks of family '{accelerator.family}' have no {kind.library}: {ability.reason}; install a"
            f" torch that is built with it, or set {NATIVE_VARIABLE}=0 to do without it, through MPI"
        )
    notes = accelerator.overridden
    if sharers > 1:
        notes = [f"{sharers} ranks share a device, as if on {sharers} hosts: a test, whose times are no speed", *notes]
    return Ability(ability.works, "; ".join([ability.reason, *notes]))


def confirm_direct(
    world: World, accelerator: Accelerator, families: Mapping[str, FamilyAbilities]
) -> dict[str, FamilyAbilities]:
    """Return the abilities; a family stays `direct` only if messages between processes prove it. All ranks must call.

    A child process has sent a message to itself, which takes another path than one between ranks. Where messages
    between the first ranks of two families fail, one of the two is not `direct`. It is the family that has no messages
    inside it to prove the ability, or else the later one.
    """
    result = dict(families)
    members = {name: world.topology.ranks_of(name) for name in families}

    def exchanged(ranks: Sequence[int]) -> Ability:
        own = None
        if world.rank in ranks:
            own = exchange_in_ring(GroupMessages(world.space.members(ranks)), accelerator)
        return all_of([each for each in world.all_objects(own) if each is not None])

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
        raise _unseen(f"{DEVICE_VARIABLE}={name}", kind)
    return visible


def _no_devices() -> list[str]:
    """Return no devices, for a rank that computes on its host.

    Raises TopologyError where the host has devices that torch does not see, unless HPCTRAIN_DEVICE names the host.
    """
    there = driver_files()
    if there and os.environ.get(DEVICE_VARIABLE) != "cpu":
        kind, path = there[0]
        raise _unseen(f"host {socket.gethostname()} has {path} of {kind.maker}'s driver", kind)
    return []


def _unseen(what: str, kind: DeviceKind) -> TopologyError:
    built = [f"{title} {v}" for title, v in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)) if v]
    hidden = [f"{name}='{os.environ[name]}'" for name in kind.visibility if name in os.environ]
    return TopologyError(
        f"{what}, but torch {torch.__version__}, built for {' and '.join(built) or 'CPUs alone'}, sees no such device"
        f"{' with ' + ' and '.join(hidden) if hidden else ''}; install torch for the devices of this host, ask the"
        f" batch system for some (--gres=gpu:N){', unset ' + ' or '.join(kind.visibility) if hidden else ''}, or set"
        f" {DEVICE_VARIABLE}=cpu to compute on processors"
    )


def _device(kind: DeviceKind, index: int, family: str, sharers: int) -> Accelerator:
    from hpctrain.comm.accelerators.torch_device import TorchAccelerator

    result = TorchAccelerator(kind, index, family, sharers)
    named = re.fullmatch(rf"{re.escape(family_of(result.model))}(-\d+)?", family)  # as `split_families` names it
    if FAMILY_VARIABLE not in os.environ and not named:
        raise TopologyError(
            f"this rank was taken for one of family '{family}', but its device {index} is a {result.model}: the host"
            f" has devices of several kinds; set {FAMILY_VARIABLE} for each rank"
        )
    return result


def choose_devices(
    topology: Topology, visible: Sequence[tuple[str, ...]], sharing: bool = False
) -> dict[int, tuple[int, str]]:
    """Return the index and the name of each device-using rank's device, by rank. Pure.

    `visible` has for each rank the names of the devices that it sees; no two devices of any hosts share a name. Ranks
    choose in their order, each the first visible device that is free, whatever MPI says of their hosts. With `sharing`,
    ranks that see the same devices take them round-robin. Raises TopologyError where a rank sees no free device.
    """
    result: dict[int, tuple[int, str]] = {}
    taken: set[str] = set()
    turns: Counter[tuple[str, ...]] = Counter()
    for rank, place in enumerate(topology.places):
        if place.kind == "cpu":
            continue
        names = visible[rank]
        index = next((index for index, name in enumerate(names) if name not in taken), None)
        if sharing:
            index = turns[names] % len(names)
            turns[names] += 1
        if index is None:
            peers = [other for other in visible if not set(names).isdisjoint(other)]
            num_devices = len(set[str]().union(*peers))
            raise TopologyError(
                f"host {place.host_name} has {len(peers)} ranks for {num_devices} visible devices: all {len(names)}"
                f" that rank {rank} sees are taken; start {num_devices} ranks a host (--ntasks-per-node={num_devices}),"
                f" show them more devices (--gpus-per-node={len(peers)}), let some ranks use {DEVICE_VARIABLE}=cpu, or"
                f" set {SHARE_VARIABLE}=1 for a test"
            )
        result[rank] = index, names[index]
        taken.add(names[index])
    return result


def _threads_per_core(world: World) -> float:
    """Return how many computing threads of this host's CPU ranks share a core. All ranks must call."""
    own = world.place.kind == "cpu", torch.get_num_threads(), os.sched_getaffinity(0)
    here = [
        result
        for place, result in zip(world.topology.places, world.all_objects(own), strict=True)
        if place.host_name == world.place.host_name and result[0]
    ]
    cores = set().union(*(cores for _, _, cores in here))
    return max(1.0, sum(threads for _, threads, _ in here) / max(1, len(cores)))
