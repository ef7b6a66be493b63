"""All ranks add up a tensor several times: `reduce.py ROUTE NUM_BYTES REPEATS`, by domains or as one of them.

Prints, as JSON, the seconds of each time, and for each rank the bytes that it says it sent to each other one.
"""

import json
import sys
import time
from dataclasses import replace

import torch

from hpctrain.comm.world import World


def main(route: str, num_bytes: int, repeats: int) -> None:
    world = World.start(timeout_seconds=30)
    if route == "messages":
        alike = tuple(place._replace(family="alike") for place in world.topology.places)
        world.configure(topology=replace(world.topology, places=alike))
    comm = world.group(range(world.size))
    values = torch.arange(num_bytes // 4, dtype=torch.float32) % 1000
    seconds = []
    for _ in range(repeats):
        tensor = values * (world.rank + 1)
        comm.barrier()
        start = time.perf_counter()
        comm.all_reduce(tensor)
        seconds.append(world.largest(time.perf_counter() - start))
        assert torch.equal(tensor, values * sum(range(world.size + 1)))
    sent = world.gather_objects(list(comm.bytes_sent))
    if world.rank == 0:
        print(json.dumps({"seconds": seconds, "sent": sent, "route": comm.route_name}), flush=True)
    world.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
