"""Two ranks with pretended devices: the first sends messages through host buffers, one after the other.

    python -m tests.hosts.far LATENCY BYTES_PER_SECOND NUM_BYTES

Prints the seconds of the second round as JSON, with chunks that follow bandwidth x latency and with two of them. The
first round is TCP's, which finds out what the link carries.
"""

import json
import sys
import time
from types import SimpleNamespace

import torch

from hpctrain.comm.world import World
from hpctrain.planner.prices.network import LATENCIES_IN_FLIGHT
from tests.ranks import test_staged

MESSAGE_BYTES = 64 << 20


def seconds_of(world: World, bytes_under_way: int, num_bytes: int) -> float:
    test_staged.NETWORKS["far"] = SimpleNamespace(algorithm=None, bytes_under_way=lambda _: bytes_under_way)
    pretended = test_staged.Pretended(world, "aa", algorithm="far")
    pair, peer = pretended.pair((0, 1)), 1 - world.rank
    tensor = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    move = pair.transport.receive if world.rank else pair.transport.send
    for _ in range(2):
        pair.barrier()
        start = time.perf_counter()
        for _ in range(num_bytes // MESSAGE_BYTES):
            is_done = move(peer, tensor)
            while not is_done():
                time.sleep(0.0002)
        seconds = time.perf_counter() - start
    pretended.close()
    return seconds


def main(latency: float, bandwidth: float, num_bytes: int) -> None:
    world = World.start(60.0, watched=False)
    seconds = [seconds_of(world, int(factor * latency * bandwidth), num_bytes) for factor in (LATENCIES_IN_FLIGHT, 0)]
    if world.rank:
        print(json.dumps(seconds), flush=True)
    world.close()


main(float(sys.argv[1]), float(sys.argv[2]), int(float(sys.argv[3])))
