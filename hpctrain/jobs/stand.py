"""Where plans of a rehearsed cluster are measured one after the other, on the same ranks."""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from hpctrain.cluster import Cluster
from hpctrain.comm.network import ClusterNetwork
from hpctrain.comm.rehearsal.device import RehearsedAccelerator
from hpctrain.comm.topology import Preferences
from hpctrain.comm.world import World
from hpctrain.data.order import open_datasets
from hpctrain.engine.overlap import resolve_overlap
from hpctrain.engine.phases import phases_of
from hpctrain.engine.trainer import Trainer
from hpctrain.errors import PlanError
from hpctrain.job import Job
from hpctrain.observe.console import QUOTED_OVERRUN
from hpctrain.plan import Plan, TensorGrid, Tile
from hpctrain.planner.estimate import Work
from hpctrain.planner.even import check_plan
from hpctrain.planner.proportional import SIDE_BY_SIDE, Candidate, rows_at_once, state_bytes
from hpctrain.planner.timed import MOST_TIMED, timed
from hpctrain.schedule import check_schedules

AGAIN = 1  # times that a plan is measured once more where the overrun was higher
MOST_TRIES = 8  # of one kind, that found no room: who has found none until then has no room for the model
OUT_OF_REACH = 1.05  # times the best plan's step: who takes longer in the first step is not timed any more


@dataclass(frozen=True)
class Held:
    """What one rank's device held, in bytes."""

    states: int
    """Weights, gradients and moments, before the first step."""
    peak: int
    total: int

    @property
    def overflows(self) -> bool:
        return self.peak > self.total


@dataclass(frozen=True)
class Measured:
    """One plan, and what became of it."""

    candidate: Candidate
    tokens: int
    """Of a step."""
    held: tuple[Held, ...]
    """By rank, as all that follows by rank."""
    step_seconds: float = 0.0
    busy_seconds: tuple[float, ...] = ()
    """That each device computed in a step."""
    overrun: float = 0.0
    loss: float = 0.0
    """Of the second step; 0 where there was none."""

    @property
    def fits(self) -> bool:
        return not any(held.overflows for held in self.held)

    @property
    def memory_share(self) -> float:
        """The peak of the fullest device, of its memory."""
        return max(held.peak / held.total for held in self.held)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    def lost(self, ideal_seconds: float) -> dict[str, float]:
        """Return what a step takes beyond `ideal_seconds`, as shares of the step, by cause; they add up to all of it.

        The cut (rows, or blocks, or the head that one stage has): what the busiest device computes more than the mean.
        The bubble: by the depth of the pipeline and the number of microbatches. Small work: what the mean device
        computes beyond the ideal, less where that has waits in it. Waiting: the rest, most of it for messages.
        """
        plan, step = self.candidate.plan, self.step_seconds
        used = {rank: self.busy_seconds[rank] for tile in plan.tiles for rank in tile.ranks}
        busiest = max(used, key=used.__getitem__)
        depth = max(map(plan.depth_to_loss, plan.tiles))
        cut = "rows"
        if self.candidate.kind != SIDE_BY_SIDE and depth:
            cut = "head" if plan.depth_to_loss(plan.tile_of(busiest)) == 0 else "blocks"
        bubble = used[busiest] * depth / plan.microbatches
        parts = {
            cut: used[busiest] - mean(used.values()),
            "bubble": bubble,
            "small work": mean(used.values()) - ideal_seconds,
            "waiting": step - used[busiest] - bubble,
        }
        return {name: seconds / step for name, seconds in parts.items()}


class Room:
    """What activations were found to take, so that plans which cannot fit are not tried."""

    def __init__(self, work: Work, cluster: Cluster):
        self._work, self._cluster = work, cluster
        self._found: dict[tuple[TensorGrid, str], dict[tuple[int, int], float]] = {}
        """By tensor grid and what is recomputed: bytes for each row of a tile with so many items and microbatches
        before it alternates."""

    def note(self, plan: Plan, held: Sequence[Held]) -> None:
        for tile in plan.tiles:
            found, key = self._found_like(tile), (tile.items.size, plan.warm_up(tile))
            each = max(held[rank].peak - held[rank].states for rank in tile.ranks) / rows_at_once(plan, tile)
            found[key] = max(each, found.get(key, 0.0))

    def _found_like(self, tile: Tile) -> dict[tuple[int, int], float]:
        return self._found.setdefault((tile.tensor, tile.recompute), {})

    def forbids(self, plan: Plan) -> bool:
        """Say whether some tile cannot fit, as tiles with no more to keep took too much for it."""
        states = state_bytes(self._work, plan)
        return any(
            states[tile] / tile.tensor.size + rows_at_once(plan, tile) * each
            > self._cluster.families[tile.family].usable_bytes
            for tile in plan.tiles
            for (items, warm_up), each in self._found_like(tile).items()
            if tile.items.size >= items and plan.warm_up(tile) >= warm_up
        )


