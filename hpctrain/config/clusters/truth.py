"""The behaviour of a rehearsal's pretend devices: the table `[truth]` of a cluster file, that only they read.

A planner knows only what was measured, as with real devices: so the truth is no part of a `Cluster`.
Figures are those of the cluster; `hpctrain.rehearsal.miniature` scales them together with a job. Those of a finished
miniature are scaled.
"""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hpctrain.config.bounds import MOST_NUMBER, Count, Latency, Rate, Scale, Slowdown
from hpctrain.config.clusters.cluster import HOST_COPY_SHARE, ITEM_BYTES, Cluster, DType, Name
from hpctrain.config.clusters.figures import Bytes
from hpctrain.config.clusters.measured_speeds import without_ranks
from hpctrain.config.tables import Several, Table, refused_for


class PretendDevice(Table):
    """The behaviour of one device of a family."""

    memory_bytes: Bytes
    memory_bytes_per_second: Rate
    """Read and written, by everything that is no product."""
    flops_per_second: Annotated[dict[DType, Rate], Field(min_length=1)]
    """The speed of products large enough to keep it busy; it does not compute in a dtype that is not listed."""
    launch_seconds: Latency = 0.0
    """The least that an operation takes."""
    tile: Annotated[tuple[Count, Count], Field(strict=False)] = (1, 1)
    """Products are computed in whole tiles of so many rows and columns of the result."""
    half_speed_rows: Annotated[float, Field(ge=0, le=MOST_NUMBER)] = 0.0
    """Rows of the result at which a product reaches half of its speed."""
    overlap_slowdown: Slowdown = 1.0
    """The factor by which a computation takes longer while the device communicates."""
    host_copy_bytes_per_second: Rate | None = None
    """The bandwidth to or from pinned host memory; left out: a share of its memory's, see
    `hpctrain.config.clusters.cluster.HOST_COPY_SHARE`."""
    jitter_share: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Standard deviation of an operation's time, of its time."""

    def product_seconds(self, dtype: str, m: int, k: int, n: int, batch: int = 1) -> float:
        """Return the seconds of `batch` products [m, k] @ [k, n]. Raises ValueError for a dtype that it does not
        have."""
        if dtype not in self.flops_per_second:
            raise ValueError(f"a device that computes in {', '.join(self.flops_per_second)} was given {dtype}")
        rows, columns = (math.ceil(size / tile) * tile for size, tile in zip((m, n), self.tile, strict=True))
        flops = 2.0 * batch * rows * k * columns
        seconds = flops / self.flops_per_second[dtype] * (1 + self.half_speed_rows / rows)
        num_bytes = ITEM_BYTES[dtype] * batch * (m * k + k * n + m * n)
        return max(self.launch_seconds, seconds, num_bytes / self.memory_bytes_per_second)

    def host_copy_seconds(self, num_bytes: int) -> float:
        """Return the seconds of a copy of so many bytes between the device and host memory."""
        speed = self.host_copy_bytes_per_second or HOST_COPY_SHARE * self.memory_bytes_per_second
        return max(self.launch_seconds, num_bytes / speed)

    def pass_seconds(self, num_bytes: int) -> float:
        """Return the seconds of an operation that does little but read and write so many bytes."""
        return max(self.launch_seconds, num_bytes / self.memory_bytes_per_second)


class DeviceEvent(Table):
    """A change of one pretend device, or the loss of it or of a node."""

    step: Count
    """The first step with that speed, or the step in which it is lost."""
    rank: Annotated[int, Field(ge=0)] | None = None
    node: Annotated[int, Field(ge=0)] | None = None
    """All devices of a node, counted over the whole cluster; for a loss alone."""
    slower: Slowdown | None = None
    """The factor by which it takes longer than its family from now on; 1: it is well again."""
    lost: Literal["killed", "silent"] | None = None
    """Its process is killed, or stops and answers nobody any more."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        mistakes = []
        if (self.rank is None) == (self.node is None):
            mistakes.append("a rank or a node; set one of them")
        if (self.slower is None) == (self.lost is None):
            mistakes.append("slower or lost; set one of them")
        if self.node is not None and self.slower is not None:
            mistakes.append("a node is lost as a whole; set slower for its ranks")
        return refused_for(self, mistakes)

    def ranks(self, cluster: Cluster) -> list[int]:
        """Return the ranks of a cluster that it is about."""
        place = "rank" if self.node is None else "node"
        return [device.rank for device in cluster.devices if getattr(device, place) == getattr(self, place)]


class Truth(Table):
    """The pretend devices, and how the rehearsal is scaled.

    Where all three scales are kept, real and pretended work have the same proportions.
    """

    time_scale: Scale = 1.0
    """Seconds of the rehearsal for one of the cluster."""
    memory_scale: Scale = 1.0
    """Bytes of the rehearsal's memory for one of the cluster's, times the square of the width scale. In a file of real
    size, left out: resolved so that the job fills as large a share of it as of the cluster's."""
    bandwidth_to_compute_scale: Scale = 1.0
    """Bytes per FLOP of the rehearsal for one of the cluster."""
    width_scale: Count = 1
    """The number by which widths and positions of the job were divided, in a finished miniature."""
    devices: dict[Name, PretendDevice] = Field(default_factory=dict)
    """The device of each family."""
    events: Several[DeviceEvent] = ()
    """What happens to single devices while a job trains."""


def after_losses(cluster: Cluster, truth: Truth, num_ranks: int) -> tuple[Cluster, Truth]:
    """Return what is left of a cluster and its truth after so many losses that it has `num_ranks` devices.

    As they are, where no number of its losses leaves that many. The events that are left are those of the other ranks,
    by their new numbers.
    """
    gone: set[int] = set()
    for event in sorted(truth.events, key=lambda event: event.step):
        if len(gone) >= cluster.num_devices - num_ranks:
            break
        gone.update(event.ranks(cluster) if event.lost else ())
    if not gone or cluster.num_devices - len(gone) != num_ranks:
        return cluster, truth
    left = [device.rank for device in cluster.devices if device.rank not in gone]
    events = [
        event.model_copy(update={"rank": left.index(rank), "node": None})
        for event in truth.events
        for rank in event.ranks(cluster)
        if rank not in gone
    ]
    return without_ranks(cluster, gone), truth.model_copy(update={"events": tuple(events)})
