"""Communicators, lanes and channels over a world's ranks, and the route that each takes."""
