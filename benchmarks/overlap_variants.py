"""what hiding communication behind computation brings, on a rehearsed cluster or here."""

import gc
import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import click

from benchmarks.pairs import Paired, Ratio, measure_pairs
from hpctrain.cli import main
from hpctrain.engine.start.facts import with_values
from hpctrain.engine.start.resolve import prepare_run
from hpctrain.engine.start.resolve_overlap import format_value, hidden_groups
from hpctrain.jobs.arguments import override_option, rehearse_option
from hpctrain.jobs.common import load_described, load_job_on, start_rehearsal, started_world
from hpctrain.rehearsal.clock import Clock, GroupTiming, TimedOperation

if TYPE_CHECKING:
    from hpctrain.comm.world import World
    from hpctrain.engine.start.facts import Prepared
    from hpctrain.plan.tiling import Plan

EXPOSED, NOTHING = "exposed", "nothing"
IN_PARTS, PARTS, ALL_AND_PARTS = "exposed, in parts", "parts", "all and parts"
ALONE = ("tensor", "data", "z")
KEYS = (*ALONE, "tensor_parts")
WHOLE_ROWS = {"tensor_parts": 1}
NONE, ALL = dict.fromkeys(ALONE, False), dict.fromkeys(ALONE, True)
NUM_PARTS = 4
VARIANTS = {
    EXPOSED: NONE | WHOLE_ROWS,
    **{name: NONE | WHOLE_ROWS | {name: True} for name in ALONE},
    "all": ALL | WHOLE_ROWS,
    IN_PARTS: NONE | {"tensor_parts": NUM_PARTS},
    PARTS: NONE | {"tensor": True, "tensor_parts": NUM_PARTS},
    ALL_AND_PARTS: ALL | {"tensor_parts": NUM_PARTS},
}


