"""Times plans of a mixed cluster by the simulator, where no more is known of its devices than their speed in steps.

What computing takes follows from these speeds, all that is communicated from the cluster's links. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hpctrain.cluster import Cluster
from hpctrain.job import Job
from hpctrain.plan import Tile
from hpctrain.planner.cost import Setup
from hpctrain.planner.estimate import ROWS_LOST, Work
from hpctrain.planner.predict import Predictor
from hpctrain.planner.proportional import Candidate
from hpctrain.planner.simulate import PassCost
from hpctrain.planner.stack import HPCTRAIN

MOST_TIMED = 60
"""Of the candidates; the simulator takes some 10 ms for each."""


class SpeedPredictor(Predictor):
    """A predictor whose devices compute by `speeds`: items, weighted by their cost, x rows a second, by family."""

    def __init__(self, work: Work, speeds: Mapping[str, float], *arguments):
        super().__init__(*arguments)
        self._work, self._speeds = work, speeds

    def item_passes(self, tile: Tile, item: int, rows: int) -> dict[str, PassCost]:
        cut = tile.tensor.x * tile.tensor.y  # of z each rank has rows of its own
        third = self._work.costs[item] * (rows + ROWS_LOST) / self._speeds[tile.family] / cut / 3
        again = third if tile.recompute == "full" else 0.0
        compute = {
            "forward": third,
            "backward": 2 * third + again,
            "backward_input": third + again,
            "backward_weight": third,
        }
        return {
            name: replace(cost, compute=compute[name]) for name, cost in super().item_passes(tile, item, rows).items()
        }

    def _update_seconds(self, tile: Tile) -> float:
        return 0.0  # speeds of whole steps have it


def timed(
    candidates: Sequence[Candidate],
    job: Job,
    cluster: Cluster,
    speeds: Mapping[str, float],
    beside: bool,
    most: int | None = MOST_TIMED,
) -> list[Candidate]:
    """Return the candidates with the seconds of a step as simulated, the fastest first.

    `speeds` are of one device of each family, in blocks x rows a second. With `beside` gradients are summed and weights
    gathered beside computation. The best `most` by estimate are timed, or all (None).
    """
    work = Work(job.model, job.data.sequence_length, job.train.global_batch)
    bucket_bytes = job.overlap.bucket_bytes if beside else None
    setup = Setup(job.model, job.data.sequence_length, job.train.dtype, HPCTRAIN, bucket_bytes=bucket_bytes)
    found = []
    for candidate in sorted(candidates, key=lambda candidate: candidate.seconds)[:most]:
        predictor = SpeedPredictor(work, speeds, setup, candidate.plan, cluster)
        found.append(replace(candidate, seconds=predictor.predict(interleave=1).step_seconds))
    return sorted(found, key=lambda candidate: candidate.seconds)
