"""The kinds of devices that torch drives, as data, and the detection of this process' kind before torch is imported.

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
    """An answer to whether something works, and the evidence for it."""

    works: bool
    reason: str


class DeviceKind(NamedTuple):
    """The devices of one maker, with the names that torch, drivers and libraries use."""

    name: str
    maker: str
    torch_type: str
    """The name for `torch.device` and `torch.get_device_module`."""
    driver_files: tuple[str, ...]
    """Files of the driver; at least one of them exists where the driver is installed."""
    device_files: tuple[str, ...] = ()
    """Driver files that prove a compute device. `/dev/dri` and WSL's `/dev/dxg` do not: they exist for displays too."""
    visibility: tuple[str, ...] = ()
    """Variables by which a launcher or a user hides devices."""
    library: str = ""
    """The maker's library of collectives; empty where hpctrain uses none."""
    groups: str = ""
    """The class of process groups by which torch uses the library."""
    not_summed: tuple[str, ...] = ()
    """Dtypes that the library does not sum: hpctrain exchanges the values and sums them itself."""
    debug: str = ""
    """The variable that makes the library more verbose."""
    network: str = ""
    """The variable that names the network on which the library's ranks find each other."""
    uses_cupy: bool = False
    """Whether CuPy supports it; CuPy then provides streams, and views of device memory for MPI."""
    plugin: str = ""
    """The package that adds it to torch; empty where torch has it built in."""
    build: str = ""
    """The suffix in the version of a torch that is built for it; empty where the version does not tell."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables with defaults that are set before the device is used, unless the site has set them."""
    in_one_order: tuple[tuple[str, str], ...] = ()
    """Variables with defaults like those of `environment`, set where sums of the library must have one order."""
    overrides: tuple[tuple[str, str], ...] = ()
    """Variables that are set even against the site's values: with others torch would block or end a rank."""
    pins_memory: bool = True
    """Whether host buffers can be pinned; false for the pretended device of tests."""


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
    # Both settings let switches sum, in an order that changes from call to call.
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
"""The kinds, by the name that jobs, cluster files and HPCTRAIN_DEVICE use."""


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
    """Set a kind's variables before torch and the library read them; return which of the site's values were
    replaced."""
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
"""Prefix of torch's former variables. Torch complains where they are set, so hpctrain does not add them."""


class DriverFile(NamedTuple):
    """A file that a driver leaves on a host which has a device of its maker."""

    kind: DeviceKind
    path: str


def driver_files() -> list[DriverFile]:
    """Return the driver files which prove that this host has devices, whatever torch sees of them."""
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
    """The device that a rank reports before it takes one."""

    kind: str
    """cpu or one of `KINDS`; or the kind that was requested and may be missing, which `bind_accelerator` detects."""
    family: str
    memory_bytes: int = 0
    """Memory of a device whose family follows from its name, and maybe from its memory too (`split_families`); else
    0."""


def detect_device(environment: Mapping[str, str] = os.environ) -> DetectedDevice:
    """Return the kind of this process' device and its family.

    The kind is HPCTRAIN_DEVICE, else the kind that torch sees. The family is HPCTRAIN_FAMILY, else it follows from the
    device's name. Where no driver is installed torch is not loaded, which saves a second.
    """
    asked = environment.get(DEVICE_VARIABLE, "auto")
    candidates = [kind for kind in KINDS.values() if asked in (kind.name, "auto") and may_be_there(kind)]
    if asked in ("cuda", "rocm"):  # torch drives both by the same names: take the one that it is built for
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
    """Make the device that this rank will probably take the current one, before MPI starts; return its index.

    An MPI that moves device memory looks at the current device once, when it starts. Without a device or a local rank
    nothing is done, and None is returned.
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
