"""A run's steps beside their prediction, where its cluster is described."""

from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import HpctrainError
from hpctrain.job import Job
from hpctrain.jobs.common import Described
from hpctrain.observe import drift
from hpctrain.plan import Plan
from hpctrain.planner.cost import Setup
from hpctrain.planner.predict import predict

if TYPE_CHECKING:
    from hpctrain.comm.accelerators.base import Accelerator
    from hpctrain.comm.world import World


class Expectation:
    """What one rank knows of it. All ranks make one and call the same; rank 0 has the prediction."""

    def __init__(
        self, world: "World", accelerator: "Accelerator", described: Described, job: Job, plan: Plan, folder: Path
    ):
        """Groups of the world that are made from now on tell where time goes. The job is resolved."""
        self._world, self._accelerator, self._described = world, accelerator, described
        self._job, self._plan, self._folder = job, plan, folder
        self._meter = world.tracer = drift.PartMeter(accelerator.moment, world.tracer)
        self._seconds: list[float] = []
        self._expected: drift.Expected | None = None

    def start(self) -> str | None:
        """Predict a step; return what is to be said, on rank 0."""
        if self._world.rank:
            return None
        job, plan, where = self._job, self._plan, self._described.name
        try:
            prediction = predict(Setup.of_job(job), plan, self._described.cluster)
        except HpctrainError as error:
            return f"no prediction from {where}: {error}"
        on_host = self._accelerator.shares_memory or self._accelerator.overrun is not None
        self._expected = drift.Expected(prediction, plan, where, on_host)
        low, high = prediction.interval_seconds
        verdict = "" if prediction.fits else "; it is predicted not to fit into memory"
        step = f"{prediction.step_seconds:.4g} s ({low:.4g} to {high:.4g})"
        return f"predicted from {where}: a step takes {step}{verdict}"

    def step_is_done(self, seconds: float) -> None:
        """Note what a step took, when all is done that goes with it."""
        self._seconds.append(seconds)
        self._meter.begin_step()

    def finish(self) -> str | None:
        """Compare, and save it in the run folder; return on rank 0 what is to be said. Raises TrainingError.

        The first step, which makes what later ones find, does not count.
        """
        world, device = self._world, self._accelerator
        own, steps, self._seconds = None, self._meter.steps[1:], self._seconds[1:]
        number = len(steps)
        if number:
            sums = {part: sum(step[part] for step in steps) for part in drift.EXPOSED}
            parts = {part: seconds / number / device.time_scale for part, seconds in sums.items()}
            peak = 0 if device.shares_memory else device.memory().peak
            own = drift.Measured(sum(self._seconds) / number, parts, peak)
        measured = world.gather_objects(own)
        told = None
        with world.all_or_none():
            if self._expected and measured[0]:
                compared = self._expected.compare(measured, number)
                drift.write(self._folder, compared)
                told = drift.text(compared)
        return told
