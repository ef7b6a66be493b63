"""Floor 2: decoder-only transformers split by a tensor grid. Knows communicators as an interface; never imports MPI."""
