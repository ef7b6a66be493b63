"""Groups: what their members agree on while they are made, and messages by a tag on one of MPI's communicators.

`hpctrain.comm.mpi_communicators` says on which: that of a family, or the bridge.
"""

import itertools
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from hpctrain.comm.mpi_communicators import FamilyCommunicators
from hpctrain.comm.waiting import Patience, wait_until
from hpctrain.config.errors import CommError

T = TypeVar("T")

OBJECTS = 0
"""The tag of what members agree on."""
MOST_TAGS = 32767
"""What the standard promises of MPI_TAG_UB."""


class MessageSpace:
    """The communicators on which all groups of a world send, and the tags that this rank's groups have."""

    def __init__(self, communicators: FamilyCommunicators, patience: Patience):
        """Nobody else sends on these communicators."""
        self.communicators, self.mpi, self.patience = communicators, communicators.mpi, patience
        self.rank: int = communicators.rank
        self._taken: set[int] = set()
        self._last = OBJECTS

    def members(self, ranks: Sequence[int]) -> "Members":
        return Members(self, ranks)

    def take_tag(self, members: "Members") -> int:
        """Return a tag that none of the members' groups has. All of them must call. Raises CommError.

        Two groups that share a rank have different tags, since that rank has proposed no tag that it has. No message
        of one can therefore be taken for one of the other.
        """
        tag = members.combine((self._last, sorted(self._taken)), choose_tag)
        if tag == OBJECTS:
            raise CommError(f"{members} cannot communicate: groups that are open have all {MOST_TAGS:,} tags of MPI")
        self._taken.add(tag)
        self._last = tag
        return tag

    def give_back(self, tag: int) -> None:
        self._taken.discard(tag)


def choose_tag(proposals: Sequence[tuple[int, Sequence[int]]]) -> int:
    """Return a tag that nobody has, by the last one and all those of each member; `OBJECTS` if there is none. Pure.

    It is the next one after all that were the last: a message that somebody left lying meets no other group until the
    tags have come round.
    """
    taken = set().union(*(theirs for _, theirs in proposals))
    last = max(last for last, _ in proposals)
    candidates = itertools.chain(range(last + 1, MOST_TAGS + 1), range(OBJECTS + 1, last + 1))
    return next((tag for tag in candidates if tag not in taken), OBJECTS)


class Members:
    """The ranks of a group, which tell each other small objects, and sleep while they wait.

    All of them must call each method. Two ranks that are in several groups call for them in the same order.
    """

    def __init__(self, space: MessageSpace, ranks: Sequence[int]):
        self.space, self.ranks = space, tuple(ranks)
        self.rank, self.size = self.ranks.index(space.rank), len(self.ranks)
        self.comm, self.peers = space.communicators.route(self.ranks)
        """MPI's communicator, and the numbers of the members there."""

    def __str__(self) -> str:
        return f"a group of {self.size} ranks ({', '.join(map(str, self.ranks[:4]))}{', ...' * (self.size > 4)})"

    def combine(self, value: Any, function: Callable[[list], T]) -> T:
        """Return what `function`, which must not raise, makes on the first member of the values of all, in order."""
        if self.rank == 0:
            result = function([value, *(self._receive(peer) for peer in range(1, self.size))])
            self._send(result, range(1, self.size))
            return result
        self._send(value, [0])
        return self._receive(0)

    def allgather(self, value: T) -> list[T]:
        return self.combine(value, list)

    def bcast(self, value: T) -> T:
        """Return the value of the first member."""
        return self.combine(value, lambda values: values[0])

    def barrier(self) -> None:
        self.combine(None, lambda _: None)

    def _send(self, value: object, peers: Iterable[int]) -> None:
        space, content = self.space, pickle.dumps((hash(self.ranks), value))
        requests = [self.comm.Isend([content, space.mpi.BYTE], dest=self.peers[peer], tag=OBJECTS) for peer in peers]
        wait_until(lambda: space.mpi.Request.Testall(requests), lambda: f"{self} to be made", space.patience)

    def _receive(self, peer: int) -> Any:
        space = self.space
        message: Any = None

        def has_arrived() -> bool:
            nonlocal message
            message = self.comm.improbe(source=self.peers[peer], tag=OBJECTS)
            return message is not None

        wait_until(has_arrived, lambda: f"rank {self.ranks[peer]} in making {self}", space.patience)
        group, value = message.recv()
        if group != hash(self.ranks):
            raise CommError(f"rank {self.ranks[peer]} makes another group than {self}: ranks make them in one order")
        return value


class GroupMessages:
    """Messages of buffers between the members of a group, by a tag of their own."""

    def __init__(self, members: Members):
        """All members must call."""
        self.members, self.space = members, members.space
        self.rank, self.size = members.rank, members.size
        self.tag = self.space.take_tag(members)

    def send(self, buffer, peer: int):
        """Return MPI's request."""
        return self.members.comm.Isend(buffer, dest=self.members.peers[peer], tag=self.tag)

    def receive(self, buffer, peer: int):
        """Return MPI's request."""
        return self.members.comm.Irecv(buffer, source=self.members.peers[peer], tag=self.tag)

    def close(self) -> None:
        """Give the tag back. All members must call, after all messages, and none whose message may be in flight."""
        self.space.give_back(self.tag)


def on_all(members, attempt: Callable[[], T]) -> T:
    """Return what this rank's attempt returns. Where that of any rank fails, all raise CommError with the first reason,
    and from its own failure those that had one.

    All ranks must call. Whatever a library raises is a failure: CuPy raises KeyError for errors that are new to it.
    """
    result, failure, cause = None, None, None
    try:
        result = attempt()
    except Exception as error:
        failure, cause = str(error) if isinstance(error, CommError) else f"{type(error).__name__}: {error}", error
    failures = [text for text in members.allgather(failure) if text is not None]
    if failures:
        raise CommError(failures[0]) from cause
    return result  # pyright: ignore[reportReturnType] - the attempt succeeded
