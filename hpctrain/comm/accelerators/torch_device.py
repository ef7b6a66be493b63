"""A rank on a device that torch drives: one class for all makers, which differ by an entry of `kinds.KINDS`."""

import mmap
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from typing import Any

import torch

from hpctrain.comm.accelerators.base import Accelerator, DeviceMemory, Event, ExportedMemory, Stream
from hpctrain.comm.accelerators.cpu import DONE
from hpctrain.comm.accelerators.kinds import DeviceKind, set_environment, torch_module
from hpctrain.comm.start.launcher import asked_threads
from hpctrain.comm.start.process import this_machine
from hpctrain.config.errors import TopologyError

# Large enough for all multiprocessors to be busy, small enough for old devices in fp32: 0.14 TFLOP a product.
MEASURED_SIZE, MEASURED_PRODUCTS = 4096, 8
SHARED_STREAMS = 24
"""Number of streams that message routes share without CuPy. Torch has 32, and hands them out round-robin."""
LIBRARY_BYTES = 1 << 30
"""Memory reserved for the buffers of a library of collectives: NCCL takes 0.1 to 0.4 GB for a communicator, and a rank
has a few."""
FRAGMENTATION_SHARE = 0.04
"""Share of a device's memory that a caching allocator is assumed to lose to fragmentation."""
ROCM_MAJOR = 10_000_000
"""Factor of the major version in CuPy's number for a version of ROCm."""
EXACT_BYTES = 4 << 20
"""Smallest host buffers that are pinned at their exact size. Rounding up could double the bytes of offloaded state."""


