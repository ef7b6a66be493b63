"""Tests of hpctrain/model."""
