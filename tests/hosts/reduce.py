"""All ranks add up a tensor several times: `reduce.py ROUTE ALGORITHM NUM_BYTES REPEATS`.

Prints, as JSON, the seconds of each time, and for each rank the bytes that it says it sent to each other one.
"""

import json
import sys
import time

import torch

from hpctrain.comm.topology import Preferences
from hpctrain.comm.world import World


def main(route: str, algorithm: str, num_bytes: int, repeats: int) -> None:
    world = World.start(timeout_seconds=30)
    world.configure(preferences=Preferences(route, algorithm))
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
        print(json.dumps({"seconds": seconds, "sent": sent, "route": comm.route}), flush=True)
    world.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
