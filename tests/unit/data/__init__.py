"""Tests of hpctrain/data."""
