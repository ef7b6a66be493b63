"""Measures a rank's device while all others measure theirs: as in training, ranks of a host share its resources."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.bind import DTYPES
from hpctrain.comm.groups.group import Group

Shape = tuple[int, int, int]
# [m, k, n] of products [m, k] @ [k, n], from small ones, which show what starting one costs, to what keeps a large
# device busy: squares; few rows, as where a tile has a row or two; a narrow output or input, as tensor parallelism
# makes them; and those of a feed-forward part: up, down, and the gradient of its weight, which sums over few rows.
SHAPES: tuple[Shape, ...] = (
    (64, 64, 64),
    (256, 256, 256),
    (16, 1024, 1024),
    (512, 512, 512),
    (1024, 1024, 128),
    (1024, 128, 1024),
    (256, 1024, 4096),
    (256, 4096, 1024),
    (1024, 256, 4096),
    (1024, 1024, 4096),
    (16, 8192, 8192),
    (4096, 8192, 1024),
    (4096, 1024, 8192),
    (4096, 4096, 4096),
    (8192, 4096, 8192),
)
ROUNDS = 3
CALLS = ROUNDS + 2
"""Fewest calls for one figure: one to warm up, one to learn how long it takes, one in each round."""
COPIED_BYTES, COPIED_BYTES_ON_CPUS = 512 << 20, 64 << 20
"""Bytes of a measured copy: more than the cache of a GPU, or a CPU rank's share of its host's cache, can hold."""
SHORT_SECONDS, SHORT_PART = 2.0, 4
"""A probe shorter than this many seconds copies fewer bytes, by this divisor: touching new memory takes time."""
SHARE_OF_MEMORY = 16
"""Measured tensors take at most this fraction (one in so many) of a rank's memory."""


class DeviceFigures(NamedTuple):
    """All figures that one rank measured."""

    family: str
    kind: str
    model: str | None
    memory_bytes: int
    memory_bytes_per_second: float
    host_copy_bytes_per_second: float | None
    flops_per_second: dict[tuple[str, Shape], float]
    """FLOP/s of a product by dtype and shape; shapes that would have taken too long are left out."""
    overlap_slowdown: float | None = None
    """Computing time with overlapped communication over that without; None where the device cannot do both at once."""
    operation_seconds: float | None = None
    """Seconds that the host needs to start an operation; None where the device is its host."""
    reserved_bytes: int = 0
    """Bytes of the memory that no plan may fill."""
    free_host_bytes: int | None = None
    """Bytes of the host's memory that the job may still fill; None where the device is its host."""


class TimeBudget:
    """Divides the remaining time evenly among the remaining figures: time that one does not use goes to the next
    ones."""

    def __init__(self, seconds: float, num_figures: int):
        self._end, self._left = time.monotonic() + seconds, num_figures

    def seconds_left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def next_share(self) -> float:
        """Return the seconds that the next figure may take."""
        share = self.seconds_left() / max(1, self._left)
        self._left -= 1
        return share


