"""Axes of a tensor grid, and what gathers and scatters positions that y or c cuts."""
