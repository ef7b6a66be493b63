"""The common part of all files that people write: strict, frozen tables, and one message for what is wrong.

Every TOML file is read here, within limits that keep a damaged one from taking minutes, or the memory of the host.
"""

import difflib
import io
import json
import math
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from hpctrain.config.errors import HpctrainError, did_you_mean
from hpctrain.config.paths import open_file, refused_as

REPEATED = re.compile(
    r"(?:Cannot overwrite a value|Cannot declare .* twice) \(at (?:line (\d+), column|end of document)"
)
HEADER = re.compile(r"\s*\[{1,2}\s*([^\[\]{}=,]+?)\s*\]{1,2}\s*(?:#.*)?")
KEY = re.compile(r"\s*([\w.\"'-]+)\s*=")
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
TYPES = {
    "int": "must be a whole number",
    "float": "must be a number",
    "dict": "must be a table, such as {name = 1}",
    "tuple": "must be a list, in [ ]",
    "string": "must be text, in quotes",
    "bool": "must be true or false",
}
"""By pydantic's type of a mistake, what to write."""
ASIDE = "given twice"
"""The table into which parsing moves what is given twice, to look for more mistakes."""
# Far more than a plan for ten thousand ranks takes; reading it takes some seconds.
MOST_BYTES = 4_000_000
# Tables in tables; no file of hpctrain has more than 6. Reading keys of many parts takes the square of their number.
MOST_NESTED = 32
KEY_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
DEEP_KEY = re.compile(rf"""(?<![\w"'-])(?:{KEY_PART}){{{MOST_NESTED}}}""", re.ASCII)
# A file is read again for each key that it has twice, and mistakes are compared with each other.
MOST_MISTAKES = 20
MOST_READ_AGAIN_BYTES = 1_000_000
SHOWN_CHARACTERS = 200
DIGITS = 6
"""Of numbers that are written, where these suffice."""

T = TypeVar("T")
Several = Annotated[tuple[T, ...], Field(strict=False)]
"""A list of a file; what is in it is strict again."""
AUTO = BeforeValidator(lambda value: None if value == "auto" else value)
"""`auto` in files, None in objects."""
FilePath = Annotated[Path, Field(strict=False)]
"""A path, which is text in a file."""


def named_in(table: Mapping[str, object], noun: str) -> AfterValidator:
    """Return the check that a value is a name in a table, whose entries are called `noun`."""

    def check(name: str) -> str:
        if name not in table:
            raise ValueError(f"'{name}' is no {noun}{did_you_mean(name, table)}")
        return name

    return AfterValidator(check)


class Table(BaseModel):
    """A table of a TOML file: immutable; it refuses a key that means nothing.

    A number is a number: neither text nor a boolean is taken for one, nor 8.0 for 8.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    other_names: ClassVar[Mapping[str, str]] = {}
    """By a key that a file of this table never had, in lower case with `_`, what to do instead."""

    if TYPE_CHECKING:  # pydantic makes it for frozen tables

        def __hash__(self) -> int: ...

    def model_copy(self, **options) -> Self:
        """Return a copy, as pydantic does, without the cached properties, which are of the old values."""
        copy = super().model_copy(**options)
        values = vars(copy)
        for name in values.keys() - type(self).model_fields.keys():
            del values[name]
        return copy


def refused_for(table: T, mistakes: Iterable[str]) -> T:
    """Return a table without mistakes, for a validator of pydantic. Raises ValueError with all of them."""
    if text := "\n".join(mistakes):
        raise ValueError(text)
    return table


def read_text(path: Path, kind: type[HpctrainError]) -> str:
    """Return a file's text. Raises `kind` where it cannot be read, is no regular file, or is too long to be ours."""
    try:
        refused = refused_as(kind, f"{shorten(path)}: cannot be read")
        with refused, io.TextIOWrapper(open_file(path, MOST_BYTES), "utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise kind(f"{path}: not valid TOML: {error}") from None
    except ValueError as error:  # a zero byte in the path
        raise kind(f"{shorten(path)}: cannot be read: {error}") from None


def parse_toml(text: str, where: str, kind: type[HpctrainError]) -> dict[str, Any]:
    """Return TOML as plain data; `where` is what errors call it. Raises `kind` where it is none."""
    tree, repeated = parse_toml_once(text, where, kind)
    if repeated:
        raise kind("\n".join(f"{where}: {line}" for line in repeated))
    return tree


def parse_toml_once(text: str, where: str, kind: type[HpctrainError]) -> tuple[dict[str, Any], list[str]]:
    """Return TOML as plain data, and a line for each key that is given twice, of which the first one counts.

    Raises `kind` where it is no TOML, or has what no file of ours has: integers beyond 64 bits, text with zero bytes,
    tables in tables without an end.
    """
    repeated: list[str] = []
    lines = text.split("\n")  # TOML knows no other ends of lines
    while True:
        try:
            tree = _parse_within_limits("\n".join(lines))
            tree.pop(ASIDE, None)
            return tree, repeated
        except tomllib.TOMLDecodeError as error:
            result = REPEATED.search(str(error))
            number = int(result[1] or 0) if result else 0
            line = lines[number - 1].strip() if number else ""
            key, header = line.partition("=")[0].strip(), HEADER.fullmatch(line)
            if header:
                lines[number - 1] = f'["{ASIDE}".{number}]'
                several = "" if "." in header[1] else f", or write [[{header[1]}]] above each"
                repeated.append(f"line {number}: {shorten(line)}: the table is there twice; keep one{several}")
            elif BARE_KEY.fullmatch(key):
                lines[number - 1] = ""
                repeated.append(f"line {number}: {shorten(key)}: the key is there twice in its table; keep one")
            else:
                place = re.search(r"\(at line (\d+), ", str(error))
                text = f": {shorten(lines[int(place[1]) - 1].strip())}" if place else ""
                raise kind("\n".join([f"{where}: not valid TOML: {shorten(error)}{text}", *repeated])) from None
            if len(repeated) == MOST_MISTAKES or len(text) * len(repeated) > MOST_READ_AGAIN_BYTES:
                raise kind("\n".join(f"{where}: {line}" for line in [*repeated, "and maybe more"])) from None
        except ValueError as error:
            raise kind("\n".join([f"{where}: {error}", *repeated])) from None


def with_lines(text: str, mistakes: Iterable[str]) -> list[str]:
    """Return mistakes, each with the number of the line that gives its key, in the order of lines.

    A mistake begins with its key.
    """
    known, placed = _lines_of_keys(text), []
    for mistake in mistakes:
        key = re.split(r"[:=\s]", mistake, maxsplit=1)[0]
        while key and key not in known:
            key = key.rpartition(".")[0]
        stated = re.match(r"line (\d+): ", mistake)
        number = known[key] if key else int(stated[1]) if stated else math.inf
        placed.append((number, f"line {number}: {mistake}" if key else mistake))
    return [mistake for _, mistake in sorted(placed, key=lambda pair: pair[0])]


def _lines_of_keys(text: str) -> dict[str, int]:
    """Return by dotted key the line on which a file begins to give it."""
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.split("\n"), 1):
        if header := HEADER.fullmatch(line):
            table = header[1].replace('"', "")
            if line.lstrip().startswith("[["):
                lines.setdefault(table, number)
                counts[table] = counts.get(table, -1) + 1
                table = f"{table}.{counts[table]}"
            lines.setdefault(table, number)
            lines.setdefault(table.partition(".")[0], number)
        elif key := KEY.match(line):
            lines.setdefault(f"{table}.{key[1]}".lstrip("."), number)
    return lines


