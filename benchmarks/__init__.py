"""What produces the figures in docs/benchmarks.md. Run them from the repository's root: `python -m benchmarks.NAME`."""
