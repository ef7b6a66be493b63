"""Weights as they are kept: shards, regions of unlike grids, gathers and sums."""
