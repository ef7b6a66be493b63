"""Seconds of computing from a profile of the very job, the best source, which corrects the formula. Pure.

A profile (`hpctrain probe --job`) has the seconds of forward and backward passes over the embedding, a block and the
head. They are of one rank alone, for several numbers of rows. On the tensor grid 1 x 1 x 1 these are the seconds. For
other tensor grids, and for parts of a pass, the formula of `planner/prices/cost.py` is corrected. The factor is the
profile over the formula on one rank, at *as many rows of the rank*.

The correction depends on rows, since they are the rows of all products of a pass. A floor of launches, tiles that are
not full, and speed that grows with rows are the same on both sides. The formula knows what a grid changes: how wide
products are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

from hpctrain.architectures.description import Experts
from hpctrain.config.clusters.cluster import Cluster, Profile, RowTimes
from hpctrain.plan.tiling import Tile
from hpctrain.planner.prices.cost import layer_cost
from hpctrain.planner.prices.curves import Curve
from hpctrain.planner.prices.devices import DeviceModel
from hpctrain.planner.prices.efficiency import Efficiency
from hpctrain.planner.prices.setup import Engine, Setup
from hpctrain.planner.prices.work import PassWork
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import EMBEDDING
from hpctrain.sharding.parameters import count_parameters

ITEMS = "embedding", "block", "head"
TIMED_ZERO = 1
"""The ZeRO stage whose times count: its passes have no shards, so the number of replicas does not matter."""


@dataclass(frozen=True)
class ProfiledDevice(DeviceModel):
    """A device whose passes take what the formula says, times what a profile of the job says of the formula."""

    _: KW_ONLY
    setup: Setup

    @property
    def times(self) -> tuple[RowTimes, ...]:
        """Return the seconds of the profile, by ascending rows."""
        return self.profile.times if self.profile else ()

    @cached_property
    def _curves(self) -> dict[tuple[str, int], Curve]:
        rows = [time.rows for time in self.times]
        return {
            (item, direction): Curve(rows, [getattr(time, f"{item}_seconds")[direction] for time in self.times])
            for item in ITEMS
            for direction in (0, 1)
        }

    @cached_property
    def _timed_block(self) -> Interval:
        """Return a block like the one that was timed: with experts where the model has any."""
        kinds, branches = self.setup.block_kinds, self.setup.branches
        return max(kinds, key=lambda block: (isinstance(branches(block)[1], Experts), kinds[block]))

    @cached_property
    def _ratios(self) -> dict[tuple[str, int, int], float]:
        return {}

    def work_seconds(self, work: PassWork, dtype: str, engine: Engine) -> float:
        """Return the formula's seconds, with each pass of the work corrected by its own ratio."""
        formula = super().work_seconds
        ratios = [self._ratio(each.item, each.direction, each.rows) for each in work.passes]
        if len(set(ratios)) <= 1:
            return formula(work, dtype, engine) * (ratios[0] if ratios else 1.0)
        parts = [formula(each.work, dtype, engine) for each in work.passes]
        corrected = sum(seconds * ratio for seconds, ratio in zip(parts, ratios, strict=True))
        return formula(work, dtype, engine) * (corrected / sum(parts))

    def _ratio(self, item: str, direction: int, rows: int) -> float:
        key = item, direction, rows
        if key not in self._ratios:
            layer = {"embedding": EMBEDDING, "block": self._timed_block, "head": self.setup.head}[item]
            cost = layer_cost(self.setup, TensorGrid(), layer, rows)
            work = cost.backward if direction else cost.forward
            formula = super().work_seconds(work, self.setup.dtype, self.setup.engine)
            self._ratios[key] = self._curves[item, direction](rows) / formula
        return self._ratios[key]

    def assumptions(self, tiles: Sequence[Tile]) -> list[str]:
        """Return what of the family's tiles the profile does not say."""
        key, result = f"families.{self.name}", []
        if grids := sorted({str(tile.tensor) for tile in tiles if tile.tensor.size > 1}):
            result.append(f"{key}: what tensor grids ({', '.join(grids)}) change of the profiled passes, by formula")
        if any(tile.zero >= 2 for tile in tiles):
            result.append(f"{key}: passes in ZeRO 2 and 3, as profiled in {TIMED_ZERO}")
        if self.profile and self.profile.work != self.setup.works[-1]:
            profiled = "fused" if self.profile.work.endswith("fused kernels") else "separate"
            result.append(f"{key}: passes with this run's kernels, as profiled with {profiled} ones")
        most = max(-(-tile.rows.size // (tile.tensor.row_parts * tile.row_chunks)) for tile in tiles)
        if most > (last := self.times[-1].rows):
            result.append(f"{key}: {most} rows at once, at the speed of the {last} that were profiled")
        if self.element_seconds is None:
            result.append(f"{key}: seconds of updates, by formula")
        return result


def device_models(
    cluster: Cluster, setup: Setup | None = None, efficiencies: Mapping[str, Efficiency] | None = None
) -> dict[str, DeviceModel]:
    """Return the devices of all families, with what profiles of the setup's very work say of them.

    `efficiencies` are by family, in place of the catalogue's. Profiles are those of `Setup.works`.
    """
    dtypes = dict(setup.by_family) if setup else {}
    profiles = timed_profiles(cluster, setup) if setup else {}
    models: dict[str, DeviceModel] = {}
    for name, family in cluster.families.items():
        known = name, family, (efficiencies or {}).get(name), dtypes.get(name)
        if setup is None or name not in profiles:
            models[name] = DeviceModel(*known)
            continue
        profile, element_seconds = profiles[name], None
        if profile.update_seconds is not None and profile.replicas == cluster.num_devices:  # that cut the weights alike
            element_seconds = profile.update_seconds / (count_parameters(setup.model) / cluster.num_devices)
        models[name] = ProfiledDevice(*known, element_seconds=element_seconds, setup=setup, profile=profile)
    return models


def timed_profiles(cluster: Cluster, setup: Setup) -> dict[str, Profile]:
    """Return by family the profiles whose times hold for a setup: of its model, positions and dtype."""
    if not cluster.profiles:
        return {}
    return {p.family: p for work in setup.works for p in cluster.profiles if p.work == work and p.zero == TIMED_ZERO}
