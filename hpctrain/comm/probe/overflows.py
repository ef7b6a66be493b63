"""What devices ran out of memory on, kept beside the descriptions of machines: later plans leave more of them free.

A file is named after what the devices are, not after what was measured: a machine that is probed again has the same.
"""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from hpctrain.comm.probe.machine import cache_folder
from hpctrain.config.cluster import Cluster, MemoryOverflow
from hpctrain.config.errors import HpctrainError, JobError
from hpctrain.config.paths import exists, read_json, write_text


def path_of(cluster: Cluster) -> Path:
    """Return the path of what is known of a cluster's devices."""
    families = [(name, each.kind, each.model, each.memory_bytes) for name, each in cluster.families.items()]
    devices = [(device.family, device.node) for device in cluster.devices]
    digest = hashlib.sha256(json.dumps([families, devices]).encode()).hexdigest()[:16]
    return cache_folder() / "machines" / f"{digest}.overflows.json"


def with_overflows(cluster: Cluster) -> Cluster:
    """Return the cluster with what was noted of its devices; a file that cannot be read is none."""
    path, families = path_of(cluster), dict(cluster.families)
    with suppress(HpctrainError, ValidationError, AttributeError, TypeError):
        noted = read_json(path, JobError, "a list of overflows") if exists(path) else {}
        for name, overflows in noted.items():
            known = families[name].overflows
            new = [each for each in map(MemoryOverflow.model_validate, overflows) if each not in known]
            families[name] = families[name].model_copy(update={"overflows": (*known, *new)})
        return cluster.model_copy(update={"families": families})
    return cluster


def describe_overflows(cluster: Cluster) -> str:
    """Say how much less of which devices plans may fill, and why; nothing where none is known to have overflowed."""
    parts = []
    for name, family in cluster.families.items():
        if family.overflows:
            whole = family.memory_bytes - family.reserve_bytes
            worst = min(family.overflows, key=lambda each: each.usable_bytes(whole))
            parts.append(
                f"plans fill {worst.usable_bytes(whole) / whole:.0%} of what they might of a device of {name}: one with"
                f" items {list(worst.items)} and {worst.rows} rows ran out of memory at {worst.bytes / 2**20:,.1f} MiB,"
                f" where {worst.predicted_bytes / 2**20:,.1f} were predicted ({path_of(cluster)})"
            )
    return "; ".join(parts)


def note_overflow(cluster: Cluster, family: str, overflow: MemoryOverflow) -> str:
    """Note an overflow of a device; return what is to be said of that. The rank that overflowed calls."""
    path = path_of(cluster)
    known = {name: list(each.overflows) for name, each in with_overflows(cluster).families.items() if each.overflows}
    known.setdefault(family, []).append(overflow)
    text = json.dumps({name: [each.model_dump() for each in overflows] for name, overflows in known.items()}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text + "\n", JobError, "free space")
    except (JobError, OSError) as error:
        return f"this could not be noted ({error}), so the same command will plan the same"
    return f"noted in {path}: the same command plans with it, and continues from the latest checkpoint"
