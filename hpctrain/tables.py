"""What the files that people write have in common: strict, frozen tables, and one message for what is wrong."""

import tomllib
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from hpctrain.errors import HpctrainError, describe_os_error, did_you_mean


class Table(BaseModel):
    """A table of a TOML file: immutable, and without room for a key that means nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


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
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise kind(f"{where}: not valid TOML: {error}") from None


def explain(error: ValidationError, table: type[BaseModel]) -> tuple[str, str]:
    """Turn pydantic's first finding in a file of `table` into its dotted key and a message that names it.

    The key is empty where the finding is about several keys at once; the message then names them itself.
    """
    problems = error.errors(include_url=False)
    first = problems[0]
    loc = [part for part in first["loc"] if part != "[key]"]  # a name that is a key is named by itself
    key = ".".join(map(str, loc))
    match first["type"]:
        case "extra_forbidden":
            text = f"{key}: unknown key{did_you_mean(str(loc[-1]), _table_at(table, loc[:-1]).model_fields)}"
        case "missing":
            text = f"{key}: missing; set it"
        case "value_error":
            text = f"{key}: {first['ctx']['error']}" if key else str(first["ctx"]["error"])
        case "model_type":
            text = f"{key} = {first['input']!r}: must be a section of keys"
        case _:
            text = f"{key} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return key, text + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")


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
