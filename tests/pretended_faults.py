"""What can be wrong with the host of a pretended device (`tests/pretended_start.py`), by the value of a variable."""

FAULT_VARIABLE = "PRETENDED_FAULT"
UNSEEN = "unseen"
"""The driver's file is there, and torch sees no device."""
REFUSED = "refused"
"""The library of collectives refuses its ranks."""
TWO_SIZES = "two sizes"
"""The devices of the ranks of a host are A100s, of 40 and of 80 GB in turn."""
