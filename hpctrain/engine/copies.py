"""Decides how often the state is copied into the memory of hosts, and where, by the cost and the risk."""

import math
import os
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpctrain.checkpoint.copies import HostCopies, copies_name, remove_litter
from hpctrain.comm.start.launcher import free_host_bytes, number_in
from hpctrain.comm.start.process import SHARED_MEMORY
from hpctrain.comm.world import World
from hpctrain.config.errors import CheckpointError
from hpctrain.config.recovery import Recovery
from hpctrain.plan.keepers import host_bytes, keepers

RESTARTS_VARIABLE = "HPCTRAIN_RESTARTS"
"""Variable by which a script says how many times it starts the ranks again."""
MOST_SHARE = 0.01
"""The most of the time that copies may take."""
DEVICE_SECONDS = 16_384 * 54 * 86_400 / 419
"""Seconds of a device between two interruptions: 419 of 16,384 GPUs in 54 days (Llama 3, arXiv 2407.21783)."""
TRIED_BYTES = 8 << 20
SPARE_SHARE = 0.1
"""The share of a folder that stays free: MPI has its segments there too."""


class Copying(NamedTuple):
    """Copies of a leg."""

    copies: HostCopies
    every: int
    """Steps between them."""
    predicted_seconds: float
    """What one takes from training, at most."""


def copy_roots(recovery: Recovery) -> list[Path]:
    """Return the folders in which copies may be, the first choice first."""
    return [SHARED_MEMORY, *([recovery.copies_folder] if recovery.copies_folder else [])]


def interval_seconds(copy_seconds: float, num_ranks: int) -> float:
    """Return the seconds between copies with the least cost of copies and repeated steps (Young 1974). Pure."""
    return max(copy_seconds / MOST_SHARE, math.sqrt(2 * copy_seconds * DEVICE_SECONDS / num_ranks))


def choose_copies(
    world: World, recovery: Recovery, run: Path, counts: Sequence[int], step: int, step_seconds: float | None
) -> tuple[Copying | None, str]:
    """Return the copies of a leg that begins after a step, and the reason. All ranks must call.

    `counts` are the elements of each rank's stream. `step_seconds` is known on rank 0.
    """
    if recovery.copies == 0:
        return None, "off, by the job"
    # Asked on one rank: some launchers bring variables to the first host alone.
    if recovery.copies is None and not world.on_first_rank(lambda: number_in((RESTARTS_VARIABLE,))[0]):
        return None, "off: nothing starts the ranks again; scripts of hpctrain mpirun and slurm do"
    need = host_bytes(world.hosts, counts)
    name = world.on_first_rank(lambda: copies_name(run, make=True) or "")
    host = world.hosts[world.rank]
    refusals = []
    for root in copy_roots(recovery):
        if world.hosts.index(host) == world.rank:
            remove_litter(root, name)
        free = _free_bytes(root, root / name)
        lacks = [each for each in world.all_objects(_refusal(root, need[host], free, host)) if each]
        if not lacks:
            break
        refusals.append(lacks[0])
    else:
        more = "" if recovery.copies_folder else "; name a folder of each host (recovery.copies_folder)"
        return None, f"off: {'; '.join(refusals)}{more}"
    seconds = world.largest(max(counts) * 4 * _seconds_a_byte(root))
    every = recovery.copies
    if every is None:
        between = interval_seconds(seconds, world.size)
        every = int(world.on_first_rank(lambda: max(1, math.ceil(between / (step_seconds or seconds / MOST_SHARE)))))
    pairs = sum(keeper is not None for keeper in keepers(world.hosts, counts))
    second = f"second ones of {pairs} ranks on other hosts" if pairs else "no second ones, as there is one host"
    why = (
        f"every {every} steps in {root}, {max(need.values()) / 2**20:,.1f} MiB a host, {second}; one takes at most"
        f" {seconds:.2g} s"
    )
    try:
        copies = HostCopies(world, root / name / host, counts, step)
    except CheckpointError as error:  # on all ranks
        return None, f"off: {error}"
    return Copying(copies, every, seconds), "; ".join([why, *refusals])


def _free_bytes(root: Path, own: Path) -> float:
    """Return the bytes that copies may have in a folder, with those that copies of this run have there."""
    try:
        facts = os.statvfs(root)
        taken = sum(file.stat().st_size for file in own.rglob("part-*"))
    except OSError:
        return 0.0
    total, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    if root == SHARED_MEMORY:  # a tmpfs, which takes memory; one without a limit has no blocks
        free = min(free, free_host_bytes()) if total else free_host_bytes()
    return free - SPARE_SHARE * total + taken


def _refusal(root: Path, need: int, free: float, host: str) -> str:
    if not os.access(root, os.W_OK):
        return f"{host}:{root} cannot be written"
    if need <= free:
        return ""
    return f"{host}:{root} has room for {max(0.0, free) / 2**20:,.1f} MiB of copies, and they need {need / 2**20:,.1f}"


def _seconds_a_byte(root: Path) -> float:
    """Return the seconds that a byte takes to be copied, checked and written."""
    data, since = np.ones(TRIED_BYTES, np.uint8), time.perf_counter()
    copy = data.copy()
    zlib.crc32(copy.data)
    with suppress(OSError):  # the first copy says what is wrong
        handle = os.open(root, os.O_TMPFILE | os.O_RDWR)
        os.write(handle, copy.data)
        os.close(handle)
    return (time.perf_counter() - since) / TRIED_BYTES
