"""Predictions of a plan: its simulation, its memory, its parts."""
