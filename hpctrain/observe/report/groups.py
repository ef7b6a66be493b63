"""Equal tiles of a plan as one line of a picture: what ranks are, in words that fit."""

from dataclasses import dataclass

from hpctrain.observe.report.record import RunRecord
from hpctrain.plan.draw import ranges
from hpctrain.plan.tiling import Tile

MOST_GROUPS = 24
"""Lines of a picture; of more groups the first are shown, and the rest is said to be left out."""


@dataclass(frozen=True)
class TileGroup:
    """The tensor grids of a plan that have equal work."""

    tiles: tuple[Tile, ...]
    ranks: tuple[int, ...]

    @property
    def tile(self) -> Tile:
        return self.tiles[0]

    @property
    def label(self) -> str:
        """What it computes."""
        return f"items {self.tile.items.start}-{self.tile.items.stop - 1}"

    @property
    def who(self) -> str:
        """Which ranks, of what family."""
        return f"{self.tile.family}, {name_ranks(self.ranks)}"


def name_ranks(ranks: tuple[int, ...]) -> str:
    """Return `rank 3`, `ranks 0-3,8`, or their number where that is long."""
    text = ranges(ranks)
    if len(text) > 18:
        return f"{len(ranks):,} ranks"
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def groups_of(run: RunRecord) -> list[TileGroup]:
    """Return the groups of a run's plan, in the order of items and then of the tiles."""
    plan = run.plan
    groups: dict[tuple, list[Tile]] = {}
    for tile in plan.first_tiles:
        every = tuple((t.items, t.rows.size) for t in plan.virtual_stages(tile))
        groups.setdefault((every, tile.family, tile.tensor, tile.recompute, tile.offload), []).append(tile)
    made = [TileGroup(tuple(tiles), tuple(sorted(r for t in tiles for r in t.ranks))) for tiles in groups.values()]
    return sorted(made, key=lambda group: (group.tile.items, group.ranks))


def families_of(run: RunRecord) -> dict[str, str]:
    """Return the fill class of each family, in the order of the cluster file; of others that tiles name, after them."""
    names = dict.fromkeys([*run.cluster.families, *(tile.family for tile in run.plan.tiles)])
    return {name: f"f{number % 8}" for number, name in enumerate(names)}
