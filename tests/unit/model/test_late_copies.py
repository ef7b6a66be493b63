"""Offload on a device whose copies are done as late as they may be: the bits of a tile that keeps all on its device."""

import ctypes
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hpctrain.checkpoint.state import tensors_of
from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.data.order import open_datasets
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.sharding.intervals import Interval
from tests.ranks.small_runs import Alone, make_job, make_trainer, write_tokens

STEPS, ROWS, MICROBATCHES = 3, 4, 3
POISON = 0xEE


class LateStream:
    """Copies in one direction. They are done when somebody waits for them, and not before."""

    def __init__(self):
        self._queue: deque[Callable[[], None]] = deque()
        self._done = self.added = 0

    def add(self, copy: Callable[[], None]) -> "LatePlace":
        self._queue.append(copy)
        self.added += 1
        return LatePlace(self, self.added)

    def finish(self, number: int) -> None:
        while self._done < number:
            self._done += 1
            self._queue.popleft()()


class LatePlace:
    """An event: the end of one copy."""

    def __init__(self, stream: LateStream, number: int):
        self._stream, self._number = stream, number

    def query(self) -> bool:
        self._stream.finish(self._number)
        return True


class LateCopies(CpuAccelerator):
    """A processor whose copies between "device" and "host" lag behind. What it computes is done at once.

    Memory that is freed while a copy uses it would be given to somebody else on a device: here that fails.
    """

    def __init__(self):
        super().__init__()
        self.streams = {"out": LateStream(), "back": LateStream()}
        self._host_buffers: list[torch.Tensor] = []

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        self._host_buffers.append(super().host_buffer(num_bytes).fill_(POISON))
        return self._host_buffers[-1]

    def move(self, target, source, after) -> LatePlace:
        num_bytes = target.numel() * target.element_size()
        assert target.is_contiguous() and source.is_contiguous()
        storages = [StorageWeakRef(each.untyped_storage()) for each in (target, source)]
        to, origin = target.data_ptr(), source.data_ptr()
        on_host = {buffer.untyped_storage().data_ptr() for buffer in self._host_buffers}

        def copy() -> None:
            after.query()
            assert not any(storage.expired() for storage in storages), "memory was freed while a copy used it"
            ctypes.memmove(to, origin, num_bytes)

        return self.streams["back" if source.untyped_storage().data_ptr() in on_host else "out"].add(copy)

    def wait_for(self, event) -> None:
        event.query()

    def synchronize(self) -> None:
        for stream in self.streams.values():
            stream.finish(stream.added)


def trained(job, offload: str, accelerator: Accelerator, **options) -> tuple[list[float], list[torch.Tensor]]:
    """Return losses and norms of some steps on one rank, and its weights and moments."""
    items = Interval(0, job.model.num_items)
    plan = Plan((Tile(items, Interval(0, ROWS), (0,), offload=offload, **options),), MICROBATCHES, ROWS)
    _, training, _ = open_datasets(job.data, job.train.seed)
    trainer = make_trainer(Alone(), job, plan, accelerator)
    trainer.initialise()
    metrics = [trainer.step(training)[0] for _ in range(STEPS)]
    accelerator.synchronize()
    state = [tensor.values for shard in trainer.optimizer.shards for tensor in tensors_of(shard)]
    return [each[key] for each in metrics for key in ("loss", "grad_norm")], state


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("options", [{}, {"recompute": "selective", "row_chunks": 2}, {"recompute": "full"}], ids=str)
def test_offload_waits_for_copies_before_it_uses_or_frees_memory(tmp_path, dtype, options):
    job = make_job(write_tokens(tmp_path / "tokens.bin"), "llama", global_batch=ROWS * MICROBATCHES, dtype=dtype)
    numbers, state = trained(job, "none", CpuAccelerator(), **options)
    late = LateCopies()
    late_numbers, late_state = trained(job, "optimizer", late, **options)
    assert late.streams["out"].added > 100 < late.streams["back"].added, "it moved what it keeps"
    assert late_numbers == numbers
    assert all(torch.equal(one, other) for one, other in zip(late_state, state, strict=True))
