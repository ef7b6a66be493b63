"""The record of what a training software of others does differently from our engine, and a setup that follows it.

The functions of the planner that price our engine are asked for others too: those that differ have an answer for a
`SoftwareSetup` here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from hpctrain.architectures.description import Attention, Experts, Mlp
from hpctrain.config.clusters.cluster import ITEM_BYTES, Cluster
from hpctrain.config.job import Model
from hpctrain.config.training.optimizers import Shape
from hpctrain.plan.holdings import Holding
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prediction.activations import STATISTIC_BYTES, branch_kept, mask_bytes
from hpctrain.planner.prediction.memory import MemoryParts, State, memory_of, state_of
from hpctrain.planner.prices.cost import computed_again, heads_on
from hpctrain.planner.prices.setup import GRADIENT_BYTES, MASTER_BYTES, Engine, Setup
from hpctrain.planner.prices.work import MatrixProduct, PassWork
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.software.nccl import NcclNetwork

CONTEXT_BYTES, NCCL_BYTES = 0.6e9, 0.23e9
"""Bytes of a device that CUDA's context and kernels take; and those of a communicator of NCCL. That has in each of 24
channels what a ring comes into, 4 MiB, and 5.2 MiB for the two protocols of small messages (NCCL src/init.cc,
DEFAULT_BUFFSIZE and its like)."""
NCCL_BUFFER_BYTES = 2**21
"""Bytes of a message to another node that NCCL holds: 2 channels, 8 slots each, chunks of 128 KiB (graph/paths.cc)."""
EXPERT_RANKS = "experts"
"""The group of ranks that have different experts of a layer, each with tokens of its own."""
FITTED = ("dispatch_seconds", "link_share", "reserved_bytes")
"""The fields of a `SoftwareVersion` that are fitted to published runs; the others are facts of its source."""


@dataclass(frozen=True)
class SoftwareVersion(Engine):
    """A version of a training software of others: what its source and its authors say, and what is fitted (`FITTED`).

    Two facts that nobody publishes are read off runs: how fast Composer's attention is, and what Megatron-DeepSpeed
    loses of a device's memory.
    """

    since: str = ""
    """Version or month from which on the software is like this."""
    rows_first: bool = False
    """Whether hidden states have rows first, as ours: gathered positions of several rows are put in order. Megatron's
    have positions first."""
    sequence_parallel: bool = False
    """Whether norms and residuals are cut over y, also where the tensor grid does not say so."""
    vocabulary_multiple: int = 1
    """Multiple to which the vocabulary ids of a rank of y are padded."""
    ties_by_pairs: bool = False
    """Whether the two stages of each replica that hold a tied embedding sum its gradients before replicas do."""
    own_gradient_bytes: int = GRADIENT_BYTES
    """Of a gradient that replicas exchange."""
    plain_gradients: tuple[str, ...] = ()
    """Dtypes whose gradients replicas exchange as they are."""
    residual_bytes: int | None = None
    """Of a number of the residual stream, and of a weight that comes over z; None: of a number of the run's dtype."""
    dropped: frozenset[str] = frozenset()
    """Whose results `selective` recomputing drops and computes again too: of "keys", of attention's "output", of the
    "gate" of a feed-forward part."""
    keeps_outputs: bool = False
    """Whether `selective` recomputing keeps what a feed-forward part adds to the residual stream, needlessly."""
    kept_inner: float = 2.0
    """Of the inner features of a block without a gate, how many copies are kept: what the activation function and what
    the product after it need. ReLU's own result is both."""
    dropped_scores: bool = True
    """Whether attention drops scores, and so keeps them twice, and a mask."""
    sums_in_place: bool = False
    """Whether a distributed optimizer updates from the very gradients that it has summed, not from a copy of them."""
    copies_for_update: bool = False
    """Whether that copy is there only while weights are updated, when activations are gone."""
    keeps_fp8: bool = False
    """Whether products in fp8 keep their inputs in it for the backward pass."""
    stores_halves: bool = True
    """Whether weights in half precision are stored with their fp32 masters, not cast anew for each use."""
    kept_gradient_bytes: Mapping[str, int] = field(default_factory=dict)
    """Of a weight's gradient, all copies of it together, by dtype; one in fp32 where nothing is said. What ZeRO 1 sums
    into is stored with them."""
    optimizer_bytes: float | None = None
    """Of the optimizer's state for a weight, masters included, where they are not those of fp32."""
    blocking_sends: bool = False
    """Whether messages between stages go through the stream that computes."""
    buffered_bytes: float = 0.0
    """Of such a message, how much is held by the library that sends it: for this much the sender does not wait."""
    link_share: float = 1.0
    """Of what a link gives its collectives."""
    socket_share: float = 1.0
    """The same of links of sockets."""
    reserved_bytes: float = 0.0
    """Of a device's memory that its libraries take before there is a model."""
    communicator_bytes: float = 0.0
    """That buffers of each communicator take."""
    overhead_share: float = 0.0
    """Of a device's memory that its buffers take, and its allocator cannot use."""


