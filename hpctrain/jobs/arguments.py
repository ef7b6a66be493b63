"""Arguments, options and output that several commands share. Numbers are finite, and within what can be enumerated."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from hpctrain.config.bounds import MOST_NUMBER, MOST_RANKS, MOST_SECONDS, MOST_WIDTH
from hpctrain.config.tables import keys_of

MOST_LISTED = 1_000_000
"""Most items that a command handles or prints one by one: tokens, sequences, steps."""
INT64 = 2**63
MOST_NAME_BYTES = 255
"""The longest name of a file, by the limits of Linux."""


class FiniteRange(click.FloatRange):
    """A number within limits, which `nan` and `inf` are not; click's own type lets `nan` pass all limits."""

    def convert(self, value, param, context):
        number = super().convert(value, param, context)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, context)
        return number


class PathArgument(click.Path):
    """A path whose names a file system can store: no command gets one that it cannot even look for."""

    def __init__(self):
        super().__init__(path_type=Path)

    def convert(self, value, param, context):
        for name in os.fsencode(value).split(b"/"):
            if len(name) > MOST_NAME_BYTES:
                self.fail(f"{os.fsdecode(name[:40])}… is a name of {len(name)} bytes; the most is {MOST_NAME_BYTES}.")
        return super().convert(value, param, context)


PATH = PathArgument()
SECONDS = FiniteRange(0, MOST_SECONDS)
RANKS = click.IntRange(1, MOST_RANKS)
COUNT = click.IntRange(1, MOST_LISTED)
NONE_OR_MORE = click.IntRange(0, MOST_LISTED)
LARGE_COUNT = click.IntRange(1, MOST_NUMBER)
SEED = click.IntRange(-INT64, INT64 - 1)
VOCABULARY = click.IntRange(max=MOST_WIDTH)


def complete_job(context, param, incomplete: str) -> list[CompletionItem]:
    """Return ready jobs, presets and job files that begin with what was typed."""
    from hpctrain.architectures.registry import presets
    from hpctrain.config.job import ready_jobs

    return _named([*ready_jobs(), *presets()], incomplete, "a ready-made job or a preset")


def complete_cluster(context, param, incomplete: str) -> list[CompletionItem]:
    """Return ready clusters, and cluster files, that begin with what was typed."""
    from hpctrain.config.clusters.cluster_file import ready_clusters

    return _named(ready_clusters(), incomplete, "a ready cluster")


def complete_key(context, param, incomplete: str) -> list[CompletionItem]:
    """Return the keys of a job, `section.key=`, that begin with what was typed."""
    from hpctrain.config.job import Job

    keys = [f"{key}=" for key in keys_of(Job)]
    return [CompletionItem(key) for key in keys if key.startswith(incomplete)]


def _named(names: Iterable[str], incomplete: str, about: str) -> list[CompletionItem]:
    items = [CompletionItem(name, help=about) for name in names if name.startswith(incomplete)]
    return [*items, CompletionItem(incomplete, type="file")]


def cluster_option(help: str = "A cluster file, or the name of a ready one.", required: bool = True):
    """Return the option `--cluster`, which is a file or the name of a ready cluster."""
    return click.option("--cluster", required=required, metavar="CLUSTER", shell_complete=complete_cluster, help=help)


override_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    shell_complete=complete_key,
    metavar="SECTION.KEY=VALUE",
    help="Change one key of the job file, such as train.steps=10 or plan.tensor.y=2. May be repeated.",
)

rehearse_option = click.option(
    "--rehearse",
    shell_complete=complete_cluster,
    metavar="CLUSTER",
    help="A cluster file, or the name of a ready one, whose devices the ranks impersonate: a rank for each.",
)

time_scale_option = click.option(
    "--time-scale",
    type=FiniteRange(min=0, max=MOST_SECONDS, min_open=True),
    metavar="SECONDS",
    help="Seconds of a rehearsal for one of its cluster. Default: the file's, or so many that the cores keep up.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")


def print_result(result: Mapping | Sequence, text: str, as_json: bool) -> None:
    """Print the result of a command as one line of JSON, or as text."""
    print(json.dumps(result) if as_json else text, flush=True)