class Stand:
    """Measures plans on the ranks of a rehearsal. All ranks make one, and call its methods in the same order."""

    def __init__(self, world: World, cluster: Cluster, job: Job, steps: int, tell: Callable[[str], None]):
        """`tell` is called with a line for each plan."""
        source, self._training, _ = open_datasets(job.data, job.train.seed)
        model = job.model.model_copy(update={"vocab_size": job.model.vocab_size or source.vocab_size})
        train = job.train.model_copy(update={"dtype": job.train.dtype or "fp32"})
        overlap, _ = resolve_overlap(job.overlap, world.topology)
        overlap = overlap.model_copy(update={"forward": bool(overlap.forward)})  # the simulation knows whole rows
        self.job = job.model_copy(update={"model": model, "train": train, "overlap": overlap})
        self.cluster = cluster
        self._world, self._steps, self.tell = world, steps, tell
        assert isinstance(world.accelerator, RehearsedAccelerator)
        self._device = world.accelerator
        self._device.overcommits = True  # an overflow is a finding here
        self.work = Work(model, job.data.sequence_length, train.global_batch)
        self._room = Room(self.work, cluster)
        self._measured: list[Measured] = []
        world.preferences = Preferences(job.comm.route, job.comm.algorithm, ClusterNetwork(cluster))
        world.enter(phases_of(job.observe).first_step)

    def timed(
        self, make: Callable[[], Sequence[Candidate]], speeds: Mapping[str, float], most: int | None = MOST_TIMED
    ) -> list[Candidate]:
        """Return what is made, with its time by simulation as `hpctrain.planner.timed` does, the fastest first.

        Made and timed on one rank. Raises PlanError on all, if it is raised there.
        """
        found: list[Candidate] | PlanError | None = None
        if self._world.rank == 0:
            try:
                beside = bool(self.job.overlap.data)
                found = timed(make(), self.job, self.cluster, speeds, beside, most)
            except PlanError as error:
                found = error
        found = self._world.broadcast_object(found)
        if isinstance(found, PlanError):
            raise found
        return found

    def best(self, name: str, count: int, candidates: Sequence[Candidate]) -> Measured | None:
        """Return the fastest of the first `count` plans that fit, one of each shape; None if there is none."""
        found: dict[tuple, Measured] = {}
        failed = 0
        least = math.inf
        for candidate in candidates:
            if len(found) == count or failed == MOST_TRIES:
                break
            if candidate.shape in found or self._room.forbids(candidate.plan):
                continue
            measured = self._measure(candidate, OUT_OF_REACH * least)
            if measured.fits:
                found[candidate.shape] = measured
                least = min(least, measured.step_seconds)
                said = f"{measured.tokens_per_second:,.0f} tokens/s, overrun {measured.overrun:.2%}"
            else:
                failed += 1
                said = f"does not fit: {measured.memory_share:.0%} of a device's memory"
            self.tell(f"{name}: {candidate.describe}: {said}")
        return max(found.values(), key=lambda measured: measured.tokens_per_second, default=None)

    def _measure(self, candidate: Candidate, reach: float) -> Measured:
        """Train some steps by a plan; only the first where that takes longer than `reach`."""
        world, device, plan = self._world, self._device, candidate.plan
        check_plan(self.job, plan, candidate.describe)
        check_schedules(plan)
        tokens = self.job.train.global_batch * self.job.data.sequence_length
        with world.freeing():
            device.start_anew()
            trainer = Trainer(world, device, self.job, plan)
            trainer.initialise()
            states = device.memory().used
            world.agree(None)  # nobody begins the first step before all can
            first = trainer.step(self._training)[0]
            memory = device.memory()
            held = self._of_all(Held(states, memory.peak, memory.total))
            measured = Measured(candidate, tokens, held)
            self._room.note(plan, measured.held)
            seconds, overrun = world.largest(first["step_seconds"]), trainer.overrun()
            beaten = seconds > reach and overrun <= QUOTED_OVERRUN
            if beaten:
                measured = replace(measured, step_seconds=seconds, overrun=overrun)
            for _ in range(1 + AGAIN if measured.fits and not beaten else 0):
                device.start_anew()
                timed = [trainer.step(self._training)[0] for _ in range(self._steps)]
                busy = self._of_all(device.busy_seconds / self._steps)
                seconds = world.largest(mean(metrics["step_seconds"] for metrics in timed))
                loss, overrun = measured.loss or timed[0]["loss"], trainer.overrun()
                measured = replace(measured, step_seconds=seconds, busy_seconds=busy, overrun=overrun, loss=loss)
                if overrun <= QUOTED_OVERRUN:
                    break
            del trainer
        if measured.fits:
            self._measured.append(measured)
        gc.collect()  # its weights are in cycles of graphs and handles
        return measured

    def _of_all(self, value) -> tuple:
        return tuple(self._world.broadcast_object(self._world.gather_objects(value)))

    def overrun(self) -> float:
        """Return the largest of all plans."""
        return max((measured.overrun for measured in self._measured), default=0.0)

    def loss_difference(self) -> float:
        """Return the largest relative difference of the plans' losses after as many steps."""
        losses = [measured.loss for measured in self._measured if measured.loss]
        return (max(losses) - min(losses)) / min(losses) if losses else 0.0
