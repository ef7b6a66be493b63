"""The table of operations: what reads it has something for each row."""

import pytest
import torch

from hpctrain.comm.collectives.flat import Collectives, FlatCollectives, SilentCollectives
from hpctrain.comm.collectives.hierarchical import HierarchicalCollectives
from hpctrain.comm.collectives.native import NativeCollectives
from hpctrain.comm.collectives.shared import SharedCollectives
from hpctrain.comm.collectives.streamed import StreamedCollectives
from hpctrain.comm.groups.group import Group
from hpctrain.comm.operations import OPERATIONS

COLLECTIVES = {name for name, row in OPERATIONS.items() if not row.matching}
BY_LIBRARY = {name for name, row in OPERATIONS.items() if row.is_launched}
KINDS = {
    FlatCollectives: COLLECTIVES,
    SilentCollectives: COLLECTIVES,
    SharedCollectives: COLLECTIVES,
    HierarchicalCollectives: COLLECTIVES,
    NativeCollectives: BY_LIBRARY,
    StreamedCollectives: set(),
}
"""The operations that each class does itself."""


@pytest.mark.parametrize("kind", Collectives.__subclasses__())
def test_collectives_have_a_method_for_each_operation_or_pass_all_of_them_on(kind):
    own = COLLECTIVES & set(vars(kind))
    assert own == KINDS[kind]
    assert ("steps" in vars(kind)) == (own != COLLECTIVES)


def test_a_group_has_a_method_for_each_operation_and_one_that_starts_it():
    for name in OPERATIONS:
        assert getattr(Group, name).__doc__, name
        if OPERATIONS[name].transfers:
            assert getattr(Group, f"start_{name}").__doc__, name


def test_an_operation_of_a_group_needs_a_row_and_one_method(monkeypatch):
    """No wrapper and no other place of the group knows the names of operations."""
    done = []

    class Shifting(SilentCollectives):
        def shift(self, flat, cuts):
            done.append((flat.tolist(), [cut.size for cut in cuts]))
            yield from ()

    monkeypatch.setitem(OPERATIONS, "shift", OPERATIONS["all_gather"])
    group = Group([0])
    group._collectives = Shifting(0, 1)
    group._begin("shift", torch.ones(4))
    assert done == [([1, 1, 1, 1], [4])]
