"""Tests of hpctrain/observe."""
