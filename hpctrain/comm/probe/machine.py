"""The description of the devices and hosts that were started: read from an earlier probe, or measured now.

A description is a cluster file in a folder of the user. Its name is a fingerprint of the hardware. So a job that starts
again on the same machine has the same figures, and gets the same plan.
"""

import hashlib
import itertools
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import ValidationError

from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.probe.survey import FABRIC, FABRIC_VARIABLE, probe_cluster
from hpctrain.comm.transports.abilities import device_route, message_route
from hpctrain.comm.transports.peer_memory import PEER_VARIABLE
from hpctrain.comm.world import World
from hpctrain.config.clusters.cluster import Cluster, MemoryOverflow, Profile
from hpctrain.config.clusters.cluster_file import dump_cluster, merge_profiles, parse_cluster, write_cluster_text
from hpctrain.config.errors import HpctrainError, JobError, TopologyError
from hpctrain.config.paths import exists, read_json, write_text
from hpctrain.config.tables import read_text
from hpctrain.plan.tiling import counted

CACHE_VARIABLE = "HPCTRAIN_CACHE"
SHORT_PROBE_SECONDS = 0.5
FORMAT = 2
"""Version of the descriptions; raised where the method of measurement changes, so that old ones do not count."""


class Machine(NamedTuple):
    """A description of the devices and hosts of all ranks."""

    path: Path
    """Path of its cluster file, which may be missing where the folder cannot be written."""
    text: str
    cluster: Cluster
    source: str
    """Origin of the figures, in words."""
    is_new: bool = False
    """Whether this start measured it."""
    disturbance: str = ""
    """The reason why the figures are not those of a quiet machine, so that they are not kept; empty: they are kept."""


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of descriptions: HPCTRAIN_CACHE, else `hpctrain` in the user's cache folder."""
    if given := environment.get(CACHE_VARIABLE):
        return Path(given)
    # Without a HOME, and for a user without a name, `~` stays: then `/.cache`, as where containers set HOME to `/`.
    own = os.path.expanduser("~/.cache").removeprefix("~")
    return Path(environment.get("XDG_CACHE_HOME") or own) / "hpctrain"


def fingerprint(world: World, accelerator: Accelerator) -> str:
    """Return the fingerprint of the devices, the hosts and the order of ranks. All ranks must call.

    Routes of devices are in it too: links by MPI differ from those by a maker's library.
    """
    own = (
        *world.place,
        accelerator.model,
        accelerator.memory().total,
        torch.get_num_threads(),
        len(os.sched_getaffinity(0)) if accelerator.kind == "cpu" else 0,
        os.environ.get(FABRIC_VARIABLE, FABRIC),
        platform.machine(),
    )
    ranks = world.all_objects(own)
    families = world.settings.devices.families if world.settings.devices else {}
    routes = [
        (one.name, other.name, device_route(one, other)[0], message_route(one, other)[0], os.environ.get(PEER_VARIABLE))
        for one, other in itertools.combinations_with_replacement(families.values(), 2)
        if not one.kind == other.kind == "cpu"
    ]
    known = json.dumps([FORMAT, world.library, torch.__version__, ranks, *routes])
    return hashlib.sha256(known.encode()).hexdigest()[:16]


def describe_machine(world: World, accelerator: Accelerator, fresh: bool = False) -> Machine:
    """Return the description of these ranks' devices, the same on all ranks. All ranks must call.

    It is read from the folder of descriptions. Where none is there, or with `fresh`, it is measured in about
    `SHORT_PROBE_SECONDS` and kept there. A measurement of a busy machine is not kept: the next start measures again.
    Raises TopologyError where names of families or fabrics cannot be used.
    """
    path = cache_folder() / "machines" / f"{fingerprint(world, accelerator)}.toml"
    result = None
    if world.rank == 0 and not fresh:
        result = _read(path)
    result = world.broadcast_object(result)
    if result:
        return result
    start = time.monotonic()
    topology = world.topology
    can_overlap = topology.has_devices or len({place.host for place in topology.places}) > 1
    measured = probe_cluster(world, accelerator, SHORT_PROBE_SECONDS, with_overlap=can_overlap)
    if measured:
        seconds = time.monotonic() - start
        head = (
            f"Measured on {time.strftime('%Y-%m-%d')} by {counted(world.size, 'rank')} in {seconds:.1f} s,"
            " when a job was started here for the first time. `hpctrain probe` measures for longer."
        )
        busy = measured.disturbance
        head += f"\nNot those of a quiet machine: {busy}." if busy else ""
        text = dump_cluster(measured.cluster, {"": head} | measured.comments)
        kept = f", not kept: {busy}; the next start measures again" if busy else keep(path, text)
        source = f"a probe of {seconds:.1f} s now{kept}"
        result = Machine(path, text, measured.cluster, source, is_new=True, disturbance=busy)
    return world.broadcast_object(result)


