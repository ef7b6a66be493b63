"""Rehearsals: local CPU ranks that behave, in time and memory, like devices of a described cluster."""
