"""Tests of hpctrain/sharding."""
