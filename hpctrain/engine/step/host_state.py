"""The optimizer's state in host memory: moments, and fp32 masters where weights in use are half precision.

An update moves it through the device bucket by bucket (ZeRO-Offload, Ren et al. 2021, updates on the host): the device
computes the same numbers as without offload. Two buckets are on the device: while one is updated, the next comes in and
the last goes out, where the device has streams.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from hpctrain.comm.accelerators.base import Accelerator, Event
from hpctrain.engine.step.updates import Updated
from hpctrain.model.storage.shard import Shard, ShardState
from hpctrain.sharding.host_buckets import ALIGNED, SLOTS, bucket_elements
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.parameters import Update


class Stretch(NamedTuple):
    """Neighbouring elements of a shard's state with the same update."""

    at: Interval
    """The interval in the group's flat array."""
    update: Update


class Bucket(NamedTuple):
    """The elements of a shard that go through the device at once."""

    shard: Shard
    state: ShardState
    stretches: tuple[Stretch, ...]
    """Updated elements in ascending order; the gaps between them are never updated."""

    @property
    def at(self) -> Interval:
        return Interval(self.stretches[0].at.start, self.stretches[-1].at.stop)


def stretches_of(shard: Shard, state: ShardState) -> list[Stretch]:
    """Return the elements of a state that this rank updates, in order; neighbours are merged."""
    stretches: list[Stretch] = []
    for region in shard.group.regions(state.at):
        stretch = Stretch(region.at, region.parameter.update)
        if stretches and stretches[-1].at.stop == stretch.at.start and stretches[-1].update == stretch.update:
            stretch = Stretch(Interval(stretches.pop().at.start, stretch.at.stop), stretch.update)
        stretches.append(stretch)
    return stretches


def buckets_of(shard: Shard, most: int) -> Iterator[Bucket]:
    """Yield the stretches of a shard in buckets of at most so many elements, a multiple of `ALIGNED`."""
    for state in shard.states:
        taken: list[Stretch] = []
        for stretch in stretches_of(shard, state):
            start = stretch.at.start
            while start < stretch.at.stop:
                left = most - (start - taken[0].at.start if taken else 0)
                stop = stretch.at.stop if stretch.at.stop - start <= left else start + max(0, left) // ALIGNED * ALIGNED
                if stop > start:
                    taken.append(Stretch(Interval(start, stop), stretch.update))
                    start = stop
                if start < stretch.at.stop:
                    yield Bucket(shard, state, tuple(taken))
                    taken = []
        if taken:
            yield Bucket(shard, state, tuple(taken))


class HostState:
    """Updates shards whose state is in host memory, on one rank. Involves no other rank."""

    def __init__(self, accelerator: Accelerator, shards: Sequence[Shard]):
        self._accelerator = accelerator
        self._most = bucket_elements(sum(shard.updated.size for shard in shards))
        self._buckets = [bucket for shard in shards for bucket in buckets_of(shard, self._most)]
        self._shape = SLOTS, max((len(_moved(bucket)) for bucket in self._buckets), default=0), self._most

    def update(self, update: Callable[[Updated, Update], None]) -> None:
        """Update all buckets and bring new weights into use on this rank.

        `update` changes tensors in place; its second argument says how.
        """
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
            self._update(bucket, slots[slot], update)
            free[slot] = self._put_back(bucket, slots[slot])
        for event in free:
            accelerator.wait_for(event)

    def _fetch(self, bucket: Bucket, slot: torch.Tensor, after: Event) -> Event:
        for staged, moved in zip(slot, _moved(bucket).values(), strict=False):
            after = self._accelerator.move(staged[: bucket.at.size], moved, after)
        return after

    def _put_back(self, bucket: Bucket, slot: torch.Tensor) -> Event:
        after = self._accelerator.queued()
        for staged, moved in zip(slot, _moved(bucket).values(), strict=False):
            after = self._accelerator.move(moved, staged[: bucket.at.size], after)
        return after

    def _update(self, bucket: Bucket, slot: torch.Tensor, update: Callable[[Updated, Update], None]) -> None:
        shard, at = bucket.shard, bucket.at
        staged = dict(zip(_moved(bucket), slot[:, : at.size], strict=False))
        grads, new_master = shard.grads[shard.updated.place_of(at)], staged.pop(MASTER, None)
        master = shard.master[shard.updated.place_of(at)] if new_master is None else new_master
        kinds: dict[Update, None] = dict.fromkeys(stretch.update for stretch in bucket.stretches)
        for kind in kinds:
            cuts = [slice(*s.at.shift(-at.start)) for s in bucket.stretches if s.update == kind]
            moments = {name: [tensor[cut] for cut in cuts] for name, tensor in staged.items()}
            update(Updated([master[cut] for cut in cuts], [grads[cut] for cut in cuts], moments), kind)
        if new_master is not None:
            shard.group.weights_at(at).copy_(new_master)


MASTER = "master"


def _moved(bucket: Bucket) -> dict[str, torch.Tensor]:
    """Return by name the tensors that a bucket moves: parts of moments, and of a master that is not in use."""
    shard, at = bucket.shard, bucket.at
    moved = {name: tensor[bucket.state.at.place_of(at)] for name, tensor in bucket.state.moments.items()}
    return moved if shard.has_master_in_use else moved | {MASTER: shard.master[shard.updated.place_of(at)]}
