"""The cluster file: its tables, their checks, what is filled in, the catalogue, the truth of a rehearsal."""
