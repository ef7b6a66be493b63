"""The kinds of devices that torch drives, as data: what differs between makers. Needs no torch.

`TorchAccelerator` is the one class behind all of them; a new maker is one more entry of `KINDS`.
"""

import importlib
import os
import sys
from importlib.metadata import version
from types import ModuleType
from typing import NamedTuple


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
    has_streams: bool = True
    pins_memory: bool = True
    """Whether host buffers can be pinned."""


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
        # Both let switches sum, in an order that changes from call to call.
        ("NCCL_NVLS_ENABLE", "0"),
        ("NCCL_COLLNET_ENABLE", "0"),
        # Connections are made when a communicator is, where all ranks are at the same place: made at the first
        # operation they would block the host inside a lane, where ranks may be at different places.
        ("NCCL_RUNTIME_CONNECT", "0"),
        # Threads of torch would end the process at an error, before hpctrain can say where.
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        ("TORCH_NCCL_ENABLE_MONITORING", "0"),
        ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0"),
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
MPS = DeviceKind(
    "mps",
    "Apple",
    "mps",
    ("/System/Library/Frameworks/Metal.framework",),
    has_streams=False,
    pins_memory=False,
)
KINDS = {kind.name: kind for kind in (CUDA, ROCM, XPU, NPU, MPS)}
"""By the name that jobs, cluster files and HPCTRAIN_DEVICE have for it."""


def may_be_there(kind: DeviceKind) -> bool:
    """Say whether a driver and a torch for a kind may be there, without loading torch."""
    if not any(map(os.path.exists, kind.driver_files)) or (kind is MPS and sys.platform != "darwin"):
        return False
    try:
        return version("torch").endswith(kind.build) and bool(not kind.plugin or version(kind.plugin))
    except ImportError:  # it is not installed
        return False


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
