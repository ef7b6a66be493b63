"""Floor 2: layouts chosen and costed from plain data. Needs neither MPI nor torch nor a GPU."""
