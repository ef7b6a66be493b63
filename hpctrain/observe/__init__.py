"""Floor 3: what a run tells about itself: its folder, its metrics, its progress."""
