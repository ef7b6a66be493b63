"""Fits what the predictor knows of accelerators and software to steps that were measured.

Two shares of each family of accelerators, three constants of each software (`SHARES`, `FITTED`), and nothing of a
single row: the sum of the rows' logarithmic errors becomes as small as it can, by Gauss-Newton steps with weights that
make squares absolute values. What the rows do not tell stays as it was. Pure.
"""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.evidence.layers import LayeredPredictor, LayerTimes
from hpctrain.config.clusters.device_catalogue import ACCELERATORS
from hpctrain.config.errors import PlanError, did_you_mean
from hpctrain.planner.prediction.predictor import Prediction
from hpctrain.planner.prices.efficiency import EFFICIENCIES, Efficiency, efficiency_name
from hpctrain.software.predictor import SoftwarePredictor
from hpctrain.software.run import STACKS, DescribedRun
from hpctrain.software.software import FITTED, SoftwareVersion

SHARES = ("product_share", "memory_share")
"""What is fitted of a family."""
BOUNDS = {
    "product_share": (0.1, 1.0),
    "memory_share": (0.1, 1.0),
    "dispatch_seconds": (1e-6, 2e-4),
    "link_share": (0.1, 1.0),
}
ROUNDS = 4
DIFFERENCE, LONGEST_STEP = 0.02, 0.3
"""Of a parameter's logarithm: for the slope, and at the most in a round."""
INERTIA = 0.03
"""How much a parameter is held where it is: a change of one e-fold counts as much as so large an error of one row."""
SMALLEST_ERROR = 0.01
"""Errors below count as squares: nobody's measurements are better."""


@dataclass(frozen=True)
class Measured:
    """A step that somebody measured."""

    name: str
    run: DescribedRun
    seconds: float
    memory_bytes: float | None = None
    """Of the rank that needed the most."""
    weight: float = 1.0
    layers: LayerTimes | None = None
    """What its layers were measured to take alone."""

    @property
    def ran(self) -> bool:
        """Whether it ran at all: of what ran out of memory `seconds` are infinite."""
        return math.isfinite(self.seconds)


class _LayeredPredictor(LayeredPredictor, SoftwarePredictor):
    """Other software whose layers were measured."""


@dataclass(frozen=True)
class Parameters:
    """All parameter sets, those of families and those of software."""

    efficiencies: Mapping[str, Efficiency]
    stacks: Mapping[str, SoftwareVersion]

    def efficiency_of(self, model: str | None) -> Efficiency | None:
        """Return the set of an accelerator, named as in the catalogue or by its maker; None if it is in none."""
        name = efficiency_name(model)
        return self.efficiencies[name] if name else None

    def predict(self, row: Measured) -> Prediction:
        """Return what is predicted of a measured step, from all that is known but the measurement."""
        run = row.run
        make = partial(_LayeredPredictor, row.layers) if row.layers else None
        return run.predict(self.stacks[run.stack], self.efficiency_of(run.accelerator), make)

    def get(self, key: tuple[str, str, str]) -> float:
        kind, name, constant = key
        return getattr(getattr(self, kind)[name], constant)

    def changed(self, values: Mapping[tuple[str, str, str], float]) -> "Parameters":
        """Return them with some values replaced, by (kind, name, constant)."""
        result = {"efficiencies": dict(self.efficiencies), "stacks": dict(self.stacks)}
        for (kind, name, constant), value in values.items():
            result[kind][name] = replace(result[kind][name], **{constant: value})
        return Parameters(**result)


SHIPPED = Parameters(EFFICIENCIES, STACKS)


def fit(
    rows: Sequence[Measured], start: Parameters = SHIPPED, tell: Callable[[str], None] = lambda _: None
) -> Parameters:
    """Return the parameters by which `rows` are predicted best; only those that some row depends on are changed.

    Rows that ran out of memory tell nothing here.
    """
    rows, parameters = [row for row in rows if row.ran], start
    keys = _keys(rows)
    errors = _errors(rows, parameters)
    for number in range(ROUNDS):
        slopes = np.stack([_slope(rows, parameters, key, errors) for key in keys], axis=1)
        step = np.clip(_solve(rows, slopes, errors), -LONGEST_STEP, LONGEST_STEP)
        candidate = _moved(parameters, keys, step)
        result = _errors(rows, candidate)
        if _size(rows, result) >= _size(rows, errors):
            candidate = _moved(parameters, keys, step / 4)
            result = _errors(rows, candidate)
            if _size(rows, result) >= _size(rows, errors):
                break
        parameters, errors = candidate, result
        tell(f"round {number + 1}: mean error {_size(rows, errors):.1%}")
    return _with_reserved(rows, parameters)


def _keys(rows: Sequence[Measured]) -> list[tuple[str, str, str]]:
    families = dict.fromkeys(ACCELERATORS[row.run.accelerator].family_name for row in rows if not row.layers)
    stacks = dict.fromkeys(row.run.stack for row in rows)
    keys = [("efficiencies", name, constant) for name in families for constant in SHARES]
    return keys + [("stacks", name, constant) for name in stacks for constant in FITTED if constant in BOUNDS]


