"""A rank on a GPU of NVIDIA (CUDA) or AMD (ROCm, which torch drives by the same names)."""

import os
import time
from contextlib import AbstractContextManager

import torch

from hpctrain.comm.accelerators.base import Accelerator, DeviceMemory, Event, Stream

# Large enough for all multiprocessors to be busy, small enough for old devices in fp32: 0.14 TFLOP a product.
MEASURED_SIZE, MEASURED_PRODUCTS = 4096, 8
# Of cuBLAS: without it, products on several streams may sum in another order from run to run.
WORKSPACE_VARIABLE, WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def gpu_kind() -> str:
    """Return which kind of GPU this torch was built for."""
    return "rocm" if torch.version.hip else "cuda"


def visible_devices() -> list[str]:
    """Return an identity of each device that this process sees, unique on its host."""
    names = []
    for index in range(torch.cuda.device_count()):
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        names.append(str(uuid) if uuid else f"device {index}")
    return names


class CudaAccelerator(Accelerator):
    """One GPU. Made by `bind_accelerator`, which chooses the index."""

    def __init__(self, index: int, family: str):
        super().__init__(gpu_kind(), family, torch.device("cuda", index), torch.cuda.get_device_name(index))
        # torch has 32 streams of each priority and hands them out in turn: those of routes have the usual one. A copy
        # must never come to lie behind an operation that waits for another rank.
        self._copy_streams = [torch.cuda.Stream(self.device, priority=-1) for _ in range(2)]

    def bind(self) -> None:
        """Use this device; sum in the same order in every run; run backward passes in the thread that asks for them.

        The last is for MPI: torch's own threads would communicate in backward passes, which an MPI without full
        support for threads does not allow.
        """
        os.environ.setdefault(WORKSPACE_VARIABLE, WORKSPACE)
        torch.cuda.set_device(self.device)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        torch.use_deterministic_algorithms(True)  # with `warn_only` attention would be left as it is
        torch.backends.cudnn.deterministic = True
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        torch.autograd.set_multithreading_enabled(False)

    def memory(self) -> DeviceMemory:
        _, total = torch.cuda.mem_get_info(self.device)
        used, peak = torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)
        return DeviceMemory(total, used, peak)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def release(self) -> None:
        torch.cuda.empty_cache()

    def new_stream(self) -> Stream:
        return torch.cuda.Stream(self.device)  # pyright: ignore[reportReturnType] - its events are torch's own

    def on(self, stream: Stream) -> AbstractContextManager:
        return torch.cuda.stream(stream)  # pyright: ignore[reportArgumentType]

    def queued(self) -> Event:
        return torch.cuda.current_stream(self.device).record_event()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        stream = self._copy_streams[target.is_cuda]
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def stream_address(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def products_per_second(self, dtype: torch.dtype) -> float:
        a, b = (torch.ones(MEASURED_SIZE, MEASURED_SIZE, dtype=dtype, device=self.device) for _ in range(2))
        torch.matmul(a, b)
        self.synchronize()
        start = time.perf_counter()
        for _ in range(MEASURED_PRODUCTS):
            torch.matmul(a, b)
        self.synchronize()
        return MEASURED_PRODUCTS * 2 * MEASURED_SIZE**3 / (time.perf_counter() - start)
