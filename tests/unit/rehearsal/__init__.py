"""Tests of hpctrain/rehearsal."""
