"""Floor 1: ranks, groups of ranks, and how bytes and tensors move between them. Knows nothing of models."""
