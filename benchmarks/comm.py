"""collectives beside raw MPI and gloo, and what lanes cost."""

import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from hpctrain.cli import main
from hpctrain.jobs.common import started_world

if TYPE_CHECKING:
    from hpctrain.comm.world import World

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
SIDES = ("hpctrain", "mpi", "gloo")
SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
# One measurement repeats an operation for about so long, and at least once.
MEASURE_SECONDS = 0.04
LATE_SECONDS = 0.5


@click.command("benchmarks.comm")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="Rounds, sides taking turns.")
@click.option("--sizes", default=",".join(map(str, SIZES)), help="Bytes of the whole fp32 tensor. [1 KiB to 64 MiB]")
@click.option("--collectives", default=",".join(COLLECTIVES), show_default=True)
@click.option("--messages", is_flag=True, help="Send messages, where ranks of one host would share its memory.")
@click.option("--no-gloo", is_flag=True, help="Leave gloo out: it is by far the slowest.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON, last.")
def command(rounds, sizes, collectives, messages, no_gloo, as_json):
    """Time collectives of all ranks beside raw MPI's blocking calls and gloo, in one run; and lanes.

    Seconds are those of the slowest rank, medians over rounds. For reduce_scatter and all_gather the bytes are those
    of all ranks' parts together.

    \b
    mpirun -n 4 python -m benchmarks.comm --json
    """
    with started_world() as world:
        world.configure(topology=replace(world.topology, shares_memory=not messages))
        wanted = collectives.split(",")
        if unknown := sorted(set(wanted) - set(COLLECTIVES)):
            raise click.BadParameter(f"no collective {', '.join(unknown)}; there are {', '.join(COLLECTIVES)}")
        sides = SIDES[:2] if no_gloo or world.size == 1 else SIDES
        summary = {
            "ranks": world.size,
            "mpi": world.library,
            "route": world.group(range(world.size)).route_name,
            "collectives": compare(world, wanted, [int(s) for s in sizes.split(",")], sides, rounds),
            "lanes": measure_lanes(world, rounds),
        }
        if world.rank == 0:
            print(json.dumps(summary) if as_json else table(summary), flush=True)


def compare(world: "World", collectives: list[str], sizes: list[int], sides, rounds: int) -> list[dict]:
    """Return, for each collective and size, each side's seconds and what hpctrain's are of the others'."""
    calls = {"hpctrain": hpctrain_calls(world), "mpi": mpi_calls(world)}
    if "gloo" in sides:
        calls["gloo"] = gloo_calls(world)
    rows = []
    for name in collectives:
        for num_bytes in sizes:
            made = {side: calls[side](name, num_bytes // 4) for side in sides}
            repeats = {side: repeat_count(world, call) for side, call in made.items()}
            taken: dict[str, list[float]] = {side: [] for side in sides}
            for number in range(rounds):
                for side in sides if number % 2 == 0 else reversed(sides):
                    taken[side].append(seconds_of(world, made[side], repeats[side]))
            medians = {side: statistics.median(seconds) for side, seconds in taken.items()}
            ratios = {
                f"{side}_over_hpctrain": statistics.median(
                    theirs / ours for theirs, ours in zip(taken[side], taken["hpctrain"], strict=True)
                )
                for side in sides
                if side != "hpctrain"
            }
            rows.append(
                {"collective": name, "bytes": num_bytes}
                | {f"{side}_seconds": seconds for side, seconds in medians.items()}
                | ratios
            )
    return rows


def repeat_count(world: "World", call: Callable[[], object]) -> int:
    call()
    once = world.largest(seconds_of(world, call, 2))
    return max(1, min(200, int(MEASURE_SECONDS / once)))


def seconds_of(world: "World", call: Callable[[], object], repeats: int) -> float:
    """Return the seconds of one call on the slowest rank."""
    world.agree(None)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return world.largest((time.perf_counter() - start) / repeats)


def hpctrain_calls(world: "World"):
    import torch

    comm = world.group(range(world.size))

    def make(name: str, count: int) -> Callable[[], object]:
        whole, part = torch.ones(count), torch.ones(count // world.size)
        return {
            "all_reduce": lambda: comm.all_reduce(whole),
            "reduce_scatter": lambda: comm.reduce_scatter(whole, part),
            "all_gather": lambda: comm.all_gather(whole),
        }[name]

    return make


def mpi_calls(world: "World"):
    import numpy as np

    mpi = world.raw_mpi
    comm = mpi.COMM_WORLD

    def make(name: str, count: int) -> Callable[[], object]:
        whole, part = np.ones(count, np.float32), np.ones(count // world.size, np.float32)
        return {
            "all_reduce": lambda: comm.Allreduce(mpi.IN_PLACE, whole),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(whole, part),
            "all_gather": lambda: comm.Allgather(part, whole),
        }[name]

    return make


def gloo_calls(world: "World"):
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore", FutureWarning)  # of functions that torch is about to rename
    folder = world.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else None)
    store = f"file://{os.path.join(folder, 'store')}"
    dist.init_process_group("gloo", init_method=store, rank=world.rank, world_size=world.size)

    def make(name: str, count: int) -> Callable[[], object]:
        whole, part = torch.ones(count), torch.ones(count // world.size)
        return {
            "all_reduce": lambda: dist.all_reduce(whole),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        }[name]

    return make


def measure_lanes(world: "World", rounds: int) -> dict:
    """Return what a lane's all-reduce of 1 kB takes, and the CPU-seconds per second of waiting for a late rank."""
    import torch

    overlapped, comm = world.group(range(world.size), overlapped=True), world.group(range(world.size))
    small = torch.ones(256)

    def on_lane():
        overlapped.start_all_reduce(small).wait()

    repeats = repeat_count(world, on_lane)
    latency = statistics.median(seconds_of(world, on_lane, repeats) for _ in range(rounds))
    burnt = {}
    for what, wait in (("lane", on_lane), ("blocking", lambda: comm.all_reduce(small))):
        world.agree(None)
        if world.rank == 0:
            time.sleep(LATE_SECONDS)
        before = time.process_time()
        wait()
        used = time.process_time() - before
        burnt[f"{what}_cpu_seconds_per_second"] = world.largest(used if world.rank else 0.0) / LATE_SECONDS
    return {"all_reduce_1kb_seconds": latency, **burnt}


def table(summary: dict) -> str:
    lines = [f"{summary['ranks']} ranks by {summary['route']}, {summary['mpi']}"]
    for row in summary["collectives"]:
        speeds = "  ".join(f"{k[:-8]} {v * 1e6:12,.0f} us" for k, v in row.items() if k.endswith("_seconds"))
        ratios = "  ".join(f"{k.split('_')[0]}/hpctrain {v:6.2f}" for k, v in row.items() if k.endswith("_hpctrain"))
        lines.append(f"{row['collective']:15}{row['bytes']:>12,} B  {speeds}  {ratios}")
    lines += [f"lanes: {key} {value:.3g}" for key, value in summary["lanes"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main(command)
