"""What the suite leaves out is there: a case that is renamed is not left out by its old name."""

from pathlib import Path

import pytest

from tests.ranks.small_runs import MODELS
from tests.selection import LEFT_OUT, ON_FOUR_RANKS_AT_MOST, ON_TWO_RANKS_ALONE, is_left_out

TESTS = Path(__file__).parents[2]
TABLES = (LEFT_OUT, ON_TWO_RANKS_ALONE, ON_FOUR_RANKS_AT_MOST)
NAMED = [(file, name) for table in TABLES for file, tests in table.items() for name in tests]


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_what_is_left_out_is_there(file, name):
    text = (TESTS / f"{file}.py").read_text()
    assert f"def test_{name}(" in text
    for case in LEFT_OUT.get(file, {}).get(name, ()):
        # Some of its arguments are spelled out there; models and numbers may not be.
        assert case in MODELS or any(f'"{argument}"' in text for argument in case.split("-")), case


def test_one_case_or_all_of_a_test_are_left_out():
    table = {"ranks/test_a": {"some": ("x-1", "y"), "all": ()}}
    for node, expected in (
        ("tests/ranks/test_a.py::test_some[x-1]", True),
        ("tests/ranks/test_a.py::test_some[x-2]", False),
        ("tests/ranks/test_a.py::test_some", False),
        ("tests/ranks/test_a.py::test_all[anything]", True),
        ("tests/ranks/test_a.py::test_all", True),
        ("tests/ranks/test_b.py::test_all", False),
    ):
        assert is_left_out(node, table) is expected, node
