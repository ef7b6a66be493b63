"""How to let an all-reduce go on while a rank computes: three ways, in one run.

mpirun -n 4 python -m benchmarks.lanes

lane    hpctrain's: steps that one thread of the rank moves, and whoever waits
thread  a thread for each lane, in MPI's blocking all-reduce, on a communicator of its own
polled  MPI's non-blocking all-reduce, tested by the main thread between products and then until it is done

Printed for each: the time of an all-reduce beside products against the products alone (what it costs), and against both
one after the other (what was hidden); and the processor's seconds for each second of waiting for a rank that is late.
"""

import json
import statistics
import sys
import threading
import time
from queue import SimpleQueue

import numpy as np
import torch

from hpctrain.comm.world import World

NUM_BYTES, PRODUCTS, SIZE = 4 << 20, 12, 256
ROUNDS, LATE_SECONDS = 15, 0.5


class Thread:
    """Blocking calls in a thread."""

    def __init__(self, mpi):
        self._mpi, self._comm, self._jobs = mpi, mpi.COMM_WORLD.Dup(), SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            array, done = self._jobs.get()
            self._comm.Allreduce(self._mpi.IN_PLACE, array)
            done.set()

    def start(self, array: np.ndarray):
        done = threading.Event()
        self._jobs.put((array, done))
        return lambda: None, done.wait


class Polled:
    """Requests that the main thread looks at."""

    def __init__(self, mpi):
        self._mpi, self._comm = mpi, mpi.COMM_WORLD.Dup()

    def start(self, array: np.ndarray):
        request = self._comm.Iallreduce(self._mpi.IN_PLACE, array)

        def wait():
            while not request.Test():
                time.sleep(50e-6)

        return request.Test, wait


class OurLane:
    def __init__(self, world):
        self._group = world.group(range(world.size), overlapped=True)

    def start(self, array: np.ndarray):
        operation = self._group.start_all_reduce(torch.from_numpy(array))
        return lambda: None, operation.wait


def main() -> None:
    world = World.start()
    torch.set_num_threads(1)
    a, b = torch.ones(SIZE, SIZE), torch.ones(SIZE, SIZE)
    array = np.zeros(NUM_BYTES // 4, np.float32)
    ways = {"lane": OurLane(world), "thread": Thread(world.raw_mpi), "polled": Polled(world.raw_mpi)}

    def compute(poll=lambda: None):
        for _ in range(PRODUCTS):
            torch.mm(a, b)
            poll()

    def timed(call) -> float:
        world.agree(None)
        start = time.perf_counter()
        call()
        return world.largest(time.perf_counter() - start)

    def overlapped(way):
        poll, wait = way.start(array)
        compute(poll)
        wait()

    def after(way):
        compute()
        way.start(array)[1]()

    taken: dict[str, dict[str, list[float]]] = {name: {"alone": [], "beside": [], "after": []} for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            taken[name]["alone"].append(timed(compute))
            taken[name]["beside"].append(timed(lambda way=way: overlapped(way)))
            taken[name]["after"].append(timed(lambda way=way: after(way)))
    summary = {}
    for name, way in ways.items():
        alone, both, one_by_one = (statistics.median(taken[name][what]) for what in ("alone", "beside", "after"))
        world.agree(None)
        if world.rank == 0:
            time.sleep(LATE_SECONDS)
        before = time.process_time()
        way.start(array)[1]()
        burnt = world.largest(time.process_time() - before if world.rank else 0.0) / LATE_SECONDS
        summary[name] = {
            "products_ms": round(alone * 1e3, 2),
            "beside_over_products": round(both / alone, 2),
            "beside_over_one_by_one": round(both / one_by_one, 2),
            "cpu_seconds_per_second_of_waiting": round(burnt, 3),
        }
    if world.rank == 0:
        print(json.dumps({"ranks": world.size, **summary}, indent=1), flush=True)
        sys.stdout.flush()
    world.close()


if __name__ == "__main__":
    main()
