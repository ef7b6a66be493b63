"""Bytes between ranks: MPI on host memory, shared memory, staged, direct."""
