"""The first half of the ranks each send a number of bytes to a partner in the second half, twice.

Prints the seconds of each time, of the slowest pair, as JSON.
"""

import json
import sys
import time

import numpy as np
from mpi4py import MPI


def main(num_bytes: int) -> None:
    comm = MPI.COMM_WORLD
    half = comm.size // 2
    payload, answer = np.zeros(num_bytes, np.uint8), np.zeros(1, np.uint8)
    seconds = []
    for _ in range(2):
        comm.Barrier()
        start = time.perf_counter()
        if comm.rank < half:
            comm.Send(payload, dest=comm.rank + half)
            comm.Recv(answer, source=comm.rank + half)
        else:
            comm.Recv(payload, source=comm.rank - half)
            comm.Send(answer, dest=comm.rank - half)
        seconds.append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
    if comm.rank == 0:
        print(json.dumps(seconds))


main(int(sys.argv[1]))
