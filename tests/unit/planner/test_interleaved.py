"""Interleaved pipelines: plans whose ranks have several tiles, and the order of their passes."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.config.errors import PlanError
from hpctrain.config.job import load_job
from hpctrain.plan.checks import check_tiling
from hpctrain.plan.draw import draw_plan
from hpctrain.plan.file import dump_plan, parse_plan
from hpctrain.plan.holdings import check_zero
from hpctrain.plan.schedule import (
    ADDING,
    Action,
    Instruction,
    forward_only,
    in_flight,
    one_f_one_b,
    passes,
    schedule_of,
)
from hpctrain.plan.schedule_run import check_no_deadlock, check_schedules
from hpctrain.plan.tiling import Plan, Tile, even_plan
from hpctrain.planner.explain import reasons
from hpctrain.planner.prediction.predictor import Predictor, predict
from hpctrain.planner.prediction.simulate import simulate
from hpctrain.planner.prices.prices import Costs, PassCost, TileCost
from hpctrain.planner.prices.setup import HPCTRAIN, Setup
from hpctrain.planner.search.changes import dealt_cuts
from hpctrain.planner.search.pipeline_run import StageMessages, done_after
from hpctrain.planner.search.search import search
from hpctrain.planner.search.space import Space
from hpctrain.planner.search.stage_variants import Passes
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.examples import costly
from tests.pretended import CLUSTER
from tests.tilings import stages_of_different_degree
from tests.unit.small_searches import EVERYTHING, cases, cluster_of, setup_of

SHAPES = st.tuples(st.integers(2, 5), st.integers(2, 3), st.integers(1, 12), st.integers(1, 2))
"""Stages, virtual stages of each, microbatches, replicas."""


def plan_of(shape, **tile) -> Plan:
    stages, virtual_stages, microbatches, data = shape
    num_items = 2 * (stages * virtual_stages + 1) + 2
    return even_plan(num_items, TensorGrid(), stages, data, microbatches, data, virtual_stages=virtual_stages, **tile)


# ---- plans -----------------------------------------------------------------------------------------------------------


@given(SHAPES)
def test_each_rank_has_every_s_th_tile(shape):
    stages, virtual_stages, _, data = shape
    plan = plan_of(shape)
    check_tiling(plan, 2 * (stages * virtual_stages + 1) + 2)
    assert plan.ranks == tuple(range(stages * data))
    assert [tile.ranks[0] for tile in plan.tiles] == list(range(stages * data)) * virtual_stages
    assert [plan.virtual_stages(tile) for tile in plan.first_tiles] == [
        plan.tiles[rank :: stages * data] for rank in plan.ranks
    ]
    assert parse_plan(dump_plan(plan), "a test") == plan


def test_it_is_described_and_drawn():
    drawing = draw_plan(plan_of((2, 2, 4, 2)), max_width=200)
    assert drawing.startswith("TP1 x PP2 (2 virtual stages) x DP2, ZeRO 1, 4 microbatches of 2 rows\n")
    assert drawing.count(" virtual stage 0 of 2 ") == drawing.count(" virtual stage 1 of 2 ") == 4
    assert drawing.count(" rank 3 ") == 2
    assert stages_of_different_degree().describe().startswith("6 tiles of TP1/TP2, up to 2 a rank, ")


def refusal(tiles, **plan) -> str:
    with pytest.raises(PlanError) as error:
        check_tiling(Plan(tuple(tiles), 2, 2, **plan), max(tile.items.stop for tile in tiles))
    return str(error.value)


def in_a_row(*ranks: int, **options) -> list[Tile]:
    return [Tile(Interval(i, i + 1), Interval(0, 2), (rank,), **options) for i, rank in enumerate(ranks)]


def test_ranks_whose_tiles_are_no_virtual_stages_are_refused():
    for ranks in ((0, 1, 1, 0), (0, 0, 1, 1), (0, 1, 0, 1, 0), (0, 1, 0), (0, 1, 2, 0, 2, 1)):
        assert "give each rank one tile, or every s-th" in refusal(in_a_row(*ranks))
    assert refusal(in_a_row(0, 1, 1, 0)) == (
        "tiles 0, 3 have the same ranks [0], with 0, 3 tiles before them of the 4 from the embedding to"
        " the loss: ranks with several tiles are an interleaved pipeline, in which all have as many, and of s stages"
        " each has every s-th tile; give each rank one tile, or every s-th"
    )
    tiles = in_a_row(0, 1, 0, 1)
    assert "tiles 0, 2 have the same ranks [0], but different zero: 1, 0;" in refusal(
        [*tiles[:2], *in_a_row(0, 1, 0, zero=0)[2:], tiles[3]]
    )
    assert 'schedule = "zb-h1" is of one tile a rank; set it to "1f1b"' in refusal(tiles, schedule="zb-h1")
    wide = [replace(tile, ranks=(0, 1), tensor=TensorGrid(y=2)) for tile in in_a_row(0, 0)]
    swapped = replace(wide[1], ranks=(1, 0))
    assert "rank 1 is already in tile 0, which has other ranks" in refusal([wide[0], swapped])


def test_even_plans_that_cannot_be_interleaved_are_refused():
    for arguments, message in (
        (
            (8, TensorGrid(), 1, 1, 2, 1, "1f1b", 2),
            "pipeline = 1 has none; set virtual_stages to 1, or pipeline to 2 or more",
        ),
        (
            (12, TensorGrid(), 2, 1, 2, 1, "1f1b", 3),
            "pipeline = 2 stages x virtual_stages = 3 need as many blocks, the model has 5",
        ),
        ((8, TensorGrid(), 2, 1, 2, 1, "zb-h1", 2), 'schedule = "zb-h1" has one tile a rank; set it to 1'),
    ):
        with pytest.raises(PlanError, match=message):
            even_plan(*arguments)


def test_tiles_with_zero_2_equal_virtual_stages_or_are_refused():
    check_zero(plan_of((2, 2, 3, 2), zero=3), "a test")
    cuts = [(items, row, 2 * stage + row) for stage in (0, 1) for items in ((0, 1), (1, 2)) for row in (0, 1)]
    tiles = [Tile(Interval(*items), Interval(row, row + 1), (rank,), zero=2) for items, row, rank in cuts]
    tiles = [
        replace(t, items=Interval(2 * (n // 4) + t.items.start, 2 * (n // 4) + t.items.stop))
        for n, t in enumerate(tiles)
    ]
    one_by_one = [replace(tile, ranks=(4 + n,)) for n, tile in enumerate(tiles) if tile.rows.start]
    interleaved = [replace(t, ranks=(n % 2,)) for n, t in enumerate(t for t in tiles if not t.rows.start)]
    plan = Plan((*interleaved, *(replace(t, ranks=(2 + n,)) for n, t in enumerate(one_by_one))), 3, 2)
    check_tiling(plan, 4)
    with pytest.raises(PlanError, match="share items but have different virtual_stages"):
        check_zero(plan, "a test")


# ---- schedules -------------------------------------------------------------------------------------------------------


def written(plan: Plan, tile: Tile) -> str:
    """Passes by microbatch, forward ones of virtual stages as `a b c`, backward ones as `A B C`."""
    letters = {Action.FORWARD: "abc", Action.BACKWARD: "ABC"}
    return " ".join(f"{letters[action][virtual_stage]}{m}" for action, virtual_stage, m in passes(plan, tile))


def test_the_order_is_that_of_the_paper():
    """Narayanan et al. 2021, figure 4: four stages of two virtual stages, eight microbatches."""
    plan = plan_of((4, 2, 8, 1))
    first, *_, last = (written(plan, tile) for tile in plan.first_tiles)
    assert first == ("a0 a1 a2 a3 b0 b1 b2 b3 a4 a5 a6 B0 a7 B1 b4 B2 b5 B3 b6 A0 b7 A1 A2 A3 B4 B5 B6 B7 A4 A5 A6 A7")
    assert last == ("a0 a1 a2 a3 b0 B0 b1 B1 b2 B2 b3 B3 a4 A0 a5 A1 a6 A2 a7 A3 b4 B4 b5 B5 b6 B6 b7 B7 A4 A5 A6 A7")
    short = plan_of((4, 2, 5, 1))
    assert written(short, short.tiles[3]) == "a0 a1 a2 a3 b0 B0 b1 B1 b2 B2 b3 B3 a4 A0 A1 A2 A3 b4 B4 A4"


@given(SHAPES, st.booleans(), st.sampled_from([{}, {"zero": 3}, {"recompute": "full"}, {"zero": 2}]))
def test_each_pass_is_there_once_in_the_order_of_microbatches_and_all_end(shape, reduce_early, options):
    plan = plan_of(shape, **options)
    check_zero(plan, "a test")
    check_schedules(plan, reduce_early)
    stages, virtual_stages, microbatches, _ = shape
    for tile in plan.first_tiles:
        steps = schedule_of(plan, tile, reduce_early)
        for virtual_stage in range(virtual_stages):
            own = [step for step in steps if step.virtual_stage == virtual_stage]
            for actions in ((Action.FORWARD,), (Action.BACKWARD, Action.BACKWARD_INPUT), ADDING):
                assert [step.microbatch for step in own if step.action in actions] == list(range(microbatches))
            early = [step for step in own if step.starts_reducing]
            assert early == [step for step in own if step.action in ADDING][-1:] * reduce_early
        backward = [
            step.action in (Action.BACKWARD, Action.BACKWARD_INPUT)
            for step in steps
            if step.action in {Action.FORWARD, *ADDING, Action.BACKWARD_INPUT}
        ]
        if microbatches % stages == 0:
            warmup = 2 * (stages - 1 - tile.ranks[0] // shape[3]) + (virtual_stages - 1) * stages
            assert backward.index(True) == min(warmup + 1, virtual_stages * microbatches)
        order = [(step.virtual_stage, step.microbatch) for step in steps if step.action is Action.FORWARD]
        assert order == [
            (s.virtual_stage, s.microbatch) for s in forward_only(plan, tile) if s.action is Action.FORWARD
        ]


@given(SHAPES)
def test_channels_hold_what_is_in_flight(shape):
    plan = plan_of(shape)
    for tile in plan.tiles:
        alive = most = 0
        for action, virtual_stage, _ in passes(plan, tile):
            if plan.virtual_stages(tile)[virtual_stage] == tile:
                alive += 1 if action is Action.FORWARD else -1
                most = max(most, alive)
        assert in_flight(plan, tile) == most <= shape[2]


def test_stages_of_different_degree_and_two_tiles_of_one_rank_end():
    check_schedules(stages_of_different_degree())
    alone = Plan(tuple(in_a_row(0, 0, 0)), 3, 2)
    check_tiling(alone, 3)
    check_schedules(alone)
    assert written(alone, alone.tiles[0]) == "a0 b0 c0 C0 a1 B0 b1 A0 c1 C1 a2 B1 b2 A1 c2 C2 B2 A2"


def test_instructions_say_which_virtual_stage_they_are_for_and_are_checked_by_it():
    plan = plan_of((2, 2, 2, 1))
    schedules = {tile: list(one_f_one_b(plan, tile)) for tile in plan.first_tiles}
    text = ", ".join(map(str, schedules[plan.tiles[1]]))
    assert text.startswith("receive activation 0, forward 0, send activation 0, receive activation 1, forward 1, send")
    assert "forward 0 of virtual stage 1, backward 0 of virtual stage 1, send gradient 0 of virtual stage 1" in text
    check_no_deadlock(plan, schedules)
    first = schedules[plan.tiles[0]]
    first.insert(0, first.pop(first.index(Instruction(Action.RECEIVE_ACTIVATION, 0, virtual_stage=1))))
    waits = r"deadlocks: .*items \[5, 7\].* waits at 'receive activation 0 of virtual stage 1'"
    with pytest.raises(PlanError, match=waits):
        check_no_deadlock(plan, schedules)


@given(st.integers(2, 6), st.integers(2, 3), st.integers(1, 4), st.tuples(*[st.floats(0.1, 3.0)] * 3))
def test_the_bubble_of_equal_stages_is_that_of_the_paper(stages, virtual_stages, rounds, seconds):
    """(p - 1) (f + b) / v, f and b those of a whole stage; without the gradients of weights where those wait."""
    forward, back, weight = seconds
    both = [(PassCost(each / virtual_stages),) for each in (forward, back + weight, back, weight)]
    cost = TileCost(*both[:2], 0.0, *both[2:])
    plan = plan_of((stages, virtual_stages, stages * rounds, 1))
    costs = Costs(dict.fromkeys(plan.tiles, cost), {(a, b): 0.0 for a in plan.tiles for b in plan.tiles})

    def bubble(made) -> float:
        steps = {tile: made(plan, tile) for tile in plan.first_tiles}
        return simulate(plan, steps, costs).step_seconds - plan.microbatches * sum(seconds)

    assert bubble(one_f_one_b) == pytest.approx((stages - 1) * sum(seconds) / virtual_stages)
    passes, messages = [Passes(forward, back + weight)] * stages, [StageMessages(0.0, 0.0)] * (stages - 1)
    whole = max(done_after(passes, messages, plan.microbatches, lambda _stage, _extra: False))
    estimated = (whole - plan.microbatches * sum(seconds)) / virtual_stages
    assert estimated == pytest.approx(bubble(one_f_one_b)), "the estimate's, too"
    split = bubble(schedule_of) * virtual_stages / (stages - 1)
    assert split == pytest.approx(forward + back) or forward + back < split < sum(seconds)


@pytest.mark.parametrize("message, blocking", [(0.0, 0.0), (0.3, 0.0), (2.0, 0.0), (0.3, 1.0), (2.0, 0.5)])
@pytest.mark.parametrize("stages, microbatches", [(1, 3), (2, 1), (2, 4), (4, 3), (4, 16), (3, 64)])
def test_the_estimate_of_a_pipeline_is_what_is_simulated(stages, microbatches, message, blocking):
    """Of many microbatches some are run, so the estimate is not exact."""
    plan = plan_of((stages, 1, microbatches, 1))
    cost = TileCost((PassCost(1.0),), (PassCost(2.0),), 0.0)
    messages = {(a, b): message for a in plan.tiles for b in plan.tiles}
    costs = Costs(dict.fromkeys(plan.tiles, cost), messages, blocking_share=blocking)
    simulated = simulate(plan, {tile: one_f_one_b(plan, tile) for tile in plan.tiles}, costs).step_seconds
    messages = [StageMessages(message, message, blocking=blocking)] * (stages - 1)
    done = done_after([Passes(1.0, 2.0)] * stages, messages, microbatches, lambda _stage, _extra: False)
    assert max(done) == pytest.approx(simulated, rel=1e-9 if microbatches <= 16 else 0.01)


def test_passes_of_equal_length_hide_those_of_weights():
    for shape in ((2, 2, 2, 1), (4, 2, 8, 1), (5, 3, 5, 1)):
        plan = plan_of(shape)
        cost = TileCost(*[(PassCost(each),) for each in (1.0, 2.0)], 0.0, *[(PassCost(1.0),)] * 2)
        costs = Costs(dict.fromkeys(plan.tiles, cost), {(a, b): 0.0 for a in plan.tiles for b in plan.tiles})
        steps = {tile: schedule_of(plan, tile) for tile in plan.first_tiles}
        busy = shape[1] * shape[2] * 3.0
        assert simulate(plan, steps, costs).step_seconds == pytest.approx(busy + (shape[0] - 1) * 2.0)


@pytest.mark.parametrize("message", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("shape", [(2, 2, 4, 1), (4, 2, 8, 1), (4, 3, 16, 1), (3, 4, 9, 1)])
def test_messages_that_nothing_hides_are_counted(shape, message):
    """As long as a hundredth, a tenth, and a third of a forward pass of a tile."""
    stages, virtual_stages, *_ = shape
    plan = plan_of(shape)
    cost = TileCost((PassCost(1.0),), (PassCost(2.0),), 0.0)
    costs = Costs(dict.fromkeys(plan.tiles, cost), {(a, b): message for a in plan.tiles for b in plan.tiles})
    steps = {tile: one_f_one_b(plan, tile) for tile in plan.first_tiles}
    simulated, hidden = (
        simulate(plan, steps, each).step_seconds
        for each in (costs, replace(costs, messages=dict.fromkeys(costs.messages, 0.0)))
    )
    there_and_back = 2 * (stages * virtual_stages - 1) * message
    assert simulated > hidden
    assert simulated == pytest.approx(hidden + there_and_back, rel=0.05), "before the first and after the last"


# ---- searches --------------------------------------------------------------------------------------------------------


def test_blocks_are_dealt_as_evenly_as_ends_of_the_model_allow():
    def dealt(blocks: int, virtual_stages: int, end: float) -> list[int]:
        cuts = dealt_cuts([blocks, blocks], (0.01, end), virtual_stages)
        assert cuts[0] == 0 and cuts[-1] == 4 * blocks + 2
        return [b // 2 - a // 2 for a, b in itertools.pairwise((0, *(cut - 1 for cut in cuts[1:-1]), cuts[-1] - 2))]

    assert dealt(4, 2, 0.0) == [2, 2, 2, 2]
    assert dealt(5, 2, 1.2) == [2, 3, 3, 2]
    assert dealt(6, 3, 2.2) == [2, 2, 2, 3, 2, 1]
    assert dealt(4, 4, 9.0) == [1] * 8, "each tile has a block"


SLOW = cluster_of([("a", 2, 2)], speeds={"a": 1e7})
"""Products take long compared with messages."""


def pipeline_search(num_blocks: int, most_virtual_stages: int = 10, **space):
    """Return a search of which pipelines are the only plans that use all devices."""
    space = Space(microbatches=(4,), largest_grid=1, most_virtual_stages=most_virtual_stages, **space)
    return search(setup_of(num_blocks, vocabulary=2), 4, SLOW, None, space, EVERYTHING)


def test_a_search_interleaves_where_that_shortens_the_bubble():
    interleaved, plain = pipeline_search(8), pipeline_search(8, 1)
    plan = interleaved.best.plan
    check_tiling(plan, 18)
    check_schedules(plan)
    assert plan.describe() == "TP1 x PP4 (2 virtual stages) x DP1, ZeRO 1, 4 microbatches of 1 row"
    assert plain.best.plan.describe() == "TP1 x PP4 x DP1, ZeRO 1, 4 microbatches of 1 row, zb-h1"
    by_1f1b = predict(setup_of(8, vocabulary=2), replace(plain.best.plan, schedule="1f1b"), SLOW)
    bubbles = [each.breakdown_seconds["bubble"] for each in (interleaved.best.prediction, by_1f1b)]
    assert bubbles[0] == pytest.approx(bubbles[1] / 2, rel=0.1)
    assert "; 4 microbatches, ZeRO 1, 2 virtual stages" in interleaved.best.describe(["a"])
    assert any("ranks have 2 virtual stages, so that bubbles are shorter" in reason for reason in reasons(interleaved))
    assert any("(2 blocks on a) is the bottleneck" in reason for reason in reasons(interleaved))


def test_a_search_takes_the_zero_bubble_schedule_where_stages_are_too_short_to_interleave():
    result = pipeline_search(4)
    best = result.best
    assert best.plan.describe() == "TP1 x PP4 x DP1, ZeRO 1, 4 microbatches of 1 row, zb-h1"
    check_schedules(best.plan)
    plain = Predictor(setup_of(4, vocabulary=2), replace(best.plan, schedule="1f1b"), SLOW).predict().step_seconds
    assert best.plain_seconds == plain > 1.05 * best.seconds
    longer = f"{plain / best.seconds - 1:.1%} longer"
    assert any("the schedule is zb-h1" in reason and longer in reason for reason in reasons(result))


@settings(max_examples=costly(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_interleaving_makes_no_plan_slower(case):
    setup, batch, cluster, space = case
    plain, result = (
        search(setup, batch, cluster, None, each).best.seconds
        for each in (replace(space, most_virtual_stages=1), space)
    )
    assert result <= plain


# ---- predictions -----------------------------------------------------------------------------------------------------

SETUP = Setup(load_job("tiny", ["model.vocab_size=64", "model.num_layers=8"]).model, 128, "fp32", HPCTRAIN)


def on_two_ranks(plan: Plan) -> Plan:
    return replace(plan, unused=(2, 3))


def test_virtual_stages_shorten_the_predicted_bubble_and_cost_memory_as_the_paper_says():
    plans = {
        n: on_two_ranks(even_plan(18, TensorGrid(), 2, 1, 8, 8, virtual_stages=n, family="fast")) for n in (1, 2, 4)
    }
    result = {n: predict(SETUP, plan, CLUSTER) for n, plan in plans.items()}
    bubbles = {n: each.breakdown_seconds["bubble"] for n, each in result.items()}
    assert bubbles[2] == pytest.approx(bubbles[1] / 2, rel=0.15)
    assert bubbles[4] == pytest.approx(bubbles[1] / 4, rel=0.3)
    for n, prediction in result.items():
        assert sum(prediction.breakdown_seconds.values()) == pytest.approx(prediction.step_seconds)
        first, last = prediction.memory
        assert len(first.items) == n and first.items[0].start == 0 and last.items[-1].stop == 18
        assert first.memory.weights + last.memory.weights == sum(s.memory.weights for s in result[1].memory)
        kept = first.memory.activations / result[1].memory[0].memory.activations
        assert kept == pytest.approx((2 + (n > 1) / n) / 2, rel=0.05), "p + (p - 1) / v microbatches instead of p"


def test_what_stays_on_a_rank_takes_no_time():
    tiles = [Tile(Interval(*items), Interval(0, 8), (0,), family="fast") for items in ((0, 9), (9, 18))]
    plan = Plan(tuple(tiles), 4, 8, unused=(1, 2, 3))
    assert set(Predictor(SETUP, plan, CLUSTER).costs.messages.values()) == {0.0}
    whole = Plan((replace(tiles[0], items=Interval(0, 18)),), 4, 8, unused=(1, 2, 3))
    seconds = [predict(SETUP, each, CLUSTER).step_seconds for each in (plan, whole)]
    assert seconds[0] == pytest.approx(seconds[1])


def test_gradients_of_the_last_virtual_stages_are_summed_during_the_passes_of_the_first():
    plan = even_plan(18, TensorGrid(), 2, 2, 8, 8, virtual_stages=2, zero=1)
    families = ("fast", "fast", "slow", "slow")
    plan = replace(plan, tiles=tuple(replace(tile, family=families[tile.ranks[0]]) for tile in plan.tiles))
    concurrent, after = (predict(replace(SETUP, bucket_bytes=size), plan, CLUSTER) for size in (1, None))
    assert concurrent.breakdown_seconds["hidden"] < after.breakdown_seconds["hidden"]
    assert concurrent.step_seconds < after.step_seconds
