"""Tests of the project's own rules: its imports, words, pages and tests."""
