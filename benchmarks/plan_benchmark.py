"""Measures plans of a rehearsed cluster one after the other, on the same ranks."""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from hpctrain.comm.world import World
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.errors import PlanError
from hpctrain.config.job import Job
from hpctrain.data.order import open_datasets
from hpctrain.engine.start.resolve_overlap import resolve_overlap
from hpctrain.engine.step.phases import phases_of
from hpctrain.engine.trainer import Trainer
from hpctrain.observe.overrun import QUOTED_OVERRUN
from hpctrain.plan.checks import check_plan
from hpctrain.plan.schedule_run import check_schedules
from hpctrain.plan.tiling import Plan
from hpctrain.planner.prices.network import ClusterNetwork
from hpctrain.planner.prices.setup import Setup
from hpctrain.planner.search.search import Limits, search
from hpctrain.planner.search.space import Space
from hpctrain.rehearsal.accelerator import RehearsedAccelerator

REPEATS = 1
"""How often a plan is measured again whose overrun was higher."""
MAX_MISFITS = 8
"""So many plans of one kind may overflow a device before the kind is given up."""
OUT_OF_REACH = 1.05
"""Times the best plan's step: a plan whose first step takes longer is not timed any further."""


@dataclass(frozen=True)
class Candidate:
    """A plan to be measured."""

    name: str
    plan: Plan
    seconds: float
    """Of a step, as predicted."""


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan that was measured. What is by rank is in their order."""

    candidate: Candidate
    tokens: int
    """Of a step."""
    memory_share: float
    """The peak of the fullest device, of its memory."""
    step_seconds: float = 0.0
    busy_seconds: tuple[float, ...] = ()
    """That each device computed in a step."""
    overrun: float = 0.0
    loss: float = 0.0
    """Of the second step; 0 where there was none."""

    @property
    def plan(self) -> Plan:
        return self.candidate.plan

    @property
    def fits(self) -> bool:
        return self.memory_share <= 1

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    def losses(self, ideal_seconds: float) -> dict[str, float]:
        """Return what a step takes beyond `ideal_seconds`, as shares of the step, by cause; they add up to all of it.

        The cut: what the busiest device computes more than the mean. The bubble: by the depth of the pipeline and the
        number of microbatches. Small work: what the mean device computes beyond the ideal. Waiting: the rest.
        """
        plan, step = self.plan, self.step_seconds
        used = [self.busy_seconds[rank] for tile in plan.tiles for rank in tile.ranks]
        bubble = max(used) * max(map(plan.depth_to_loss, plan.tiles)) / plan.microbatches
        parts = {
            "cut": max(used) - mean(used),
            "bubble": bubble,
            "small work": mean(used) - ideal_seconds,
            "waiting": step - max(used) - bubble,
        }
        return {name: seconds / step for name, seconds in parts.items()}


class PlanBenchmark:
    """Measures plans on the ranks of a rehearsal. All ranks make one, and call its methods in the same order."""

    def __init__(self, world: World, cluster: Cluster, job: Job, steps: int, report: Callable[[str], None]):
        """`report` is called with a line for each plan."""
        source, self._training, _ = open_datasets(job.data, job.train.seed)
        model = job.model.model_copy(update={"vocab_size": job.model.vocab_size or source.vocab_size})
        train = job.train.model_copy(update={"dtype": job.train.dtype or "fp32"})
        overlap, _ = resolve_overlap(job.overlap, world.topology)
        parts = {"tensor_parts": overlap.tensor_parts or 1}
        overlap = overlap.model_copy(update=parts)  # what is `auto` is off: plans are compared, not numbers of parts
        self.job = job.model_copy(update={"model": model, "train": train, "overlap": overlap})
        self.cluster = cluster
        self._world, self._steps, self._report = world, steps, report
        assert isinstance(world.accelerator, RehearsedAccelerator)
        self._device = world.accelerator
        self._device.overcommits = True  # an overflow is a finding here
        self._measured: list[MeasuredPlan] = []
        world.configure(network=ClusterNetwork(cluster))
        world.enter(phases_of(job.observe).first_step)

    def search(self, name: str, families: Sequence[str], space: Space, limits: Limits) -> list[Candidate]:
        """Return the plans of a search over some families, the fastest first; none, with the reason, if none fits.

        One of those whose families have the same tensor grids, stages and replicas. Searched for on one rank.
        """
        result: list[Candidate] | PlanError = []
        if self._world.rank == 0:
            try:
                setup, batch = Setup.of_job(self.job), self.job.train.global_batch
                plans = search(setup, batch, self.cluster, families, space, limits).plans
                fastest: dict[tuple, Candidate] = {}
                for simulated in plans:
                    key = simulated.layout.shape.pipelines, simulated.layout.shape.choices
                    fastest.setdefault(key, Candidate(name, simulated.plan, simulated.seconds))
                result = list(fastest.values())
            except PlanError as error:
                result = error
        result = self._world.broadcast_object(result)
        if isinstance(result, PlanError):
            self._report(f"{name}: {result}")
            return []
        return result

    def best(self, count: int, candidates: Sequence[Candidate]) -> MeasuredPlan | None:
        """Return the fastest of the first `count` candidates that fit; None if there is none."""
        result: list[MeasuredPlan] = []
        misfits = 0
        for candidate in candidates:
            if len(result) == count or misfits == MAX_MISFITS:
                break
            measured = self._measure(candidate, OUT_OF_REACH * min((m.step_seconds for m in result), default=math.inf))
            if measured.fits:
                result.append(measured)
                said = f"{measured.tokens_per_second:,.0f} tokens/s, overrun {measured.overrun:.2%}"
            else:
                misfits += 1
                said = f"does not fit: {measured.memory_share:.0%} of a device's memory"
            self._report(f"{candidate.name}: {candidate.plan.describe()}: {said}")
        return max(result, key=lambda measured: measured.tokens_per_second, default=None)

    def _measure(self, candidate: Candidate, reach: float) -> MeasuredPlan:
        """Train some steps by a plan; only the first where that takes longer than `reach`."""
        world, device, plan = self._world, self._device, candidate.plan
        check_plan(self.job, plan, candidate.name)
        check_schedules(plan)
        tokens = self.job.train.global_batch * self.job.data.sequence_length
        with world.freeing():
            device.start_anew()
            trainer = Trainer(world, device, self.job, plan)
            trainer.initialise()
            world.agree(None)  # nobody begins the first step before all can
            first = trainer.step(self._training)[0]
            memory = device.memory()
            measured = MeasuredPlan(candidate, tokens, world.largest(memory.peak / memory.total))
            seconds, overrun = world.largest(first["step_seconds"]), trainer.overrun() or 0.0
            beaten = seconds > reach and overrun <= QUOTED_OVERRUN
            if beaten:
                measured = replace(measured, step_seconds=seconds, overrun=overrun)
            for _ in range(1 + REPEATS if measured.fits and not beaten else 0):
                device.start_anew()
                timed = [trainer.step(self._training)[0] for _ in range(self._steps)]
                busy = world.all_objects(device.busy_seconds / self._steps)
                seconds = world.largest(mean(metrics["step_seconds"] for metrics in timed))
                loss, overrun = measured.loss or timed[0]["loss"], trainer.overrun() or 0.0
                measured = replace(measured, step_seconds=seconds, busy_seconds=tuple(busy), overrun=overrun, loss=loss)
                if overrun <= QUOTED_OVERRUN:
                    break
            del trainer
        if measured.fits:
            self._measured.append(measured)
        gc.collect()  # its weights are in cycles of graphs and handles
        return measured

    def overrun(self) -> float:
        """Return the largest of all plans."""
        return max((measured.overrun for measured in self._measured), default=0.0)

    def loss_difference(self) -> float:
        """Return the largest relative difference of the plans' losses after as many steps."""
        losses = [measured.loss for measured in self._measured if measured.loss]
        return (max(losses) - min(losses)) / min(losses) if losses else 0.0