def measure_device(
    comm: Group,
    accelerator: Accelerator,
    family: str,
    ranks_on_host: int,
    seconds: float,
    dtypes: Sequence[str],
) -> DeviceFigures:
    """Measure the device for about so many seconds.

    `dtypes` are those in which any device of `comm` measures products. They are the same on all its ranks, which must
    all call.
    """
    on_cpu = accelerator.kind == "cpu"
    memory = accelerator.memory().total // (ranks_on_host if on_cpu else 1)
    budget = TimeBudget(seconds, len(dtypes) * len(SHAPES) + 3)
    speeds: dict[tuple[str, Shape], float] = {}
    for name in dtypes:
        most_bytes = memory // SHARE_OF_MEMORY if name in accelerator.measured_dtypes else 0
        measured = measure_products(comm, accelerator, DTYPES[name], most_bytes, budget)
        speeds |= {(name, shape): speed for shape, speed in measured}
    most = (COPIED_BYTES_ON_CPUS if on_cpu else COPIED_BYTES) // (SHORT_PART if seconds < SHORT_SECONDS else 1)
    num_bytes = min(most, memory // SHARE_OF_MEMORY // 2)
    comm.barrier()
    copied = 2 * num_bytes / _copy_seconds(accelerator, num_bytes, budget.next_share())
    comm.barrier()
    share = budget.next_share()
    host_copied = None if on_cpu else num_bytes / host_copy_seconds(accelerator, num_bytes, share)
    comm.barrier()
    share = budget.next_share()
    started = None if on_cpu else operation_seconds(accelerator, share)
    figures = DeviceFigures(family, accelerator.kind, accelerator.model, memory, copied, host_copied, speeds)
    return figures._replace(operation_seconds=started, reserved_bytes=accelerator.reserved_bytes())


def measure_products(
    comm: Group, accelerator: Accelerator, dtype: torch.dtype, most_bytes: int, budget: TimeBudget
) -> Iterator[tuple[Shape, float]]:
    """Yield each shape and its FLOP/s; shapes that exceed their time or `most_bytes` are skipped.

    All ranks of `comm` must exhaust it: they start with each shape together.
    """
    # Small products show the cost of a launch. Extrapolated from them, large ones would seem too slow for a device.
    is_asked = most_bytes and accelerator.kind != "cpu"
    fastest = (is_asked and accelerator.products_per_second(dtype)) or None
    has_one = False  # the smallest product is measured in any case: a family needs a speed
    for shape in SHAPES:
        comm.barrier()
        seconds = budget.next_share()
        m, k, n = shape
        flops = 2 * m * k * n
        if (m * k + k * n + m * n) * dtype.itemsize > most_bytes:
            continue
        if has_one and fastest is not None and CALLS * flops / fastest > seconds:
            continue
        a, b = (torch.empty(size, dtype=dtype, device=accelerator.device).uniform_(-1, 1) for size in ((m, k), (k, n)))
        out = torch.empty(m, n, dtype=dtype, device=accelerator.device)
        speed = flops / seconds_of(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), accelerator, seconds)
        fastest, has_one = max(speed, fastest or 0.0), True
        yield shape, speed


def seconds_of(call: Callable[[], object], accelerator: Accelerator, seconds: float) -> float:
    """Return the seconds of a call in the best of some rounds that together take about `seconds`.

    The best round counts, since other programs on the machine only add time. Rounds have many calls, since ranks that
    share cores take turns.
    """

    def mean_of(count: int) -> float:
        taken = accelerator.compute_stopwatch()
        for _ in range(count):
            call()
        return taken() / count

    end = time.monotonic() + seconds
    mean_of(1)
    count = max(1, int(seconds / ROUNDS / max(mean_of(1), 1e-9)))
    best = mean_of(count)
    for _ in range(ROUNDS - 1):
        if time.monotonic() < end:
            best = min(best, mean_of(count))
    return best


def _copy_seconds(accelerator: Accelerator, num_bytes: int, seconds: float) -> float:
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=accelerator.device) for _ in range(2))
    return seconds_of(lambda: target.copy_(source), accelerator, seconds)


def host_copy_seconds(accelerator, num_bytes: int, seconds: float) -> float:
    """Return the seconds of a copy of so many bytes between device and host, in the slower direction."""
    host, there = (
        accelerator.host_buffer(num_bytes),
        torch.ones(num_bytes, dtype=torch.uint8, device=accelerator.device),
    )

    def one_direction(target: torch.Tensor, source: torch.Tensor) -> None:
        event = accelerator.copy(target, source)
        while not event.query():
            os.sched_yield()

    directions = ((host, there), (there, host))
    return max(seconds_of(lambda w=direction: one_direction(*w), accelerator, seconds / 2) for direction in directions)


SMALL_OPERATIONS = 8
"""Operations of `operation_seconds`: a product, its activation and a sum, their five of the backward pass."""


