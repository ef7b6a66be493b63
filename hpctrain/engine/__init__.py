"""Floor 3: what executes a plan: communicators, the pipeline, the optimizer, the step loop."""
