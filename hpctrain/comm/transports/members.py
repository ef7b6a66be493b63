"""Groups: what their members agree on, and messages by a tag on one of MPI's communicators.

`hpctrain.comm.mpi_communicators` says on which: that of a family, or the bridge. Members tell each other small objects
along a binomial tree, so that the first of 4,096 hears twelve others. Nothing here needs torch: mistakes in files are
reported before it is imported.
"""

import itertools
import pickle
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

from hpctrain.comm.mpi_communicators import FamilyCommunicators
from hpctrain.comm.waiting import Condition, Patience, Steps, complete, until_all
from hpctrain.config.errors import CommError

T = TypeVar("T")

OBJECTS, NUMBERS, FAREWELL = range(3)
"""Tags of agreements among members, of figures sent while ranks compute, and of ranks that all fail."""
FIRST_TAG, LAST_TAG = 3, 32767
"""Tags of groups; the standard promises that MPI_TAG_UB is at least the last."""
NO_TAG = -1


class MessageSpace:
    """The communicators that all groups of a world use, and the tags of this rank's groups."""

    def __init__(self, communicators: FamilyCommunicators, patience: Patience):
        """Nothing else may send on these communicators."""
        self.communicators, self.mpi, self.patience = communicators, communicators.mpi, patience
        self.rank: int = communicators.rank
        self._taken: set[int] = set()
        self._last = FIRST_TAG - 1

    def members(self, ranks: Sequence[int], tag: int = OBJECTS) -> "Members":
        """Return the members of a group. Their objects are sent with a `tag` that no group has."""
        return Members(self, ranks, tag)

    def take_tag(self, members: "Members") -> int:
        """Return a tag that none of the members' groups has. All of them must call. Raises CommError.

        Two groups that share a rank have different tags, since that rank never proposes a tag of its own groups. So no
        message of one group can be taken for one of the other.
        """
        tag = members.combine((self._last, sorted(self._taken)), choose_tag)
        if tag == NO_TAG:
            count = LAST_TAG - FIRST_TAG + 1
            raise CommError(f"{members} cannot communicate: groups that are open have all {count:,} tags of MPI")
        self._taken.add(tag)
        self._last = tag
        return tag

    def give_back(self, tag: int) -> None:
        self._taken.discard(tag)


def choose_tag(proposals: Sequence[tuple[int, Sequence[int]]]) -> int:
    """Return a free tag, by the last tag and the used tags of each member; `NO_TAG` if there is none. Pure.

    It is the next one after all last ones. So a message that was left in flight matches no other group until the tags
    repeat.
    """
    taken = set().union(*(theirs for _, theirs in proposals))
    last = max(last for last, _ in proposals)
    candidates = itertools.chain(range(last + 1, LAST_TAG + 1), range(FIRST_TAG, last + 1))
    return next((tag for tag in candidates if tag not in taken), NO_TAG)


