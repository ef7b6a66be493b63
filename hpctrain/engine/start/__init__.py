"""Everything before the first step: every open choice gets a value and a reason."""
