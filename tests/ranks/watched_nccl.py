"""The fake library of collectives, whose operations on the pretended device are watched for races."""

from tests.ranks.fake_devices import FakeNccl, FakeNcclCommunicator
from tests.ranks.pretended_device import MODULE


class WatchedNccl(FakeNccl):
    """The library of collectives, whose operations are watched too."""

    def NcclCommunicator(self, size, key, rank):  # noqa: N802
        return WatchedCommunicator(self, size, key, rank)


class WatchedCommunicator(FakeNcclCommunicator):
    def __init__(self, *given):
        super().__init__(*given)
        MODULE.libraries += 1

    def destroy(self):
        super().destroy()
        MODULE.libraries -= 1

    def _touch(self, name: str, stream: int, number: int, reads, writes) -> None:
        """`reads` and `writes` are addresses and numbers of elements."""
        of = next(each for each in MODULE.streams if each.cuda_stream == stream)
        size = self._bytes_of(number)
        tick = of.launch()
        for pairs, is_write in ((reads, False), (writes, True)):
            for address, count in pairs:
                block = MODULE.block_at(address) if count else None
                if block is not None:
                    block.touch((address, address + count * size), of, tick, is_write, f"NCCL's {name}")

    def _bytes_of(self, number: int) -> int:
        return int(self._nccl.dtypes[number][1:])

    def allReduce(self, sent, received, count, number, op, stream):  # noqa: N802
        self._touch("allReduce", stream, number, [], [(received, count)])
        super().allReduce(sent, received, count, number, op, stream)

    def reduce(self, sent, received, count, number, op, root, stream):
        self._touch("reduce", stream, number, [(sent, count)], [(received, count)])
        super().reduce(sent, received, count, number, op, root, stream)

    def reduceScatter(self, sent, received, count, number, op, stream):  # noqa: N802
        size = self._comm.size
        self._touch("reduceScatter", stream, number, [(sent, count * size)], [(received, count)])
        super().reduceScatter(sent, received, count, number, op, stream)

    def allGather(self, sent, received, count, number, stream):  # noqa: N802
        parts = [(received + i * count * self._bytes_of(number), count) for i in range(self._comm.size)]
        others = [each for each in parts if each[0] != sent]  # a part that is in its place stays as it is
        self._touch("allGather", stream, number, [(sent, count)], others)
        super().allGather(sent, received, count, number, stream)

    def broadcast(self, sent, received, count, number, root, stream):
        at = [(received, count)]
        self._touch("broadcast", stream, number, *((at, []) if self._comm.rank == root else ([], at)))
        super().broadcast(sent, received, count, number, root, stream)

    def send(self, address, count, number, peer, stream):
        self._touch("send", stream, number, [(address, count)], [])
        super().send(address, count, number, peer, stream)

    def recv(self, address, count, number, peer, stream):
        self._touch("recv", stream, number, [], [(address, count)])
        super().recv(address, count, number, peer, stream)
