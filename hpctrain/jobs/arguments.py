"""Types of arguments that several commands have: numbers that are finite, and within what can be enumerated."""

import math

import click

from hpctrain.config.bounds import MOST_NUMBER, MOST_RANKS, MOST_SECONDS

MOST_LISTED = 1_000_000
"""Of what a command does or prints one by one: tokens, sequences, steps."""
INT64 = 2**63


class FiniteRange(click.FloatRange):
    """A number within limits, which `nan` and `inf` are not; click's own type lets `nan` pass all limits."""

    def convert(self, value, param, context):
        number = super().convert(value, param, context)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, context)
        return number


SECONDS = FiniteRange(0, MOST_SECONDS)
RANKS = click.IntRange(1, MOST_RANKS)
COUNT = click.IntRange(1, MOST_LISTED)
NONE_OR_MORE = click.IntRange(0, MOST_LISTED)
LARGE_COUNT = click.IntRange(1, MOST_NUMBER)
SEED = click.IntRange(-INT64, INT64 - 1)
