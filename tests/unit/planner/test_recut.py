"""Cuts between the branches of blocks: none other makes the slowest stage faster."""

import itertools
import math
import re
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from hpctrain.plan.checks import check_tiling
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.explain import reasons
from hpctrain.planner.prediction.predictor import Predictor, predict
from hpctrain.planner.search.changes import cuts_inside_blocks
from hpctrain.planner.search.item_cuts import PricedItems, best_cuts, slowest_seconds
from hpctrain.planner.search.search import search
from hpctrain.planner.search.space import Space
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import is_attention
from tests.unit.small_searches import EVERYTHING, FAST_NETWORK, cluster_of, setup_of


@st.composite
def pipelines(draw):
    num_blocks = draw(st.integers(1, 5))
    attention, mlp, *ends = (draw(st.floats(0.1, 3.0)) for _ in range(4))
    items = [ends[0], *[attention, mlp] * num_blocks, ends[1]]
    stages = []
    for _ in range(draw(st.integers(1, min(4, num_blocks)))):
        times = draw(st.sampled_from([1.0, 1.5, 4.0]))
        seconds = list(itertools.accumulate((times * item for item in items), initial=0.0))
        stages.append(PricedItems(seconds, draw(st.sampled_from([2, 4, 100])) + 1))
    return stages, num_blocks


@given(pipelines())
def test_no_other_cut_makes_the_slowest_faster(case):
    stages, num_blocks = case
    num_items, inner = 2 * num_blocks + 2, len(stages) - 1
    every = [[0, *cut, num_items] for cut in itertools.combinations(range(2, num_items - 1), inner)]
    old = [0, *(2 * i + 3 for i in range(inner)), num_items]
    assume(slowest_seconds(stages, old) < math.inf)
    cuts = best_cuts(stages, old)
    slowest = slowest_seconds(stages, cuts)
    assert slowest <= min(slowest_seconds(stages, cut) for cut in every) * (1 + 1e-6)
    if slowest_seconds(stages, old) <= slowest * (1 + 1e-9):
        assert cuts == old, "as near to whole blocks as can be"


def test_few_blocks_on_more_devices_are_cut_inside():
    """Three equal devices, four blocks: of whole blocks one has two."""
    setup, cluster = setup_of(4), cluster_of([("a", 1, 1), ("b", 1, 1), ("c", 1, 1)], **FAST_NETWORK)
    result = search(setup, 12, cluster, space=Space(microbatches=(12,)), limits=EVERYTHING)
    cut = [timed for timed in result.plans if not all(is_attention(t.items.start) for t in timed.plan.tiles[1:])]
    for timed in cut:
        check_tiling(timed.plan, setup.model.num_items)
    tiles = [Tile(Interval(*items), Interval(0, 1), (i,), family="abc"[i]) for i, items in enumerate(WHOLE)]
    whole = Predictor(setup, Plan(tuple(tiles), 12, 1), cluster)
    (inside,) = cuts_inside_blocks(whole)
    assert predict(setup, inside, cluster).step_seconds * 1.05 < whole.predict().step_seconds
    halves = replace(result, plans=(cut[0], *result.plans))
    assert re.search(r"stage \d \(\d?\.5 blocks on [abc]\)", " ".join(reasons(halves)))


WHOLE = (0, 5), (5, 7), (7, 10)
"""The items of the three devices: two blocks and the embedding, one, one and the head."""
