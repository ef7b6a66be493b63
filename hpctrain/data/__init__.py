"""Floor 2: token files, and which sequence goes where. Needs neither MPI nor torch."""
