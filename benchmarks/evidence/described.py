"""Other people's training runs, in the words of their papers, as a setup, a plan and a cluster of ours.

For judging the predictor by published measurements: 1D tensor parallelism with or without sequence parallelism, a
pipeline with interleaving, replicas, full, selective or no recomputing, a distributed optimizer or not, FSDP.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks.evidence.layers import LayeredPredictor, LayerTimes
from benchmarks.evidence.stacks import ROWS_FIRST, STACKS, Software
from hpctrain.config.bounds import MOST_LAYERS, MOST_RANKS, MOST_SEQUENCES, MOST_WIDTH
from hpctrain.config.clusters.cluster import ITEM_BYTES, Cluster, Fabric, Nic, Nodes
from hpctrain.config.clusters.device_catalogue import ACCELERATORS, LINK_LATENCY_SECONDS, NETWORKS
from hpctrain.config.errors import PlanError, did_you_mean
from hpctrain.config.job import Model
from hpctrain.plan.schedule import in_flight
from hpctrain.plan.tiling import Plan, Tile, even_plan
from hpctrain.planner.prediction.activations import layer_kept
from hpctrain.planner.prediction.memory import StageMemory
from hpctrain.planner.prediction.predictor import Prediction, Predictor
from hpctrain.planner.prices.efficiency import Efficiency, efficiency_of
from hpctrain.planner.prices.prices import GradientExchange
from hpctrain.planner.prices.setup import Setup
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import layers

BUCKET_BYTES = 25 << 20
"""Of gradients that torch's DistributedDataParallel sums at once."""


