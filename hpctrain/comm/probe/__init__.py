"""Measures devices and links of the ranks that were started, and describes them as a cluster."""
