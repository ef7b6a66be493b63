"""Compares a run's steps with their prediction, where its cluster is described."""

from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.observe import drift
from hpctrain.plan.tiling import Plan
from hpctrain.planner.predictor import Prediction

if TYPE_CHECKING:
    from hpctrain.comm.accelerators.base import Accelerator
    from hpctrain.comm.world import World


class Expectation:
    """What one rank knows of it. All ranks make one and call the same; rank 0 has the prediction."""

    def __init__(
        self,
        world: "World",
        accelerator: "Accelerator",
        prediction: Prediction | None,
        plan: Plan,
        where: str,
        folder: Path,
    ):
        """Measure where time goes in groups of the world that are made from now on.

        `prediction` is on rank 0, where there is one; `where` is what it is from.
        """
        self._world, self._accelerator, self._folder = world, accelerator, folder
        on_host = accelerator.shares_memory or accelerator.overrun is not None
        self._expected = prediction and drift.Expected(prediction, plan, where, on_host)
        self.meter = drift.PartMeter(accelerator.now, world.tracer)
        world.configure(tracer=self.meter)
        self._seconds: list[float] = []

    def start(self) -> str | None:
        """Return what is to be said of the prediction, on rank 0."""
        if not self._expected:
            return None
        prediction = self._expected.prediction
        low, high = prediction.interval_seconds
        verdict = "" if prediction.fits else "; it is predicted not to fit into memory"
        step = f"{prediction.step_seconds:.4g} s ({low:.4g} to {high:.4g})"
        return f"predicted: a step takes {step}{verdict}"

    def step_is_done(self, seconds: float) -> None:
        """Note what a step took, when all is done that goes with it."""
        self._seconds.append(seconds)
        self.meter.begin_step()

    def finish(self) -> str | None:
        """Compare, and save it in the run folder; return on rank 0 what is to be said. Raises TrainingError.

        The first step, which creates what later ones reuse, does not count.
        """
        world, device = self._world, self._accelerator
        own, steps, self._seconds = None, self.meter.steps[1:], self._seconds[1:]
        number = len(steps)
        if number:
            sums = {part: sum(step[part] for step in steps) for part in drift.EXPOSED}
            parts = {part: seconds / number / device.time_scale for part, seconds in sums.items()}
            peak = 0 if device.shares_memory else device.memory().peak
            own = drift.MeasuredStep(sum(self._seconds) / number, parts, peak)
        measured = world.gather_objects(own)
        summary = None
        with world.all_or_none():
            if self._expected and measured[0]:
                compared = self._expected.compare(measured, number)
                drift.write(self._folder, compared)
                summary = drift.text(compared)
        return summary
