"""Keys of job files that are gone, with their successors.

A job that hpctrain wrote itself, in a checkpoint or a run folder, is read as if such a key were not there, so that old
runs live on. A job file of a person is refused with what to write instead.
"""

import sys
from collections.abc import Callable
from functools import reduce
from operator import getitem
from typing import Any

REMOVED = {
    "comm.algorithm": "remove the line: hpctrain takes the fastest algorithm by the links of the cluster",
    "comm.route": "remove the line: where the ranks of a group are decides how they communicate",
    "observe.timeout_seconds": "set observe.step_timeout_seconds",
    "plan.chunks": "set plan.virtual_stages",
    "products": "remove the section: products are no longer tuned",
}
"""By dotted key, or section, what to do instead. A key that a version drops is added here."""


def ignore(text: str) -> None:
    """Say nothing."""


def say_on_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def without_removed(tree: dict[str, Any], where: str, say: Callable[[str], None] = ignore) -> dict[str, Any]:
    """Return the job that hpctrain wrote, as plain data, without keys that are gone; say for each that it was there.

    Those whose value was "auto" had no effect before, so nothing is said of them.
    """
    for key in removed_keys(tree):
        *sections, last = key.split(".")
        if reduce(getitem, sections, tree)[last] != "auto":
            say(f"{where}: {key} is of an older version and has no effect any more; now: {REMOVED[key]}")
        tree = _without(tree, sections, last)
    return tree


def removed_keys(tree: dict[str, Any]) -> list[str]:
    """Return the keys of a job, as plain data, that are gone."""
    return [key for key in REMOVED if _has(tree, key.split("."))]


def _has(tree: Any, parts: list[str]) -> bool:
    for part in parts:
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


def _without(tree: dict[str, Any], sections: list[str], last: str) -> dict[str, Any]:
    if sections:
        return tree | {sections[0]: _without(tree[sections[0]], sections[1:], last)}
    return {key: value for key, value in tree.items() if key != last}
