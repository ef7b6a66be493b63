"""Floor 3: HDF5 checkpoints that any layout can write and any other can read."""
