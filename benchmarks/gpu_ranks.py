"""What `benchmarks.gpu` asks of several ranks: whether their collectives are exact, and who notices a lost rank.

    mpirun -n 2 env HPCTRAIN_SHARE_DEVICES=1 HPCTRAIN_NATIVE=1 python -m benchmarks.gpu_ranks collectives

Ranks that share a GPU use NCCL so, by sockets: the same calls as on a cluster, and no speed.
"""

import json
import os
import signal
import time

import click
import torch

from benchmarks.gpu import LOST
from benchmarks.gpu_inside import keep, seconds_of
from hpctrain.cli import main
from hpctrain.comm.bind import bind_accelerator
from hpctrain.comm.world import World
from hpctrain.config.errors import HpctrainError
from hpctrain.jobs.common import started_world
from hpctrain.sharding.intervals import Interval, cut_evenly

UNEVEN = (0.0, 0.5, 0.5, 0.6)
"""Where the parts of up to four ranks begin, as shares of all elements: one is empty, and the last is short."""
REDUCED = (("fp32", torch.float32, "sum"), ("bf16", torch.bfloat16, "sum"), ("fp32", torch.float32, "max"))

UNWATCHED_SECONDS = 8.0
"""After which a rank gives up that nobody watches."""


@click.group()
def command():
    """Measure one thing of all ranks that were started."""


@command.command()
@click.option("--mebibytes", default=64, show_default=True)
def collectives(mebibytes: int):
    """Whether collectives are exact, by the library that the ranks have, and their seconds."""
    with started_world() as world:
        device = bind_accelerator(world).device
        group = world.group(range(world.size), "data")
        exact: dict[str, bool] = {}
        seconds: dict[str, float] = {}
        result = {"ranks": world.size, "route": group.route_name, "reason": group.reason, "seconds": seconds}
        for name, dtype, op in REDUCED:
            size = (mebibytes << 20) // dtype.itemsize // world.size * world.size
            of_ranks = [torch.arange(size, device=device).remainder(251).add(rank) for rank in range(world.size)]
            given = of_ranks[world.rank].to(dtype)
            expected = (torch.stack(of_ranks).sum(0) if op == "sum" else of_ranks[-1]).to(dtype)
            starts = [int(share * size) for share in UNEVEN[: world.size]]
            uneven = [Interval(*pair) for pair in zip(starts, [*starts[1:], size - 7], strict=True)]
            for cut, cuts in (("even", cut_evenly(size, world.size)), ("uneven", uneven)):
                own, stop = slice(*cuts[world.rank]), cuts[-1].stop
                out, gathered = torch.empty_like(expected[own]), torch.zeros_like(expected)
                gathered[own] = expected[own]
                call = f"reduce-scatter {cut} {op} {name}"
                seconds[call] = seconds_of(lambda o=out, c=cuts, g=given, op=op: group.reduce_scatter(g, o, c, op), 3)
                exact[call] = torch.equal(out, expected[own])
                call = f"all-gather {cut} {name}"
                seconds[call] = seconds_of(lambda g=gathered, c=cuts: group.all_gather(g, c), 3)
                exact[call] = torch.equal(gathered[:stop], expected[:stop])
            summed, call = given.clone(), f"all-reduce {op} {name}"
            group.all_reduce(summed, op)
            exact[call] = torch.equal(summed, expected)
            seconds[call] = seconds_of(lambda g=given, op=op: group.all_reduce(g, op), 3)
            if world.rank == 0:
                keep(result)
        wrong = {call for each in world.all_objects(exact) for call, is_exact in each.items() if not is_exact}
        if world.rank == 0:
            print(json.dumps(result | {"num_exact": len(exact) - len(wrong), "not_exact": sorted(wrong)}))


@command.command()
@click.argument("cut", type=click.Choice(["even", "uneven"]))
def lost(cut: str):
    """Sum without an end; rank 1 is killed before its fourth sum. The others are to notice it by the library alone."""
    world = World.start(UNWATCHED_SECONDS, watched=False)
    try:
        accelerator = bind_accelerator(world)
        group = world.group(range(world.size), "data")
        flat = torch.ones(1 << 20, device=accelerator.device)
        cuts = cut_evenly(flat.numel(), world.size)
        if cut == "uneven":
            cuts = [Interval(0, flat.numel() - 7), *[Interval(flat.numel() - 7, flat.numel())] * (world.size - 1)]
        out = torch.empty(cuts[world.rank].size, device=accelerator.device)
        number = 0
        while True:
            if number == 3 and world.rank == 1:
                print(f"{LOST} {time.time()}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            group.reduce_scatter(flat, out, cuts)
            accelerator.launches.look()
            time.sleep(0.05)
            number += 1
    except HpctrainError as error:
        print(f"hpctrain: {type(error).__name__}: {error}", flush=True)
        os._exit(error.exit_code)  # MPI may wait for the lost one


if __name__ == "__main__":
    main(command)
