"""Checks what a start needs, from Python to the shared folder, line by line, with the fix for what is wrong."""
