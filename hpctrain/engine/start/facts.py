"""The facts that a start knows of a run while its job is resolved, in one frozen object."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.job import Job
from hpctrain.plan.tiling import Plan

if TYPE_CHECKING:
    from hpctrain.comm.world import World
    from hpctrain.config.clusters.truth import Truth
    from hpctrain.data.order import AnySequences
    from hpctrain.data.tokens import TokenSource
    from hpctrain.planner.prediction.predictor import Prediction

WHY = "another plan"
"""The choice whose reason is why a run got another plan."""


@dataclass(frozen=True)
class MachineDescription:
    """A description of the machine that the ranks run on: the real one, or the one that they impersonate."""

    cluster: Cluster
    name: str
    is_rehearsed: bool = False
    path: Path | None = None
    """Path of a description that hpctrain keeps itself, and extends."""
    disturbance: str = ""
    """Why the measurements are not those of a quiet machine, so that they are not kept; empty: they are."""
    truth: "Truth | None" = None
    """The behaviour of the impersonated devices."""
    filled: tuple[str, ...] = ()
    """Figures that a cluster file leaves out, each with the data sheet that they are from."""
    scale: str = ""
    """Factors by which a rehearsal is smaller than the real cluster and job, in words."""

    @property
    def doubt(self) -> str:
        """Say why steps may differ from what it predicts, until another start measures it again; empty: no reason."""
        if self.disturbance:
            return f"the machine was busy when it was measured ({self.disturbance}); the next start measures it again"
        return ""


@dataclass(frozen=True)
class Prepared:
    """Everything known of a run before its weights are made. Each resolver returns it with more values and reasons."""

    world: "World"
    job: Job
    source: "TokenSource"
    training: "AnySequences"
    validation: "AnySequences | None"
    resume_from: Path | None = None
    fresh_probe: bool = False
    described_or_none: MachineDescription | None = None
    """The machine, as soon as it is known."""
    plan_or_none: Plan | None = None
    """The plan, as soon as there is one."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Reasons of choices, by key of the job or by name of the choice."""
    links_of: Cluster | None = None
    """The cluster whose links choose algorithms: first that of the run that is continued, if it has links."""
    previous: tuple[Plan, Cluster] | None = None
    """Plan and cluster of the run that is continued, where these ranks need a plan of their own, or may."""
    job_to_keep: Job | None = None
    """The job of the run that is continued, where its plan is kept unless another one is clearly faster."""
    speeds: Mapping[int, float] | None = field(default_factory=dict)
    """The times of devices as factors of their family's, by rank, where other ones were measured while training; None
    where a plan was asked for, which stays whatever is measured."""
    prediction: "Prediction | None" = None
    """Prediction of a step; on rank 0."""

    def but(self, reasons: Mapping[str, str] = {}, **values: Any) -> Self:
        """Return a copy with other values, and with the reasons for them."""
        return replace(self, reasons={**self.reasons, **reasons}, **values)

    @cached_property
    def families(self) -> list[str]:
        return [place.family for place in self.world.topology.places]

    @property
    def described(self) -> MachineDescription:
        assert self.described_or_none is not None, "asked for after the machine is known"
        return self.described_or_none

    @property
    def plan(self) -> Plan:
        assert self.plan_or_none is not None, "asked for after the plan is there"
        return self.plan_or_none


def with_values(job: Job, section: str, **values) -> Job:
    """Return the job with some values of a section replaced."""
    return job.model_copy(update={section: getattr(job, section).model_copy(update=values)})
