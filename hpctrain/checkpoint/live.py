"""The state of live ranks as a source: what each owned is in its host memory, from which others take what they need.

A rank that needs elements asks their owners for rectangles. Owners answer in messages of bounded size. Each element is
sent once to each rank that needs it and does not have it.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hpctrain.checkpoint.format import RECTANGLE
from hpctrain.checkpoint.source import Bounds, StateSource
from hpctrain.checkpoint.state import host_values, read_values, tensors_of
from hpctrain.comm.transports.members import GroupMessages
from hpctrain.comm.waiting import complete, until_all
from hpctrain.comm.world import World
from hpctrain.model.storage.shard import Shard

MESSAGE_ELEMENTS = 1 << 20
"""The most fp32 elements of a message, 4 MiB: one comes and one goes at a time."""
ASKED = np.dtype("<i8")
"""A rectangle of a stream that is asked for: where it begins, the stream's row length, rows and columns."""


class LiveState(StateSource):
    """The state after a step, in the host memory of its owners. All ranks make one, and all call the same methods.

    It needs neither the plan nor the trainer that it is from.
    """

    def __init__(
        self,
        world: World,
        shapes: Mapping[str, tuple[int, ...]],
        own: np.ndarray,
        stream: np.ndarray,
        step: int,
        texts: Mapping[str, str],
    ):
        """`own` are the rectangles of this rank's `stream` (fp32). `texts` are those that a checkpoint has of it."""
        by_rank = world.all_objects(own)
        for rank, rectangles in enumerate(by_rank):
            rectangles["stream"] = rank
        table = np.concatenate([np.zeros(0, RECTANGLE), *by_rank])
        super().__init__(list(shapes.items()), table[np.argsort(table["tensor"], kind="stable")])
        self.step, self.texts = step, texts
        self._world, self._stream = world, stream
        self._messages = GroupMessages(world.space.members(range(world.size)))
        self._asked: dict[int, list[tuple[int, int, int, int]]] = {}
        """Rectangles that this rank asks each owner for, and where their elements go."""
        self._outs: dict[int, list[np.ndarray]] = {}
        self.bytes_sent = 0
        """Bytes of elements that this rank sent to others."""

    def fill(self, shards: Sequence[Shard]) -> None:
        """Fill the masters and moments that this rank updates. All ranks must call, with the shards of one plan."""
        for number in range(int(self._world.largest(len(shards)))):  # host memory for one of them at a time
            values = []
            for tensor in tensors_of(shards[number]) if number < len(shards) else ():
                for region in shards[number].group.regions(tensor.at):
                    target = tensor.values[tensor.at.place_of(region.at)]
                    values.append((target, host_values(target)))
                    read_values(self, tensor.kind, region, values[-1][1])
            self.check_all()
            for target, arrived in values:
                if arrived is not target:
                    target.copy_(arrived)

    def read_rectangle(self, rectangle, rows: Bounds, columns: Bounds, out: np.ndarray) -> None:
        """Ask the rectangle's owner, in pieces that fit into a message."""
        (top, _), (left, right), owner = rectangle["rows"], rectangle["columns"], int(rectangle["stream"])
        width, begin = int(right) - int(left), int(rectangle["start"])
        across = min(MESSAGE_ELEMENTS, columns[1] - columns[0])
        down = MESSAGE_ELEMENTS // across
        for row in range(*rows, down):
            for column in range(*columns, across):
                part = out[row - rows[0] :, column - columns[0] :][:down, :across]
                first = begin + (row - int(top)) * width + column - int(left)
                self._asked.setdefault(owner, []).append((first, width, *part.shape))
                self._outs.setdefault(owner, []).append(part)

    def check_all(self) -> None:
        """Bring to each rank what it asked for. All ranks must call.

        In round i a rank sends to the one i places after it, and receives from the one i before it.
        """
        world, size = self._world, self._world.size
        counts = world.all_objects({owner: len(asked) for owner, asked in self._asked.items()})
        theirs = {rank: np.empty((of[world.rank], 4), ASKED) for rank, of in enumerate(counts) if world.rank in of}
        asked = {owner: np.array(pieces, ASKED) for owner, pieces in self._asked.items()}
        nothing = np.empty((0, 4), ASKED)
        with world.recorded("move"):
            for shift in range(size):
                to, source = (world.rank + shift) % size, (world.rank - shift) % size
                if shift:  # the requests travel the other way
                    self._exchange(source, asked.get(source), to, theirs.get(to))
                else:
                    theirs |= {to: asked.get(to, nothing)}
            for shift in range(size):
                to, source = (world.rank + shift) % size, (world.rank - shift) % size
                self._answer(to, theirs.get(to, nothing), source, asked.get(source, nothing))
        self._asked, self._outs = {}, {}

    def _answer(self, to: int, theirs: np.ndarray, source: int, asked: np.ndarray) -> None:
        """Send a rank what it asked for, and receive what this rank asked another one for, message by message."""
        outs, sent, received = self._outs.get(source, []), list(messages(theirs)), list(messages(asked))
        for number in range(max(len(sent), len(received))):
            outgoing = incoming = None
            if number < len(sent):
                outgoing = np.concatenate([self._piece(*of).reshape(-1) for of in theirs[sent[number]].tolist()])
            if number < len(received):
                ours = asked[received[number]]
                incoming = outgoing if to == self._world.rank else np.empty(int((ours[:, 2] * ours[:, 3]).sum()), "<f4")
            if to != self._world.rank:
                self._exchange(to, outgoing, source, incoming)
                self.bytes_sent += 0 if outgoing is None else outgoing.nbytes
            if incoming is None:
                continue
            at = 0
            for out in outs[received[number]]:
                out[:] = incoming[at : at + out.size].reshape(out.shape)
                at += out.size

    def _piece(self, first: int, width: int, rows: int, columns: int) -> np.ndarray:
        return np.lib.stride_tricks.as_strided(self._stream[first:], (rows, columns), (4 * width, 4), writeable=False)

    def _exchange(self, to: int, outgoing: np.ndarray | None, source: int, incoming: np.ndarray | None) -> None:
        """Send one rank an array, and fill one from another rank, where there are any."""
        requests = []
        if incoming is not None:
            requests.append(self._messages.receive(incoming, source))
        if outgoing is not None:
            requests.append(self._messages.send(outgoing, to))
        awaited = f"rank {source} to send and rank {to} to receive state"
        complete(until_all([request.Test for request in requests], awaited), "move", self._world.patience)

    def close(self) -> None:
        """Release the messages' tag. All ranks must call, when all state has moved."""
        self._messages.close()


def messages(pieces: np.ndarray) -> Iterator[slice]:
    """Yield the pieces of each message: as many as fit into it."""
    start, size = 0, 0
    for number, (_, _, rows, columns) in enumerate(pieces.tolist()):
        if size and size + rows * columns > MESSAGE_ELEMENTS:
            yield slice(start, number)
            start, size = number, 0
        size += rows * columns
    if size:
        yield slice(start, len(pieces))
