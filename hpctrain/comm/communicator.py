"""Communicators: collectives on torch tensors over a set of ranks, by the route that fits where the ranks are.

Every collective must be called by all ranks of the group, in the same order. Tensors must be contiguous; any shape
and any dtype that torch trains with. Results are the same bits on every rank and in every run.
"""

import os
from collections.abc import Sequence

import torch

from hpctrain.comm.messages import MessageChannel, MessageCollectives
from hpctrain.comm.shared import SharedChannel, SharedCollectives
from hpctrain.intervals import Interval, cut_evenly

Channel = SharedChannel | MessageChannel
# Forces a route, for tests and for machines whose shared memory is too small: "messages".
ROUTE_VARIABLE = "HPCTRAIN_ROUTE"


class Communicator:
    """Collectives over one group of ranks; a group of one does nothing, at no cost."""

    def __init__(
        self,
        ranks: Sequence[int],
        route: SharedCollectives | MessageCollectives | None,
        reason: str,
        ranks_on_host: int = 1,
    ):
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = route.rank if route else 0
        self.route = route.name if route else "none"
        self.reason = reason
        self._route = route
        self._ranks_on_host = ranks_on_host

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return zeros [numel] in memory that this group's collectives work on with the fewest copies.

        All ranks must call with the same `numel`. The tensor is gone when the communicator is closed.
        """
        if isinstance(self._route, SharedCollectives) and device.type == "cpu" and numel:
            memory = self._route.allocate(numel * dtype.itemsize, self._ranks_on_host)
            if memory is not None:
                return memory.view(dtype)
        return torch.zeros(numel, dtype=dtype, device=device)

    def allocate_common(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Return zeros [numel] that are one memory for all ranks; None where the group has no such memory.

        Who writes must see to it that nobody reads, by `barrier`. All ranks must call.
        """
        if isinstance(self._route, SharedCollectives) and device.type == "cpu" and numel:
            memory = self._route.allocate_common(numel * dtype.itemsize, self._ranks_on_host)
            return None if memory is None else memory.view(dtype)
        return None

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce in place over all ranks; `op` is sum, max or min. Half precision is summed in fp32."""
        if self._route and tensor.numel():
            self._route.all_reduce(tensor.view(-1), op)
        return tensor

    def reduce_scatter(self, tensor: torch.Tensor, out: torch.Tensor, cuts: Sequence[Interval] | None = None) -> None:
        """Sum over ranks; rank i gets elements `cuts[i]` of the flat tensor (default: an even cut) in `out`."""
        flat = tensor.view(-1)
        if self._route:
            self._route.reduce_scatter(flat, cuts or cut_evenly(flat.numel(), self.size), out.view(-1))
        else:
            out.view(-1).copy_(flat)

    def all_gather(self, tensor: torch.Tensor, cuts: Sequence[Interval] | None = None) -> torch.Tensor:
        """Fill the flat tensor on all ranks in place, of which rank i brings elements `cuts[i]`."""
        if self._route and tensor.numel():
            flat = tensor.view(-1)
            self._route.all_gather(flat, cuts or cut_evenly(flat.numel(), self.size))
        return tensor

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Overwrite the tensor with that of `root` (a position in the group)."""
        if self._route and tensor.numel():
            self._route.broadcast(tensor.view(-1), root)
        return tensor

    def barrier(self) -> None:
        if self._route:
            self._route.barrier()

    def abandon(self) -> None:
        """Leave without the others: `close` will do nothing. For error paths."""
        if self._route:
            self._route.abandon()

    def close(self) -> None:
        if self._route:
            self._route.close()


def choose_route(ranks: Sequence[int], hosts: Sequence[str]) -> tuple[str, str]:
    """Return the route for a group and the reason.

    | route    | who                     | waiting ranks     | reduction            |
    |----------|-------------------------|-------------------|----------------------|
    | shared   | all ranks on one host   | yield, then sleep | ours, order of ranks |
    | messages | any ranks (host memory) | yield, then sleep | ours, order of ranks |
    """
    if os.environ.get(ROUTE_VARIABLE) == "messages":
        return "messages", f"{ROUTE_VARIABLE} asks for it"
    where = {hosts[rank] for rank in ranks}
    if len(where) == 1:
        return "shared", f"all on host {hosts[ranks[0]]}"
    return "messages", f"spread over {len(where)} hosts"


def _sub_communicator(mpi, parent, ranks: Sequence[int]):
    """Make an MPI communicator of these ranks alone, in this order; only they call."""
    group = parent.group.Incl(list(ranks))
    made = parent.Create_group(group)
    group.Free()
    return made


def make_communicator(mpi, parent, ranks: Sequence[int], hosts: Sequence[str], timeout_seconds: float) -> Communicator:
    """Make the communicator of a group by `choose_route`. Its ranks must call, in the same order of calls."""
    if len(ranks) == 1:
        return Communicator(ranks, None, "a single rank")
    route, reason = choose_route(ranks, hosts)
    comm = _sub_communicator(mpi, parent, ranks)
    kind = SharedCollectives if route == "shared" else MessageCollectives
    return Communicator(ranks, kind(mpi, comm, timeout_seconds), reason, hosts.count(hosts[parent.rank]))


def make_channel(mpi, parent, peer: int, num_bytes: int, depth: int, hosts, timeout_seconds: float) -> Channel:
    """Make a channel between this rank and `peer`. Both must call."""
    ranks = sorted((parent.rank, peer))
    comm = _sub_communicator(mpi, parent, ranks)
    if choose_route(ranks, hosts)[0] == "shared":
        return SharedChannel(mpi, comm, num_bytes, depth, timeout_seconds)
    return MessageChannel(mpi, comm, depth, timeout_seconds)
