"""The tags of groups, and what ranks that make groups in different orders are told."""

import pickle
import random
from types import SimpleNamespace

import pytest

from hpctrain.comm.transports.members import FIRST_TAG, LAST_TAG, NO_TAG, Members, MessageSpace, choose_tag, tree_at
from hpctrain.comm.waiting import Patience, Phase
from hpctrain.config.errors import CommError


def test_groups_that_share_a_rank_have_different_tags():
    """Groups are opened and closed at random, more often than there are tags."""
    last, taken = [FIRST_TAG - 1] * 6, [set() for _ in range(6)]
    groups: dict[tuple[int, ...], int] = {}
    draw = random.Random(1)
    for number in range(LAST_TAG + 2000):
        ranks = tuple(draw.sample(range(6), draw.randint(2, 6))) + (-number,)
        members = ranks[:-1]
        tag = choose_tag([(last[rank], sorted(taken[rank])) for rank in members])
        assert FIRST_TAG <= tag <= LAST_TAG
        assert all(tag != other for theirs, other in groups.items() if set(theirs[:-1]) & set(members))
        groups[ranks] = tag
        for rank in members:
            last[rank] = tag
            taken[rank].add(tag)
        while len(groups) > 8:
            closed = draw.choice(list(groups))
            for rank in closed[:-1]:
                taken[rank].discard(groups[closed])
            del groups[closed]


def test_a_tag_is_used_again_as_late_as_possible():
    assert choose_tag([(4, [4]), (9, [2])]) == 10
    assert choose_tag([(LAST_TAG, [1, 3]), (9, [2])]) == 4


class Answering:
    """The communicators of rank 0, to which rank 1 says one thing for a group of its own; all of them are one."""

    rank = 0
    mpi = SimpleNamespace(BYTE=1)

    def __init__(self, ranks, value):
        self._content = hash(ranks), [pickle.dumps(value)]

    def route(self, ranks):
        return self, ranks

    def improbe(self, source, tag):
        return SimpleNamespace(recv=lambda: self._content)

    def Isend(self, buffer, dest, tag):  # noqa: N802
        self.sent = pickle.loads(buffer[0])
        return SimpleNamespace(Test=lambda: True)


PATIENCE = Patience(Phase("a test", 1.0, "no.key"))


@pytest.mark.parametrize("size", [1, 2, 3, 6, 8, 13, 4096])
def test_a_tree_brings_the_values_of_all_in_their_order_and_few_to_each(size):
    """Below each member are those that follow it without a gap: what it passes on is in order."""

    def below(position: int) -> list[int]:
        return [position, *(other for child in tree_at(position, size)[1] for other in below(child))]

    assert below(0) == list(range(size))
    for position in range(size):
        _, children = tree_at(position, size)
        assert len(children) <= (size - 1).bit_length()
        assert all(tree_at(child, size)[0] == position for child in children)


def test_all_tags_taken_is_an_error_on_all_members():
    comm = Answering((0, 1), (5, list(range(FIRST_TAG, LAST_TAG))))
    space = MessageSpace(comm, PATIENCE)
    members = Members(space, (0, 1))
    assert space.take_tag(members) == LAST_TAG
    with pytest.raises(CommError, match=r"a group of 2 ranks \(0, 1\) cannot communicate: .* all 32,765 tags of MPI"):
        space.take_tag(members)
    assert comm.sent == (hash((0, 1)), [pickle.dumps(NO_TAG)])
    space.give_back(LAST_TAG)
    assert space.take_tag(members) == LAST_TAG


def test_ranks_that_make_groups_in_different_orders_are_told():
    members = Members(MessageSpace(Answering((0, 1, 2), None), PATIENCE), (0, 1))
    with pytest.raises(CommError, match=r"rank 1 makes another group than a group of 2 ranks \(0, 1\)"):
        members.barrier()
