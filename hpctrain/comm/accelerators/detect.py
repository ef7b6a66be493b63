"""This process' kind of device and its family: asked at the start, so torch only where it is needed."""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from hpctrain.comm.accelerators.kinds import KINDS, may_be_there, torch_module
from hpctrain.comm.start.launcher import number_in
from hpctrain.launch.mpi import LOCAL_RANK_VARIABLES

# Set for a rank: the kind of device to use, and the name of its family.
DEVICE_VARIABLE, FAMILY_VARIABLE = "HPCTRAIN_DEVICE", "HPCTRAIN_FAMILY"
# From a device's name, in lower case, to its family: the first that matches. What is captured is the family, spaces
# left out; a part of a GPU (MIG) is a family of its own, since it computes and holds less.
NAME_PATTERNS = (
    r"\b(g[bh]\d{3})\b",  # gh200, gb200: a GPU with its own CPU
    r"\b([ahbv]\d{2,3}[gs]?)\b",  # a100, h200, b200, v100, a10g, v100s
    r"\b(l\d{1,2}s?|t4|p100|k80)\b",
    r"\b(rtx (?:pro )?a?\d{4}(?: ti| super)?)\b",
    r"\b(gtx \d{4}(?: ti)?)\b",
    r"\b(mi\d{2,3}[xa]?)\b",  # mi250x, mi300a
    r"\b(rx \d{4} ?(?:xtx|xt)?|w\d{4})\b",
)
MIG_PATTERN = r"\bmig (\d+g\.\d+gb)"
VENDOR_WORDS = r"\b(nvidia|amd|tesla|geforce|quadro|radeon|instinct|graphics)\b"


class DetectedDevice(NamedTuple):
    """A rank's words about its device before it takes one."""

    kind: str
    """cpu or one of `KINDS`; or what was asked for and may be missing, which `bind_accelerator` detects."""
    family: str
    memory_bytes: int = 0
    """Of a device whose name decides its family, and maybe not alone: see `split_families`."""


def detect_device(environment: Mapping[str, str] = os.environ) -> DetectedDevice:
    """Return the kind of this process' device and its family.

    The kind is HPCTRAIN_DEVICE, else what torch sees; the family HPCTRAIN_FAMILY, else from the device's name. Where no
    driver is, torch is not asked: it takes a second to load.
    """
    asked = environment.get(DEVICE_VARIABLE, "auto")
    candidates = [kind for kind in KINDS.values() if asked in (kind.name, "auto") and may_be_there(kind)]
    if asked in ("cuda", "rocm"):  # torch drives both by the same names: the one that it is built for
        candidates = [KINDS["cuda"], KINDS["rocm"]]
    for kind in candidates:
        if module := torch_module(kind):
            family, memory_bytes = environment.get(FAMILY_VARIABLE), 0
            if not family and hasattr(module, "get_device_name"):
                index = (local_rank(environment) or 0) % module.device_count()
                family = family_of(module.get_device_name(index))
                if hasattr(module, "get_device_properties"):
                    memory_bytes = module.get_device_properties(index).total_memory
            return DetectedDevice(kind.name, family or kind.name, memory_bytes)
    name = "cpu" if asked == "auto" else asked
    return DetectedDevice(name, environment.get(FAMILY_VARIABLE, name))


def local_rank(environment: Mapping[str, str]) -> int | None:
    """Return this process' number among the ranks of its host, by the launcher's variables; None without any. Pure.

    Raises LaunchError.
    """
    return number_in(LOCAL_RANK_VARIABLES, environment)[0]


def use_device_early(device: DetectedDevice, environment: Mapping[str, str] = os.environ) -> int | None:
    """Make the device that this rank will likely take the current one, and return its index: before MPI starts, since
    an MPI that moves device memory looks at that once. None, and nothing done, without a device or a local rank.
    """
    number, kind = local_rank(environment), KINDS.get(device.kind)
    module = torch_module(kind) if kind and number is not None else None
    if module is None or number is None or not hasattr(module, "set_device"):
        return None
    index = number % module.device_count()
    module.set_device(index)
    return index


def family_of(name: str) -> str:
    """Return the family of a device by the name that its driver gives it, such as "h200" for "NVIDIA H200". Pure."""
    lower = name.lower()
    part = re.search(MIG_PATTERN, lower)
    suffix = f"-mig-{part[1]}" if part else ""
    for pattern in NAME_PATTERNS:
        if result := re.search(pattern, lower):
            return result[1].replace(" ", "") + suffix
    words = re.sub(VENDOR_WORDS, " ", lower)
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-") or "gpu"
