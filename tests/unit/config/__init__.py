"""Tests of hpctrain/config."""
