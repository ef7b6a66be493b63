"""Reads tables of steps that somebody measured: one run a line, in the words of `DescribedRun`. Pure."""

import csv
import math
from dataclasses import MISSING, fields
from pathlib import Path

from benchmarks.evidence.calibrate import Measured
from hpctrain.config.errors import PlanError, did_you_mean
from hpctrain.software.run import DescribedRun

OUT_OF_MEMORY = "oom"
"""In place of seconds."""
SWITCHES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def load_measured(path: Path) -> list[Measured]:
    """Read a CSV file of runs.

    Its columns are the fields of `DescribedRun`, of which those without a default must be there and empty cells are the
    default; `step_seconds`, or `oom` of a run that had too little memory; and, as wished, `name` and `memory_bytes`.
    Raises PlanError that names line and column.
    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PlanError(f"{path}: cannot be read: {error}") from None
    if not rows:
        raise PlanError(f"{path} has no rows; see docs/planner.md for what a row says")
    known = {field.name: field for field in fields(DescribedRun)}
    given = [name for name in rows[0] if name]
    needed = [name for name, field in known.items() if field.default is MISSING] + ["step_seconds"]
    for name in needed:
        if name not in given:
            raise PlanError(f"{path}: no column '{name}'{did_you_mean(name, given)}; needed are {', '.join(needed)}")
    for name in given:
        if name not in known and name not in ("name", "step_seconds", "memory_bytes"):
            raise PlanError(f"{path}: unknown column '{name}'{did_you_mean(name, [*known, 'name', 'memory_bytes'])}")
    return [_measured(row, known, f"{path}:{number}") for number, row in enumerate(rows, 2)]


def _measured(row: dict[str, str], known: dict, where: str) -> Measured:
    values = {}
    for name, field in known.items():
        text = (row.get(name) or "").strip()
        if text:
            values[name] = _value(text, getattr(field.type, "__name__", str(field.type)), f"{where}: {name}")
        elif field.default is MISSING:
            raise PlanError(f"{where}: {name} is empty")
    try:
        run = DescribedRun(**values)
        _ = run.plan, run.setup()
    except (PlanError, ValueError) as error:
        raise PlanError(f"{where}: {error}") from None
    text = (row["step_seconds"] or "").strip()
    seconds = math.inf if text.lower() == OUT_OF_MEMORY else _value(text, "float", f"{where}: step_seconds")
    memory = (row.get("memory_bytes") or "").strip()
    name = (row.get("name") or "").strip() or where.rsplit(":", 1)[-1]
    return Measured(name, run, seconds, _value(memory, "float", f"{where}: memory_bytes") if memory else None)


def _value(text: str, kind: str, where: str):
    """Return a cell as what a field is declared to be; numbers are above 0."""
    try:
        if kind.startswith("tuple"):
            return tuple(int(part) for part in text.split("/"))
        if kind.startswith("bool"):
            return SWITCHES[text.lower()]
        if kind.startswith("str"):
            return text
        value = (int if kind.startswith("int") else float)(text)
    except (ValueError, KeyError):
        raise PlanError(f"{where} = '{text}' is no {kind.split(' ')[0]}") from None
    if not (0 < value < math.inf or (value == 0 and where.endswith("zero"))):
        raise PlanError(f"{where} = {text} is no finite number above 0")
    return value
