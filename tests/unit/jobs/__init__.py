"""Tests of hpctrain/jobs."""
