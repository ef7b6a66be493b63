"""Training runs of other software, in the words of their papers and launch lines, as a setup, a plan and a cluster.

They have 1D tensor parallelism with or without sequence parallelism, a pipeline with interleaving, replicas, full,
selective or no recomputing, a distributed optimizer or not, FSDP.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hpctrain.config.bounds import MOST_LAYERS, MOST_RANKS, MOST_SEQUENCES, MOST_WIDTH
from hpctrain.config.clusters.cluster import ITEM_BYTES, Cluster, Fabric, Nic, Nodes
from hpctrain.config.clusters.device_catalogue import ACCELERATORS, LINK_LATENCY_SECONDS, NETWORKS
from hpctrain.config.errors import PlanError, did_you_mean
from hpctrain.config.job import Model
from hpctrain.plan.tiling import Plan, even_plan
from hpctrain.planner.prediction.memory import StageMemory
from hpctrain.planner.prediction.predictor import Prediction
from hpctrain.planner.prices.efficiency import Efficiency, efficiency_of
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import layers
from hpctrain.software.deepspeed import DEEPSPEED, EAGER
from hpctrain.software.megatron import MEGATRON, MEGATRON_2020, MEGATRON_CORE, MEGATRON_CORE_2024
from hpctrain.software.predictor import SoftwarePredictor, TiedByPairs, interleaved, interleaved_memory, uneven_seconds
from hpctrain.software.software import EXPERT_RANKS, SoftwareSetup, SoftwareVersion
from hpctrain.software.torch_fsdp import COMPOSER, COMPOSER_PURE, FSDP, FSDP_COMPILED, FSDP_COMPILED_LOSS, TORCH_FLASH

_TORCH = EAGER, TORCH_FLASH, FSDP, FSDP_COMPILED, FSDP_COMPILED_LOSS, COMPOSER, COMPOSER_PURE
STACKS = {each.name: each for each in (MEGATRON_2020, MEGATRON, DEEPSPEED, MEGATRON_CORE, MEGATRON_CORE_2024, *_TORCH)}
"""The software of others by name."""

BUCKET_BYTES = 25 << 20
"""Bytes of gradients that torch's DistributedDataParallel sums at once."""


