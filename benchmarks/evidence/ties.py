"""How Megatron and software like it exchange the gradients of a tied embedding, which is on the first and last stage.

hpctrain's ranks that hold it sum as one group. Megatron's sum twice: all replicas of a stage what they hold, the
embedding with the rest, and each replica's first and last stage the embedding between the two of them (Narayanan et al.
2021; DeepSpeed's `_exec_reduce_tied_grads` before `_exec_reduce_grads`). All of these pairs share the NICs.
"""

from dataclasses import replace

from hpctrain.plan.tiling import Tile
from hpctrain.planner.predictor import Predictor
from hpctrain.planner.prices import Sharing


class TiedByPairs(Predictor):
    """A predictor of a plan whose replicas are equal."""

    def _sharings(self) -> tuple[Sharing, ...]:
        return tuple(
            self._by_pairs(sharing) if len({tile.items for tile in sharing.tiles}) > 1 else sharing
            for sharing in super()._sharings()
        )

    def _by_pairs(self, sharing: Sharing) -> Sharing:
        stages: dict[object, list[Tile]] = {}
        for tile in sharing.tiles:
            stages.setdefault(tile.items, []).append(tile)
        ends = list(stages.values())
        (tied,) = (group for group in self._rank_shards(ends[0][0]).shard_groups if group.is_tied)
        num_bytes = self._stored(tied, ends[0][0].tensor.z) * self.setup.gradient_bytes
        pair = tuple(tiles[0].ranks[0] for tiles in ends)
        every = self.network.crowd(tuple(rank for tiles in ends for tile in tiles for rank in tile.ranks))
        between = self.network.group_seconds("all_reduce", num_bytes, pair, every)
        operation = "reduce_scatter" if tied.zero else "all_reduce"
        replicas = (tuple(tile.ranks[0] for tile in tiles) for tiles in ends)
        of_stage = max(self.network.group_seconds(operation, num_bytes, ranks, self._sharers) for ranks in replicas)
        return replace(sharing, reduce_seconds=between + of_stage)
