"""An operation, from its call to who has waited for it: instruments observe it, and a lane moves it."""
