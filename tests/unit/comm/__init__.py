"""Tests of hpctrain/comm."""
