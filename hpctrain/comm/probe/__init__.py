"""Measures devices and links of the ranks that were started, and makes a cluster of it."""
