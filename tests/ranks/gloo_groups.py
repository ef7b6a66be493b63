"""Torch's process groups by gloo, with the calls that those of devices have and gloo has not."""

import torch
from torch.distributed import ProcessGroupGloo, distributed_c10d

OPTIONS = ProcessGroupGloo._Options  # pyright: ignore[reportAttributeAccessIssue]


class GlooGroup:
    """A group whose lists may be of uneven tensors, and which exchanges lists.

    Lists must be asked for as asynchronous operations: NCCL's group starts their messages together. It records the end
    of a synchronous one on a stream where nothing is, and nobody would notice a peer that is gone.
    """

    @staticmethod
    def Options():  # noqa: N802
        made = OPTIONS()
        made._devices = [ProcessGroupGloo.create_default_device()]  # pyright: ignore[reportAttributeAccessIssue]
        return made

    def __init__(self, store, rank: int, size: int, options):
        self._group, self._rank = ProcessGroupGloo(store, rank, size, options), rank

    def __getattr__(self, name: str):
        return getattr(self._group, name)

    def reduce_scatter(self, outs, lists, options) -> None:
        assert options.asyncOp
        (out,), (parts,) = outs, lists
        for root, part in enumerate(parts):
            given = distributed_c10d.ReduceOptions()
            given.reduceOp, given.rootRank = options.reduceOp, root
            total = part.clone()
            if total.numel():
                self._group.reduce([total], given).wait()
            if root == self._rank:
                out.copy_(total)

    def allgather(self, lists, owns, options) -> None:
        assert options.asyncOp
        for root, part in enumerate(lists[0]):
            given = distributed_c10d.BroadcastOptions()
            given.rootRank = root
            if part.numel():
                self._group.broadcast([part], given).wait()

    def alltoall(self, received, sent, options) -> None:
        out, into = [part.numel() for part in sent], [part.numel() for part in received]
        packed = torch.empty(sum(into), dtype=torch.uint8)
        self._group.alltoall_base(packed, torch.cat(sent), into, out, options).wait()
        for part, data in zip(received, packed.split(into), strict=True):
            part.copy_(data)
