"""The run folder: the schema of its files, its lock, its spans."""