def _errors(rows: Sequence[Measured], parameters: Parameters) -> np.ndarray:
    return np.array([math.log(row.seconds / parameters.predict(row).step_seconds) for row in rows])


def _concerns(key: tuple[str, str, str], row: Measured) -> bool:
    if key[0] == "stacks":
        return key[1] == row.run.stack
    return not row.layers and key[1] == ACCELERATORS[row.run.accelerator].family_name


def _slope(rows: Sequence[Measured], parameters: Parameters, key: tuple, errors: np.ndarray) -> np.ndarray:
    """Return by how much the logarithm of each prediction grows with that of a parameter."""
    value, (_, highest) = parameters.get(key), BOUNDS[key[2]]
    by = DIFFERENCE if value * math.exp(DIFFERENCE) <= highest else -DIFFERENCE
    moved = parameters.changed({key: value * math.exp(by)})
    concerned = [i for i, row in enumerate(rows) if _concerns(key, row)]
    slopes = np.zeros(len(rows))
    slopes[concerned] = (errors[concerned] - _errors([rows[i] for i in concerned], moved)) / by
    return slopes


def _solve(rows: Sequence[Measured], slopes: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """Return the step that leaves the smallest sum of absolute errors, nearly: least squares, weighted again."""
    step = np.zeros(slopes.shape[1])
    weights = np.array([row.weight for row in rows])
    held = np.eye(len(step)) * INERTIA**2
    for _ in range(20):
        weighted = weights / np.maximum(np.abs(errors - slopes @ step), SMALLEST_ERROR)
        step = np.linalg.solve(slopes.T @ (weighted[:, None] * slopes) + held, slopes.T @ (weighted * errors))
    return step


def _moved(parameters: Parameters, keys: Sequence[tuple], step: np.ndarray) -> Parameters:
    values = {}
    for key, by in zip(keys, step, strict=True):
        low, high = BOUNDS[key[2]]
        values[key] = min(max(parameters.get(key) * math.exp(by), low), high)
    return parameters.changed(values)


def _size(rows: Sequence[Measured], errors: np.ndarray) -> float:
    return float(np.average(np.abs(np.expm1(-errors)), weights=[row.weight for row in rows]))


def _with_reserved(rows: Sequence[Measured], parameters: Parameters) -> Parameters:
    """Fit what libraries take of memory, for software of which rows tell memory: the median of what is missing."""
    missing: dict[str, list[float]] = {}
    for row in rows:
        if row.memory_bytes:
            needed = max(stage.memory.total for stage in parameters.predict(row).memory)
            missing.setdefault(row.run.stack, []).append(row.memory_bytes - needed)
    values = {}
    for name, result in missing.items():
        values["stacks", name, "reserved_bytes"] = max(
            0.0, parameters.stacks[name].reserved_bytes + float(np.median(result))
        )
    return parameters.changed(values)


def changes(before: Parameters, after: Parameters) -> list[tuple[str, str, float, float]]:
    """Return (table, constant, before, after) of all that is not the same."""
    result = []
    for kind, constants in (("efficiencies", (*SHARES, "fp32_share")), ("stacks", FITTED)):
        for name in getattr(after, kind):
            for constant in constants:
                old, new = (which.get((kind, name, constant)) for which in (before, after))
                if old != new:
                    result.append((f"{kind}.{name}", constant, old, new))
    return result


# ---- files -----------------------------------------------------------------------------------------------------------


def dump_parameters(before: Parameters, after: Parameters, source: str) -> str:
    """Write what changed as a file of parameters; `source` says what it was fitted to."""
    lines = ["# What the predictor knows of accelerators and software, in place of what it ships with.", f"# {source}"]
    table = None
    for where, constant, old, new in changes(before, after):
        if where != table:
            lines += ["", f"[{where}]"]
            table = where
        lines.append(f"{constant} = {new:.6g}  # was {old:.6g}")
    return "\n".join(lines) + "\n"


def load_parameters(path: Path, start: Parameters = SHIPPED) -> Parameters:
    """Read a file of parameters. Raises PlanError for what it does not know or cannot be."""
    try:
        tree = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlanError(f"{path}: cannot be read: {error}") from None
    values = {}
    for kind, tables in tree.items():
        known = {"efficiencies": (*SHARES, "fp32_share"), "stacks": FITTED}
        if kind not in known:
            raise PlanError(f"{path}: no table '{kind}'{did_you_mean(kind, list(known))}; it has {', '.join(known)}")
        for name, constants in tables.items():
            if name not in getattr(start, kind):
                raise PlanError(f"{path}: no {kind}.{name}{did_you_mean(name, list(getattr(start, kind)))}")
            for constant, value in constants.items():
                where = f"{path}: {kind}.{name}.{constant}"
                if constant not in known[kind]:
                    raise PlanError(f"{where}: unknown{did_you_mean(constant, list(known[kind]))}")
                low, high = BOUNDS.get(constant, (0.0, math.inf))
                if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                    raise PlanError(f"{where} = {value!r}: set it to a number from {low:g} to {high:g}")
                values[kind, name, constant] = float(value)
    return start.changed(values)