def parse_override(override: str) -> tuple[list[str], Any]:
    """Return the parts of the key, and the value, of `section.key=value`. Raises ValueError where it is none.

    An unquoted word is a string, as a shell user expects.
    """
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts) or len(parts) > MOST_NESTED:
        raise ValueError("write it as section.key=value")
    try:
        tree = _parse_within_limits(f"value = {text}")
    except tomllib.TOMLDecodeError:
        if "\n" in text:
            raise ValueError("has a second line, which would be ignored") from None
        return parts, text
    if list(tree) != ["value"]:
        raise ValueError("has more than one value; set one key at a time")
    return parts, tree["value"]


def as_table(value: Any) -> dict[str, Any]:
    """Return a table of a file that was not validated yet; an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list:
    """Return a list of a file that was not validated yet; an empty one in place of anything else."""
    return list(value) if isinstance(value, list | tuple) else []


def tables_of(tree: Mapping[str, Any], section: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the tables of a section of a file that was not validated yet, each with its dotted key."""
    tables = tree.get(section)
    named = tables.items() if isinstance(tables, dict) else enumerate(as_list(tables))
    return [(f"{section}.{name}", table) for name, table in named if isinstance(table, dict)]


def flatten(tree: Mapping[str, Any], separator: str = ".") -> Iterator[tuple[str, Any]]:
    """Yield each key of nested tables with its value, a table itself before what is in it: `train`, `train.steps`."""
    for key, value in tree.items():
        yield key, value
        if isinstance(value, Mapping):
            yield from ((f"{key}{separator}{inner}", each) for inner, each in flatten(value, separator))


def given_values(table: Table) -> dict[str, Any]:
    """Return the values of a table that are set, by key."""
    values = {name: getattr(table, name) for name in type(table).model_fields}
    return {name: value for name, value in values.items() if value not in (None, {}, ())}


def toml_key(name: str) -> str:
    """Return a key as TOML."""
    return name if BARE_KEY.fullmatch(name) else toml_value(name)


def toml_value(value) -> str:
    """Return a value as TOML, tables in line."""
    match value:
        case Table():
            return toml_value(given_values(value))
        case dict():
            return "{" + ", ".join(f"{toml_key(name)} = {toml_value(inner)}" for name, inner in value.items()) + "}"
        case tuple() | list():
            return "[" + ", ".join(map(toml_value, value)) + "]"
        case bool():
            return str(value).lower()
        case int():
            return f"{value:_}" if value >= 10**6 else str(value)
        case float():
            short = re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.{DIGITS}g}")
            exact = short if float(short) == value else repr(value)
            return exact if re.search(r"[.e]", exact) else f"{exact}.0"
        case _:  # strings of JSON are strings of TOML, but for one character
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_comment(text: str, width: int | None = None) -> list[str]:
    """Return text as lines of comments, at most so wide; a character that cannot be printed becomes a blank."""
    lines = [one_line(line) for line in text.splitlines()]
    if width:
        lines = [part for line in lines for part in textwrap.wrap(line, width - 2) or [""]]
    return [f"# {line}".rstrip() for line in lines]


