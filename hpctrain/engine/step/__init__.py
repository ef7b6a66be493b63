"""One step: the pipeline's instructions, the loss scale, the optimizer and its shards."""
