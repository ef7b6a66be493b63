"""Every route offers the same collectives. `groups/maker.py` chooses one for a group:

| class                     | for                                                                      |
|---------------------------|--------------------------------------------------------------------------|
| `SharedCollectives`       | ranks of one host, through its memory                                    |
| `FlatCollectives`         | ranks that are all equally far from each other, by messages              |
| `HierarchicalCollectives` | several domains: one of the others inside each, and messages across      |
| `NativeCollectives`       | devices of one family, by their maker's library (`transports/native.py`) |
| `ByMemory`                | such devices: the library for their memory, messages for the host's      |
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from hpctrain.comm.progress.steps import Steps
from hpctrain.sharding.intervals import Interval


class Collectives(Protocol):
    """Collectives on flat tensors, as steps, that all ranks of the group must take.

    Where ranks have devices, `StreamedCollectives` is around them: it returns what is launched there.
    """

    name: str
    rank: int
    size: int

    def barrier(self) -> Steps: ...

    def all_reduce(self, flat: torch.Tensor, op: str) -> Steps: ...

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, op: str) -> Steps: ...

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[Interval]) -> Steps: ...
