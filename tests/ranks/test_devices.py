"""Routes and training on real GPUs; ranks share them where there are fewer than ranks, except for NCCL.

mpirun -n 4 python -m pytest --with-mpi -rs tests/ranks/test_devices.py
"""

import pytest
import torch

from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.comm.accelerators.kinds import KINDS, family_of
from hpctrain.comm.accelerators.torch_device import TorchAccelerator
from hpctrain.comm.bind import DTYPES
from hpctrain.comm.collectives.native import library_ability
from hpctrain.comm.transports.cuda_aware import probe_direct
from tests.ranks.small_runs import Alone, largest_relative_difference, losses, make_job
from tests.ranks.test_staged import Pretended, check_collectives

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(not NUM_GPUS, reason="needs a GPU that torch sees")
# Cycles of a kernel that only waits, some 10 ms: what is queued behind it is late.
LATE = 20_000_000
# Small ones, and some that go through host buffers in several chunks.
SIZES = (1, 100, 500_000)


class OnGpu(Pretended):
    """Ranks of families a and b have GPUs, those of family c have none."""

    def __init__(self, world, families, **settings):
        on_gpu = families[world.rank] != "c"
        device = CpuAccelerator("c")
        if on_gpu:
            kind = KINDS["rocm" if torch.version.hip else "cuda"]
            device = TorchAccelerator(kind, world.rank % NUM_GPUS, families[world.rank])
        device.bind()
        super().__init__(world, families, device=device, **settings)

    def later(self, values: torch.Tensor) -> torch.Tensor:
        if self.device.kind == "cpu":
            return values
        given = values.to(self.device.device)
        tensor = torch.zeros_like(given)
        torch.cuda._sleep(LATE)
        return tensor.copy_(given)


def check_sizes(world, pretended: Pretended):
    ranks = list(range(world.size))
    comm = pretended.group(ranks)
    for size in SIZES:
        for dtype in ("fp32", "bf16", "int64"):
            case = {"ranks": ranks, "size": size, "dtype": dtype, "op": "sum", "seed": size}
            check_collectives(comm, case | {"counts": [size // 2 + 3 * i for i in ranks]}, pretended.later)
    mine = torch.tensor([float(world.rank)])  # tensors of the host go through the same group
    comm.all_reduce(mine)
    assert mine == sum(ranks)
    comm.close()
    pretended.device.synchronize()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("families", ["aaaaaaaa", "abababab", "acacacac"])
def test_staged_collectives_on_gpus(world, families):
    check_sizes(world, OnGpu(world, families[: world.size]))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("families", ["aaaaaaaa", "aabbaabb"])
def test_native_collectives_on_gpus(world, families):
    if world.size > NUM_GPUS:
        pytest.skip(f"NCCL needs a GPU for each of the {world.size} ranks, and there are {NUM_GPUS}")
    kind = KINDS["rocm" if torch.version.hip else "cuda"]
    if not (result := library_ability(kind)).works:
        pytest.skip(result.reason)
    check_sizes(world, OnGpu(world, families[: world.size], native=True))


@pytest.mark.timeout(300)
def test_direct_collectives_on_gpus(world):
    kind = "rocm" if torch.version.hip else "cuda"
    result = world.broadcast_object(probe_direct(kind) if world.rank == 0 else None)
    if not result.works:
        pytest.skip(f"this MPI is not given memory of GPUs: {result.reason}")
    check_sizes(world, OnGpu(world, "a" * world.size, direct="a"))


@pytest.mark.timeout(300)
def test_two_lanes_on_gpus(world):
    pretended, ranks = OnGpu(world, "a" * world.size), list(range(world.size))
    groups = [pretended.group(ranks, overlapped=True) for _ in range(2)]
    tensors = [pretended.later(torch.full((200_000,), float(world.rank + i))) for i in range(6)]
    works = [groups[i % 2].start_all_reduce(tensor) for i, tensor in enumerate(tensors)]
    for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        assert (tensor == sum(ranks) + i * world.size).all()
    pretended.close()


@pytest.mark.timeout(300)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("families", ["aaaa", "aacc"])
def test_training_on_gpus_gives_the_losses_of_one_cpu_rank(world, tokens, families):
    expected = world.broadcast_object(losses(Alone(), make_job(tokens, "llama")) if world.rank == 0 else None)
    for plan in ({"tensor": {"y": 2}, "pipeline": 2}, {"tensor": {"z": 2}, "data": 2}):
        pretended = OnGpu(world, families)
        result = losses(pretended, make_job(tokens, "llama", plan), accelerator=pretended.device)
        assert largest_relative_difference(result, expected) < 1e-4  # other exp and log than the processor's
        if families == "aaaa":
            again = losses(pretended, make_job(tokens, "llama", plan), accelerator=pretended.device)
            assert again == result, "the same job twice is the same, bit for bit"
        pretended.close()


@pytest.mark.timeout(120)
def test_what_a_gpu_says_of_itself(world):
    device = OnGpu(world, "a" * world.size).device
    tensor = torch.zeros(1 << 20, device=device.device)
    memory = device.memory()
    assert memory.total > memory.peak >= memory.used >= tensor.numel() * 4
    assert family_of(device.model)
    assert device.is_on_device(tensor) and not device.is_on_device(tensor.cpu())
    buffer = device.host_buffer(100)
    assert buffer.is_pinned() and buffer.numel() == 100
    assert device.products_per_second(DTYPES["fp32"]) > 1e11
    assert device.staging.num_bytes == 0
