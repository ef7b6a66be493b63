"""Tests of hpctrain/checkpoint."""
