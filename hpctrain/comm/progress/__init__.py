"""The life of an operation, from its call to the wait for it: instruments observe it, and a lane moves it."""
