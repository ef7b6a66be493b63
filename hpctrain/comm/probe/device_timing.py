"""Measures a rank's device while all others measure theirs: as in training, ranks of a host share what they share."""

import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.accelerators.bind import DTYPES
from hpctrain.comm.communicator import Communicator

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
"""The least that are needed for one figure: one to warm up, one to learn how long it takes, one in each round."""
COPIED_BYTES, COPIED_BYTES_ON_CPUS = 512 << 20, 64 << 20
"""More than caches hold: those of a GPU, and what a CPU rank has of its host's."""
SHORT_SECONDS, SHORT_PART = 2.0, 4
"""A probe shorter than this copies so many times less: memory that is touched for the first time takes a while."""
SHARE_OF_MEMORY = 16
"""Nothing is measured with tensors of more than this part of the memory that a rank has."""


class DeviceFigures(NamedTuple):
    """What one rank measured."""

    family: str
    kind: str
    model: str | None
    memory_bytes: int
    memory_bytes_per_second: float
    host_copy_bytes_per_second: float | None
    flops_per_second: dict[tuple[str, Shape], float]
    """Of dtype and shape; those that would have taken too long are left out."""
    overlap_slowdown: float | None = None
    """How many times as long it computes while it communicates; None where it does not do both at once."""
    reserved_bytes: int = 0
    """Of the memory, what no plan may fill."""


class Schedule:
    """Cuts the time that is left evenly among the figures that are left: what one does not use the next ones have."""

    def __init__(self, seconds: float, num_figures: int):
        self._end, self._left = time.monotonic() + seconds, num_figures

    def seconds_left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def next_share(self) -> float:
        """Return how many seconds the next figure may take."""
        share = self.seconds_left() / max(1, self._left)
        self._left -= 1
        return share


def measure_device(
    comm: Communicator, accelerator: Accelerator, family: str, ranks_on_host: int, seconds: float
) -> DeviceFigures:
    """Measure the device for about so many seconds. All ranks of `comm` must call."""
    on_cpu = accelerator.kind == "cpu"
    memory = accelerator.memory().total // (ranks_on_host if on_cpu else 1)
    schedule = Schedule(seconds, len(accelerator.measured_dtypes) * len(SHAPES) + 2)
    speeds = {
        (name, shape): speed
        for name in accelerator.measured_dtypes
        for shape, speed in measure_products(comm, accelerator, DTYPES[name], memory // SHARE_OF_MEMORY, schedule)
    }
    most = (COPIED_BYTES_ON_CPUS if on_cpu else COPIED_BYTES) // (SHORT_PART if seconds < SHORT_SECONDS else 1)
    num_bytes = min(most, memory // SHARE_OF_MEMORY // 2)
    comm.barrier()
    copied = 2 * num_bytes / _copy_seconds(accelerator, num_bytes, schedule.next_share())
    comm.barrier()
    share = schedule.next_share()
    host_copied = None if on_cpu else num_bytes / host_copy_seconds(accelerator, num_bytes, share)
    reserved = accelerator.reserved_bytes()
    model = accelerator.model
    return DeviceFigures(family, accelerator.kind, model, memory, copied, host_copied, speeds, reserved_bytes=reserved)


def measure_products(
    comm: Communicator, accelerator: Accelerator, dtype: torch.dtype, most_bytes: int, schedule: Schedule
) -> Iterator[tuple[Shape, float]]:
    """Yield each shape and its FLOP/s; shapes that do not fit into their time or `most_bytes` are passed over.

    All ranks of `comm` must exhaust it: they start with each shape together.
    """
    fastest = None
    for shape in SHAPES:
        comm.barrier()
        seconds = schedule.next_share()
        m, k, n = shape
        flops = 2 * m * k * n
        if (m * k + k * n + m * n) * dtype.itemsize > most_bytes:
            continue
        if fastest is not None and CALLS * flops / fastest > seconds:
            continue
        a, b = (torch.empty(size, dtype=dtype, device=accelerator.device).uniform_(-1, 1) for size in ((m, k), (k, n)))
        out = torch.empty(m, n, dtype=dtype, device=accelerator.device)
        speed = flops / seconds_of(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), accelerator, seconds)
        fastest = max(speed, fastest or 0.0)
        yield shape, speed


def seconds_of(call: Callable[[], object], accelerator: Accelerator, seconds: float) -> float:
    """Return what a call takes in the best of some rounds, that together take about `seconds`.

    The best, since what others do on the machine only adds; rounds of many calls, since ranks that share cores take
    turns on them.
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
    """Return what a copy of so many bytes takes between device and host, in the slower direction."""
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
