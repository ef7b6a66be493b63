"""A run as a launch line or a configuration of its software says it: what advice and exports need of each software."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Self, TypeVar

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.errors import PlanError
from hpctrain.plan.tiling import Plan
from hpctrain.software.run import DescribedRun
from hpctrain.software.software import SoftwareVersion

Value = TypeVar("Value")


@dataclass(frozen=True)
class LaunchedRun(ABC):
    """A run on a cluster, and the words of its software for its layout."""

    run: DescribedRun
    software: SoftwareVersion
    assumed: tuple[str, ...]
    """What the launch line does not say."""

    recomputing: ClassVar[tuple[str, ...]] = ("none", "full")
    """The kinds of recomputing that advice tries."""
    virtual_stages: ClassVar[tuple[int, ...]] = (1, 2, 4)

    @abstractmethod
    def with_layout(self, run: DescribedRun) -> Self:
        """Return it with another layout of the same model and batch, as the software runs that."""

    @abstractmethod
    def words(self) -> dict[str, str]:
        """Return the flags or keys of its layout; a switch has an empty value."""


def check_exportable(name: str, plan: Plan, cluster: Cluster) -> None:
    """Raise PlanError for what no other software does, and for a plan of other ranks than the cluster's."""
    if len(plan.ranks) != cluster.num_devices:
        raise PlanError(
            f"the plan is for {len(plan.ranks)} ranks, and a launch line for all {cluster.num_devices} devices of the"
            " cluster; give a cluster of as many, or make a plan for this one"
        )
    if plan.unused or any(tile.offload != "none" or tile.row_chunks > 1 for tile in plan.tiles):
        raise PlanError(f"{name} has no unused ranks, no row chunks and no optimizer in host memory of this kind")


def shared_value(name: str, what: str, values: Iterable[Value]) -> Value:
    """Return the value that all tiles share. Raises PlanError where there are several."""
    distinct = list(dict.fromkeys(values))
    if len(distinct) > 1:
        several = ", ".join(map(str, distinct[:4]))
        raise PlanError(f"{name} has one value for all ranks, and tiles of this plan have {what} {several}")
    return distinct[0]


def check_places(name: str, plan: Plan, expected: Plan) -> None:
    """Raise PlanError where a software would place a stage on other ranks."""
    for ours, theirs in zip(_places(plan), _places(expected), strict=True):
        if ours != theirs:
            raise PlanError(
                f"{name} places the replicas of a stage on ranks {theirs}, and this plan on {ours}: order ranks by"
                " stage, then replica, then tensor coordinate"
            )


def _places(plan: Plan) -> list[list[int]]:
    """Return the ranks of each stage, replica by replica."""
    stages: dict[int, list[int]] = {}
    for tile in sorted(plan.first_tiles, key=lambda tile: (tile.items, tile.rows)):
        stages.setdefault(tile.items.start, []).extend(tile.ranks)
    return list(stages.values())
