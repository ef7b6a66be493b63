"""Engine and predictor take the same algorithm: for all groups and sizes of the plans that are found for ready clusters."""

from types import SimpleNamespace

import pytest

from hpctrain.comm.network import BESIDE, ClusterNetwork
from hpctrain.comm.routes import RouteMaker
from hpctrain.comm.topology import Preferences, Topology, places_of
from hpctrain.engine.overlap import resolve_on
from hpctrain.job import Job
from hpctrain.jobs.common import ready_miniature
from hpctrain.planner.choose import find_best
from hpctrain.planner.cost import Setup
from hpctrain.planner.predict import Predictor
from hpctrain.planner.search import Limits
from hpctrain.role import role_of
from tests.unit.test_ready_clusters import DEVICES

PLANS = 200
"""That a search scores: few, for any plan has groups."""


class Priced(ClusterNetwork):
    """Notes by which algorithm each collective is priced, by group."""

    def __init__(self, cluster):
        super().__init__(cluster)
        self._by: dict[tuple, str] = {}
        self._asked: dict[tuple[int, ...], set[tuple]] = {}

    def group_seconds(self, operation, num_bytes, ranks, beside=None):
        seconds = super().group_seconds(operation, num_bytes, ranks, beside)
        if seconds:
            form = self._form(tuple(ranks), beside)
            self._asked.setdefault(tuple(ranks), set()).add((operation, int(num_bytes), form))
        return seconds

    def _seconds_by(self, algorithm, operation, num_bytes, form, beside):
        if beside == BESIDE:
            self._by[operation, num_bytes, form] = algorithm
        return super()._seconds_by(algorithm, operation, num_bytes, form, beside)

    def of_groups_like(self, ranks: tuple[int, ...]) -> set[tuple[str, int, str]]:
        """Return operation, bytes and algorithm of what groups of this form exchange: of groups that are alike one is
        priced."""
        form = self._form(ranks, None)
        alike = (asked for group, asked in self._asked.items() if self._form(group, None) == form)
        return {(*key[:2], self._by[key]) for asked in alike for key in asked}


class Unconnected(RouteMaker):
    """Makes a rank's collectives as in a rehearsal, over transports that lead nowhere."""

    def __init__(self, cluster, rank: int, preferences: Preferences):
        topology = Topology(places_of(cluster), shares_memory=False)
        super().__init__(None, SimpleNamespace(rank=rank), topology, preferences)

    def transport(self, ranks, pace=None):
        return SimpleNamespace(rank=ranks.index(self.rank), size=len(ranks), name="messages")

    def algorithm(self, operation: str, num_bytes: int, ranks: tuple[int, ...]) -> str:
        """Return the algorithm that the group's collectives take, as they ask for it."""
        made = self._collectives(ranks, self.transport(ranks), self._preferences.route)
        if hasattr(made, "_across"):
            chosen = made._choose(operation, num_bytes)
            return chosen if chosen == "domains" else made._across._choose(operation, num_bytes)
        return made._choose(operation, num_bytes)


def resolved(job: Job, cluster, plan=None) -> Job:
    return job.model_copy(update={"overlap": resolve_on(job, cluster, True, plan)[0]})


@pytest.fixture(scope="module", params=DEVICES)
def planned(request):
    """A ready cluster's miniature, its job, and a plan that a search found."""
    made = ready_miniature(request.param)
    found = find_best(resolved(made.job, made.cluster), made.cluster, Limits(weighed=PLANS, seconds=60), request.param)
    return made.cluster, resolved(made.job, made.cluster, found.best.plan), found.best.plan


def groups_of(job: Job, plan) -> set[tuple[int, ...]]:
    """Return each axis of each tensor grid, each set of ranks that hold the same weights, and all ranks."""
    found = {tuple(plan.ranks)}
    for rank in plan.ranks:
        role = role_of(job.model, plan, rank, job.overlap.bucket_bytes)
        found |= set(role.axes.values()) | {holding.ranks for holding in role.held.holdings}
    return {ranks for ranks in found if len(ranks) > 1}


def test_the_engine_takes_the_algorithm_that_was_priced(planned):
    cluster, job, plan = planned
    network = Priced(cluster)
    _ = Predictor(Setup.of_job(job), plan, cluster, network=network).predict().step_seconds
    preferences = Preferences(job.comm.route, job.comm.algorithm, ClusterNetwork(cluster))
    for ranks in sorted(groups_of(job, plan)):
        priced = network.of_groups_like(ranks)
        assert priced, f"nothing that ranks {ranks} exchange is priced"
        for rank in ranks:
            engine = Unconnected(cluster, rank, preferences)
            taken = {(operation, n, engine.algorithm(operation, n, ranks)) for operation, n, _ in priced}
            assert taken == priced, f"rank {rank} of {ranks}"
