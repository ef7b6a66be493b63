"""The kinds of devices that torch drives, as data, and which of them this process has: asked before torch is there.

`TorchAccelerator` is the one class behind all of them; a new maker is one more entry of `KINDS`.
"""

import importlib
import os
import re
from collections.abc import Mapping, MutableMapping
from importlib.metadata import version
from types import ModuleType
from typing import NamedTuple

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


class Ability(NamedTuple):
    """An answer to whether something works, and how that is known."""

    works: bool
    reason: str


class DeviceKind(NamedTuple):
    """A maker's devices, as torch, drivers and libraries call them."""

    name: str
    maker: str
    torch_type: str
    """What `torch.device` and `torch.get_device_module` call it."""
    driver_files: tuple[str, ...]
    """One of these is there where a driver is."""
    device_files: tuple[str, ...] = ()
    """Those of them that prove a device for computing: `/dev/dri` and WSL's `/dev/dxg` are there for displays too."""
    visibility: tuple[str, ...] = ()
    """Variables by which a launcher or a user hides devices."""
    library: str = ""
    """The maker's library of collectives; empty where hpctrain uses none."""
    groups: str = ""
    """The class of process groups by which torch uses the library."""
    not_summed: tuple[str, ...] = ()
    """Dtypes that the library does not sum: they are exchanged, and summed by ourselves."""
    debug: str = ""
    """The variable by which the library says more."""
    network: str = ""
    """The variable that names the network by which the library's ranks find each other."""
    uses_cupy: bool = False
    """Whether CuPy is built for it, which then makes streams, and views of device memory for MPI."""
    plugin: str = ""
    """The package that adds it to torch; empty where torch has it."""
    build: str = ""
    """What the version of a torch that is built for it ends in; empty where it does not say."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that are set where they are not, before the device is used."""
    in_one_order: tuple[tuple[str, str], ...] = ()
    """The same, where sums of the library must have one order."""
    overrides: tuple[tuple[str, str], ...] = ()
    """Variables that have these values whatever a site has set: with others a rank would wait, or end, by torch."""
    pins_memory: bool = True
    """Whether host buffers can be pinned: not for a device that tests pretend."""


CUDA = DeviceKind(
    "cuda",
    "NVIDIA",
    "cuda",
    ("/dev/nvidiactl", "/dev/dxg"),
    device_files=("/dev/nvidiactl",),
    visibility=("CUDA_VISIBLE_DEVICES",),
    library="NCCL",
    groups="torch.distributed.ProcessGroupNCCL",
    debug="NCCL_DEBUG=INFO",
    network="NCCL_SOCKET_IFNAME",
    uses_cupy=True,
    environment=(
        # Without it, products on several streams may sum in another order from run to run.
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        # Connections are made when a communicator is, where all ranks are at the same place: made at the first
        # operation they would block the host inside a lane, where ranks may be at different places.
        ("NCCL_RUNTIME_CONNECT", "0"),
        # Torch's own flight recorder walks Python's stack at each collective.
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "0"),
        ("TORCH_FR_BUFFER_SIZE", "0"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "0"),
    ),
    # Both let switches sum, in an order that changes from call to call.
    in_one_order=(("NCCL_NVLS_ENABLE", "0"), ("NCCL_COLLNET_ENABLE", "0")),
    overrides=(
        # Threads of torch would end the process at an error, before hpctrain can say where.
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        ("NCCL_ASYNC_ERROR_HANDLING", "0"),
        ("TORCH_NCCL_ENABLE_MONITORING", "0"),
        ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0"),
        # The host would wait for each collective.
        ("TORCH_NCCL_BLOCKING_WAIT", "0"),
        ("NCCL_BLOCKING_WAIT", "0"),
    ),
)
ROCM = CUDA._replace(
    name="rocm",
    maker="AMD",
    driver_files=("/dev/kfd",),
    device_files=("/dev/kfd",),
    visibility=("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    library="RCCL",
)
XPU = DeviceKind(
    "xpu",
    "Intel",
    "xpu",
    ("/dev/dri",),
    visibility=("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
    library="oneCCL",
    groups="torch.distributed.ProcessGroupXCCL",
    debug="CCL_LOG_LEVEL=info",
    network="CCL_KVS_IFACE",
    build="+xpu",
)
NPU = DeviceKind(
    "npu",
    "Huawei",
    "npu",
    ("/dev/davinci_manager",),
    device_files=("/dev/davinci_manager",),
    visibility=("ASCEND_RT_VISIBLE_DEVICES",),
    library="HCCL",
    groups="torch_npu._C._distributed_c10d.ProcessGroupHCCL",
    not_summed=("float64", "uint8"),
    debug="ASCEND_GLOBAL_LOG_LEVEL=1",
    network="HCCL_SOCKET_IFNAME",
    plugin="torch_npu",
    environment=(("HCCL_DETERMINISTIC", "true"),),  # the same order in every sum
)
KINDS = {kind.name: kind for kind in (CUDA, ROCM, XPU, NPU)}
"""By the name that jobs, cluster files and HPCTRAIN_DEVICE have for it."""


def may_be_there(kind: DeviceKind) -> bool:
    """Say whether a driver and a torch for a kind may be there, without loading torch."""
    if not any(map(os.path.exists, kind.driver_files)):
        return False
    try:
        return version("torch").endswith(kind.build) and bool(not kind.plugin or version(kind.plugin))
    except ImportError:  # it is not installed
        return False


def set_environment(
    kind: DeviceKind, in_one_order: bool, environment: MutableMapping[str, str] = os.environ
) -> list[str]:
    """Set a kind's variables, before torch and the library read them; say which of a site's were replaced."""
    for name, value in (*kind.environment, *(kind.in_one_order if in_one_order else ())):
        environment.setdefault(name, value)
    replaced = []
    for name, value in kind.overrides:
        given = environment.get(name, value)
        if given != value:
            replaced.append(f"{name}={given} of this site is set to {value}")
        if name in environment or not name.startswith(LEGACY):
            environment[name] = value
    return replaced


LEGACY = "NCCL_"
"""Before names by which torch had variables of its own; it complains where they are set, so they are not."""


class DriverFile(NamedTuple):
    """A file that a driver leaves on a host which has a device of its maker."""

    kind: DeviceKind
    path: str


def driver_files() -> list[DriverFile]:
    """Return what shows that this host has devices, whatever torch sees of them."""
    every = [DriverFile(kind, path) for kind in KINDS.values() for path in kind.device_files]
    return [each for each in every if os.path.exists(each.path)]


def torch_module(kind: DeviceKind) -> ModuleType | None:
    """Return torch's module of a kind, such as `torch.cuda`, where this torch sees a device of it. Loads torch."""
    import torch

    if kind.torch_type == "cuda" and bool(torch.version.hip) != (kind is ROCM):
        return None
    try:
        if kind.plugin:
            importlib.import_module(kind.plugin)
        module = torch.get_device_module(kind.torch_type)
        return module if module.device_count() > 0 else None
    except (AttributeError, ImportError, RuntimeError):
        return None


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
