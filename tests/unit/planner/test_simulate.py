"""The simulation runs pipelines that are equal once: that may not change any result."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpctrain.planner.prediction.simulate as simulation
from hpctrain.config.job import Model
from hpctrain.plan.schedule import one_f_one_b, schedule_of
from hpctrain.plan.schedule_run import ScheduleRun
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prediction.simulate import simulate
from hpctrain.planner.prices.prices import Costs, GradientExchange, PassCost, TileCost
from hpctrain.sharding.intervals import Interval
from tests.tilings import tilings

MODEL = Model(architecture="llama", num_layers=5, hidden_size=16, num_heads=4, vocab_size=64)
TILINGS = st.integers(1, 6).flatmap(lambda ranks: st.integers(1, 6).flatmap(lambda m: tilings(MODEL, ranks, 5, m)))
SECONDS = st.sampled_from([0.0, 0.5, 1.0, 2.5])


def beside_itself(plan: Plan) -> tuple[Plan, dict[Tile, Tile]]:
    """Return a plan and its copy on other ranks and rows, as one plan; and by tile its copy."""
    num_ranks = max(rank for tile in plan.tiles for rank in tile.ranks) + 1
    copies = {
        tile: replace(
            tile,
            rows=tile.rows.shift(plan.rows),
            ranks=tuple(rank + num_ranks for rank in tile.ranks),
        )
        for tile in plan.tiles
    }
    return Plan((*plan.tiles, *copies.values()), plan.microbatches, 2 * plan.rows, plan.schedule), copies


@settings(max_examples=300, deadline=None)
@given(TILINGS, st.data())
def test_it_takes_as_long_as_if_each_were_run_by_itself(drawn, data):
    plan, copies = beside_itself(replace(drawn, unused=()))
    tiles: dict[Tile, TileCost] = {}
    for tile, copy in copies.items():
        passes = [(PassCost(data.draw(SECONDS)),) * tile.row_chunks for _ in range(4)]
        cost = TileCost(passes[0], passes[1], 0.25, passes[2], passes[3], overlap_slowdown=1.5)
        tiles[tile] = tiles[copy] = cost
    pairs = [pair for a in copies for b in plan.downstream(a) for pair in ((a, b), (b, a))]
    messages = {pair: data.draw(SECONDS) for pair in pairs}
    messages |= {(copies[a], copies[b]): seconds for (a, b), seconds in messages.items()}
    ports = {pair: data.draw(st.dictionaries(st.integers(0, 3), st.sampled_from([0.5, 1.0]))) for pair in pairs}
    ports |= {(copies[a], copies[b]): of_pair for (a, b), of_pair in ports.items()}
    exchanges = []
    for items in sorted({tile.items for tile in plan.tiles}):
        holders = tuple(tile for tile in plan.tiles if tile.items == items)
        ready, needed = (dict.fromkeys(holders, data.draw(SECONDS)).__getitem__ for _ in range(2))
        exchanges.append(GradientExchange(holders, data.draw(SECONDS), data.draw(SECONDS), ready, needed))
    if pairs and data.draw(st.booleans()):  # the copy is not quite one
        a, b = data.draw(st.sampled_from(pairs))
        messages[copies[a], copies[b]] = messages[a, b] + 0.75
    elif data.draw(st.booleans()):
        tile = data.draw(st.sampled_from(list(copies)))
        tiles[copies[tile]] = replace(tiles[tile], forward=(PassCost(3.0),) * tile.row_chunks)
    under_way = {pair: data.draw(st.sampled_from([0.0, 0.5])) * seconds for pair, seconds in messages.items()}
    costs = Costs(tiles, messages, tuple(exchanges), 0.1, under_way=under_way, ports=ports)
    schedules = {tile: schedule_of(plan, tile) for tile in plan.first_tiles}
    merged = simulate(plan, schedules, costs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation.Simulation, "originals", lambda _, schedules: {tile: tile for tile in schedules})
        apart = simulate(plan, schedules, costs)
    assert merged == apart


def test_a_copy_is_run_once(monkeypatch):
    ran = []
    advance = ScheduleRun.advance
    monkeypatch.setattr(
        ScheduleRun, "advance", lambda self, each: ran.append(each.virtual_stages[0]) or advance(self, each)
    )
    first = [Tile(Interval(0, 3), Interval(row, row + 1), (row,)) for row in (0, 1)]
    meeting = Plan((*first, Tile(Interval(3, 7), Interval(0, 2), (2,))), 4, 2)
    plan, _ = beside_itself(meeting)
    cost = dict.fromkeys(plan.tiles, TileCost((PassCost(1.0),), (PassCost(2.0),)))
    messages = {pair: 1.0 for a in plan.tiles for b in plan.downstream(a) for pair in ((a, b), (b, a))}
    simulate(plan, {tile: one_f_one_b(plan, tile) for tile in plan.tiles}, Costs(cost, messages))
    assert set(ran) == set(meeting.tiles)


def test_what_a_stage_sends_forward_and_backward_shares_its_nic():
    """Stages on a node each, whose messages take longer than they compute: the one in the middle sends most."""
    plan = Plan(tuple(Tile(Interval(3 * i, 3 * i + 3), Interval(0, 1), (i,)) for i in range(3)), 20, 1)
    cost = dict.fromkeys(plan.tiles, TileCost((PassCost(0.1),), (PassCost(0.2),)))
    pairs = [pair for a in plan.tiles for b in plan.downstream(a) for pair in ((a, b), (b, a))]
    messages = dict.fromkeys(pairs, 1.0)
    schedules = {tile: one_f_one_b(plan, tile) for tile in plan.tiles}
    inside = simulate(plan, schedules, Costs(cost, messages)).step_seconds
    ports = {(a, b): {2 * a.ranks[0]: 1.0, 2 * b.ranks[0] + 1: 1.0} for a, b in pairs}
    across = simulate(plan, schedules, Costs(cost, messages, ports=ports)).step_seconds
    assert across >= 2 * plan.microbatches * 1.0, "forty messages leave one node"
    assert inside < across


def test_delays_of_messages_one_after_the_other_overlap():
    """Two sites: a stage sends while earlier messages are under way, so that it waits for one delay, not for all."""
    plan = Plan(tuple(Tile(Interval(3 * i, 3 * i + 3), Interval(0, 1), (i,), extra_warmup=9) for i in range(2)), 10, 1)
    cost = dict.fromkeys(plan.tiles, TileCost((PassCost(0.01),), (PassCost(0.02),)))
    pairs = [pair for a in plan.tiles for b in plan.downstream(a) for pair in ((a, b), (b, a))]
    schedules = {tile: one_f_one_b(plan, tile) for tile in plan.tiles}

    def step(delay: float, num_bytes: float, is_under_way: bool) -> float:
        under_way = dict.fromkeys(pairs, delay if is_under_way else 0.0)
        costs = Costs(cost, dict.fromkeys(pairs, delay + num_bytes), under_way=under_way)
        return simulate(plan, schedules, costs).step_seconds

    assert step(0.5, 0.001, True) - step(0.0, 0.001, True) == pytest.approx(2 * 0.5, rel=0.1), "there and back"
    assert step(0.5, 0.001, False) > 5.0, "each occupies the wire"
    assert step(0.0, 0.1, True) > 10 * 0.1, "bytes do"
