"""Which kind of device this process has, and of which family: asked at the start, so torch only where it is needed."""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

# Set for a rank: the kind of device to use, and the name of its family.
DEVICE_VARIABLE, FAMILY_VARIABLE = "HPCTRAIN_DEVICE", "HPCTRAIN_FAMILY"
# One of these is there where a driver for GPUs is; where none is, torch need not be asked (it takes a second to load).
DRIVER_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
LOCAL_RANK_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
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
    """What a rank says of its device before it takes one."""

    kind: str
    """cpu, cuda or rocm; or what was asked for and may not be there, which `bind_accelerator` finds."""
    family: str


def detect_device(environment: Mapping[str, str] = os.environ) -> DetectedDevice:
    """Return the kind of this process' device and its family. Never raises.

    The kind is HPCTRAIN_DEVICE, else what torch sees; the family HPCTRAIN_FAMILY, else from the device's name.
    """
    asked = environment.get(DEVICE_VARIABLE, "auto")
    if asked == "cpu" or (asked == "auto" and not any(map(os.path.exists, DRIVER_FILES))):
        return DetectedDevice("cpu", environment.get(FAMILY_VARIABLE, "cpu"))

    import torch

    if not torch.cuda.is_available():
        kind = "cpu" if asked == "auto" else asked
        return DetectedDevice(kind, environment.get(FAMILY_VARIABLE, kind))

    from hpctrain.comm.accelerators.cuda import gpu_kind

    kind = gpu_kind() if asked in ("auto", "cuda", "rocm") else asked
    local_rank = next((int(environment[v]) for v in LOCAL_RANK_VARIABLES if v in environment), 0)
    name = torch.cuda.get_device_name(local_rank % torch.cuda.device_count())
    return DetectedDevice(kind, environment.get(FAMILY_VARIABLE) or family_of(name))


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
