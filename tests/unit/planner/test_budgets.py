"""Budgets of searches: more of them never make the chosen plan slower."""

from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.config.errors import PlanError
from hpctrain.planner.search.search import TRIED, Limits, Search, search
from hpctrain.planner.search.space import Space
from tests.examples import costly
from tests.unit.small_searches import cluster_of, setup_of

MACHINES = (
    [("a", 2, 4), ("b", 2, 4)],
    [("a", 2, 4), ("b", 1, 4), ("c", 2, 2)],
    [("a", 4, 4)],
    [("a", 3, 2), ("b", 5, 1), ("c", 1, 4)],
)


@st.composite
def machines(draw):
    setup = setup_of(draw(st.sampled_from([6, 8, 12])), vocabulary=512)
    if draw(st.booleans()):
        setup = replace(setup, overlaps=frozenset(("tensor", "z")), bucket_bytes=draw(st.sampled_from([1, 20_000])))
    networks = {"nic": draw(st.sampled_from([2e7, 2e8])), "link": draw(st.sampled_from([1e8, 1e9]))}
    memory = draw(st.sampled_from([1_000_000, 4_000_000, 40_000_000]))
    return setup, draw(st.sampled_from([16, 24, 48])), cluster_of(draw(st.sampled_from(MACHINES)), memory, **networks)


def seconds_by_layout(found) -> dict:
    layouts = ((plan.layout, plan.seconds) for plan in found.plans)
    return {(each.shape, each.rows, *(s.blocks for s in each.all_stages)): seconds for each, seconds in layouts}


@settings(max_examples=costly(4), deadline=None, suppress_health_check=list(HealthCheck))
@given(machines())
def test_a_larger_budget_never_chooses_a_slower_plan(machine):
    """It simulates all that the usual budget simulates, which is small here, whatever else the estimate prefers."""
    setup, batch, cluster = machine
    usual: dict = {}
    with patch("hpctrain.planner.search.search.SCORED", 30):
        for scored in (30, 120, 480):
            try:
                found = search(setup, batch, cluster, limits=Limits(scored, 2))
            except PlanError:  # where nothing fits
                assert not usual, "a larger budget finds what a smaller one found"
                continue
            larger = seconds_by_layout(found)
            assert all(larger[layout] <= seconds for layout, seconds in usual.items())
            usual = larger


def test_no_round_begins_when_the_time_is_over():
    """While no layout fits, some are simulated whatever the limits: so many in all, not in each round."""
    simulated = []
    searching = Search(
        setup_of(8, vocabulary=512),
        16,
        cluster_of([("a", 2, 4), ("b", 1, 4)]),
        None,
        Space(),
        Limits(480, 2, seconds=1.0),
        lambda: 10.0 * (len(simulated) > TRIED),
    )
    searching._simulator.simulated = lambda layout: simulated.append(layout) or ()
    searching._simulator.shortage = "nothing fits"
    with patch("hpctrain.planner.search.search.SCORED", 30), pytest.raises(PlanError, match="nothing fits"):
        searching.run()
    assert len(simulated) == TRIED + 1


def test_what_a_budget_does_not_suffice_for_is_left_for_the_next_round():
    machine = cluster_of([("a", 2, 4), ("b", 1, 4)])
    setup = setup_of(8, vocabulary=512)
    with patch("hpctrain.planner.search.search.SCORED", 30):
        one_round, two_rounds = (search(setup, 16, machine, limits=Limits(most, 2)) for most in (30, 120))
    assert not one_round.is_complete
    assert one_round.searched["scored"] < 2 * 30 < two_rounds.searched["scored"]
