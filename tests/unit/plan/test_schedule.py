"""Schedules do all the work once, as 1F1B says, and do not deadlock; those that do are detected."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.errors import PlanError
from hpctrain.config.job import Model
from hpctrain.plan.checks import check_tiling
from hpctrain.plan.holdings import check_zero
from hpctrain.plan.schedule import (
    ADDING,
    Action,
    Instruction,
    channel_depth,
    forward_only,
    in_flight,
    one_f_one_b,
    schedule_of,
    weight_delay,
)
from hpctrain.plan.schedule_run import check_no_deadlock, check_schedules
from hpctrain.plan.tiling import Plan, Tile, even_plan
from hpctrain.planner.prediction.simulate import simulate
from hpctrain.planner.prices.prices import Costs, PassCost, TileCost
from hpctrain.planner.search.extra_warmup import with_extra_warmup
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.tilings import tilings, with_extra_warmups
from tests.unit.plan.test_plan import uneven_plan

LAYOUTS = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 9))


def plan_of(layout):
    pipeline, data, microbatches = layout
    return even_plan(14, TensorGrid(), pipeline, data, microbatches, data)


@given(LAYOUTS)
def test_1f1b_works_on_every_microbatch_once_and_ends(layout):
    plan = plan_of(layout)
    schedules = {tile: one_f_one_b(plan, tile) for tile in plan.tiles}
    check_no_deadlock(plan, schedules)
    check_no_deadlock(plan, {tile: forward_only(plan, tile) for tile in plan.tiles})
    for steps in schedules.values():
        for action in (Action.FORWARD, Action.BACKWARD):
            assert [s.microbatch for s in steps if s.action is action] == list(range(plan.microbatches))
        assert [s.action for s in steps[-2:]] == [Action.REDUCE_GRADIENTS, Action.UPDATE]


@given(LAYOUTS)
def test_1f1b_holds_no_more_activations_than_its_warm_up(layout):
    plan = plan_of(layout)
    for tile in plan.tiles:
        alive = most = 0
        for step in one_f_one_b(plan, tile):
            alive += (step.action is Action.FORWARD) - (step.action is Action.BACKWARD)
            most = max(most, alive)
        assert most == min(plan.microbatches, plan.depth_to_loss(tile) + 1)


def test_tiles_of_different_shape_do_not_deadlock():
    plan = uneven_plan()
    check_no_deadlock(plan, {tile: one_f_one_b(plan, tile) for tile in plan.tiles})


def schedules_of_two_stages():
    plan = even_plan(6, TensorGrid(), 2, 1, 2, 1)
    return plan, {tile: list(one_f_one_b(plan, tile)) for tile in plan.tiles}


def test_waiting_for_each_other_is_detected():
    plan, schedules = schedules_of_two_stages()
    first = schedules[plan.tiles[0]]
    first.insert(0, first.pop(first.index(Instruction(Action.RECEIVE_GRADIENT, 0))))
    with pytest.raises(PlanError, match=r"deadlocks: .*items \[0, 3\].* waits at 'receive gradient 0'"):
        check_no_deadlock(plan, schedules)


def test_a_send_waits_while_its_channel_is_full():
    """Both stages send all their messages before they take any: no channel holds as many."""
    plan = even_plan(6, TensorGrid(), 2, 1, 6, 1)
    first, last = plan.tiles
    assert channel_depth(plan, first, last) < plan.microbatches
    ends = [Instruction(Action.REDUCE_GRADIENTS), Instruction(Action.UPDATE)]

    def steps(*actions: Action) -> list[Instruction]:
        return [Instruction(action, microbatch) for action in actions for microbatch in range(plan.microbatches)] + ends

    schedules = {
        first: steps(Action.SEND_ACTIVATION, Action.RECEIVE_GRADIENT),
        last: steps(Action.SEND_GRADIENT, Action.RECEIVE_ACTIVATION),
    }
    with pytest.raises(PlanError, match="deadlocks: .* waits at 'send activation 2'; .* waits at 'send gradient 2'"):
        check_no_deadlock(plan, schedules)


def test_a_send_that_nobody_takes_is_detected():
    plan, schedules = schedules_of_two_stages()
    schedules[plan.tiles[1]].remove(Instruction(Action.RECEIVE_ACTIVATION, 1))
    with pytest.raises(PlanError, match="'send activation 1' to tile items .* is never received"):
        check_no_deadlock(plan, schedules)


def test_a_message_out_of_order_is_detected():
    plan, schedules = schedules_of_two_stages()
    last = schedules[plan.tiles[1]]
    a, b = (last.index(Instruction(Action.RECEIVE_ACTIVATION, m)) for m in (0, 1))
    last[a], last[b] = last[b], last[a]
    with pytest.raises(PlanError, match="expects microbatch 1 and is sent 0"):
        check_no_deadlock(plan, schedules)


def test_tiles_that_exchange_while_they_compute_go_together():
    plan = even_plan(10, TensorGrid(), 2, 2, 3, 2, zero=3)
    schedules = {tile: list(one_f_one_b(plan, tile)) for tile in plan.tiles}
    check_no_deadlock(plan, schedules)
    first = schedules[plan.tiles[0]]
    first.insert(first.index(Instruction(Action.FORWARD, 1)), first.pop(first.index(Instruction(Action.BACKWARD, 0))))
    with pytest.raises(PlanError, match="exchanges in 'backward 0' while tile .* is at 'forward 1'"):
        check_no_deadlock(plan, schedules)


def test_all_ranks_end_a_step_together():
    def refusal(change) -> str:
        plan, schedules = schedules_of_two_stages()
        change(schedules[plan.tiles[1]])
        with pytest.raises(PlanError) as error:
            check_no_deadlock(plan, schedules)
        return str(error.value)

    def reduce_before_the_last_message(steps):
        steps.insert(-2, steps.pop(-2))

    reduce = Instruction(Action.REDUCE_GRADIENTS)
    assert "rows [0, 1]: 'send gradient 1' comes after 'reduce gradients'" in refusal(reduce_before_the_last_message)
    without = refusal(lambda steps: steps.remove(reduce))
    assert "ends with 'reduce gradients, update' and tile items [3, 6] rows [0, 1] with 'update', which all" in without
    neither = refusal(lambda steps: (steps.pop(), steps.pop()))
    assert "rows [0, 1] with 'no more', which all ranks do together" in neither


def test_row_chunks_keep_one_at_the_loss():
    plan = even_plan(6, TensorGrid(), 2, 1, 1, 2, row_chunks=2)
    check_no_deadlock(plan, {tile: one_f_one_b(plan, tile) for tile in plan.tiles})
    assert ", ".join(map(str, one_f_one_b(plan, plan.tiles[1]))) == (
        "receive activation 0, forward 0, backward 0, forward 0.1, backward 0.1, send gradient 0, reduce gradients,"
        " update"
    )


def test_instructions_can_be_read():
    plan = even_plan(6, TensorGrid(), 2, 1, 1, 1)
    assert ", ".join(map(str, one_f_one_b(plan, plan.tiles[0]))) == (
        "forward 0, send activation 0, receive gradient 0, backward 0, reduce gradients, update"
    )


# ---- backward passes that are split ----------------------------------------------------------------------------------

MODEL = Model(architecture="llama", num_layers=5, hidden_size=16, num_heads=4, vocab_size=64)
TILINGS = st.integers(1, 12).flatmap(
    lambda ranks: st.integers(1, 9).flatmap(lambda microbatches: tilings(MODEL, ranks, 5, microbatches))
)


def most(steps, over: tuple[Action, ...]) -> int:
    """The largest number of row chunks that were forward and not yet in a pass of `over`."""
    alive = result = 0
    for step in steps:
        alive += (step.action is Action.FORWARD) - (step.action in over)
        result = max(result, alive)
    return result


def check_each_pass_is_once_and_in_order(plan: Plan, tile: Tile, steps) -> None:
    every = [(m, s) for m in range(plan.microbatches) for s in range(tile.row_chunks)]
    for actions in ((Action.FORWARD,), (Action.BACKWARD, Action.BACKWARD_INPUT), ADDING):
        assert [(step.microbatch, step.row_chunk) for step in steps if step.action in actions] == every


@given(TILINGS, st.sampled_from(["1f1b", "zb-h1"]), st.booleans())
def test_any_tiling_has_each_pass_once_in_the_order_of_microbatches_and_ends(drawn, schedule, reduce_early):
    plan = replace(drawn, schedule=schedule)
    check_schedules(plan, reduce_early)
    for tile in plan.tiles:
        steps = schedule_of(plan, tile, reduce_early)
        check_each_pass_is_once_and_in_order(plan, tile, steps)
        assert [step for step in steps if step.starts_reducing] == [s for s in steps if s.action in ADDING][
            -1:
        ] * reduce_early


@given(TILINGS.flatmap(with_extra_warmups), st.booleans())
def test_more_microbatches_in_flight_wait_for_nobody_for_ever(plan, reduce_early):
    check_tiling(plan, MODEL.num_items)
    check_schedules(plan, reduce_early)
    for tile in plan.tiles:
        steps = schedule_of(plan, tile, reduce_early)
        check_each_pass_is_once_and_in_order(plan, tile, steps)
        if plan.downstream(tile):
            kept = min(plan.depth_to_loss(tile) + tile.extra_warmup + 1, plan.microbatches)
            assert most(steps, (Action.BACKWARD, Action.BACKWARD_INPUT)) == tile.row_chunks * kept
            assert in_flight(plan, tile) == kept


EXCHANGING = st.integers(1, 8).flatmap(
    lambda ranks: st.integers(1, 9).flatmap(lambda m: tilings(MODEL, ranks, 6, m, exchanging=True))
)


@given(st.one_of(TILINGS, EXCHANGING), st.data())
def test_what_warms_up_longer_for_its_messages_is_a_plan(plan, data):
    seconds = st.floats(0.1, 3.0)
    cost = {tile: TileCost((PassCost(data.draw(seconds)),), (PassCost(data.draw(seconds)),)) for tile in plan.tiles}
    pairs = [pair for tile in plan.tiles for o in plan.downstream(tile) for pair in ((tile, o), (o, tile))]
    messages = {pair: data.draw(st.floats(0.0, 3.0)) for pair in pairs}
    further = with_extra_warmup(plan, Costs(cost, messages))
    if further is None:
        return
    check_tiling(further, MODEL.num_items)
    check_zero(further, "a test")
    check_schedules(further)
    for tile, other in zip(plan.tiles, further.tiles, strict=True):
        assert other == replace(tile, extra_warmup=other.extra_warmup)
        assert in_flight(further, other) <= plan.microbatches


def test_messages_that_take_longer_have_more_in_flight():
    plan = even_plan(8, TensorGrid(), 3, 1, 12, 1)
    cost = dict.fromkeys(plan.tiles, TileCost((PassCost(1.0),), (PassCost(2.0),)))

    def extra_warmup(message_seconds: float, microbatches: int = 12) -> list[int]:
        of = replace(plan, microbatches=microbatches)
        messages = {(a, b): message_seconds for a in plan.tiles for b in plan.tiles}
        further = with_extra_warmup(of, Costs(cost, messages))
        return [tile.extra_warmup for tile in further.tiles] if further else [0, 0, 0]

    assert extra_warmup(0.0) == extra_warmup(0.02) == [0, 0, 0], "of a round trip of 6 s, a hundredth of one stage's 3"
    assert extra_warmup(0.1) == extra_warmup(1.5) == [2, 1, 0]
    assert extra_warmup(1.6) == extra_warmup(100.0) == [4, 2, 0], "two more, at the most"
    assert extra_warmup(100.0, microbatches=4) == [1, 2, 0], "there are no more than 4"
    assert extra_warmup(100.0, microbatches=2) == [0, 0, 0]


def test_where_memory_is_short_the_slowest_messages_have_more_in_flight_first():
    plan = even_plan(10, TensorGrid(), 4, 1, 16, 1)
    cost = dict.fromkeys(plan.tiles, TileCost((PassCost(1.0),), (PassCost(2.0),)))
    first, second, third, last = plan.tiles
    messages = {(first, second): 2.0, (third, last): 3.0}

    def extra_warmup(*headroom: int) -> list[int]:
        further = with_extra_warmup(plan, Costs(cost, messages), dict(zip(plan.tiles, headroom, strict=True)))
        return [tile.extra_warmup for tile in further.tiles] if further else [0, 0, 0, 0]

    assert extra_warmup(9, 9, 9, 0) == [2, 1, 1, 0], "one more for each of the two gaps"
    assert extra_warmup(2, 1, 1, 0) == [2, 1, 1, 0]
    assert extra_warmup(1, 1, 1, 0) == [1, 1, 1, 0], "the later messages take longer"
    assert extra_warmup(1, 0, 1, 0) == [0, 0, 0, 0], (
        "all before must have headroom; and without them the earlier gain nothing"
    )


def test_pipelines_that_are_equal_but_for_what_is_in_flight_are_not_simulated_as_one():
    def step(*extra_warmup: int) -> float:
        """Return what pipelines side by side take together, the first stages of which have so much extra warm-up."""
        tiles = []
        for row, number in enumerate(extra_warmup):
            tiles.append(Tile(Interval(0, 3), Interval(row, row + 1), (2 * row,), extra_warmup=number))
            tiles.append(Tile(Interval(3, 6), Interval(row, row + 1), (2 * row + 1,)))
        plan = Plan(tuple(tiles), 8, len(extra_warmup))
        cost = dict.fromkeys(plan.tiles, TileCost((PassCost(1.0),), (PassCost(2.0),)))
        messages = {(a, b): 1.0 for a in plan.tiles for b in plan.tiles}
        return simulate(plan, {t: one_f_one_b(plan, t) for t in plan.tiles}, Costs(cost, messages)).step_seconds

    assert step(2, 0) == step(0, 2) == step(0, 0) > step(2, 2)


@given(TILINGS)
def test_zb_h1_keeps_no_more_microbatches_than_the_first_tile_on_the_longest_path_by_1f1b(drawn):
    plan = replace(drawn, schedule="zb-h1")
    for tile in plan.tiles:
        steps, depth = schedule_of(plan, tile), plan.depth_to_loss(tile)
        if plan.downstream(tile):  # at the loss row_chunks go forward and back one by one
            assert most(steps, (Action.BACKWARD, Action.BACKWARD_INPUT)) == tile.row_chunks * min(
                depth + 1, plan.microbatches
            )
        path = depth + plan.depth_from_start(tile) + 1
        assert most(steps, ADDING) <= tile.row_chunks * min(path, plan.microbatches)


@given(TILINGS)
def test_tiles_wait_for_each_other_in_the_order_of_1f1b_whatever_the_schedule(drawn):
    for schedule in ("1f1b", "zb-h1"):
        plan = replace(drawn, schedule=schedule)
        for tile in plan.tiles:
            split = [step for step in schedule_of(plan, tile) if step.action is not Action.BACKWARD_WEIGHT]
            as_one = [replace(s, action=Action.BACKWARD) if s.action is Action.BACKWARD_INPUT else s for s in split]
            assert as_one == list(one_f_one_b(plan, tile))


def test_1f1b_sends_the_gradient_before_it_computes_those_of_weights_where_that_costs_nothing():
    plan = even_plan(6, TensorGrid(), 2, 1, 2, 1)
    assert ", ".join(map(str, schedule_of(plan, plan.tiles[1]))) == (
        "receive activation 0, forward 0, backward input 0, send gradient 0, backward weight 0,"
        " receive activation 1, forward 1, backward input 1, send gradient 1, backward weight 1,"
        " reduce gradients, update"
    )
    assert schedule_of(plan, plan.tiles[0]) == one_f_one_b(plan, plan.tiles[0]), "nobody waits for it"
    for option in ({"recompute": "full"}, {"row_chunks": 2}, {"zero": 2}):
        assert delay_of_the_second(TensorGrid(), **option) is None
    grids = (TensorGrid(z=2), TensorGrid(y=2), TensorGrid(x=2))
    assert [delay_of_the_second(grid) for grid in grids] == [0, None, None]


def delay_of_the_second(grid: TensorGrid, **options) -> int | None:
    plan = even_plan(6, grid, 2, 1, 2, 2, **options)
    return weight_delay(plan, plan.tiles[1])


def test_zb_h1_leaves_weight_passes_for_the_end():
    plan = even_plan(8, TensorGrid(), 3, 1, 4, 1, schedule="zb-h1")
    letters = {Action.FORWARD: "F", Action.BACKWARD: "B", Action.BACKWARD_INPUT: "I", Action.BACKWARD_WEIGHT: "W"}
    computed = [
        " ".join(
            f"{letters[step.action]}{step.microbatch}" for step in schedule_of(plan, tile) if step.action in letters
        )
        for tile in plan.tiles
    ]
    assert computed == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


@given(st.integers(2, 8), st.integers(0, 12), st.tuples(*[st.floats(0.1, 3.0)] * 3))
def test_the_bubbles_of_equal_stages_are_those_of_the_paper(stages, more, seconds):
    """(p - 1) (f + dX + dW) by 1F1B, without dW where the gradient is sent first, and (p - 1) (f + dX - dW) by ZB-H1,
    of which messages from stage to stage leave no less than a pass."""
    forward, back, weight = seconds
    passes = [(PassCost(seconds),) for seconds in (forward, back + weight, back, weight)]
    cost = TileCost(*passes[:2], 0.0, *passes[2:])

    def bubble(schedule: str, made) -> float:
        plan = even_plan(2 * stages + 2, TensorGrid(), stages, 1, stages + more, 1, schedule=schedule)
        costs = Costs(dict.fromkeys(plan.tiles, cost), {(a, b): 0.0 for a in plan.tiles for b in plan.tiles})
        steps = {tile: made(plan, tile) for tile in plan.tiles}
        return simulate(plan, steps, costs).step_seconds - plan.microbatches * sum(seconds)

    hops = stages - 1
    assert bubble("1f1b", one_f_one_b) == pytest.approx(hops * (forward + back + weight))
    assert bubble("1f1b", schedule_of) == pytest.approx(hops * (forward + back))
    expected = hops * max(forward + back - weight, forward, back)
    assert bubble("zb-h1", schedule_of) == pytest.approx(expected)


def test_gradients_that_are_added_out_of_order_or_never_are_detected():
    plan = even_plan(6, TensorGrid(), 2, 1, 2, 1, schedule="zb-h1")

    def refusal(change) -> str:
        schedules = {tile: list(schedule_of(plan, tile)) for tile in plan.tiles}
        change(schedules[plan.tiles[1]])
        with pytest.raises(PlanError) as error:
            check_no_deadlock(plan, schedules)
        return str(error.value)

    first, second = (Instruction(Action.BACKWARD_WEIGHT, m) for m in (0, 1))

    def swap(steps):
        a, b = steps.index(first), steps.index(second)
        steps[a], steps[b] = steps[b], steps[a]

    assert "'backward weight 0' comes after microbatch 1, row chunk 0 was added" in refusal(swap)
    assert "'backward input 0' has no weight pass" in refusal(lambda steps: steps.remove(first))
    assert "'backward weight 0' comes before its input pass" in refusal(lambda steps: steps.insert(0, first))


def test_tiles_with_zero_2_delay_their_weight_passes_equally_or_are_refused():
    check_schedules(even_plan(10, TensorGrid(), 2, 2, 3, 2, schedule="zb-h1", zero=3))
    cuts = [((0, 2), (0, 1)), ((0, 1), (1, 2)), ((1, 2), (1, 2))]
    tiles = [Tile(Interval(*items), Interval(*rows), (i,)) for i, (items, rows) in enumerate(cuts)]
    tiles += [Tile(Interval(2, 6), Interval(row, row + 1), (3 + row,), zero=2) for row in (0, 1)]
    plan = Plan(tuple(tiles), 3, 2)
    check_zero(plan, "a test")
    check_schedules(plan)
    with pytest.raises(PlanError, match="tiles 3 and 4 share items but have different tiles before: 1 and 2"):
        check_zero(replace(plan, schedule="zb-h1"), "a test")
