"""Predicts from what single layers were measured to take on a device, in place of its data sheet. Pure.

A table of them is a CSV file with one line for each model, device, microbatch, degree of tensor parallelism and layer
(`COLUMNS`); of layers that are equal one is enough. Seconds are what the ranks of a tensor grid take together, with
their collectives.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.errors import PlanError, did_you_mean
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.curves import Curve
from hpctrain.planner.prices.prices import PassCost
from hpctrain.planner.prices.setup import Setup
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import block_of, layers

COLUMNS = ("device", "microbatch", "tensor", "layer", "forward_seconds", "backward_seconds", "update_seconds")
ALIASES = {
    "gpu": "device",
    "mbs": "microbatch",
    "tp": "tensor",
    "fwd_s": "forward_seconds",
    "bwd_s": "backward_seconds",
    "update_s": "update_seconds",
}
"""How Sailor's profiles call them."""


@dataclass(frozen=True)
class Layer:
    """One layer on one device by one degree of tensor parallelism: seconds over the rows of a microbatch."""

    forward: Curve
    backward: Curve
    update_seconds: float


class LayerTimes:
    """The layers of one model, by device, degree of tensor parallelism and number."""

    def __init__(self, where: str, layers: Mapping[tuple[str, int], Mapping[int, Layer]]):
        """`where` is what errors call it."""
        self._where, self._layers = where, layers

    def of(self, device: str, tensor: int, number: int, last: int) -> Layer:
        """Return a layer by its number. The embedding, 0, and the head, `last`, have their own; of blocks it is the
        last one measured at or before.

        Raises PlanError where the table has none.
        """
        layers = self._layers.get((device, tensor))
        if layers is None:
            devices = sorted({known for known, _ in self._layers})
            degrees = sorted(degree for known, degree in self._layers if known == device)
            what = did_you_mean(device, devices) if not degrees else f"; of it there are tensor {degrees}"
            raise PlanError(f"{self._where} has no layers of {device} by tensor {tensor}{what}")
        if 0 not in layers or last not in layers or len(layers) < 3 or max(layers) > last:
            raise PlanError(
                f"{self._where}: {device} by tensor {tensor} has layers {sorted(layers)}; needed are 0 (embedding),"
                f" {last} (head, of a model with {last - 1} blocks) and a block between"
            )
        if number in (0, last):
            return layers[number]
        blocks = [block for block in layers if 0 < block < last]
        return layers[max((block for block in blocks if block <= number), default=min(blocks))]


def load_layers(path: Path, model: str | None = None, devices: Mapping[str, str] | None = None) -> LayerTimes:
    """Read a table of layers; of several models `model`. `devices` are the names of devices that it calls otherwise.

    Raises PlanError that names line and column.
    """
    points: dict[tuple[str, int], dict[int, list[tuple[int, float, float, float]]]] = {}
    models = set()
    for number, row in enumerate(_rows(path), 2):
        models.add(row.get("model", ""))
        if model is not None and row.get("model") != model:
            continue
        where = f"{path}:{number}"
        rows, tensor, layer = (_number(row, name, where, int) for name in ("microbatch", "tensor", "layer"))
        seconds = [_number(row, name, where, float) for name in COLUMNS[4:]]
        device = (devices or {}).get(row["device"], row["device"])
        points.setdefault((device, tensor), {}).setdefault(layer, []).append((rows, *seconds))
    if model is None and len(models) > 1:
        raise PlanError(f"{path} has layers of {', '.join(sorted(models))}; name one of them as `model`")
    if not points:
        raise PlanError(f"{path} has no layers of '{model}'{did_you_mean(model or '', sorted(models))}")
    layers = {key: {n: _layer(sorted(result)) for n, result in by.items()} for key, by in points.items()}
    return LayerTimes(str(path), layers)


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="") as file:
            read = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: cannot be read: {error}") from None
    result = [{ALIASES.get(name, name): value for name, value in row.items() if name} for row in read]
    if result and (missing := [name for name in COLUMNS if name not in result[0]]):
        raise PlanError(f"{path}: no column '{missing[0]}'{did_you_mean(missing[0], list(result[0]))}")
    return result


def _number(row: dict[str, str], name: str, where: str, kind: type) -> float:
    try:
        value = kind(row[name])
    except (TypeError, ValueError):
        raise PlanError(f"{where}: {name} = '{row[name]}' is no {'whole ' if kind is int else ''}number") from None
    if not value >= 0:
        raise PlanError(f"{where}: {name} = {row[name]} is below 0")
    return value


def _layer(points: Sequence[tuple[int, float, float, float]]) -> Layer:
    rows = [point[0] for point in points]
    forward, backward = (Curve(rows, [point[i] for point in points]) for i in (1, 2))
    return Layer(forward, backward, points[-1][3])


class LayeredPredictor(Predictor):
    """A predictor whose devices compute as a table of layers says, which goes before profiles.

    A family is looked up by its `model`, or else by its own name. A backward pass is cut into its two parts as by the
    device's data sheet.
    """

    def __init__(self, layers: LayerTimes, setup: Setup, plan: Plan, cluster: Cluster, efficiencies=None):
        """Raises PlanError for a plan with z, over which layers were not measured."""
        super().__init__(setup, plan, cluster.model_copy(update={"profiles": ()}), efficiencies)
        self._layers = layers
        if any(tile.tensor.z > 1 for tile in self.plan.tiles):
            raise PlanError("a table of layers tells nothing of weights that come over z: predict from data sheets")

    def _measured(self, tile: Tile, items: Interval) -> list[Layer]:
        if self.setup.is_block(items) and items.size == 1:
            raise PlanError("a table of layers tells nothing of half a block: cut plans between blocks")
        families = {name: self.cluster.families[name].model or name for name in self._families[tile]}
        degree, number = tile.tensor.x * tile.tensor.y, block_of(items.start) + 1
        last = self.setup.model.num_layers + 1
        return [self._layers.of(device, degree, number, last) for device in families.values()]

    def layer_passes(self, tile: Tile, layer: Interval, rows: int) -> dict[str, PassCost]:
        passes = super().layer_passes(tile, layer, rows)
        measured = self._measured(tile, layer)
        forward, backward = (max(getattr(each, way)(rows) for each in measured) for way in ("forward", "backward"))
        again = forward if tile.recompute == "full" else 0.0
        of_input, of_weight = passes["backward_input"].compute, passes["backward_weight"].compute
        share = of_input / (of_input + of_weight)
        compute = {
            "forward": forward,
            "backward": backward + again,
            "backward_input": backward * share + again,
            "backward_weight": backward * (1 - share),
        }
        return {name: replace(cost, compute=compute[name], tensor=0.0) for name, cost in passes.items()}

    def _update_seconds(self, tile: Tile) -> float:
        own = [layer for t in self.plan.tiles if t.ranks == tile.ranks for layer in layers(t.items)]
        whole = sum(max(each.update_seconds for each in self._measured(tile, layer)) for layer in own)
        stored = sum(self._stored(group, tile) for group in self._holding(tile).shard_groups)
        return whole * self._updated(tile) / max(1, stored)
