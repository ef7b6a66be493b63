"""Before the first step: every choice that is open becomes a value and a reason."""