class TorchAccelerator(Accelerator):
    """One device of a kind that torch drives. Made by `bind_accelerator`, which chooses the index."""

    measured_dtypes = ("fp32", "bf16", "fp16")

    def __init__(
        self, kind: DeviceKind, index: int, family: str, sharers: int = 1, module: Any = None, cupy: Any = None
    ):
        """`sharers` is how many ranks use the device. `module` and `cupy` replace torch's and CuPy, for tests."""
        module = module or torch_module(kind)
        if module is None:
            raise TopologyError(f"torch {torch.__version__} sees no device of kind {kind.name}")
        name = module.get_device_name(index) if hasattr(module, "get_device_name") else f"{kind.maker} {kind.name}"
        super().__init__(kind.name, family, torch.device(kind.torch_type, index), name)
        self._kind, self._index, self._sharers = kind, index, max(1, sharers)
        self._module, self._given_cupy = module, cupy
        self._outside = 0
        self._num_streams = 0
        # Copies have streams of their own: none may queue behind an operation that waits for another rank.
        self._copy_streams = [self._pooled_stream(priority=-1) for _ in range(2)]

    @cached_property
    def cupy(self) -> Any:
        """CuPy's module, or None where it is missing, broken, or not built for this kind.

        Raises TopologyError for a CuPy of another maker or another ROCm than torch's: a process has one such runtime.
        """
        if self._given_cupy or not self._kind.uses_cupy:
            return self._given_cupy
        try:
            import cupy  # pyright: ignore[reportMissingImports] - an extra
        except Exception:  # whatever a broken installation raises
            return None
        check_cupy(cupy.cuda, torch.version.hip)
        return cupy

    def use(self) -> None:
        """Make it the current device of the calling thread: for torch, for CuPy, and for an MPI that asks the
        driver."""
        if hasattr(self._module, "set_device"):
            self._module.set_device(self._index)
        if self.cupy is not None:
            self.cupy.cuda.Device(self._index).use()

    def bind(self, in_one_order: bool = True) -> None:
        """Use this device; sum in fp32 and in the same order in every run; run backward passes in the calling thread.

        The last is for MPI: torch's own threads would communicate in backward passes, which an MPI without full support
        for threads does not allow.
        """
        self.overridden = set_environment(self._kind, in_one_order)
        self.use()
        torch.set_num_threads(asked_threads() or 1)
        self.sum_in_one_order(in_one_order)
        products = torch.backends.cuda.matmul  # else a library may add parts of a long sum in half precision
        products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = False
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        torch.autograd.set_multithreading_enabled(False)
        self._outside = self._measure_outside()

    def sum_in_one_order(self, always: bool) -> None:
        torch.use_deterministic_algorithms(always)  # with `warn_only` attention would be left as it is
        torch.backends.cudnn.deterministic = always

    def _measure_outside(self) -> int:
        """Return the bytes used outside of torch's allocator: the driver's context and loaded libraries. On a shared
        device all its ranks so far count."""
        if not hasattr(self._module, "mem_get_info"):
            return 0
        one = torch.ones(64, 64, device=self.device)
        torch.matmul(one, one)  # loads the library of products
        self.synchronize()
        free, total = self._module.mem_get_info(self._index)
        return max(0, total - free - self._module.memory_reserved(self._index))

    def memory(self) -> DeviceMemory:
        """Return the memory of this rank. `total` is its even share of the device.

        `used` and `peak` are the bytes that torch's allocator has reserved. They include unusable ones, which other
        programs cannot have either.
        """
        module, index = self._module, self._index
        if hasattr(module, "mem_get_info"):
            total = module.mem_get_info(index)[1]
        else:
            total = module.get_device_properties(index).total_memory
        return DeviceMemory(total // self._sharers, module.memory_reserved(index), module.max_memory_reserved(index))

    def free_bytes(self) -> int | None:
        return self._module.mem_get_info(self._index)[0] if hasattr(self._module, "mem_get_info") else None

    def reserved_bytes(self) -> int:
        """Return the bytes of this rank's share that no plan may fill.

        They are the driver's context and other users' memory, measured when the device was bound; the buffers of a
        library of collectives; and an allowance for fragmentation.
        """
        total = self.memory().total
        library = LIBRARY_BYTES if self._kind.library and self._sharers == 1 else 0
        reserved = self._outside // self._sharers + library + int(FRAGMENTATION_SHARE * total)
        return min(reserved, total // 2)

    def synchronize(self) -> None:
        """Wait until all work queued on any stream is done, collectives included."""
        self._module.synchronize()

    def step_stopwatch(self, step: int) -> Callable[[], float]:
        start = time.perf_counter()
        return lambda: time.perf_counter() - start

    def release(self) -> None:
        if hasattr(self._module, "empty_cache"):
            self._module.empty_cache()

    def forget_peak(self) -> None:
        self._module.reset_peak_memory_stats(self._index)

    def _pooled_stream(self, priority: int = 0) -> Any:
        return self._module.Stream(self.device, priority=priority)

    def new_stream(self) -> Stream:
        """Return a stream that nothing else uses: one of CuPy, since torch's pool repeats after 32.

        Without CuPy it is one of a few shared ones. Routes on the same stream then wait for each other's copies, but
        for no rank.
        """
        if self.cupy is not None:
            with self.cupy.cuda.Device(self._index):
                made = self.cupy.cuda.Stream(non_blocking=True)
            stream = self._module.ExternalStream(made.ptr, device=self.device)
            stream.hpctrain_owner = made  # it lives as long as its last user
            return stream
        self._num_streams += 1
        return self._shared_streams[self._num_streams % SHARED_STREAMS]

    @cached_property
    def _shared_streams(self) -> list[Any]:
        return [self._pooled_stream() for _ in range(SHARED_STREAMS)]

    def launch_stream(self) -> Stream:
        return self._pooled_stream(priority=-1)

    def on(self, stream: Stream) -> AbstractContextManager:
        return self._module.stream(stream)

    def queued(self) -> Event:
        return self._current().record_event()

    def wait_for(self, event: Event) -> None:
        if event is not DONE:
            self._current().wait_event(event)

    def _current(self) -> Any:
        return self._module.current_stream(self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        stream = self._copy_streams[self.is_on_device(target)]
        with self.on(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    @cached_property
    def _move_streams(self) -> list[Any]:
        return [self._pooled_stream() for _ in range(2)]

    def move(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        stream = self._move_streams[self.is_on_device(target)]
        if after is not DONE:
            stream.wait_event(after)
        with self.on(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        is_rounded = num_bytes >= EXACT_BYTES and num_bytes.bit_count() > 1
        if is_rounded and self._kind.pins_memory and hasattr(self._module, "cudart"):
            exact = register_memory(num_bytes, self._module.cudart())
            if exact is not None:
                return exact
            with suppress(RuntimeError):  # clear the driver's last error, which the next launch would report as its own
                torch.ones(1, device=self.device)
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._kind.pins_memory)

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type

    def view_for_mpi(self, data: torch.Tensor) -> Any:
        """Return device bytes as a CuPy array over the same memory; None without CuPy.

        DLPack would wait for a stream; here nothing is queued and nothing waits. The caller must know that the bytes
        are complete.
        """
        if self.cupy is None or not self.is_on_device(data) or not data.numel():
            return None
        return self._array_at(data.data_ptr(), data.numel(), data)

    def _array_at(self, address: int, num_bytes: int, owner: object) -> Any:
        cuda = self.cupy.cuda
        memory = cuda.UnownedMemory(address, num_bytes, owner, self._index)
        return self.cupy.ndarray((num_bytes,), dtype="uint8", memptr=cuda.MemoryPointer(memory, 0))

    def export_memory(self, num_bytes: int) -> ExportedMemory | None:
        if self.cupy is None:
            return None
        runtime = self.cupy.cuda.runtime
        with self.cupy.cuda.Device(self._index):
            address = runtime.malloc(num_bytes)  # not torch's allocator: a handle opens the driver's whole allocation
            try:
                handle = runtime.ipcGetMemHandle(address)
            except Exception:
                runtime.free(address)
                raise
        return ExportedMemory(torch.from_dlpack(self._array_at(address, num_bytes, self)), handle)

    def import_memory(self, handle: bytes, num_bytes: int) -> torch.Tensor:
        with self.cupy.cuda.Device(self._index):
            address = self.cupy.cuda.runtime.ipcOpenMemHandle(handle)
        return torch.from_dlpack(self._array_at(address, num_bytes, self))

    def close_memory(self, imported: torch.Tensor) -> None:
        self.cupy.cuda.runtime.ipcCloseMemHandle(imported.data_ptr())

    def free_memory(self, exported: torch.Tensor) -> None:
        self.cupy.cuda.runtime.free(exported.data_ptr())

    def products_per_second(self, dtype: torch.dtype) -> float:
        a, b = (torch.ones(MEASURED_SIZE, MEASURED_SIZE, dtype=dtype, device=self.device) for _ in range(2))
        torch.matmul(a, b)
        self.synchronize()
        start = time.perf_counter()
        for _ in range(MEASURED_PRODUCTS):
            torch.matmul(a, b)
        self.synchronize()
        return MEASURED_PRODUCTS * 2 * MEASURED_SIZE**3 / (time.perf_counter() - start)


def check_cupy(cuda: Any, hip: str | None) -> None:
    """Compare what CuPy is built for with the ROCm that torch is built for, None: CUDA. Raises TopologyError."""
    cupy_rocm = cuda.driver.get_build_version() // ROCM_MAJOR if cuda.runtime.is_hip else None
    torch_rocm = int(hip.split(".")[0]) if hip else None
    if cupy_rocm != torch_rocm:
        one, other = (f"ROCm {major}" if major else "CUDA" for major in (cupy_rocm, torch_rocm))
        raise TopologyError(
            f"CuPy is built for {one}, and torch {torch.__version__} for {other}: install the CuPy of torch's, or none"
        )


def visible_devices(kind: DeviceKind) -> list[str]:
    """Return a name for each device of a kind that this process sees; empty without torch's module.

    Names are unique among the devices of all hosts.
    """
    module = torch_module(kind)
    if module is None:
        return []
    names = []
    for index in range(module.device_count()):
        properties = module.get_device_properties(index) if hasattr(module, "get_device_properties") else None
        uuid = getattr(properties, "uuid", None)
        names.append(str(uuid) if uuid and str(uuid).strip("0-") else f"device {index} of {this_machine()}")
    return names


class _Registered(mmap.mmap):
    """Pinned memory, which is registered with the driver until its last user is gone."""

    unregister: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unregister is not None:
            self.unregister()


def register_memory(num_bytes: int, runtime: Any) -> torch.Tensor | None:
    """Return pinned uint8 memory of exactly so many bytes, or None where the driver refuses it.

    Torch rounds sizes up to a power of two. `runtime` is that of `torch.cuda.cudart`.
    """
    memory = _Registered(-1, num_bytes)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    address = tensor.data_ptr()
    if int(runtime.cudaHostRegister(address, num_bytes, 0)):
        return None
    memory.unregister = lambda: runtime.cudaHostUnregister(address)
    return tensor
