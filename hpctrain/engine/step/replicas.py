"""Compares the weights that several ranks hold alike, by a 64-bit digest of each shard group.

All holders of a shard group have the same bits of it after each update: with ZeRO 0 they compute the same, with 1 and 2
each element is updated by one owner and gathered, also among unlike families. With ZeRO 3 each element is on one rank.
Holders that compute in different dtypes have rounded the same masters, and are compared with those of their dtype.

Copies of norms and biases inside a tensor grid are in different shard groups. Sums of different groups may differ in
their last bits, so that these are not compared.
"""

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hpctrain.comm.world import World
from hpctrain.config.errors import shorten_list
from hpctrain.model.storage.groups import HeldArray
from hpctrain.model.storage.shard import Shard
from hpctrain.model.storage.store import Store

COLUMNS = 2048
CHUNK_WORDS = 4096 * COLUMNS
"""Words digested at once, 64 MiB: the sums of rows and columns take a small part of that."""
MULTIPLIERS = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64
"""Odd numbers as in SplitMix64 (Steele et al. 2014), as int64."""


def digest(weights: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit digest of the bits of a flat contiguous tensor: int64, on the device or on the host.

    Any change of one word changes it, and so do changes of several but for one in 2^64. Sums of rows and of columns
    need no copy of the weights; they are mixed with their places, so that exchanged words are seen.
    """
    total = torch.zeros((), dtype=torch.int64)
    per_word = 8 // weights.element_size()
    for chunk in weights.split(CHUNK_WORDS * per_word):
        if chunk.device.type != "cuda":  # other devices may have no sums of int64
            chunk = chunk.cpu()
        if chunk.numel() % per_word or chunk.data_ptr() % 8:
            chunk = torch.cat([chunk, chunk.new_zeros(-chunk.numel() % per_word)])
        words = chunk.view(torch.int64)
        whole = words[: words.numel() // COLUMNS * COLUMNS].view(-1, COLUMNS)
        parts = torch.cat([whole.sum(1), whole.sum(0), words[whole.numel() :]])
        places = torch.arange(1, parts.numel() + 1, device=parts.device)
        total = total.to(parts.device) * MULTIPLIERS[0] + _mix(parts + places * MULTIPLIERS[1]).sum()
    return total


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Spread each word's bits over the whole of it, one to one."""
    words = (words ^ (words >> 32 & 0xFFFFFFFF)) * MULTIPLIERS[1]
    return words ^ (words >> 29 & 0x7FFFFFFFF)


class HeldPart(NamedTuple):
    """The part of a shard group that this rank and others hold."""

    key: int
    """Identifier of the part: equal on all ranks that hold it in the same dtype, and on no others."""
    group: HeldArray
    ranks: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        """The parameters that have elements in the part."""
        return list(dict.fromkeys(region.parameter.name for region in self.group.regions(self.group.stored)))


class Replicas:
    """The parts of one rank that other ranks hold too. All ranks make one, and all call the same."""

    def __init__(self, world: World, store: Store, shards: Sequence[Shard], holders: Sequence[tuple[int, ...]]):
        """`holders` are the ranks of each shard."""
        self._world, self._store = world, store
        self._parts = [
            HeldPart(_key(shard.group, ranks), shard.group, ranks)
            for shard, ranks in zip(shards, holders, strict=True)
            if len(ranks) > 1 and shard.zero < 3 and shard.group.size
        ]
        keys = np.array([part.key for part in self._parts], dtype=np.int64)
        self._keys: list[np.ndarray] = world.gather_objects(keys)
        """Keys of all ranks, on rank 0."""
        self.exist: bool = world.broadcast_object(any(keys.size for keys in self._keys))

    def differing(self) -> str | None:
        """Return where replicas differ, in words, the same on all ranks; None where they do not."""
        self._store.await_weights()
        digests = [digest(part.group.weights) for part in self._parts]
        own = torch.stack(digests).cpu().numpy() if digests else np.empty(0, dtype=np.int64)
        gathered = self._world.gather_objects(own)
        odd: dict[int, list[int]] = self._world.broadcast_object(odd_ranks(self._keys, gathered))
        if not odd:
            return None
        names = [name for part in self._parts if self._world.rank in odd.get(part.key, ()) for name in part.names]
        place = self._world.place
        own = shorten_list(names), f"rank {self._world.rank} (host {place.host}, {place.family})"
        by_names: dict[str, list[str]] = {}
        for parameters, rank in self._world.gather_objects(own):
            if parameters:
                by_names.setdefault(parameters, []).append(rank)
        texts = [f"{shorten_list(ranks)}: {parameters}" for parameters, ranks in by_names.items()]
        return self._world.broadcast_object(shorten_list(texts, "; "))


def describe_odd(step: int, odd: str, checkpoint: Path | None) -> str:
    """Return an error text for replicas that differ, with where to continue; `odd` is of `Replicas.differing`."""
    return (
        f"step {step}: weights that ranks hold alike differ in their bits, on {odd}; start the same command again, it"
        f" continues from {checkpoint or 'the start'}, which is from before. Where the same rank is named again, leave"
        " its node out; where all are named again, set plan.zero = 1: one rank then updates each weight"
    )


def odd_ranks(keys: Sequence[np.ndarray], digests: Sequence[np.ndarray]) -> dict[int, list[int]]:
    """Return by key of a part the ranks whose digest is not that of most of its holders; without most, all holders.

    `keys` and `digests` are those of each rank, in the order of its parts.
    """
    by_key: dict[int, dict[int, int]] = {}
    for rank, (own_keys, own_digests) in enumerate(zip(keys, digests, strict=True)):
        for key, value in zip(own_keys.tolist(), own_digests.tolist(), strict=True):
            by_key.setdefault(key, {})[rank] = value
    result = {}
    for key, values in by_key.items():
        (value, count), *others = Counter(values.values()).most_common(2)
        if others:
            has_majority = 2 * count > len(values)
            result[key] = [rank for rank, own in values.items() if not has_majority or own != value]
    return result


def _key(group: HeldArray, ranks: tuple[int, ...]) -> int:
    """Return the identifier of a part: its holders, its dtype, and where it begins."""
    first = next(group.regions(group.stored))
    text = f"{ranks} {group.weights.dtype} {group.size} {first.parameter.name} {first.box} {first.elements}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
