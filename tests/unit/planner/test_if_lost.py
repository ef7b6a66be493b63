"""What a loss costs: nothing lost is the same plan, who is lost computes nothing, and the parts of the stall."""

import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.measured_speeds import without_ranks
from hpctrain.config.job import load_job
from hpctrain.observe.machines import format_losses
from hpctrain.plan.moves import PlanState
from hpctrain.plan.tiling import Plan
from hpctrain.planner.if_lost import (
    COPIES,
    FAMILY,
    GIVEN_BACK,
    KINDS,
    NODE,
    RANK,
    RESTARTED,
    Delays,
    PricedLoss,
    losses_of,
    move_seconds,
    price_losses,
)
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.network import ClusterNetwork
from hpctrain.planner.search.search import Limits, search
from hpctrain.planner.search.space import Space
from hpctrain.planner.what_if import PossibleMachine, what_if, without_rows
from hpctrain.sharding.intervals import tiles_exactly
from tests.examples import costly
from tests.tilings import tilings
from tests.unit.small_searches import cluster_of, model_of, setup_of

SETUP, BATCH = setup_of(2), 4
FEW = Limits(scored=6, simulated=1)
JOB = load_job("tiny", ("model.vocab_size=64", f"train.global_batch={BATCH}", "checkpoint.every=10"))
TABLES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 2), st.integers(1, 2)), min_size=1, max_size=3)


def best_of(cluster: Cluster, known_seconds: float = float("inf")) -> Predictor:
    limits = replace(FEW, known_seconds=known_seconds)
    return search(SETUP, BATCH, cluster, space=Space(zero=(0, 1)), limits=limits).best.predictor


def predicted(cluster: Cluster, plan: Plan) -> Predictor:
    return Predictor(SETUP, plan, cluster)


def priced(cluster: Cluster, kind: str, delays: Delays | None = None) -> list[PricedLoss]:
    return price_losses(JOB, cluster, best_of(cluster), kind, best_of, predicted, delays)


@settings(max_examples=costly(24), deadline=None, suppress_health_check=list(HealthCheck))
@given(TABLES)
def test_losing_nothing_is_the_same_plan(tables):
    cluster = cluster_of(tables, nic=1e7)
    best, everyone = best_of(cluster), tuple(range(cluster.num_devices))
    same = without_ranks(cluster, ())
    assert [device[2:] for device in same.devices] == [device[2:] for device in cluster.devices]
    machines = [PossibleMachine("now", cluster), PossibleMachine("nothing lost", same, kept=everyone)]
    _, row = what_if(
        machines, lambda machine, known: best if machine is cluster else best_of(machine, known), predicted
    )
    assert row.plan == best.plan and row.change is None


@settings(max_examples=costly(24), deadline=None, suppress_health_check=list(HealthCheck))
@given(TABLES, st.sampled_from(KINDS))
def test_what_is_lost_computes_nothing_and_what_moves_is_counted(tables, kind):
    cluster = cluster_of(tables, nic=1e7)
    now, *losses = priced(cluster, kind)
    before = PlanState(SETUP.model, best_of(cluster).plan, JOB.overlap.bucket_bytes)
    everyone = range(cluster.num_devices)
    for loss in losses:
        left = [rank for rank in everyone if rank not in loss.loss.ranks]
        machine, plan = loss.row.machine.cluster, loss.row.plan
        assert [device.family for device in machine.devices] == [cluster.devices[rank].family for rank in left]
        assert plan.ranks == tuple(range(len(left)))
        assert loss.row.tokens_per_second <= now.row.tokens_per_second * 1.05, "but for who rests"
        if kind == FAMILY:
            assert not {tile.family for tile in plan.tiles} & {cluster.devices[rank].family for rank in loss.loss.ranks}
        after = PlanState(SETUP.model, plan, JOB.overlap.bucket_bytes)
        moves = before.moves_to(after, left, lambda shape: 12)
        assert loss.moved_bytes == sum(moves.values())
        assert loss.lost_bytes == before.lost_bytes(loss.loss.ranks, lambda shape: 12)


def test_losses_that_are_alike_are_one_row():
    cluster = cluster_of([("a", 2, 2), ("b", 1, 2), ("a", 1, 2)])
    state = dict.fromkeys(range(8), 10) | {2: 11}
    ranks, nodes, families = (losses_of(cluster, kind, state) for kind in (RANK, NODE, FAMILY))
    assert [(each.name, each.count) for each in ranks] == [("a rank of a", 4), ("a rank of b", 2), ("a rank of a", 2)]
    assert ranks[0].ranks == (2,), "the one with the most state"
    assert [(each.name, each.count, each.ranks) for each in nodes[:2]] == [
        ("a node of 2 a", 2, (2, 3)),
        ("a node of 2 b", 1, (4, 5)),
    ]
    assert [(each.name, each.ranks) for each in families] == [("all 6 a", (0, 1, 2, 3, 6, 7)), ("all 2 b", (4, 5))]
    assert not losses_of(cluster_of([("a", 1, 2)]), FAMILY, {}), "nothing would be left"


@pytest.mark.parametrize("kind", [NODE, FAMILY])
def test_a_loss_of_all_devices_is_said(kind):
    rows = priced(cluster_of([("a", 1, 2)]), kind)
    assert len(rows) == 1 and format_losses(rows).endswith("\nsuch a loss takes all devices")


