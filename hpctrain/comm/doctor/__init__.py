"""What a start needs, from Python to the shared folder, checked line by line with the fix for what is wrong."""