@dataclass(frozen=True)
class DescribedRun:
    """A run as a paper tells it. `accelerator` and `network` are names of
    `hpctrain.config.clusters.device_catalogue`."""

    hidden: int
    layers: int
    heads: int
    positions: int
    tensor: int
    pipeline: int
    data: int
    microbatch: int
    global_batch: int
    accelerator: str
    vocabulary: int = 51200
    ffn: int | None = None
    devices_per_node: int = 8
    network: str = "HDR"
    nics_per_node: int | None = None
    """That a node's devices share; None: one for each."""
    nic_bytes_per_second: float | None = None
    """Of one NIC, where it is told; else the network's."""
    latency_seconds: float | None = None
    """Of a message between nodes, where it is told; else the network's."""
    link_bytes_per_second: float | None = None
    """Between devices of a node, where it is told; else the data sheet's."""
    dtype: str = "fp16"
    linear_dtype: str | None = None
    """Of linear layers of blocks, where it is another one: fp8."""
    recompute: str = "none"
    sequence_parallel: bool = False
    context: int = 1
    """How many ranks cut the positions of a row; what they exchange of keys and values is hidden by attention."""
    zero: int = 0
    """1: a distributed optimizer; 3: weights come, and their gradients go, beside what is computed (FSDP)."""
    interleave: int = 1
    stack: str = "megatron-lm"
    architecture: str = "gpt2"
    kv_heads: int | None = None
    tie_head: bool = True
    stages: tuple[int, ...] = ()
    """How many items each stage has; left out: blocks cut evenly."""
    gpipe: bool = False
    """Whether all forward passes of a step come before the first backward pass (GPipe)."""
    overlapped: bool = False
    """Whether gradients, kept in half precision, are summed beside the last backward pass, in torch's buckets."""
    overlaps_tensor: bool = False
    """Whether collectives of the tensor grid are overlapped with products (Transformer Engine's user buffers)."""
    kept_inner: float | None = None
    """In place of the stack's, where the model's activation function is another one."""
    cuda_graphs: bool = False
    """Whether the host starts whole passes as graphs, so that no operation waits for it."""
    blocking_launches: bool = False
    """Whether the host waits for each operation before it starts the next (`CUDA_LAUNCH_BLOCKING`)."""

    def __post_init__(self):
        for name, known in (("accelerator", ACCELERATORS), ("network", NETWORKS), ("stack", STACKS)):
            if getattr(self, name) not in known:
                raise PlanError(f"no {name} '{getattr(self, name)}'{did_you_mean(getattr(self, name), known)}")
        for name, most in (("hidden", MOST_WIDTH), ("layers", MOST_LAYERS), ("global_batch", MOST_SEQUENCES)):
            if getattr(self, name) > most:
                raise PlanError(f"{name} = {getattr(self, name):,} is more than {most:,}; is it a slip of the finger?")
        if self.num_devices > MOST_RANKS:
            raise PlanError(
                f"tensor x pipeline x data x context are {self.num_devices:,} devices, and the most is {MOST_RANKS:,}"
            )
        if self.zero == 3 and self.overlapped:
            raise PlanError("`overlapped` is of gradients that are summed once; with zero = 3 all exchanges are beside")
        if self.global_batch % (self.data * self.microbatch):
            raise PlanError(
                f"a global batch of {self.global_batch} is not divisible by data {self.data} x microbatch"
                f" {self.microbatch}"
            )

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def weight_holders(self) -> int:
        """Return how many ranks have the same weights, or a part of them each: replicas, and parts of their rows."""
        return self.data * self.context

    @cached_property
    def model(self) -> Model:
        return Model(
            architecture=self.architecture,
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            ffn_size=self.ffn,
            vocab_size=self.vocabulary,
            max_positions=self.positions,
            tie_head=self.tie_head,
        )

    def setup(self, stack: Software | None = None) -> Setup:
        """Return what is trained; `stack` in place of the named one, for fitting its constants."""
        stack = stack or STACKS[self.stack]
        kept = stack.kept_inner if self.kept_inner is None else self.kept_inner
        cut = self.sequence_parallel or stack.sequence_parallel
        stack = replace(stack, sequence_parallel=cut, scatters_sums=cut, kept_inner=kept, tensor_slowdown=1.0)
        if self.cuda_graphs:
            stack = replace(stack, dispatch_seconds=0.0)
        if self.overlapped:
            size = ITEM_BYTES[self.dtype]
            stack = replace(stack, own_gradient_bytes=size, kept_gradient_bytes={self.dtype: size}, sums_in_place=False)
        bucket_bytes = BUCKET_BYTES if self.overlapped else None
        overlaps = frozenset({"z"} if self.zero == 3 else ()) | (
            frozenset({"tensor"}) if self.overlaps_tensor else frozenset()
        )
        parts = self.tensor if self.overlaps_tensor else 1
        return Setup(
            self.model,
            self.positions // self.context,
            self.dtype,
            stack,
            overlaps,
            bucket_bytes=bucket_bytes,
            linear_dtype=self.linear_dtype,
            context_parts=self.context,
            tensor_parts=parts,
        )

    @cached_property
    def plan(self) -> Plan:
        """Return the plan: even, but for `stages`; raises PlanError as `even_plan` does.

        Replicas that share all of their weights (ZeRO 3) are the z of the tensor grids.
        """
        z, data = (self.weight_holders, 1) if self.zero == 3 else (1, self.weight_holders)
        plan = even_plan(
            self.model.num_items,
            TensorGrid(y=self.tensor, z=z, sequence_parallel=self.sequence_parallel and self.stack in ROWS_FIRST),
            self.pipeline,
            data,
            self.global_batch // self.data // self.microbatch,
            self.microbatch * self.weight_holders,
            family=self.accelerator,
            recompute=self.recompute,
            zero=0 if self.zero == 3 else self.zero,
        )
        if self.gpipe:
            warm_ups = ((tile, plan.microbatches - 1 - plan.depth_to_loss(tile)) for tile in plan.tiles)
            plan = replace(plan, tiles=tuple(replace(tile, extra_warmup=max(0, extra)) for tile, extra in warm_ups))
        if not self.stages:
            return plan
        every = layers(Interval(0, self.model.num_items))
        if len(self.stages) != self.pipeline or sum(self.stages) != len(every):
            raise PlanError(
                f"stages = {list(self.stages)} are not {self.pipeline} stages of together {len(every)} layers, with the"
                " embedding and the head"
            )
        stops = [every[stop - 1].stop for stop in itertools.accumulate(self.stages)]
        cuts = [Interval(*pair) for pair in itertools.pairwise([0, *stops])]
        tiles = (replace(tile, items=cuts[i // data]) for i, tile in enumerate(plan.tiles))
        return replace(plan, tiles=tuple(tiles))

    @cached_property
    def cluster(self) -> Cluster:
        """Return as many nodes as are needed. What their software reserves is known to the stack, not to the device."""
        accelerator, network = ACCELERATORS[self.accelerator], NETWORKS[self.network]
        per_node = min(self.devices_per_node, self.num_devices)
        latency = self.latency_seconds or network.latency_seconds
        nic = Nic(
            origin="datasheet",
            fabric=self.network,
            count=self.nics_per_node or per_node,
            send_bytes_per_second=self.nic_bytes_per_second or network.bytes_per_second,
            receive_bytes_per_second=self.nic_bytes_per_second or network.bytes_per_second,
        )
        nodes = Nodes(
            origin="datasheet",
            count=-(-self.num_devices // per_node),
            devices={self.accelerator: per_node},
            link_latency_seconds=LINK_LATENCY_SECONDS,
            link_bytes_per_second=self.link_bytes_per_second or accelerator.link_bytes_per_second,
            nics=(nic,),
        )
        return Cluster(
            families={self.accelerator: accelerator.family(self.accelerator, reserved_bytes=0)},
            fabrics={self.network: Fabric(origin="datasheet", latency_seconds=latency)},
            nodes=(nodes,),
        )

    def predict(
        self,
        stack: Software | None = None,
        efficiency: Efficiency | None = None,
        layers: LayerTimes | None = None,
    ) -> Prediction:
        """Predict a step; `stack` and `efficiency` are for fitting, `layers` are in place of a data sheet."""
        predictor = self._predictor(stack, efficiency, layers)
        prediction = predictor.predict()
        if self.interleave == 1:
            return prediction
        uneven_seconds = _uneven_seconds(predictor, prediction)
        return interleaved(prediction, self.plan, self.interleave, predictor.setup, uneven_seconds)

    def memory(self, stack: Software | None = None) -> tuple[StageMemory, ...]:
        """Return what ranks need, without simulating a step."""
        memory = self._predictor(stack, None, None).memory
        if self.interleave == 1:
            return memory
        return interleaved_memory(memory, self.plan, self.interleave, self.setup(stack))

    def _predictor(self, stack: Software | None, efficiency: Efficiency | None, layers: LayerTimes | None) -> Predictor:
        setup = self.setup(stack)
        if self.blocking_launches:
            known = efficiency or efficiency_of(ACCELERATORS[self.accelerator].kind, self.accelerator)
            efficiency = replace(known, launch_seconds=known.launch_seconds + setup.stack.dispatch_seconds)
        efficiencies = {self.accelerator: efficiency} if efficiency else {}
        arguments = setup, self.plan, self.cluster, efficiencies
        if layers:
            return LayeredPredictor(layers, *arguments)
        return predictor_of(self)(*arguments)


class TiedByPairs(Predictor):
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
        between = self.network.group_seconds("all_reduce", num_bytes, pair, every)
        operation = "reduce_scatter" if tied.zero else "all_reduce"
        replicas = (tuple(tile.ranks[0] for tile in tiles) for tiles in ends)
        of_stage = max(self.network.group_seconds(operation, num_bytes, ranks, self._sharers) for ranks in replicas)
        return replace(exchange, reduce_seconds=between + of_stage)


def predictor_of(run: DescribedRun) -> type[Predictor]:
    """Return what predicts a run: Megatron and its like exchange a tied embedding in their own order."""
    is_tied = run.tie_head and run.pipeline > 1 and run.zero < 2
    return TiedByPairs if is_tied and run.stack.startswith("megatron") else Predictor


def _uneven_seconds(predictor: Predictor, prediction: Prediction) -> float:
    """Return how long ranks wait in the mean because their stage does less than the slowest, which is no bubble."""
    parts = prediction.breakdown_seconds
    slowest = max(cost.seconds for cost in predictor.costs.tiles.values())
    return max(0.0, slowest * predictor.plan.microbatches - parts["compute"] - parts["tensor"])


def interleaved(
    prediction: Prediction, plan: Plan, virtual_stages: int, setup: Setup, uneven_seconds: float = 0.0
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
    memory: Sequence[StageMemory], plan: Plan, virtual_stages: int, setup: Setup
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


@dataclass(frozen=True)
class Outcome:
    """What is predicted of a run."""

    step_seconds: float
    memory_bytes: float
    """Of the rank that needs the most."""
    fits: bool
    """Whether every rank has enough memory."""


def predict_run(run: DescribedRun) -> Outcome:
    """Predict one step of a run: its seconds, and the bytes of the rank that needs the most.

    Raises PlanError where the layout does not go with the model.
    """
    prediction = run.predict()
    return Outcome(prediction.step_seconds, max(stage.memory.total for stage in prediction.memory), prediction.fits)
