"""Seconds of computing from a profile of the very job, the best source, which corrects the formula. Pure.

A profile (`hpctrain probe --job`) has the seconds of forward and backward passes over the embedding, a block and the
head, on one rank alone, over its rows. On the tensor grid 1 x 1 x 1 these are the seconds. For other tensor grids, and
for parts of a pass, the formula of `planner/cost.py` is corrected. The factor is the profile over the formula on one
rank, at *as many rows of the rank*. The correction depends on rows, since they are the rows of all products of a pass:
a floor of launches, tiles that are not full, and speed that grows with rows are the same on both sides. The formula
knows what a grid changes: how wide products are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hpctrain.config.cluster import Cluster, Profile
from hpctrain.plan.tiling import Tile
from hpctrain.planner.cost import Setup, layer_cost
from hpctrain.planner.curves import Curve
from hpctrain.planner.devices import DeviceModel
from hpctrain.planner.efficiency import Efficiency
from hpctrain.planner.stack import HPCTRAIN
from hpctrain.planner.work import ItemPass
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.items import BLOCK, EMBEDDING
from hpctrain.sharding.parameters import count_parameters

ITEMS = "embedding", "block", "head"
TIMED_ZERO = 1
"""The ZeRO stage whose times count: its passes have no shards, so that it is no matter how many replicas there were."""


class ProfiledPasses:
    """What a profile says of one device of its family."""

    def __init__(self, setup: Setup, device: DeviceModel, profile: Profile, num_devices: int):
        """`device` is without a profile; the cluster has `num_devices`."""
        self._setup, self._device, self.profile = setup, device, profile
        rows = [time.rows for time in profile.times]
        self._last_rows = rows[-1]
        self._curves = {
            (item, direction): Curve(rows, [getattr(time, f"{item}_seconds")[direction] for time in profile.times])
            for item in ITEMS
            for direction in (0, 1)
        }
        self._ratios: dict[tuple[str, int, int], float] = {}
        self.element_seconds: float | None = None
        """Of an update, for each weight that a rank updates; None where it was measured for another number of
        replicas, among which the weights are cut."""
        if profile.update_seconds is not None and profile.replicas == num_devices:
            self.element_seconds = profile.update_seconds / (count_parameters(setup.model) / num_devices)

    def ratio(self, passes: Sequence[ItemPass]) -> float:
        """Return by what the formula's seconds of some passes together are to be multiplied."""
        ratios = [self._ratio(each.item, each.direction, each.rows) for each in passes]
        if len(set(ratios)) == 1:
            return ratios[0]
        dtype, stack = self._setup.dtype, self._setup.stack
        seconds = [each.work.formula_seconds(self._device, dtype, stack) for each in passes]
        return sum(s * ratio for s, ratio in zip(seconds, ratios, strict=True)) / sum(seconds)

    def _ratio(self, item: str, direction: int, rows: int) -> float:
        key = item, direction, rows
        if key not in self._ratios:
            layer = {"embedding": EMBEDDING, "block": BLOCK, "head": self._setup.head}[item]
            cost = layer_cost(self._setup, TensorGrid(), layer, rows)
            work = cost.backward if direction else cost.forward
            formula = work.formula_seconds(self._device, self._setup.dtype, self._setup.stack)
            self._ratios[key] = self._curves[item, direction](rows) / formula
        return self._ratios[key]

    def assumptions(self, tiles: Sequence[Tile]) -> list[str]:
        """Return what of the family's tiles the profile does not say."""
        key, result = f"families.{self._device.name}", []
        if grids := sorted({str(tile.tensor) for tile in tiles if tile.tensor.size > 1}):
            result.append(f"{key}: what tensor grids ({', '.join(grids)}) change of the profiled passes, by formula")
        if any(tile.zero >= 2 for tile in tiles):
            result.append(f"{key}: passes in ZeRO 2 and 3, as profiled in {TIMED_ZERO}")
        if self.profile.work != self._setup.works[-1]:
            profiled = "fused" if self.profile.work.endswith("fused kernels") else "separate"
            result.append(f"{key}: passes with this run's kernels, as profiled with {profiled} ones")
        most = max(-(-tile.rows.size // (tile.tensor.z * tile.row_chunks)) for tile in tiles)
        if most > self._last_rows:
            result.append(f"{key}: {most} rows at once, at the speed of the {self._last_rows} that were profiled")
        if self.element_seconds is None:
            result.append(f"{key}: seconds of updates, by formula")
        return result


def device_models(
    cluster: Cluster, setup: Setup | None = None, efficiencies: Mapping[str, Efficiency] | None = None
) -> dict[str, DeviceModel]:
    """Return the devices of all families, with what profiles of the setup's very work say of them.

    `efficiencies` are by family, in place of the catalogue's. Profiles are of our engine alone.
    """
    fitted = efficiencies or {}
    models = {name: DeviceModel(name, family, fitted.get(name)) for name, family in cluster.families.items()}
    if setup is None:
        return models
    for family, dtype in setup.by_family:
        if family in models:
            models[family] = replace(models[family], computes_in=dtype)
    for family, profile in timed_profiles(cluster, setup).items():
        passes = ProfiledPasses(setup, models[family], profile, cluster.num_devices)
        models[family] = replace(models[family], profiled=passes)
    return models


def timed_profiles(cluster: Cluster, setup: Setup) -> dict[str, Profile]:
    """Return by family the profiles whose times hold for a setup: of its model, positions and dtype."""
    if not cluster.profiles or setup.stack.name != HPCTRAIN.name:
        return {}
    return {p.family: p for work in setup.works for p in cluster.profiles if p.work == work and p.zero == TIMED_ZERO}
