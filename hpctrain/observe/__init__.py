"""Floor 3: what a run reports: its folder, its metrics, its progress."""
