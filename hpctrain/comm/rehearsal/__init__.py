"""Ranks on CPUs that behave, in time and memory, like devices of a described cluster, with real numerics."""
