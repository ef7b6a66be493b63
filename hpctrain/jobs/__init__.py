"""Floor 4: what a batch job or a person runs, one module a command, and ready-made job files (*.toml)."""
