"""Predicts plans as software of others runs them, with its sends, tied embeddings and interleaved stages. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from hpctrain.config.errors import PlanError
from hpctrain.plan.holdings import Holding, holding_of
from hpctrain.plan.schedule import in_flight
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prediction.activations import layer_kept
from hpctrain.planner.prediction.memory import StageMemory
from hpctrain.planner.prediction.predictor import Prediction, Predictor
from hpctrain.planner.prices.prices import GradientExchange
from hpctrain.software.experts import parts_by_experts
from hpctrain.software.software import SoftwareSetup


class SoftwarePredictor(Predictor):
    """A predictor of a plan that other software runs."""

    setup: SoftwareSetup

    def _waiting_share(self, tile: Tile) -> float:
        return 0.0 if self.setup.engine.blocking_sends else super()._waiting_share(tile)

    def _holding_of(self, rank: int) -> Holding:
        """Return what a rank holds, in the ZeRO stage of its tile, also where holders are of several families. Of those
        that have the rest of a layer alike only every so-manieth has the same experts."""
        setup, grid = self.setup, self.plan.tile_of(rank).tensor
        holding = holding_of(setup.held_model(grid), self.plan, rank, self._bucket_bytes)
        groups = (
            replace(group, zero=min(group.zero, max(self.plan.tile_of(each).zero for each in group.ranks)))
            for group in holding.shard_groups
        )
        step = max(1, setup.expert_parts * setup.expert_cut // grid.size)
        cut = (part for group in groups for part in (parts_by_experts(group, rank, step) if step > 1 else (group,)))
        return replace(holding, shard_groups=tuple(cut))


class TiedByPairs(SoftwarePredictor):
    """A predictor of software like Megatron, which sums the gradients of a tied embedding twice, where our ranks that
    hold it sum as one group. All replicas of a stage sum what they hold, the embedding with the rest. Each replica's
    first and last stage sum the embedding between the two of them (Narayanan et al. 2021; DeepSpeed's
    `_exec_reduce_tied_grads` before `_exec_reduce_grads`). All of these pairs share the NICs. Replicas are equal."""

    def _gradient_exchanges(self) -> tuple[GradientExchange, ...]:
        return tuple(
            self._by_pairs(exchange) if len({tile.items for tile in exchange.tiles}) > 1 else exchange
            for exchange in super()._gradient_exchanges()
        )

    def _by_pairs(self, exchange: GradientExchange) -> GradientExchange:
        stages: dict[object, list[Tile]] = {}
        for tile in exchange.tiles:
            stages.setdefault(tile.items, []).append(tile)
        ends = list(stages.values())
        (tied,) = (group for group in self._holding(ends[0][0]).shard_groups if group.is_tied)
        num_bytes = self._stored(tied, ends[0][0]) * self.setup.gradient_bytes
        pair = tuple(tiles[0].ranks[0] for tiles in ends)
        every = self.network.concurrent(tuple(rank for tiles in ends for tile in tiles for rank in tile.ranks))
        between = self.network.holder_seconds("all_reduce", num_bytes, pair, every)
        operation = "reduce_scatter" if tied.zero else "all_reduce"
        replicas = (tuple(tile.ranks[0] for tile in tiles) for tiles in ends)
        of_stage = max(self.network.holder_seconds(operation, num_bytes, ranks, self._sharers) for ranks in replicas)
        return replace(exchange, reduce_seconds=between + of_stage)


def uneven_seconds(predictor: Predictor, prediction: Prediction) -> float:
    """Return how long ranks wait in the mean because their stage does less than the slowest, which is no bubble."""
    parts = prediction.breakdown_seconds
    slowest = max(cost.seconds for cost in predictor.costs.tiles.values())
    return max(0.0, slowest * predictor.plan.microbatches - parts["compute"] - parts["tensor"])


def interleaved(
    prediction: Prediction, plan: Plan, virtual_stages: int, setup: SoftwareSetup, uneven_seconds: float = 0.0
) -> Prediction:
    """Return a prediction where ranks have so many virtual stages: the bubble is as many times shorter (Narayanan et
    al. 2021), but for what ranks wait for the slowest stage. Raises as `interleaved_memory`."""
    breakdown, exposed = dict(prediction.breakdown_seconds), dict(prediction.exposed_seconds)
    saved = max(0.0, breakdown["bubble"] - uneven_seconds) * (1 - 1 / virtual_stages)
    breakdown["bubble"] -= saved
    exposed["pipeline"] -= saved
    share = 1 - saved / prediction.step_seconds
    low, high = prediction.interval_seconds
    return replace(
        prediction,
        step_seconds=prediction.step_seconds * share,
        interval_seconds=(low * share, high * share),
        breakdown_seconds=breakdown,
        exposed_seconds=exposed,
        memory=interleaved_memory(prediction.memory, plan, virtual_stages, setup),
        tokens_per_second=prediction.tokens_per_second / share,
        mfu=prediction.mfu / share,
    )


def interleaved_memory(
    memory: Sequence[StageMemory], plan: Plan, virtual_stages: int, setup: SoftwareSetup
) -> tuple[StageMemory, ...]:
    """Return what ranks with so many virtual stages need (Korthikanti et al. 2022, section 4.2.3).

    With v virtual stages, a rank of p stages, d before the loss, keeps ((v - 1) p + 1 + 2 d) / v microbatches: those
    of Megatron-LM's warm-up. Logits of one microbatch exist at once. Raises PlanError where the plan has too few blocks
    for so many.
    """
    stages, num_layers = max(plan.path_length(tile) for tile in plan.tiles), plan.tiles[-1].items.stop // 2 + 1
    if stages < 2 or stages * virtual_stages > num_layers:
        raise PlanError(
            f"interleave = {virtual_stages} of {stages} stages: there must be two stages, and no more virtual stages,"
            f" here {stages * virtual_stages}, than the model has layers with its ends, {num_layers}"
        )

    def interleaved(stage: StageMemory) -> StageMemory:
        tile, depth = stage.tile, plan.depth_to_loss(stage.tile)
        kept = min(plan.microbatches, ((virtual_stages - 1) * stages + 1 + 2 * depth) / virtual_stages)
        rows = tile.rank_rows
        of_head = 0.0 if depth else rows * layer_kept(setup, tile.tensor, setup.head, tile.recompute, rows)
        activations = of_head + (stage.memory.activations - of_head) * kept / in_flight(plan, tile)
        return replace(stage, memory=replace(stage.memory, activations=int(activations)))

    return tuple(map(interleaved, memory))
