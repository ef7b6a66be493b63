"""Watches the ranks: the last operations of each, ranks that wait for a missing one, and killed ranks."""
