"""What the files that people write have in common: strict, frozen tables, and one message for what is wrong."""

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from hpctrain.config.errors import HpctrainError, describe_os_error, did_you_mean

REPEATED = re.compile(r"Cannot overwrite a value \(at (?:line (\d+), column|end of document)")
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class Table(BaseModel):
    """A table of a TOML file: immutable, and without room for a key that means nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    if TYPE_CHECKING:  # pydantic makes it for frozen tables

        def __hash__(self) -> int: ...


def read_text(path: Path, kind: type[HpctrainError]) -> str:
    """Return a file's text. Raises `kind` where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise kind(f"{path}: cannot be read: {describe_os_error(error)}") from None
    except UnicodeDecodeError as error:
        raise kind(f"{path}: not valid TOML: {error}") from None


def parse_toml(text: str, where: str, kind: type[HpctrainError]) -> dict[str, Any]:
    """Return TOML as plain data; `where` is what errors call it. Raises `kind` where it is none."""
    tree, repeated = parse_toml_once(text, where, kind)
    if repeated:
        raise kind("\n".join(f"{where}: {line}" for line in repeated))
    return tree


def parse_toml_once(text: str, where: str, kind: type[HpctrainError]) -> tuple[dict[str, Any], list[str]]:
    """Return TOML as plain data, and a line for each key that is given twice, of which the first one counts."""
    repeated: list[str] = []
    lines = text.split("\n")  # TOML knows no other ends of lines
    while True:
        try:
            return tomllib.loads("\n".join(lines)), repeated
        except tomllib.TOMLDecodeError as error:
            result = REPEATED.search(str(error))
            number = int(result[1]) if result else 0
            key = lines[number - 1].partition("=")[0].strip() if 0 < number <= len(lines) else ""
            if not BARE_KEY.fullmatch(key):
                raise kind("\n".join([f"{where}: not valid TOML: {error}", *repeated])) from None
            repeated.append(f"line {number}: {key}: the key is there twice in its table; keep one")
            lines[number - 1] = ""


def explain(error: ValidationError, table: type[BaseModel]) -> list[tuple[str, str]]:
    """Turn pydantic's findings in a file of `table` into dotted keys, each with a message that names it.

    A key is empty where the finding is about several keys at once; the message then names them itself. A key that is
    missing because it was misspelt is reported once, as the typo.
    """
    problems = error.errors(include_url=False)
    texts: list[tuple[str, str]] = []
    typos: set[str] = set()
    for problem in problems:
        if problem["type"] == "extra_forbidden":
            *above, name = problem["loc"]
            close = difflib.get_close_matches(str(name), _table_at(table, above).model_fields, n=1)
            typos |= {".".join(map(str, [*above, meant])) for meant in close}
    for problem in problems:
        here = problem["loc"]
        inside = any(other["loc"][: len(here)] == here and other["loc"] != here for other in problems)
        if problem["type"] == "too_short" and inside:
            continue  # it has entries, all of them wrong, and each is listed
        key, text = _explain_one(problem, table)
        if problem["type"] != "missing" or key not in typos:
            texts.append((key, text))
    return list(dict.fromkeys(texts))


def _explain_one(problem: Mapping[str, Any], table: type[BaseModel]) -> tuple[str, str]:
    loc = [part for part in problem["loc"] if part != "[key]"]  # a name that is a key is named by itself
    key = ".".join(map(str, loc))
    match problem["type"]:
        case "extra_forbidden":
            text = f"{key}: unknown key{did_you_mean(str(loc[-1]), _table_at(table, loc[:-1]).model_fields)}"
        case "missing":
            text = f"{key}: missing; set it"
        case "value_error":
            text = f"{key}: {problem['ctx']['error']}" if key else str(problem["ctx"]["error"])
        case "model_type":
            text = f"{key} = {problem['input']!r}: must be a section of keys"
        case _:
            text = f"{key} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
    return key, text


def _table_at(table: type[BaseModel], loc: list[int | str]) -> type[BaseModel]:
    """Return the table that is found at a place in a file of `table`."""
    annotation: Any = table
    for part in loc:
        arguments = get_args(annotation)
        if not arguments:
            annotation = annotation.model_fields[part].annotation
        else:
            annotation = arguments[-1] if get_origin(annotation) is dict else arguments[0]
        annotation = _plain(annotation)
    return annotation


def _plain(annotation: Any) -> Any:
    """Return what is annotated, or what an optional is when it is given."""
    while get_origin(annotation) in (Annotated, Union, UnionType):
        annotation = next(argument for argument in get_args(annotation) if argument is not NoneType)
    return annotation
