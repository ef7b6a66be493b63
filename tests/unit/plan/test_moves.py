"""What moves between two plans: counted by marking each element, and what nobody has any more."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config.training.optimizers import RULES
from hpctrain.plan.holdings import holding_of
from hpctrain.plan.moves import PlanState
from hpctrain.plan.stored import state_of
from hpctrain.plan.tiling import Plan, even_plan
from hpctrain.sharding.grid import ONE_RANK
from hpctrain.sharding.parameters import all_parameters
from tests.examples import costly
from tests.tilings import tilings
from tests.unit.small_searches import model_of

MODEL, RANKS, ROWS, MICROBATCHES = model_of(3), 6, 5, 3
RULE = RULES["adamw"]


def element_bytes(shape: tuple[int, ...]) -> int:
    return 4 + RULE.moment_bytes(shape)


def marks(plan: Plan, rank: int, is_owned: bool) -> dict[str, np.ndarray]:
    """Return how often a rank has each element of each parameter."""
    shapes = {name: (*parameter.shape, 1)[:2] for name, parameter in all_parameters(MODEL).items()}
    result = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    if rank in plan.unused:
        return result
    for parameter, (rows, columns) in state_of(holding_of(MODEL, plan, rank), rank, is_owned):
        result[parameter.name][slice(*rows), slice(*columns)] += 1
    return result


DRAWN = tilings(MODEL, RANKS, ROWS, MICROBATCHES, exchanging=True)


@settings(max_examples=costly(40), deadline=None)
@given(DRAWN, DRAWN, st.sets(st.integers(0, RANKS - 1), max_size=RANKS - 1))
def test_bytes_that_move_are_what_ranks_need_and_do_not_own(first, second, lost):
    before, after = PlanState(MODEL, first), PlanState(MODEL, second)
    kept = range(RANKS)
    owned = [marks(first, rank, True) for rank in range(RANKS)]
    updated = [marks(first, rank, False) for rank in range(RANKS)]
    moved = gone = 0
    for name, parameter in all_parameters(MODEL).items():
        each = element_bytes(parameter.shape)
        assert (sum(had[name] for had in owned) == 1).all(), "each element has one owner"
        for rank in range(RANKS):
            moved += each * int(((marks(second, rank, False)[name] > 0) & (owned[rank][name] == 0)).sum())
        held = sum(updated[rank][name] for rank in range(RANKS) if rank not in lost)
        gone += each * int((held == 0).sum() if len(lost) < RANKS else 0)
    moves = before.moves_to(after, kept, element_bytes)
    assert sum(moves.values()) == moved and all(source != to for source, to in moves)
    assert before.lost_bytes(lost, element_bytes) == gone
    whole = sum(each.size * element_bytes(all_parameters(MODEL)[name].shape) for name, each in owned[0].items())
    assert sum(before.bytes_of(element_bytes, is_owned=True).values()) == whole, "a copy has each element once"
    assert not before.moves_to(before, kept, element_bytes) or any(tile.zero == 0 for tile in first.tiles)


@pytest.mark.parametrize("lost", [(), (0,), (0, 1, 2)])
def test_numbers_of_those_left_are_their_old_ones(lost):
    """A plan of the ranks left numbers them anew; what moves is between old numbers, also from those that leave."""

    def replicas(count: int) -> Plan:
        return even_plan(MODEL.num_items, ONE_RANK, 1, count, 1, 60)

    left = [rank for rank in range(RANKS) if rank not in lost]
    moves = PlanState(MODEL, replicas(RANKS)).moves_to(PlanState(MODEL, replicas(len(left))), left, element_bytes)
    assert {to for _, to in moves} <= set(left)
    assert {source for source, _ in moves} >= set(lost) and bool(moves) == bool(lost)
