"""Instruments observe each operation, and lanes move it while the rank computes."""
