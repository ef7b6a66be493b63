"""The fake library of collectives, whose operations on the pretended device are watched for races."""

from collections.abc import Sequence

import numpy as np
import torch

from tests.ranks.fake_devices import FakeGroup, FakeLibrary
from tests.ranks.pretended_device import MODULE, held


class WatchedLibrary(FakeLibrary):
    """The library of collectives, whose operations are watched too."""

    def __init__(self, mpi):
        super().__init__(mpi, MODULE.current_stream)

    def __call__(self, store, rank: int, size: int, options) -> "WatchedGroup":
        return WatchedGroup(self, store, rank, size)


class WatchedGroup(FakeGroup):
    def __init__(self, *given):
        super().__init__(*given)
        MODULE.libraries += 1

    def shutdown(self) -> None:
        super().shutdown()
        MODULE.libraries -= 1

    def memory(self, tensor: torch.Tensor) -> np.ndarray:
        return held(tensor).detach().numpy()

    def use(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        stream = MODULE.current_stream()
        MODULE.touch(reads, writes, stream, f"NCCL's {name}")
        MODULE.launched[stream.cuda_stream] = stream.clock[stream.cuda_stream]
