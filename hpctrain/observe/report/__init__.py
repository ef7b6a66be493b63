"""The report of one or several runs: one HTML file made of what their folders hold, and of nothing else."""
