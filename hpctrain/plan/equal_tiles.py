"""Groups of a plan's tensor grids that have equal work: reports and samples have one line for each group."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.plan.draw import ranges
from hpctrain.plan.tiling import Plan, Tile


@dataclass(frozen=True)
class TileGroup:
    """Tensor grids with equal work, by the first tile of each."""

    tiles: tuple[Tile, ...]
    ranks: tuple[int, ...]

    @property
    def tile(self) -> Tile:
        return self.tiles[0]

    def describe(self, ranks: Sequence[int] | None = None) -> str:
        """Say what is computed, by which family and ranks; these are all of the group, unless some are given."""
        ranks = tuple(sorted(ranks or self.ranks))
        text = ranges(ranks)
        who = f"{len(ranks):,} ranks" if len(text) > 18 else f"rank{'s' * (len(ranks) > 1)} {text}"
        return f"items {self.tile.items.start}-{self.tile.items.stop - 1} · {self.tile.family}, {who}"


def tile_groups(plan: Plan) -> list[TileGroup]:
    """Return the groups of equal tiles, in the order of items and then of the tiles."""
    groups: dict[tuple[Tile, ...], list[Tile]] = {}
    for tile in plan.first_tiles:
        groups.setdefault(tuple(plan.equal_work[each] for each in plan.virtual_stages(tile)), []).append(tile)
    equal = [TileGroup(tuple(tiles), tuple(sorted(r for t in tiles for r in t.ranks))) for tiles in groups.values()]
    return sorted(equal, key=lambda group: (group.tile.items, group.ranks))
