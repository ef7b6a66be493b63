"""The optimizer's state in host memory: moments, and fp32 masters where weights in use are half precision.

An update moves it through the device bucket by bucket (ZeRO-Offload, Ren et al. 2021, updates on the host): the device
computes the same numbers as without offload. Two buckets are on the device: while one is updated, the next comes in and
the last goes out, where the device has streams.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from hpctrain.comm.accelerators.base import Accelerator, Event
from hpctrain.model.shard import Shard
from hpctrain.sharding.host_buckets import ALIGNED, SLOTS, bucket_elements
from hpctrain.sharding.intervals import Interval


class Updated(NamedTuple):
    """Parts of shards with the same update, all of one dim; each list has one tensor a part."""

    masters: list[torch.Tensor]
    grads: list[torch.Tensor]
    exp_avg: list[torch.Tensor]
    exp_avg_sq: list[torch.Tensor]


class Run(NamedTuple):
    """Neighbouring elements of a shard with the same update."""

    at: Interval
    """Within the group's flat array."""
    decays: bool
    """Whether they have weight decay."""


class Bucket(NamedTuple):
    """The elements of a shard that go through the device at once."""

    shard: Shard
    runs: tuple[Run, ...]
    """In order; what lies between them is never updated."""

    @property
    def at(self) -> Interval:
        return Interval(self.runs[0].at.start, self.runs[-1].at.stop)


def runs_of(shard: Shard) -> list[Run]:
    """Return what this rank updates of a shard, in order, neighbours together."""
    runs: list[Run] = []
    for region in shard.group.regions(shard.updated):
        run = Run(region.at, region.parameter.decay)
        if runs and runs[-1].at.stop == run.at.start and runs[-1].decays == run.decays:
            run = Run(Interval(runs.pop().at.start, run.at.stop), run.decays)
        runs.append(run)
    return runs


def buckets_of(shard: Shard, most: int) -> Iterator[Bucket]:
    """Yield the runs of a shard in buckets of at most so many elements, a multiple of `ALIGNED`."""
    taken: list[Run] = []
    for run in runs_of(shard):
        start = run.at.start
        while start < run.at.stop:
            left = most - (start - taken[0].at.start if taken else 0)
            stop = run.at.stop if run.at.stop - start <= left else start + max(0, left) // ALIGNED * ALIGNED
            if stop > start:
                taken.append(Run(Interval(start, stop), run.decays))
                start = stop
            if start < run.at.stop:
                yield Bucket(shard, tuple(taken))
                taken = []
    if taken:
        yield Bucket(shard, tuple(taken))


class HostState:
    """Updates shards whose state is in host memory, on one rank. Involves no other rank."""

    def __init__(self, accelerator: Accelerator, shards: Sequence[Shard]):
        self._accelerator = accelerator
        self._most = bucket_elements(sum(shard.updated.size for shard in shards))
        self._buckets = [bucket for shard in shards for bucket in buckets_of(shard, self._most)]
        kinds = max((len(shard.on_host) for shard in shards), default=0)
        self._shape = SLOTS, kinds, self._most

    def update(self, adamw: Callable[[Updated, bool], None]) -> None:
        """Update all buckets and bring new weights into use on this rank. `adamw` updates parts in place, which have
        weight decay or not."""
        if not self._buckets:
            return
        accelerator = self._accelerator
        slots = torch.empty(self._shape, dtype=torch.float32, device=accelerator.device)
        free = [accelerator.queued()] * SLOTS
        there = self._fetch(self._buckets[0], slots[0], free[0])
        for number, bucket in enumerate(self._buckets):
            slot, arrived = number % SLOTS, there
            if number + 1 < len(self._buckets):
                following = (number + 1) % SLOTS
                there = self._fetch(self._buckets[number + 1], slots[following], free[following])
            accelerator.wait_for(arrived)
            self._update(bucket, slots[slot], adamw)
            free[slot] = self._put_back(bucket, slots[slot])
        for event in free:
            accelerator.wait_for(event)

    def _fetch(self, bucket: Bucket, slot: torch.Tensor, after: Event) -> Event:
        for staged, state in zip(slot, bucket.shard.on_host.values(), strict=False):
            after = self._accelerator.move(staged[: bucket.at.size], bucket.shard.of(state, bucket.at), after)
        return after

    def _put_back(self, bucket: Bucket, slot: torch.Tensor) -> Event:
        after = self._accelerator.queued()
        for staged, state in zip(slot, bucket.shard.on_host.values(), strict=False):
            after = self._accelerator.move(bucket.shard.of(state, bucket.at), staged[: bucket.at.size], after)
        return after

    def _update(self, bucket: Bucket, slot: torch.Tensor, adamw: Callable[[Updated, bool], None]) -> None:
        shard, start = bucket.shard, bucket.at.start
        staged = dict(zip(shard.on_host, slot, strict=False))
        for decays in (True, False):
            parts = Updated([], [], [], [])
            for run in (run for run in bucket.runs if run.decays == decays):
                here = slice(*run.at.shift(-start))
                for kind, part in zip(("master", "exp_avg", "exp_avg_sq"), (parts[0], *parts[2:]), strict=True):
                    part.append(staged[kind][here] if kind in staged else shard.of(shard.master, run.at))
                parts.grads.append(shard.of(shard.grads, run.at))
            adamw(parts, decays)
        if "master" in staged:
            shard.group.weights_at(bucket.at).copy_(staged["master"][: bucket.at.size])
