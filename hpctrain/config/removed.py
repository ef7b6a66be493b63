"""Keys of job files that are gone, with their successors.

A job that hpctrain wrote itself, in a checkpoint or a run folder, is read as if such a key were not there, so that old
runs live on. A job file of a person is refused with what to write instead.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import reduce
from typing import Any

from hpctrain.architectures.registry import describe_unread, unread_keys
from hpctrain.config.tables import as_table

REMOVED = {
    "comm.algorithm": "remove the line: hpctrain takes the fastest algorithm by the links of the cluster",
    "comm.route": "remove the line: where the ranks of a group are decides how they communicate",
    "observe.timeout_seconds": "set observe.step_timeout_seconds",
    "overlap.forward": "set overlap.tensor_parts, which overlaps the same sums and those of cut positions too",
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

    Those whose value was "auto" or false had no effect before, so nothing is said of them. Keys of `[model]` that the
    family does not read never had one: they are left out too.
    """
    tree = deepcopy(tree)
    for key in removed_keys(tree):
        section, last = _place(tree, key)
        if section.pop(last) not in ("auto", False):
            say(f"{where}: {key} is of an older version and has no effect any more; now: {REMOVED[key]}")
    model = as_table(tree.get("model"))
    with suppress(KeyError, TypeError, ValueError):  # what is wrong with it is reported when it is checked
        for key in unread_keys(model):
            reason = describe_unread(model["architecture"], key)
            say(f"{where}: model.{key} = {model.pop(key)} is passed over: it {reason}")
    return tree


def removed_keys(tree: dict[str, Any]) -> list[str]:
    """Return the keys of a job, as plain data, that are gone."""
    places = {key: _place(tree, key) for key in REMOVED}
    return [key for key, (section, last) in places.items() if last in section]


def _place(tree: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Return the section that a dotted key is in, an empty one where there is none, and the key in it."""
    *sections, last = key.split(".")
    return reduce(lambda table, name: as_table(table.get(name)), sections, as_table(tree)), last
