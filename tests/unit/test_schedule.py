"""Schedules do all the work once, as 1F1B says, and do not deadlock; those that do are found out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import PlanError
from hpctrain.job import Model
from hpctrain.plan import TensorGrid, check_tiling, even_plan
from hpctrain.schedule import Instruction, Op, check_no_deadlock, forward_only, one_f_one_b
from tests.tilings import tilings
from tests.unit.test_plan import uneven_plan

MODEL = Model(architecture="gpt2", num_layers=4, hidden_size=16, num_heads=4, vocab_size=13)
LAYOUTS = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 9))


def plan_of(layout):
    pipeline, data, microbatches = layout
    return even_plan(8, TensorGrid(), pipeline, data, microbatches, data)


@given(LAYOUTS)
def test_1f1b_works_on_every_microbatch_once_and_ends(layout):
    plan = plan_of(layout)
    schedules = {tile: one_f_one_b(plan, tile) for tile in plan.tiles}
    check_no_deadlock(plan, schedules)
    check_no_deadlock(plan, {tile: forward_only(plan, tile) for tile in plan.tiles})
    for steps in schedules.values():
        for op in (Op.FORWARD, Op.BACKWARD):
            assert [s.microbatch for s in steps if s.op is op] == list(range(plan.microbatches))
        assert [s.op for s in steps[-2:]] == [Op.REDUCE_GRADIENTS, Op.UPDATE]


@given(LAYOUTS)
def test_1f1b_holds_no_more_activations_than_its_warm_up(layout):
    plan = plan_of(layout)
    for tile in plan.tiles:
        alive = most = 0
        for step in one_f_one_b(plan, tile):
            alive += (step.op is Op.FORWARD) - (step.op is Op.BACKWARD)
            most = max(most, alive)
        assert most == min(plan.microbatches, plan.depth_to_loss(tile) + 1)


def test_tiles_of_unlike_shape_do_not_deadlock():
    plan = uneven_plan()
    check_no_deadlock(plan, {tile: one_f_one_b(plan, tile) for tile in plan.tiles})


@given(tilings(MODEL, 6, 8, 5))
def test_no_tiling_deadlocks(plan):
    """Whatever their depth, data degree, and rows by turns."""
    check_tiling(plan, MODEL.num_items)
    for schedule in (one_f_one_b, forward_only):
        check_no_deadlock(plan, {tile: schedule(plan, tile) for tile in plan.tiles})


def schedules_of_two_stages():
    plan = even_plan(4, TensorGrid(), 2, 1, 2, 1)
    return plan, {tile: list(one_f_one_b(plan, tile)) for tile in plan.tiles}


def test_waiting_for_each_other_is_found():
    plan, schedules = schedules_of_two_stages()
    first = schedules[plan.tiles[0]]
    first.insert(0, first.pop(first.index(Instruction(Op.RECEIVE_GRADIENT, 0))))
    with pytest.raises(PlanError, match=r"deadlocks: .*items \[0, 2\].* waits at 'receive gradient 0'"):
        check_no_deadlock(plan, schedules)


def test_a_send_that_nobody_takes_is_found():
    plan, schedules = schedules_of_two_stages()
    schedules[plan.tiles[1]].remove(Instruction(Op.RECEIVE_ACTIVATION, 1))
    with pytest.raises(PlanError, match="'send activation 1' to tile items .* is never received"):
        check_no_deadlock(plan, schedules)


def test_a_message_out_of_order_is_found():
    plan, schedules = schedules_of_two_stages()
    last = schedules[plan.tiles[1]]
    a, b = (last.index(Instruction(Op.RECEIVE_ACTIVATION, m)) for m in (0, 1))
    last[a], last[b] = last[b], last[a]
    with pytest.raises(PlanError, match="expects microbatch 1 and is sent 0"):
        check_no_deadlock(plan, schedules)


def test_tiles_that_exchange_while_they_compute_go_together():
    plan = even_plan(6, TensorGrid(), 2, 2, 3, 2, zero=3)
    schedules = {tile: list(one_f_one_b(plan, tile)) for tile in plan.tiles}
    check_no_deadlock(plan, schedules)
    first = schedules[plan.tiles[0]]
    first.insert(first.index(Instruction(Op.FORWARD, 1)), first.pop(first.index(Instruction(Op.BACKWARD, 0))))
    with pytest.raises(PlanError, match="exchanges in 'backward 0' while tile .* is at 'forward 1'"):
        check_no_deadlock(plan, schedules)


def test_substeps_keep_one_at_the_loss():
    plan = even_plan(4, TensorGrid(), 2, 1, 1, 2, substeps=2)
    check_no_deadlock(plan, {tile: one_f_one_b(plan, tile) for tile in plan.tiles})
    assert ", ".join(map(str, one_f_one_b(plan, plan.tiles[1]))) == (
        "receive activation 0, forward 0, backward 0, forward 0.1, backward 0.1, send gradient 0, reduce gradients,"
        " update"
    )


def test_instructions_can_be_read():
    plan = even_plan(4, TensorGrid(), 2, 1, 1, 1)
    assert ", ".join(map(str, one_f_one_b(plan, plan.tiles[0]))) == (
        "forward 0, send activation 0, receive gradient 0, backward 0, reduce gradients, update"
    )
