"""Axes of a tensor grid, and positions that they cut."""
