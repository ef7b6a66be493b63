"""Engine and predictor take the same algorithm: for all groups and sizes of plans for the ready clusters."""

import itertools
from types import SimpleNamespace

import pytest

from hpctrain.comm.collectives.hierarchical import HierarchicalCollectives
from hpctrain.comm.groups.maker import RouteMaker
from hpctrain.comm.groups.settings import Settings
from hpctrain.comm.topology import Topology, places_of
from hpctrain.config.job import Job
from hpctrain.config.parallelism import PlanRequest, TensorSizes
from hpctrain.engine.start.resolve_overlap import resolve_for, resolve_overlap, topology_of
from hpctrain.jobs.common import ready_miniature
from hpctrain.plan.role import role_of
from hpctrain.plan.uniform import resolve_plan
from hpctrain.planner.choose import search_best
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.network import ClusterNetwork
from hpctrain.planner.prices.prices import Prices
from hpctrain.planner.prices.setup import Setup
from hpctrain.planner.search.search import Limits
from tests.unit.rehearsal.test_ready_clusters import DEVICES

PLANS = 100
"""That a search scores: few, for any plan has groups."""
GRIDS = {
    "x, y and data": PlanRequest(tensor=TensorSizes(x=2, y=2), data=2, microbatch=4),
    "y, z and stages": PlanRequest(tensor=TensorSizes(y=2, z=2), pipeline=2, microbatch=4),
    "y of all devices": PlanRequest(tensor=TensorSizes(y=8), microbatch=4),
}
"""Plans with other groups than those of the search, whose tensor grids sum over families and nodes too. Each cluster
has one of them."""
CASES = [(name, None) for name in DEVICES] + list(zip(DEVICES, itertools.cycle(GRIDS), strict=False))
SIZES = [1 << power for power in range(3, 22)]


class Priced(ClusterNetwork):
    """Notes by which algorithm each collective is priced, by group."""

    def __init__(self, cluster):
        super().__init__(cluster)
        self._priced: dict[tuple[int, ...], set[tuple[str, int, str]]] = {}

    def algorithm(self, operation, num_bytes, ranks, by_domains=True):
        algorithm = super().algorithm(operation, num_bytes, ranks, by_domains)
        self._priced.setdefault(tuple(ranks), set()).add((operation, num_bytes, algorithm))
        return algorithm

    def exchanged(self, num_ranks: int) -> set[tuple[str, int]]:
        """Return operation and bytes of what groups of this size exchange: of groups of a tile one is priced."""
        return {each[:2] for ranks, priced in self._priced.items() for each in priced if len(ranks) == num_ranks}

    def priced(self, ranks: tuple[int, ...]) -> set[tuple[str, int, str]]:
        """Return operation, bytes and algorithm of what a group was priced for."""
        return self._priced[ranks]


class Unconnected(RouteMaker):
    """Makes a rank's collectives as in a rehearsal, over transports that lead nowhere."""

    def __init__(self, cluster, rank: int):
        topology = Topology(places_of(cluster), shares_memory=False)
        super().__init__(SimpleNamespace(rank=rank), Settings(topology, ClusterNetwork(cluster)))

    def transport(self, ranks, pace=None):
        return SimpleNamespace(rank=ranks.index(self.rank), size=len(ranks), name="messages")

    def algorithm(self, operation: str, num_bytes: int, ranks: tuple[int, ...]) -> str:
        """Return the algorithm that the group's collectives take, as they ask for it."""
        collectives = self._collectives(ranks, self.transport(ranks))
        if operation == "all_reduce":
            return collectives.algorithm(num_bytes)
        return "domains" if isinstance(collectives, HierarchicalCollectives) else "exchange"


def resolved(job: Job, cluster, plan=None) -> Job:
    topology = topology_of(cluster, True)
    overlap, _ = resolve_for(job, plan, topology, cluster) if plan else resolve_overlap(job.overlap, topology)
    return job.model_copy(update={"overlap": overlap})


def found_plan(name: str, job: Job, cluster):
    return search_best(resolved(job, cluster), cluster, Limits(scored=PLANS, seconds=60), name).best.plan


def even_plan(job: Job, cluster, request: PlanRequest):
    families = [device.family for device in cluster.devices]
    return resolve_plan(job.model_copy(update={"plan": request}), cluster.num_devices, families).plan


def groups_of(job: Job, plan) -> set[tuple[int, ...]]:
    """Return each axis of each tensor grid, each set of ranks that hold the same weights, and all ranks."""
    result = {tuple(plan.ranks)}
    for rank in plan.ranks:
        role = role_of(job.model, job.data.sequence_length, plan, rank, job.overlap.bucket_bytes)
        result |= set(role.axes.values()) | {shard_group.ranks for shard_group in role.holding.shard_groups}
    return {ranks for ranks in result if len(ranks) > 1}


@pytest.mark.parametrize(("name", "grid"), CASES)
def test_the_engine_takes_the_algorithm_that_was_priced(name, grid):
    """For what the job exchanges by the plan of a search, or by another; and for all-reduces of other sizes."""
    made = ready_miniature(name)
    cluster, job = made.cluster, made.job
    plan = even_plan(job, cluster, GRIDS[grid]) if grid else found_plan(name, job, cluster)
    job = resolved(job, cluster, plan)
    network = Priced(cluster)
    setup = Setup.of_job(job)
    Predictor(setup, plan, cluster, prices=Prices(setup, cluster, network=network)).predict()
    concurrent = network.concurrent(tuple(plan.ranks))
    for ranks in sorted(groups_of(job, plan)):
        exchanged = network.exchanged(len(ranks))
        assert exchanged, f"nothing that {len(ranks)} ranks exchange is priced"
        for operation, num_bytes in exchanged | {("all_reduce", size) for size in SIZES}:
            network.group_seconds(operation, num_bytes, ranks, concurrent)
        priced = network.priced(ranks)
        for rank in ranks:
            engine = Unconnected(cluster, rank)
            taken = {(operation, n, engine.algorithm(operation, n, ranks)) for operation, n, _ in priced}
            assert taken == priced, f"rank {rank} of {ranks}"
