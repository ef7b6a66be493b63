"""Sends memory of a device to itself, for `probe_direct`. Arguments: kind (cpu, cuda, ...), index of the device.

Run by its path, so that it needs nothing of this package. Says in one line what it did; anything else is a no.
"""

import resource
import sys

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the trial may crash, and a core dump would take gigabytes

import mpi4py  # noqa: E402

mpi4py.rc.threads = False

import torch  # noqa: E402
from mpi4py import MPI  # noqa: E402

# Sizes of a message that MPI copies into its own buffers, and of one that it moves in place.
SIZES = (1024, 8 << 20)


def main(kind: str, index: int) -> str:
    torch_type = "cuda" if kind == "rocm" else kind
    device = torch.device("cpu" if kind == "cpu" else f"{torch_type}:{index}")
    comm = MPI.COMM_WORLD
    if comm.size != 1:
        raise SystemExit(f"is one of {comm.size} ranks: the launcher's environment is still there")
    for size in SIZES:
        for target in dict.fromkeys((device, torch.device("cpu"))):
            sent = (torch.arange(size, device=device) % 251).to(torch.uint8)
            received = torch.zeros(size, dtype=torch.uint8, device=target)
            if device.type != "cpu":
                torch.get_device_module(torch_type).synchronize()
            pointers = [MPI.buffer.fromaddress(tensor.data_ptr(), size) for tensor in (sent, received)]
            requests = [comm.Irecv(pointers[1], source=0), comm.Isend(pointers[0], dest=0)]
            MPI.Request.Waitall(requests)
            if not torch.equal(received.to(device), sent):
                raise SystemExit(f"{size} bytes arrived changed")
    return f"a probe sent it in messages of {SIZES[0]} and {SIZES[-1]} bytes, which arrived as they were"


if __name__ == "__main__":
    print(main(sys.argv[1], int(sys.argv[2])), flush=True)
