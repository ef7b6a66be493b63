"""Tests of hpctrain/planner."""