def _parse_within_limits(text: str) -> dict[str, Any]:
    """Return TOML as plain data. Raises ValueError: TOMLDecodeError where it is none, else for what goes too far."""
    if DEEP_KEY.search(text):
        raise ValueError(f"a key has more than {MOST_NESTED} parts; no key of a file of this kind does")
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError(f"has tables or lists within each other, more than {MOST_NESTED} deep") from None
    except ValueError:  # Python's own limit on the digits of an integer
        raise ValueError("has an integer of thousands of digits; TOML's have 64 bits at most") from None
    _check_values(tree)
    return tree


def _check_values(tree: dict[str, Any]) -> None:
    """Refuse values that no file of ours has, by the key. Raises ValueError."""
    waiting: list[tuple[str, int, Any]] = [("", 0, tree)]
    while waiting:
        key, depth, value = waiting.pop()
        if depth > MOST_NESTED:
            raise ValueError(f"{shorten(key)}: has tables or lists within each other, more than {MOST_NESTED} deep")
        if isinstance(value, dict | list):
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += ((f"{key}.{name}" if key else str(name), depth + 1, inner) for name, inner in entries)
        elif isinstance(value, str) and "\0" in value:
            raise ValueError(f"{shorten(key)} = {shorten(repr(value))}: has a zero byte; remove it")
        elif type(value) is int and not -(2**63) <= value < 2**63:
            raise ValueError(f"{shorten(key)}: is an integer of more than 64 bits, and TOML has none")
        if "\0" in key:
            raise ValueError(f"the key {shorten(repr(key))} has a zero byte; remove it")


def one_line(value: object) -> str:
    """Return a text for a comment or a name: whatever cannot be printed, ends of lines too, becomes a blank."""
    return "".join(character if character.isprintable() else " " for character in str(value))


def shorten(value: object) -> str:
    """Return a value as a message shows it: its text, the middle left out where it is long."""
    text = str(value)
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]}…{text[-half:]}"


def explain(error: ValidationError, table: type[BaseModel]) -> list[tuple[str, str]]:
    """Turn pydantic's findings in a file of `table` into dotted keys, each with a message that names it.

    A key is empty where the finding is about several keys at once; the message then names them itself. A key that is
    missing because it was misspelt is reported once, as the typo. Of very many only the first ones are there.
    """
    problems = error.errors(include_url=False)
    left_out = len(problems) - MOST_MISTAKES
    problems = problems[:MOST_MISTAKES]
    texts: list[tuple[str, str]] = []
    typos: set[str] = set()  # the keys that unknown ones probably mean
    for problem in error.errors(include_url=False):
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
    if left_out > 0:
        texts.append((texts[-1][0] if texts else "", f"and {left_out:,} mistakes more"))
    return list(dict.fromkeys(texts))


def _explain_one(problem: Mapping[str, Any], table: type[BaseModel]) -> tuple[str, str]:
    loc = [part for part in problem["loc"] if part != "[key]"]  # a name that is a key is named by itself
    key = ".".join(map(str, loc))
    match problem["type"]:
        case "extra_forbidden":
            there = _table_at(table, loc[:-1]).model_fields
            instead = getattr(table, "other_names", {}).get(str(loc[-1]).lower().replace("-", "_"))
            hint = f"; {instead}" if instead else did_you_mean(str(loc[-1]), there)
            text = f"{shorten(key)}: unknown key{hint}"
        case "missing":
            text = f"{key}: missing; set it"
        case "value_error":
            lines = str(problem["ctx"]["error"]).splitlines()
            text = "\n".join(f"{key}: {line}" if key else line for line in lines)
        case "model_type":
            text = f"{key} = {shorten(repr(problem['input']))}: must be a section of keys"
        case kind:
            value, expected = problem["input"], TYPES.get(kind.removesuffix("_type").removesuffix("_from_float"))
            expected = expected or f"{problem['msg'][0].lower()}{problem['msg'][1:]}"
            expected += f"; write [[{key}]] above each" if kind == "tuple_type" and isinstance(value, dict) else ""
            text = f"{key} = {shorten(repr(value))}: {expected}"
    return key, text


def keys_of(table: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a table and of those in it, but of lists of tables."""
    for name, field in table.model_fields.items():
        inner = _plain(field.annotation)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys_of(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _table_at(table: type[BaseModel], loc: list[int | str]) -> type[BaseModel]:
    """Return the type of the table under a key of a file of `table`."""
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
    """Return a type without its annotations, and without None."""
    while get_origin(annotation) in (Annotated, Union, UnionType):
        annotation = next(argument for argument in get_args(annotation) if argument is not NoneType)
    return annotation