@click.command("benchmarks.overlap_variants")
@click.argument("job")
@override_option
@rehearse_option
@click.option("--steps", default=3, show_default=True, type=click.IntRange(1), help="Steps of each that are timed.")
@click.option("--pairs", type=click.IntRange(2), metavar="N", help="Time so many pairs of steps, here or rehearsed.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def command(job, overrides, rehearse, steps, pairs, as_json):
    """Time training steps of JOB with all communication exposed, with each overlap alone, and with all of them.

    `parts` is on top of `tensor`: products in four parts of their rows. It gives the same numbers but for the last
    bits, by as much as `loss_difference`. With --rehearse times
    are the rehearsed cluster's. `best_seconds` is what a step would take if each operation went on beside what is
    computed between its start and its end, and took what it takes when it is exposed; `hidden_share` is how much of
    what that saves was saved. `ideal_seconds` is the longer of all computation and all communication, in which ranks
    that wait for slower ones are counted: compare ranks that are alike.

    With --pairs a step with all exposed and a step with an overlap are taken in turn, on the ranks as they are or
    rehearsed. Told is the median ratio of their times with its 95 % confidence interval, whether the numbers are the
    same bits, and what `auto` does here and why. `nothing` is no overlap against itself. Overlaps that have nothing to
    hide in the plan are left out.

    \b
    mpirun -n 4 python -m benchmarks.overlap_variants tiny --rehearse cluster.toml --set plan.tensor.y=4
    mpirun -n 4 python -m benchmarks.overlap_variants tiny --pairs 20 --set plan.tensor.y=2 --set plan.data=2
    """
    if not (rehearse or pairs):
        raise click.UsageError("say on which rehearsed cluster, --rehearse CLUSTER, or how many pairs here, --pairs 20")
    described = load_described(rehearse) if rehearse else None
    with started_world(described) as world:
        parsed = load_job_on(world, job, overrides)
        if described:
            parsed, described = start_rehearsal(world, described, parsed)
        prepared = prepare_run(world, parsed, described=described)
        if pairs:
            summary = compare_pairs(world, prepared, pairs)
            if world.rank == 0:
                print(json.dumps(summary) if as_json else table_of_pairs(summary), flush=True)
            return
        variants = [name for name in VARIANTS if not cuts_rows(name) or has_sums(prepared.plan)]
        measured = {name: measure(world, prepared, VARIANTS[name], steps) for name in variants}
        summary = {"plan": prepared.plan.describe(), "ranks": world.size, **compare(world, measured)}
        summary["overrun"] = world.largest(world.accelerator.overrun)
        if world.rank == 0:
            print(json.dumps(summary) if as_json else table(summary), flush=True)


def cuts_rows(variant: str) -> bool:
    """Say whether a variant computes fewer rows at once, and so other last bits."""
    return variant in VARIANTS and VARIANTS[variant]["tensor_parts"] > 1


def has_sums(plan: "Plan") -> bool:
    """Say whether anything is summed over a tensor grid."""
    return any(tile.tensor.cuts_weights for tile in plan.tiles)


class Measured(NamedTuple):
    """The fastest of one rank's steps, in seconds of the cluster: a rank that gets no core is late, never early."""

    step_seconds: float
    compute_seconds: float
    operations: "list[Operation]"
    loss: float


class Operation(NamedTuple):
    """One operation of a group, as the rank that computes saw it."""

    group: str
    name: str
    num_bytes: int
    stream: int
    """Operations of a stream go one after the other."""
    asked: tuple[int, float]
    """Where in the order of what the rank did, and after how many seconds of computation in the step."""
    met: tuple[int, float]
    """And where it was waited for."""
    seconds: float

    @property
    def kind(self) -> tuple[str, str, int]:
        return self.group, self.name, self.num_bytes


class Mark(NamedTuple):
    """A place in what one rank's device does."""

    number: int
    """Of the rank's places in their order."""
    busy_seconds: float
    """That the device had been asked to compute."""


class LoggedOperation(TimedOperation):
    """An operation that notes where the device was when it was asked for, and when it was waited for."""

    log: ClassVar[list["LoggedOperation"]] = []
    """Of this rank, in the order in which they were waited for."""
    _numbers = itertools.count()

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.asked_at = self._mark(self.pace.clock)

    def meet(self) -> None:
        self.met_at = self._mark(self.pace.clock)
        super().meet()
        self.log.append(self)

    def _mark(self, clock: Clock) -> Mark:
        return Mark(next(self._numbers), clock.busy_seconds)


def measure(world: "World", prepared: "Prepared", switches: dict[str, bool | int], steps: int) -> Measured:
    """Train a few steps from the start. All ranks must call."""
    from hpctrain.engine.step.phases import phases_of
    from hpctrain.engine.trainer import Trainer

    job = with_values(prepared.job, "overlap", **switches)
    device = world.accelerator
    clock, scale = device.clock, device.time_scale
    GroupTiming.steps = lambda self, *asked: LoggedOperation(self, *asked)
    trainer = Trainer(world, device, job, prepared.plan)
    trainer.initialise()
    world.enter(phases_of(job.observe).first_step)
    trainer.step(prepared.training)
    result = []
    for _ in range(steps):
        LoggedOperation.log.clear()
        before = clock.busy_seconds
        metrics = trainer.step(prepared.training)[0]
        logged = list(LoggedOperation.log)
        operations = [_operation(p, before, scale) for p in logged if p.asked_at.busy_seconds >= before]
        seconds = world.largest(metrics["step_seconds"])
        result.append(Measured(seconds, (clock.busy_seconds - before) / scale, operations, metrics["loss"]))
    LoggedOperation.log.clear()
    del trainer, logged
    gc.collect()  # the next one needs the pretended memory
    fastest = min(result, key=lambda each: each.step_seconds)  # the same one on all ranks
    return fastest._replace(loss=result[-1].loss)


def _operation(paced: LoggedOperation, before: float, scale: float) -> Operation:
    asked, met = ((mark.number, (mark.busy_seconds - before) / scale) for mark in (paced.asked_at, paced.met_at))
    stream, seconds = id(paced.pace), (paced.ended - paced.begun) / scale
    return Operation(paced.pace.group, paced.operation, paced.num_bytes, stream, asked, met, seconds)


def seconds_alone(operations: Iterable[Operation]) -> dict[tuple[str, str, int], float]:
    """Return what operations take, by their kind, where nothing is overlapped with them."""
    result = defaultdict(list)
    for operation in operations:
        result[operation.kind].append(operation.seconds)
    return {kind: statistics.median(seconds) for kind, seconds in result.items()}


def exposed_seconds(operations: Iterable[Operation], alone: Mapping[tuple[str, str, int], float]) -> float:
    """Return for how long the device would wait if each operation took what it takes alone. Pure."""
    events = [(operation.asked, False, operation) for operation in operations]
    events += [(operation.met, True, operation) for operation in operations]
    waited = 0.0
    free: dict[int, float] = defaultdict(float)
    ends: dict[tuple[int, float], float] = {}
    for (_, computed), is_met, operation in sorted(events, key=lambda event: event[0]):
        now = computed + waited
        if is_met:
            waited += max(0.0, ends[operation.asked] - now)
        else:
            begin = max(now, free[operation.stream])
            ends[operation.asked] = free[operation.stream] = begin + alone.get(operation.kind, operation.seconds)
    return waited


def compare(world: "World", measured: Mapping[str, Measured]) -> dict:
    """Return what is told, of the slowest rank each. All ranks must call."""
    base = measured[EXPOSED]
    by_group: dict[str, float] = defaultdict(float)
    for operation in base.operations:
        by_group[operation.group] += operation.seconds
    every = world.all_objects(dict(by_group))
    compute, communication = world.largest(base.compute_seconds), world.largest(sum(by_group.values()))
    step = {name: each.step_seconds for name, each in measured.items()}
    best, shares = {}, {}
    for name, each in measured.items():
        if name not in (EXPOSED, IN_PARTS):
            like = measured[IN_PARTS if cuts_rows(name) else EXPOSED]
            alone = seconds_alone(like.operations)
            best[name] = world.largest(like.compute_seconds + exposed_seconds(each.operations, alone))
            can_be_hidden = step[EXPOSED] - best[name]
            shares[name] = (step[EXPOSED] - step[name]) / can_be_hidden if can_be_hidden > 0 else None
    return {
        "step_seconds": step,
        "compute_seconds": compute,
        "communication_seconds": communication,
        "communication_seconds_by_group": {
            group: max(seconds.get(group, 0.0) for seconds in every) for group in sorted({g for s in every for g in s})
        },
        "communication_share": communication / step[EXPOSED],
        "ideal_seconds": max(compute, communication),
        "best_seconds": best,
        "hidden_share": shares,
        "same_bits": len({each.loss for name, each in measured.items() if not cuts_rows(name)}) == 1,
        "loss_difference": max(abs(each.loss / base.loss - 1) for each in measured.values()),
    }


def compare_pairs(world: "World", prepared: "Prepared", pairs: int) -> dict:
    """Time pairs of steps, exposed and with each overlap; return what is told. All ranks must call."""
    job, plan = prepared.job, prepared.plan
    groups = hidden_groups(job, plan, world.rank)
    there = [key for key in ALONE if world.largest(max(map(len, groups[key]), default=1)) > 1]
    names = [EXPOSED, *there] + ["all"] * (len(there) > 1)
    if has_sums(plan):
        names += [PARTS] + [ALL_AND_PARTS] * (len(there) > 1)
    jobs = {NOTHING if name == EXPOSED else name: with_values(job, "overlap", **VARIANTS[name]) for name in names}
    result = measure_pairs(world, replace(prepared, job=with_values(job, "overlap", **VARIANTS[EXPOSED])), jobs, pairs)
    summary = {
        "plan": plan.describe(),
        "ranks": world.size,
        "pairs": pairs,
        "overlaps": {name: _told_of(paired) for name, paired in result.items()},
        "same_bits": all(paired.same_bits for name, paired in result.items() if not cuts_rows(name)),
        "auto": {
            key: prepared.reasons.get(
                f"overlap.{key}", f"{format_value(getattr(job.overlap, key) or WHOLE_ROWS.get(key, False))}: asked for"
            )
            for key in KEYS
        },
    }
    if world.accelerator.overrun is not None:
        summary["overrun"] = world.largest(world.accelerator.overrun)
    return summary


def _told_of(paired: Paired) -> dict:
    return {
        "exposed_seconds": statistics.median(paired.first),
        "seconds": statistics.median(paired.second),
        "ratio": paired.ratio._asdict(),
        "same_bits": paired.same_bits,
    }


def table_of_pairs(summary: dict) -> str:
    lines = [f"{summary['ranks']} ranks: {summary['plan']}; {summary['pairs']} pairs of steps each"]
    lines.append(f"  {'overlap':18} {'exposed ms':>10} {'with it ms':>10}  with it / exposed (95 % interval)")
    for name, each in summary["overlaps"].items():
        bits = "same bits" if each["same_bits"] else "other bits" if cuts_rows(name) else "OTHER BITS"
        seconds = f"{each['exposed_seconds'] * 1e3:10.2f} {each['seconds'] * 1e3:10.2f}"
        lines.append(f"  {name:18} {seconds}  {Ratio(**each['ratio'])}, {bits}")
    lines += [f"  auto: {key} {reason}" for key, reason in summary["auto"].items()]
    if "overrun" in summary:
        lines.append(f"  overrun {summary['overrun']:.2%}")
    return "\n".join(lines)


def table(summary: dict) -> str:
    lines = [f"{summary['ranks']} ranks: {summary['plan']}"]
    for name, seconds in summary["step_seconds"].items():
        line = f"  {name:18} {seconds * 1e3:10.2f} ms"
        if name in summary["best_seconds"]:
            share = summary["hidden_share"][name]
            said = "nothing to hide" if share is None else f"{share:.0%} of what can be hidden is"
            line += f"   at best {summary['best_seconds'][name] * 1e3:10.2f} ms: {said}"
        lines.append(line)
    lines.append(f"  {'computation':18} {summary['compute_seconds'] * 1e3:10.2f} ms")
    share = summary["communication_share"]
    lines.append(f"  {'communication':18} {summary['communication_seconds'] * 1e3:10.2f} ms ({share:.0%})")
    lines += [f"    {g or 'group':16} {s * 1e3:10.2f} ms" for g, s in summary["communication_seconds_by_group"].items()]
    lines.append(f"  {'ideal':18} {summary['ideal_seconds'] * 1e3:10.2f} ms; overrun {summary['overrun']:.2%}")
    bits = "the same bits" if summary["same_bits"] else "OTHER BITS"
    lines.append(f"  {bits}; with fewer rows at once losses differ by {summary['loss_difference']:.1e} at most")
    return "\n".join(lines)


if __name__ == "__main__":
    main(command)
