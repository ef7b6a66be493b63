"""Floor 2: prices and searches layouts, from plain data. Needs neither MPI nor torch nor a GPU."""
