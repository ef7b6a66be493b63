"""Tests of hpctrain/plan."""
