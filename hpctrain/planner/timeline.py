"""When a step's instructions are predicted to run, for a picture of it: the simulator, with every pass noted. Pure."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from hpctrain.config.cluster import Cluster
from hpctrain.plan.schedule import Instruction, Op, one_f_one_b, schedules_of
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.cost import Setup
from hpctrain.planner.predictor import Prediction, Predictor
from hpctrain.planner.simulate import Simulated, Simulation


class PredictedSpan(NamedTuple):
    """An instruction and when it runs, in seconds of the step."""

    instruction: Instruction
    begin: float
    end: float


@dataclass(frozen=True)
class Forecast:
    """A predicted step in detail. Each tile represents its ranks, as in `Plan.first_tiles`."""

    prediction: Prediction
    spans: dict[Tile, list[PredictedSpan]]
    exposed: dict[Tile, dict[str, float]]
    """Seconds by part for each tile; they add up to the step."""


class _TimedSimulation(Simulation):
    """A simulation that notes when passes, sums and updates run."""

    def __init__(self, *args):
        super().__init__(*args)
        self.spans: dict[Tile, list[PredictedSpan]] = {tile: [] for tile in self.runners}

    def compute(self, clock, step) -> None:
        since = clock.now
        super().compute(clock, step)
        self.spans[clock.virtual_stages[0]].append(PredictedSpan(step, since, clock.now))

    def simulated(self) -> Simulated:
        originals = {copy.virtual_stages[0]: one.virtual_stages[0] for copy, one in self.copies().items()}
        result = super().simulated()
        for tile, original in originals.items():
            passes = [span for span in self.spans[original] if span.instruction.microbatch >= 0]
            self.spans[tile] = passes + self.spans[tile]
        return result

    def _reduce(self) -> None:
        self._note(Op.REDUCE_GRADIENTS, super()._reduce)

    def _finish(self) -> None:
        self._note(Op.UPDATE, super()._finish)
        for spans in self.spans.values():  # the update began when the sums had ended, which it called
            reduce, update = spans[-2:]
            spans[-1] = update._replace(begin=reduce.end)

    def _note(self, op: Op, run) -> None:
        begun = {tile: clock.now for tile, clock in self.runners.items()}
        run()
        for tile, clock in self.runners.items():
            self.spans[tile].append(PredictedSpan(Instruction(op), begun[tile], clock.now))


def forecast(setup: Setup, plan: Plan, cluster: Cluster) -> Forecast:
    """Return the prediction of one step with its spans. Raises as `predict`."""
    predictor = Predictor(setup, plan, cluster)
    make = partial(one_f_one_b, splits_backward=setup.stack.splits_backward)
    simulation = _TimedSimulation(plan, schedules_of(plan, make), predictor.costs)
    simulated = simulation.simulated()
    return Forecast(predictor.predict(), simulation.spans, simulated.exposed)