class Members:
    """The ranks of a group, which exchange small objects, and sleep while they wait.

    All of them must call each method. Two ranks that are in several groups call for them in the same order. No member
    returns from `combine`, or from a method that uses it, before all have called.
    """

    def __init__(self, space: MessageSpace, ranks: Sequence[int], tag: int = OBJECTS):
        self.space, self.ranks, self._tag = space, tuple(ranks), tag
        self.rank, self.size = self.ranks.index(space.rank), len(self.ranks)
        self.comm, self.peers = space.communicators.route(self.ranks)
        """MPI's communicator, and the numbers of the members there."""
        self._identity = hash(self.ranks)
        self._parent, self._children = tree_at(self.rank, self.size)

    def __str__(self) -> str:
        return f"a group of {self.size} ranks ({', '.join(map(str, self.ranks[:4]))}{', ...' * (self.size > 4)})"

    def combine(
        self, value: Any, function: Callable[[list], T], operation: str = "", patience: Patience | None = None
    ) -> T:
        """Return what `function` makes of all members' values, in order.

        It runs on the first member, and must not raise. After the `patience` (default: that of the space) an error
        names the `operation` (default: the making of the group).
        """
        return complete(
            self._combining(value, function), operation or f"making {self}", patience or self.space.patience
        )

    def allgather(self, value: T, operation: str = "") -> list[T]:
        return self.combine(value, list, operation)

    def bcast(self, value: T, operation: str = "") -> T:
        """Return the value of the first member."""
        return self.combine(value if self.rank == 0 else None, lambda values: values[0], operation)

    def barrier(self, operation: str = "", patience: Patience | None = None) -> None:
        self.combine(None, lambda _: None, operation, patience)

    def send(self, value: object, peer: int, operation: str) -> None:
        """Send one member a value; it has to `receive` it."""
        complete(self.sending([pickle.dumps(value)], [peer]), operation, self.space.patience)

    def receive(self, peer: int, operation: str) -> Any:
        (content,) = complete(self.receiving(peer), operation, self.space.patience)
        return pickle.loads(content)

    def gathering(self, value: object) -> Generator[Condition, None, list]:
        """Bring all values to the first member, as steps that return them there, in order. No other member waits."""
        contents = [pickle.dumps(value)]
        for child in self._children:
            contents += yield from self.receiving(child)
        if self._parent is None:
            return [pickle.loads(content) for content in contents]
        yield from self.sending(contents, [self._parent])
        return []

    def _combining(self, value: object, function: Callable[[list], T]) -> Generator[Condition, None, T]:
        values = yield from self.gathering(value)
        if self._parent is None:
            content = pickle.dumps(function(values))
        else:
            (content,) = yield from self.receiving(self._parent)
        yield from self.sending([content], self._children[::-1])  # those with the most below them first
        return pickle.loads(content)

    def sending(self, contents: list[bytes], peers: Iterable[int]) -> Steps:
        """Send some members bytes, as steps."""
        message = pickle.dumps((self._identity, contents))
        buffer = [message, self.space.mpi.BYTE]
        requests = [self.comm.Isend(buffer, dest=self.peers[peer], tag=self._tag) for peer in peers]
        yield from until_all([request.Test for request in requests], "members to listen")

    def receiving(self, peer: int) -> Generator[Condition, None, list[bytes]]:
        """Receive a member's next message, as steps that return it. They raise CommError if it belongs to another
        group."""
        message: Any = None

        def has_arrived() -> bool:
            nonlocal message
            message = self.comm.improbe(source=self.peers[peer], tag=self._tag)
            return message is not None

        yield from until_all([has_arrived], f"rank {self.ranks[peer]}")
        group, contents = message.recv()
        if group != self._identity:
            raise CommError(f"rank {self.ranks[peer]} makes another group than {self}: ranks make them in one order")
        return contents


def tree_at(position: int, size: int) -> tuple[int | None, list[int]]:
    """Return the parent and the children of a member in a binomial tree, whose root is the first. Pure.

    The members below each child follow it without a gap, up to the next child.
    """
    lowest = position & -position or 1 << size.bit_length()
    parent = position & (position - 1) if position else None
    powers = (1 << power for power in range(lowest.bit_length() - 1))
    return parent, [position + power for power in powers if position + power < size]


class GroupMessages:
    """Messages of buffers between the members of a group, with a tag of its own."""

    def __init__(self, members: Members):
        """All members must call."""
        self.members, self.space = members, members.space
        self.rank, self.size = members.rank, members.size
        self.tag = self.space.take_tag(members)

    def send(self, buffer, peer: int):
        """Start a send; return MPI's request."""
        return self.members.comm.Isend(buffer, dest=self.members.peers[peer], tag=self.tag)

    def receive(self, buffer, peer: int):
        """Start a receive; return MPI's request."""
        return self.members.comm.Irecv(buffer, source=self.members.peers[peer], tag=self.tag)

    def close(self) -> None:
        """Release the tag. All members must call, when none of their messages is in flight."""
        self.space.give_back(self.tag)

    def abandon(self) -> None:
        """Keep the tag: a message that is still in flight must not reach another group."""


def on_all(members, attempt: Callable[[], T]) -> T:
    """Return what this rank's attempt returns; where any rank's attempt fails, all raise.

    They raise CommError or the first failure's kind of error, with its reason. A rank that failed itself raises from
    its own failure. All ranks must call. Every exception counts, since libraries raise unexpected kinds: CuPy raises
    KeyError for errors that are new to it.
    """
    result, failure, cause = None, None, None
    try:
        result = attempt()
    except Exception as error:
        is_ours, cause = isinstance(error, CommError), error
        failure = (type(error), str(error)) if is_ours else (CommError, f"{type(error).__name__}: {error}")
    failures = [each for each in members.allgather(failure) if each is not None]
    if failures:
        kind, text = failures[0]
        raise kind(text) from cause
    return result  # pyright: ignore[reportReturnType] - the attempt succeeded