def test_a_stall_has_its_parts():
    cluster = cluster_of([("a", 2, 1), ("b", 1, 2)], nic=1e7)
    now, first, *_ = priced(cluster, RANK)
    (given_back, copies, dead), step = first.stall_seconds.values(), first.row.prediction.step_seconds
    assert list(first.stall_seconds) == [GIVEN_BACK, COPIES, RESTARTED]
    assert {key: dead[key] for key in ("noticed", "MPI", "import", "made", "first step")} == {
        "noticed": 1.0, "MPI": 0.2, "import": 2.8, "made": 0.5, "first step": step
    }  # fmt: skip
    assert (
        not {"noticed", "MPI", "import", "read"} & given_back.keys() and given_back["searched"] == dead["searched"] > 0
    )
    assert copies == dead | {"read": copies["read"], "moved": given_back["moved"]} and copies["read"] > 0
    owned = PlanState(SETUP.model, best_of(cluster).plan, JOB.overlap.bucket_bytes).bytes_of(lambda shape: 12, True)
    assert copies["read"] == max(owned.values()) / 1e9 * math.ceil(len(owned) / 3), "three are left and read all parts"
    assert first.repeated_steps == 5 and now.stall_seconds == {}
    assert "restarted: about 5 steps since the last checkpoint are repeated" in format_losses([now, first])


def test_a_measured_delay_is_not_called_assumed():
    cluster = cluster_of([("a", 2, 1)])
    assumed = priced(cluster, RANK)[1].assumed
    measured = priced(cluster, RANK, Delays(import_seconds=1.5))[1]
    assert [text for text in assumed if text not in measured.assumed] == ["a start: 2.8 s of torch's import"]
    assert measured.stall_seconds[RESTARTED]["import"] == 1.5


def test_copies_are_counted_in_the_memory_of_hosts():
    cluster = cluster_of([("a", 2, 2)])
    owned = PlanState(SETUP.model, best_of(cluster).plan, JOB.overlap.bucket_bytes).bytes_of(lambda shape: 12, True)
    assert len(owned) == 4 and owned[0] + owned[1] == owned[2] + owned[3]
    each = 2 * sum(owned.values())  # of its ranks and of those of the other node, twice
    rows = priced(cluster, RANK)
    assert rows[0].copies == f"copies in memory take {each / 1e9:,.3g} GB of node 0" and rows[1].copies == ""
    assert rows[0].copies in format_losses(rows)
    nodes = (cluster.nodes[0].model_copy(update={"host_memory_bytes": each - 1}),)
    short = priced(cluster.model_copy(update={"nodes": nodes}), RANK)[0].copies
    assert short.endswith(f"GB of node 0, which has {(each - 1) / 1e9:,.3g}: set recovery.copies_folder")
    assert rows[0].data()["copies"] == rows[0].copies
    unlike = cluster_of([("a", 1, 2), ("a", 1, 2)])
    nodes = tuple(
        node.model_copy(update={"host_memory_bytes": there}) for node, there in zip(unlike.nodes, (9, 5), strict=True)
    )
    fewest = priced(unlike.model_copy(update={"nodes": nodes}), RANK)[0].copies
    assert "GB of node 1, which has" in fewest, "the one that is short of the most"


def test_what_moves_shares_links():
    """Rounds come one after the other, ranks of a node share its NIC, and long moves are cut into messages."""
    cluster = cluster_of([("a", 2, 2)], nic=1e8, latency=0.0)
    network = ClusterNetwork(cluster)
    alone = move_seconds({(0, 2): 8 << 20}, 4, network)
    assert alone == pytest.approx((8 << 20) / 1e8)
    assert move_seconds({(0, 2): 8 << 20, (1, 3): 8 << 20}, 4, network) == pytest.approx(2 * alone)
    two_rounds = move_seconds({(0, 2): 8 << 20, (1, 2): 8 << 20}, 4, network)
    assert two_rounds == pytest.approx(2 * alone), "round 2 and round 1"
    assert move_seconds({}, 4, network) == 0


ROWS = 6


@settings(max_examples=costly(60), deadline=None)
@given(tilings(model_of(3), 5, ROWS, 2), st.sets(st.integers(0, 4), min_size=1, max_size=4))
def test_a_plan_without_the_rows_of_some_ranks_is_a_tiling(plan, gone):
    left = without_rows(plan, sorted(gone))
    if left is None:
        assert any(not gone.isdisjoint(tile.ranks) for tile in plan.tiles)
        return
    assert gone.isdisjoint(rank for tile in left.tiles for rank in tile.ranks)
    for item in range(model_of(3).num_items):
        assert tiles_exactly(
            [tile.rows for tile in left.tiles if tile.contains(item)], plan.tiles[0].rows._make((0, ROWS))
        )
    assert {*left.ranks} | gone == set(range(5))


def test_a_loss_without_a_plan_says_why():
    cluster = cluster_of([("a", 1, 2)], memory=110_000)
    fits = cluster_of([("a", 1, 2)])
    rows = price_losses(JOB, cluster, best_of(fits), RANK, best_of, predicted)
    assert rows[1].row.plan is None and f"no plan of those left: {rows[1].row.refusal}" in format_losses(rows)
