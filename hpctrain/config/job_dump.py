"""Writes a job as TOML that `load_job` reads back."""

import json
import re
from collections.abc import Mapping

from hpctrain.config.job import Job


def dump_job(job: Job, reasons: Mapping[str, str], plan_file: str | None) -> str:
    """Return a job as TOML, with reasons as comments. `plan_file` is relative to it; None: the plan is searched for."""
    tree = job.model_dump(mode="json", exclude_none=True, exclude={"plan"})
    lines = ["# What this run does, with every choice made. Reasons:"]
    lines += [f"# {key}: {reason}" for key, reason in reasons.items()] or ["# nothing was left to choose"]
    lines += ["", f"name = {_toml(tree.pop('name'))}"]
    if plan_file:
        tree["plan"] = {"file": plan_file}
    for section, values in tree.items():
        lines += ["", f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _toml(value) -> str:
    if isinstance(value, dict):
        keys = (key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key) for key in value)
        return "{" + ", ".join(f"{key} = {_toml(v)}" for key, v in zip(keys, value.values(), strict=True)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # JSON and TOML write strings, numbers and booleans identically
    return json.dumps(value, ensure_ascii=False)