def _read(path: Path) -> Machine | None:
    """Return a description that was kept; None for an unreadable one, which is measured again."""
    if not path.is_file():
        return None
    try:
        text = read_text(path, TopologyError)
        age = time.strftime("%Y-%m-%d", time.localtime(path.stat().st_mtime))
        return Machine(path, text, parse_cluster(text, str(path)), f"{path}, measured on {age}")
    except (HpctrainError, OSError):
        return None


def keep(path: Path, text: str) -> str:
    """Write a description; return a message about it. One rank calls."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_cluster_text(path, text)
    except (JobError, OSError) as error:
        return f", not kept ({error}; set {CACHE_VARIABLE} to a folder that can be written)"
    return f", kept in {path}"


def add_profiles(
    path: Path, cluster: Cluster, profiles: Sequence[Profile], comments: Sequence[str], keeps: bool = True
) -> str:
    """Add profiles of a job to a description; return its text. One rank calls.

    The description is kept unless it is of a busy machine.
    """
    known = _read(path)
    text = known.text if known and known.cluster == cluster else dump_cluster(cluster)
    text = merge_profiles(text, str(path), profiles, comments)
    if keeps:
        keep(path, text)
    return text


def overflows_path(cluster: Cluster) -> Path:
    """Return the file of memory overflows of a cluster's devices: later plans leave more memory free on them.

    Its name follows from the devices, not from measured figures: a machine that is probed again has the same.
    """
    families = [(name, each.kind, each.model, each.memory_bytes) for name, each in cluster.families.items()]
    devices = [(device.family, device.node) for device in cluster.devices]
    digest = hashlib.sha256(json.dumps([families, devices]).encode()).hexdigest()[:16]
    return cache_folder() / "machines" / f"{digest}.overflows.json"


def with_overflows(cluster: Cluster) -> Cluster:
    """Return the cluster with the recorded overflows of its devices; an unreadable file counts as none."""
    path, families = overflows_path(cluster), dict(cluster.families)
    with suppress(HpctrainError, ValidationError, AttributeError, TypeError):
        noted = read_json(path, JobError, "a list of overflows") if exists(path) else {}
        for name, overflows in noted.items():
            known = families[name].overflows
            new = [each for each in map(MemoryOverflow.model_validate, overflows) if each not in known]
            families[name] = families[name].model_copy(update={"overflows": (*known, *new)})
        return cluster.model_copy(update={"families": families})
    return cluster


def describe_overflows(cluster: Cluster) -> str:
    """Say how much less of which devices' memory plans may fill, and why; empty where no overflow is recorded."""
    parts = []
    for name, family in cluster.families.items():
        if family.overflows:
            whole = family.memory_bytes - family.reserve_bytes
            worst = min(family.overflows, key=lambda each: each.usable_bytes(whole))
            parts.append(
                f"plans fill {worst.usable_bytes(whole) / whole:.0%} of what they might of a device of {name}: one with"
                f" items {list(worst.items)} and {worst.rows} rows ran out of memory at {worst.bytes / 2**20:,.1f} MiB,"
                f" where {worst.predicted_bytes / 2**20:,.1f} were predicted ({overflows_path(cluster)})"
            )
    return "; ".join(parts)


def note_overflow(cluster: Cluster, family: str, overflow: MemoryOverflow) -> str:
    """Record an overflow of a device; return a message about it. The rank that overflowed calls."""
    path = overflows_path(cluster)
    known = {name: list(each.overflows) for name, each in with_overflows(cluster).families.items() if each.overflows}
    known.setdefault(family, []).append(overflow)
    text = json.dumps({name: [each.model_dump() for each in overflows] for name, overflows in known.items()}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text + "\n", JobError, "free space")
    except (JobError, OSError) as error:
        return f"this could not be noted ({error}), so the same command will plan the same"
    return f"noted in {path}: the same command plans with it, and continues from the latest checkpoint"