@dataclass(frozen=True)
class SoftwareSetup(Setup):
    """A setup whose `engine` is another software."""

    engine: SoftwareVersion
    _: KW_ONLY
    expert_parts: int = 1
    """Number of ranks among which whole experts of a layer are cut. They go through all ranks of a stage."""
    expert_cut: int = 1
    """Number of ranks among which each expert is cut."""
    fuses_experts: bool = False
    """Whether the products of experts are one operation with the activation and casts (cuDNN's grouped kernels), and
    their tokens are put in order on their way."""
    dispatches_once: bool = False
    """Whether a token goes to a rank, and to a node, once, however many of its experts are there."""

    splits_backward: ClassVar[bool] = False
    sums_itself: ClassVar[bool] = False
    expected_messages: ClassVar[int] = 0
    works: ClassVar[tuple[str, ...]] = ()  # profiles are of our engine

    @classmethod
    def of(cls, setup: Setup, software: SoftwareVersion) -> Self:
        """Return a setup with another software in place of our engine."""
        values: dict[str, Any] = {each.name: getattr(setup, each.name) for each in fields(setup)}
        values["engine"] = software
        return cls(**values)

    def state_bytes(self, parts: Iterable[tuple[Shape, float]] | None = None) -> float:
        own = self.engine.optimizer_bytes
        return super().state_bytes(parts) if own is None else own

    def held_model(self, grid: TensorGrid) -> Model:
        """Return a model of whose weights a rank of a grid, which cuts experts by y, holds as much as it does of this
        one's: of more experts smaller parts."""
        model, parts = self.model, self.expert_parts * self.expert_cut
        key = "expert_size" if model.expert_size else "ffn_size"
        size = getattr(model, key)
        return model.model_copy(update={key: size * grid.y // parts}) if parts > 1 else model

    def group_ranks(self, tile: Tile, name: str) -> tuple[int, ...]:
        if name != EXPERT_RANKS:
            return super().group_ranks(tile, name)
        size = self.expert_parts * self.expert_cut
        first = tile.ranks[0] // size * size
        return tuple(range(first, first + size, self.expert_cut))

    @property
    def context_sizes(self) -> list[int]:
        return []  # context parallelism is part of a run, by `context_shares`

    def sequence_parts(self, grid: TensorGrid) -> int:
        return grid.y if self.engine.sequence_parallel else grid.sequence_parts

    def blocking_share(self, rows: int, grid: TensorGrid) -> float:
        """Return it for messages that go through the stream that computes, but for what NCCL holds of them."""
        if not self.engine.blocking_sends:
            return 0.0
        parts = grid.y if self.engine.gathers_parts else 1
        num_bytes = rows * self.positions * self.model.hidden_size * self.item_bytes / parts
        return max(0.0, 1 - self.engine.buffered_bytes / num_bytes)

    def network(self, cluster: Cluster) -> NcclNetwork:
        engine = self.engine
        experts = next((block.mlp for block in self.blocks if isinstance(block.mlp, Experts)), None)
        copies = experts.chosen if experts and self.dispatches_once else 0
        sums = not engine.sequence_parallel
        return NcclNetwork(cluster, engine.link_share, engine.socket_share, sums=sums, copies=copies)

    def tensor_slowdown(self, measured: float) -> float:
        return 1.0  # Transformer Engine's user buffers move bytes by copy engines

    def recomputes(self, layer: Interval) -> bool:
        return self.is_block(layer)

    def head_columns(self, grid: TensorGrid) -> int:
        columns = super().head_columns(grid)
        return columns + -columns % self.engine.vocabulary_multiple

    def logits_at_once(self, tokens: int, columns: int, rows: int = 1) -> int:
        return tokens

    @property
    def gradient_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] if self.dtype in self.engine.plain_gradients else self.engine.own_gradient_bytes

    @property
    def gathered_bytes(self) -> int:
        return self.engine.residual_bytes or self.item_bytes

    @property
    def summed_bytes(self) -> float:
        # Where norms are cut over y, a sum is a scatter and the gather of the next product's input.
        own = self.item_bytes
        return (own + self.operand_bytes) / 2 if self.engine.sequence_parallel else own

    @property
    def kept_logit_bytes(self) -> int:
        return STATISTIC_BYTES


@state_of.register
def _(
    setup: SoftwareSetup, stored: float, updated: float, packed: float, zero: int, num_holders: int, state_bytes: float
) -> State:
    software, b = setup.engine, setup.item_bytes
    weights = (updated if zero == 3 else stored) if software.stores_halves or b >= MASTER_BYTES else 0.0
    gradients = (updated if zero >= 2 else stored) * software.kept_gradient_bytes.get(setup.dtype, GRADIENT_BYTES)
    if zero == 1 and num_holders > 1 and not (software.sums_in_place or software.copies_for_update):
        gradients += updated * GRADIENT_BYTES
    return State(b * weights + b * packed, gradients, updated * state_bytes)


@memory_of.register
def _(
    setup: SoftwareSetup,
    network: NcclNetwork,
    plan: Plan,
    tile: Tile,
    shards: Holding,
    rank: int,
    waiting: int,
    available: int,
) -> MemoryParts:
    """Add what libraries and an allocator take."""
    parts = memory_of.dispatch(Setup)(setup, network, plan, tile, shards, rank, waiting, available)
    num_holders = max((len(group.ranks) for group in shards.shard_groups), default=1)
    num_groups = sum(size > 1 for size in (num_holders, *tile.tensor.sizes.values(), plan.path_length(tile)))
    software = setup.engine
    taken = int(software.reserved_bytes) + int(software.overhead_share * available)
    parts = replace(parts, buffers=parts.buffers + taken + int(num_groups * software.communicator_bytes))
    if tile.zero == 1 and num_holders > 1 and software.copies_for_update and not software.sums_in_place:
        copy = int(parts.moments / setup.state_bytes() * GRADIENT_BYTES)
        return replace(parts, gradients=parts.gradients + max(0, copy - parts.activations))
    return parts


@computed_again.register
def _(setup: SoftwareSetup, grid: TensorGrid, tokens: int, branch: Attention | Mlp, passed: float) -> PassWork:
    """Add the products whose results are dropped."""
    again: PassWork = computed_again.dispatch(Setup)(setup, grid, tokens, branch, passed)
    if setup.engine.again_operations is None:
        return again
    hidden = setup.model.hidden_size // grid.x
    if isinstance(branch, Mlp):
        sizes = {"gate": (hidden, branch.inner // grid.y)} if branch.gated else {}
    else:
        query, key = heads_on(branch, grid)
        sizes = {"keys": (hidden, key), "output": (query, hidden)}
    dropped = [size for name, size in sizes.items() if name in setup.engine.dropped]
    return replace(again, products=[MatrixProduct(tokens, *size, dtype=setup.linear_dtype) for size in dropped])


@mask_bytes.register
def _(_setup: SoftwareSetup, _grid: TensorGrid, _attention: Attention, _recompute: str, _rows: int) -> float:
    return 0.0  # its kernels have windows of their own


@branch_kept.register
def _(setup: SoftwareSetup, grid: TensorGrid, branch: Attention | Mlp, recompute: str, rows: int) -> float:
    if isinstance(branch, Experts):
        return _experts_kept(setup, grid, branch, recompute, rows)
    software, b, positions = setup.engine, setup.item_bytes, setup.positions
    hidden = positions * setup.model.hidden_size / grid.x / setup.sequence_parts(grid)
    if not software.flash:
        return (2 * b + 1) * hidden + _inner_kept(setup, grid, branch, recompute)
    kept_by_ours = branch_kept.dispatch(Setup)
    if recompute == "selective" and software.again_operations is None:  # there are no scores to drop
        recompute, rows = "none", 1
    if software.keeps_fp8 and setup.linear_dtype == "fp8" and recompute == "none":
        return kept_by_ours(setup, grid, branch, recompute, rows) + _fp8_kept(setup, grid, branch)
    if recompute == "none":
        return kept_by_ours(setup, grid, branch, recompute, rows)
    own = kept_by_ours(setup, grid, branch, recompute, rows)
    if recompute != "selective":
        return own
    if isinstance(branch, Mlp):  # its input is computed again from attention's output
        own += b * hidden * (software.keeps_outputs - ("output" in software.dropped))
        gate = positions * branch.inner / grid.y if branch.gated and "gate" in software.dropped else 0.0
        return own - b * gate
    return own - b * positions * heads_on(branch, grid)[1] * ("keys" in software.dropped)


def _experts_kept(setup: SoftwareSetup, grid: TensorGrid, experts: Experts, recompute: str, rows: int) -> float:
    """Return what ours keeps of a mixture of experts, and the inputs of their products, which ours gathers anew."""
    own = branch_kept.dispatch(Setup)(setup, grid, experts, recompute, rows)
    pairs = setup.positions / setup.sequence_parts(grid) * experts.chosen
    features = setup.model.hidden_size * setup.expert_cut + experts.inner * (recompute == "none")
    kept = setup.linear_dtype if setup.linear_dtype and setup.engine.keeps_fp8 else setup.dtype
    return own + pairs * features * ITEM_BYTES[kept]


def _fp8_kept(setup: SoftwareSetup, grid: TensorGrid, branch: Attention | Mlp) -> float:
    """Return how many bytes more a branch keeps of a row where inputs of its products are kept in fp8: normed input,
    and the inner features that go into the last product, which is less. Attention keeps its output beside that of the
    last product."""
    saved, positions = setup.item_bytes - ITEM_BYTES["fp8"], setup.positions
    normed = -saved * positions * setup.model.hidden_size / grid.x / setup.sequence_parts(grid)
    if isinstance(branch, Mlp):
        return normed - saved * positions * branch.inner / grid.y
    return normed + ITEM_BYTES["fp8"] * positions * heads_on(branch, grid)[0]


def _inner_kept(setup: SoftwareSetup, grid: TensorGrid, branch: Attention | Mlp, recompute: str) -> float:
    """Return the bytes that a branch with scores keeps of a row besides its input."""
    b, positions = setup.item_bytes, setup.positions
    if isinstance(branch, Mlp):
        return b * positions * branch.inner / grid.y * setup.engine.kept_inner
    of_scores = 2 * b + 1 if setup.engine.dropped_scores else b
    scores = branch.heads / grid.y * positions**2 * of_scores if recompute == "none" else 0.0
    return 2 * b * positions * sum(heads_on(branch, grid)) + scores