def operation_seconds(accelerator: Accelerator, seconds: float) -> float:
    """Return what the host needs to start an operation, in passes whose tensors are so small that the device waits."""
    weight = torch.ones(8, 8, device=accelerator.device, requires_grad=True)
    data = torch.ones(8, 8, device=accelerator.device)

    both_passes = seconds_of(lambda: torch.nn.functional.gelu(data @ weight).sum().backward(), accelerator, seconds)
    return both_passes / SMALL_OPERATIONS


# Products short enough that many are computed while bytes move, and large enough to keep the device busy.
PRODUCT_SIZE, PRODUCT_SIZE_ON_CPUS = 2048, 256
MOVED_BYTES, MOVED_BYTES_ON_CPUS = 256 << 20, 32 << 20
SAMPLE_BYTES, SHORTEST_SECONDS = 1 << 20, 0.2
"""Bytes of a trial all-reduce, whose time sets the bytes of the measured ones. These are sized for at least so many
seconds."""


def _affordable_count(comm: Group, accelerator: Accelerator, most_bytes: int, seconds: float) -> int:
    """Return the number of floats that an all-reduce sums in at most so many seconds, the same on all ranks."""
    sample = torch.zeros(min(SAMPLE_BYTES, most_bytes) // 4, device=accelerator.device)
    for _ in range(2):  # the first all-reduce connects the ranks
        taken = accelerator.stopwatch()
        comm.all_reduce(sample)
        once = taken()
    affordable = min(most_bytes // 4, int(sample.numel() * max(1.0, seconds / once)))
    fewest = torch.full((1,), affordable, dtype=torch.int64, device=accelerator.device)
    comm.all_reduce(fewest, "min")  # different devices, and hosts, have different memory
    return int(fewest.item())


def measure_overlap(comm: Group, accelerator: Accelerator, memory_bytes: int, seconds: float) -> float | None:
    """Measure for about so many seconds by what factor an overlapped all-reduce slows down a product.

    The factor is at least 1; None where the group has no lane, which a thread must move. All ranks must call.
    """
    if not comm.is_overlapped:
        return None
    on_cpu = accelerator.kind == "cpu"
    size = PRODUCT_SIZE_ON_CPUS if on_cpu else PRODUCT_SIZE
    num_bytes = min(MOVED_BYTES_ON_CPUS if on_cpu else MOVED_BYTES, memory_bytes // SHARE_OF_MEMORY)
    measured = [DTYPES[name] for name in accelerator.measured_dtypes]
    device, dtype = accelerator.device, max(measured, key=accelerator.products_per_second)
    a, b = (torch.empty(size, size, dtype=dtype, device=device).uniform_(-1, 1) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype, device=device)
    moved = torch.zeros(
        _affordable_count(comm, accelerator, num_bytes, max(seconds / 2, SHORTEST_SECONDS)), device=device
    )

    def compute(until: Callable[[], bool]) -> tuple[int, float]:
        """Compute products until a condition is true, and one at the least; return their number and the seconds."""
        count, start = 0, time.perf_counter()
        while not count or not until():
            torch.mm(a, b, out=out)
            accelerator.finish_queued()  # synchronizing the device would wait for the all-reduce too
            count += 1
        return count, time.perf_counter() - start

    alone, overlapped = [], []
    agreed, end, is_warm = torch.zeros(1, device=device), time.monotonic() + seconds, False
    while not agreed.item():
        work = comm.start_all_reduce(moved)
        result = compute(lambda work=work: work.ended)  # no poll: a thread moves the bytes
        work.wait()
        comm.barrier()
        stop = time.perf_counter() + result[1]
        other = compute(lambda stop=stop: time.perf_counter() >= stop)
        if is_warm:  # the first round touches new memory and wakes threads
            alone.append(other)
            overlapped.append(result)
        agreed.fill_(is_warm and time.monotonic() >= end)
        is_warm = True
        comm.all_reduce(agreed, "max")
    mean, mean_alone = (
        sum(seconds for _, seconds in rounds) / sum(count for count, _ in rounds) for rounds in (overlapped, alone)
    )
    return max(1.0, mean / mean_alone)
