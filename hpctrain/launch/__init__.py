"""Starts ranks: scripts for Slurm and for mpirun, on families that need software of their own. Light: a login node."""
