"""Tests of hpctrain/engine."""
