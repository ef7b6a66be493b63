"""How many random examples a costly rule is tried on: a part of them in `make test`, all in `make test-random`."""

import os

VARIABLE, ALL = "HPCTRAIN_TEST_EXAMPLES", "random"
"""The variable that selects the profile of examples, see tests/conftest.py, and its value for new ones each time."""
PART = 6


def costly(count: int) -> int:
    return count if os.environ.get(VARIABLE) == ALL else -(-count // PART)
