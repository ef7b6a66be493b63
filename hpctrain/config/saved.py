"""Jobs and plans that hpctrain wrote itself, in an older schema too, so that old runs live on.

Each has the number of the schema in which it was written; one without a number is of the oldest. In an older one keys
that are gone are passed over, and values that are gone are read as others, each with a line. Under `[model]` a key that
nobody knows is not passed over: it says what the weights are. One that the family does not read is: it never had an
effect. A file of a person has no such number, and is taken at its word.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import reduce
from typing import Any

from pydantic import BaseModel, ValidationError

from hpctrain.architectures.registry import describe_unread, unread_keys
from hpctrain.config.errors import HpctrainError, shorten_list
from hpctrain.config.tables import as_table, toml_value

SCHEMA = 3
"""The schema of what is written now: one more whenever a key or a value of jobs or plans goes."""
KEY = "schema"
RESOLVED = "resolved.toml"
"""The job in a folder of a run, beside its plan."""
GONE_OFFLOADS = {"activations": "none", "all": "optimizer"}
"""Activations stay on the device now."""
GONE_VALUES: Mapping[str, Mapping[Any, Any]] = {
    "precision.overrides.linear": {"fp8": None},
    "plan.offload": GONE_OFFLOADS,
}
"""By dotted key of a job: what a value that is gone is read as; None: as if the key were not there."""
OTHER_NUMBERS = {"precision.overrides.linear": "fp8"}
"""Values that are gone and without which a run has other numbers, so that none goes on."""
GONE_TILE_VALUES: Mapping[str, Mapping[Any, Any]] = {"offload": GONE_OFFLOADS}
"""By key of a plan's tile."""


def ignore(text: str) -> None:
    """Say nothing."""


def say_on_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def schema_of(tree: Mapping[str, Any], where: str, error: type[HpctrainError]) -> int:
    """Return the schema of what hpctrain wrote, as plain data. Raises `error` where it is a newer one."""
    number = tree.get(KEY, 0)
    if type(number) is not int or not 0 <= number <= SCHEMA:
        raise error(
            f"{where}: is of schema {number!r}, and this hpctrain reads {SCHEMA} and older ones; use the version of"
            " hpctrain that wrote it, or a newer one"
        )
    return number


def saved_job(
    tree: Mapping[str, Any],
    table: type[BaseModel],
    where: str,
    error: type[HpctrainError],
    say: Callable[[str], None] = ignore,
) -> dict[str, Any]:
    """Return the job that hpctrain wrote, as plain data of `table`, without its number and what is gone since then.

    Values that had no effect ("auto", "none", false, nothing) are passed over without a line. Raises `error`.
    """
    is_older = schema_of(tree, where, error) < SCHEMA
    result = deepcopy({key: value for key, value in tree.items() if key != KEY})
    if not is_older:
        return result
    for key, values in GONE_VALUES.items():
        *sections, last = key.split(".")
        section = reduce(lambda under, name: as_table(under.get(name)), sections, result)
        if last in section:
            now = replaced({key: section.pop(last)}, {key: values}, where, say)[key]
            section |= {} if now is None else {last: now}
    model = as_table(result.get("model"))
    with suppress(
        ArithmeticError, KeyError, TypeError, ValueError
    ):  # what is wrong with it is reported when it is checked
        for key in unread_keys(model):
            reason = describe_unread(model["architecture"], key)
            say(f"{where}: model.{key} = {model.pop(key)} is passed over: it {reason}")
    gone = []
    for *sections, last in unknown_keys(result, table):
        section = reduce(lambda under, name: under[name], sections, result)
        if section.pop(last) not in ("auto", "none", False, None):
            gone.append(".".join(map(str, [*sections, last])))
    if gone:
        say(f"{where}: is of an older version; keys that are gone are passed over: {shorten_list(gone)}")
    return result


def replaced(
    section: Mapping[str, Any], gone: Mapping[str, Mapping[Any, Any]], where: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return a section of what hpctrain wrote with the values that are gone as what they are read as."""
    result = dict(section)
    for key, values in gone.items():
        if isinstance(value := result.get(key), str) and value in values:
            result[key] = values[value]
            now = "left out" if values[value] is None else f"read as {toml_value(values[value])}"
            say(f"{where}: is of an older version; {key} = {toml_value(value)} is gone and is {now}")
    return result


def with_other_numbers(tree: Mapping[str, Any]) -> str:
    """Return what of a saved job is gone and gave other numbers, such as `precision.overrides.linear = "fp8"`."""
    for key, value in OTHER_NUMBERS.items():
        *sections, last = key.split(".")
        if reduce(lambda under, name: as_table(under.get(name)), sections, dict(tree)).get(last) == value:
            return f"{key} = {toml_value(value)}"
    return ""


def unknown_keys(tree: dict[str, Any], table: type[BaseModel]) -> list[tuple[Any, ...]]:
    """Return the keys of plain data, with the sections above them, that `table` does not know, but for `[model]`."""
    try:
        table.model_validate(tree)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        return [each["loc"] for each in problems if each["type"] == "extra_forbidden" and each["loc"][0] != "model"]
    return []