@dataclass(frozen=True)
class DescribedRun:
    """A run as its paper describes it. `accelerator` and `network` are names of
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
    sequence_parallel: bool | None = None
    """Whether norms and residuals are cut over the tensor grid; None: as the software does."""
    context: int = 1
    """How many ranks cut the positions of a row; what they exchange of keys and values is hidden by attention."""
    zero: int = 0
    """1: a distributed optimizer; 3: weights come, and their gradients go, beside what is computed (FSDP)."""
    replicas: int = 1
    """With zero = 3 how many groups of ranks have all shards of the weights each (FSDP's hybrid shards)."""
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
    gradient_bytes: int | None = None
    """Of a weight's gradient as it is kept and exchanged, where it is told; else the software's."""
    optimizer_bytes: float | None = None
    """Of the optimizer's state for a weight, masters included, where it is told; else of fp32."""
    exposes_gathers: bool = False
    """Whether weights are gathered at the end of a step, while nothing computes, though gradients are overlapped."""
    overlaps_tensor: bool = False
    """Whether collectives of the tensor grid are overlapped with products (Transformer Engine's user buffers)."""
    kept_inner: float | None = None
    """In place of the stack's, where the model's activation function is another one."""
    cuda_graphs: bool = False
    """Whether the host starts whole passes as graphs, so that no operation waits for it."""
    blocking_launches: bool = False
    """Whether the host waits for each operation before it starts the next (`CUDA_LAUNCH_BLOCKING`)."""
    gradient_dtype: str | None = None
    """The dtype of gradients that are `overlapped`; None: the run's."""
    head_size: int | None = None
    """Features of a head; None: hidden / heads."""
    num_experts: int | None = None
    """Experts of a layer; None: it has none."""
    experts_per_token: int | None = None
    expert_size: int | None = None
    """Inner features of an expert; None: ffn."""
    expert_parallel: int = 1
    """How many ranks of a stage have different experts of a layer, and send each other their tokens."""
    expert_tensor: int = 1
    """How many ranks cut each of these experts."""
    dispatches_once: bool = False
    """Whether a token goes to a rank, and to a node, once, however many of its experts are there (DeepEP, HybridEP)."""
    fuses_experts: bool = False
    """Whether the products of experts are one operation with the activation and casts (cuDNN's grouped kernels)."""
    overlaps_experts: bool = False
    """Whether what experts exchange is overlapped with products of another microbatch."""
    window: int | None = None
    """Positions that a token attends to in layers with a window."""
    global_every: int | None = None
    """Every so-manieth layer has no window."""
    machine: Cluster | None = None
    """A cluster that is given whole, in place of the words for accelerator, node and network."""

    def __post_init__(self):
        for name, known in (("accelerator", ACCELERATORS), ("network", NETWORKS), ("stack", STACKS)):
            if getattr(self, name) not in known and (self.machine is None or name == "stack"):
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
        own, ranks = self.expert_parallel * self.expert_tensor, self.num_devices // self.pipeline
        is_shared = own > 1 and (self.num_experts is None or ranks % own or self.zero == 3)
        if is_shared or (self.num_experts and own % self.tensor):
            raise PlanError(
                f"expert_parallel {self.expert_parallel} x expert_tensor {self.expert_tensor} must be a multiple of"
                f" tensor = {self.tensor} that divides the {ranks} devices of a stage; above 1 they need num_experts,"
                " and not zero = 3"
            )
        if self.global_batch % (self.data * self.microbatch):
            raise PlanError(
                f"a global batch of {self.global_batch} is not divisible by data {self.data} x microbatch"
                f" {self.microbatch}; make it a multiple of {self.data * self.microbatch}"
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
            head_size=self.head_size,
            ffn_size=self.ffn,
            vocab_size=self.vocabulary,
            max_positions=self.positions,
            tie_head=self.tie_head,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            expert_size=self.expert_size,
            window=self.window,
            global_every=self.global_every,
        )

    def setup(self, stack: SoftwareVersion | None = None) -> SoftwareSetup:
        """Return what is trained; `stack` in place of the named one, for fitting its constants."""
        stack = stack or STACKS[self.stack]
        kept = stack.kept_inner if self.kept_inner is None else self.kept_inner
        cut = stack.sequence_parallel if self.sequence_parallel is None else self.sequence_parallel
        stack = replace(stack, sequence_parallel=cut, kept_inner=kept)
        if self.gradient_bytes:
            kept = {self.dtype: self.gradient_bytes}
            stack = replace(stack, own_gradient_bytes=self.gradient_bytes, kept_gradient_bytes=kept)
        stack = replace(stack, optimizer_bytes=self.optimizer_bytes)
        if self.cuda_graphs:
            stack = replace(stack, dispatch_seconds=0.0)
        if self.overlapped:
            size = ITEM_BYTES[self.gradient_dtype or self.dtype]
            stack = replace(stack, own_gradient_bytes=size, kept_gradient_bytes={self.dtype: size}, sums_in_place=False)
        bucket_bytes = BUCKET_BYTES if self.overlapped else None
        switches = {"z": self.zero == 3, "tensor": self.overlaps_tensor, EXPERT_RANKS: self.overlaps_experts}
        overlaps = frozenset(name for name, is_on in switches.items() if is_on)
        parts = self.tensor if self.overlaps_tensor else 1
        return SoftwareSetup(
            self.model,
            self.positions // self.context,
            self.dtype,
            stack,
            overlaps,
            bucket_bytes=bucket_bytes,
            gathers_early=not self.exposes_gathers,
            linear_dtype=self.linear_dtype,
            context_shares=(1,) * self.context,
            tensor_parts=parts,
            expert_spread=0.0,  # published runs balance the load by force
            expert_parts=self.expert_parallel,
            expert_cut=self.expert_tensor,
            dispatches_once=self.dispatches_once,
            fuses_experts=self.fuses_experts,
        )

    @cached_property
    def plan(self) -> Plan:
        """Return the plan: even, but for `stages`; raises PlanError as `even_plan` does.

        Replicas that share all of their weights (ZeRO 3) are the z of the tensor grids.
        """
        z = self.weight_holders // self.replicas if self.zero == 3 else 1
        data = self.weight_holders // z
        plan = even_plan(
            self.model.num_items,
            TensorGrid(
                y=self.tensor, z=z, sequence_parallel=bool(self.sequence_parallel) and STACKS[self.stack].rows_first
            ),
            self.pipeline,
            data,
            self.global_batch // self.data // self.microbatch,
            self.microbatch * self.weight_holders,
            family=self.accelerator,
            recompute=self.recompute,
            zero=0 if self.zero == 3 else self.zero,
        )
        if self.machine:
            kinds = [device.family for device in self.machine.devices]
            names = ("+".join(dict.fromkeys(kinds[rank] for rank in tile.ranks)) for tile in plan.tiles)
            plan = replace(plan, tiles=tuple(map(lambda tile, name: replace(tile, family=name), plan.tiles, names)))
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
        """Return the machine for other software: what that reserves is known to the stack, not to the device."""
        families = {n: f.model_copy(update={"reserved_bytes": 0}) for n, f in self.own_cluster.families.items()}
        return self.own_cluster.model_copy(update={"families": families, "profiles": ()})

    @cached_property
    def own_cluster(self) -> Cluster:
        """Return the machine for our own engine, or as many nodes as are needed."""
        if self.machine:
            return self.machine
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
            fully_connected=accelerator.fully_connected and not self.link_bytes_per_second,
            nics=(nic,),
        )
        return Cluster(
            families={self.accelerator: accelerator.family(self.accelerator)},
            fabrics={self.network: Fabric(origin="datasheet", latency_seconds=latency)},
            nodes=(nodes,),
        )

    def predict(
        self,
        stack: SoftwareVersion | None = None,
        efficiency: Efficiency | None = None,
        make: Callable[..., SoftwarePredictor] | None = None,
    ) -> Prediction:
        """Predict a step; `stack` and `efficiency` are for fitting, `make` is in place of the predictor's class."""
        predictor = self.predictor(stack, efficiency, make)
        prediction = predictor.predict()
        if self.interleave == 1:
            return prediction
        uneven = uneven_seconds(predictor, prediction)
        return interleaved(prediction, self.plan, self.interleave, predictor.setup, uneven)

    def memory(self, stack: SoftwareVersion | None = None) -> tuple[StageMemory, ...]:
        """Return what ranks need, without simulating a step."""
        memory = self.predictor(stack).memory
        if self.interleave == 1:
            return memory
        return interleaved_memory(memory, self.plan, self.interleave, self.setup(stack))

    def predictor(
        self,
        stack: SoftwareVersion | None = None,
        efficiency: Efficiency | None = None,
        make: Callable[..., SoftwarePredictor] | None = None,
    ) -> SoftwarePredictor:
        """Return what predicts the plan of one stage a rank; the arguments are those of `predict`."""
        setup = self.setup(stack)
        if self.blocking_launches:
            known = efficiency or efficiency_of(ACCELERATORS[self.accelerator].kind, self.accelerator)
            efficiency = replace(known, launch_seconds=known.launch_seconds + setup.engine.dispatch_seconds)
        is_tied = self.tie_head and self.pipeline > 1 and self.zero < 2
        make = make or (TiedByPairs if is_tied and setup.engine.ties_by_pairs else SoftwarePredictor)
        return make(setup, self.plan, self.cluster, {self.accelerator: efficiency} if efficiency else {})


def cut_layers(num_layers: int, num_parts: int, first: int = 1, last: int = 1) -> list[int]:
    """Return how many layers of a model, with embedding and head, each virtual stage has where these are about equal.

    `first` and `last` are what embedding and head count as (torchtitan, `generate_llm_fqn_per_model_part`; Megatron-LM,
    `--account-for-embedding-in-pipeline-split`). Raises PlanError for a stage without layers.
    """
    each, more = divmod(num_layers + first + last, num_parts)
    parts = [each + (number < more) for number in range(num_parts)]
    if each < max(first, last, 1):
        raise PlanError(f"{num_layers} blocks in {num_parts} stages leave one with {each} layers; use fewer stages")
    parts[0] += 1 - first
    parts[-1] += 1 - last
    return parts


def stages_of(parts: Sequence[int], pipeline: int) -> tuple[int, ...]:
    """Return the layers of each rank of a pipeline, of all its virtual stages together."""
    return tuple(sum(parts[rank::pipeline]) for rank in range(pipeline))
