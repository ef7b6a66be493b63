"""The model that is trained, and the kernels of our engine: what prices and memory depend on. Pure."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, lru_cache
from typing import ClassVar, Self

from hpctrain.architectures.description import Attention, Layer, Mlp
from hpctrain.config.clusters.cluster import ITEM_BYTES, Cluster
from hpctrain.config.job import Job, Model
from hpctrain.config.kernels import LOGITS_BYTES, tokens_at_once
from hpctrain.config.parallelism import EXPERT_SPREAD
from hpctrain.config.training.optimizers import RULES, Shape
from hpctrain.plan.schedule import EXPECTED_AHEAD
from hpctrain.plan.tiling import Tile
from hpctrain.planner.prices.curves import describe_training
from hpctrain.planner.prices.network import ClusterNetwork
from hpctrain.sharding.grid import AXES, GROUPS, STORED, TensorGrid
from hpctrain.sharding.intervals import Interval, divisors
from hpctrain.sharding.items import block_of, is_attention
from hpctrain.sharding.parameters import all_parameters, padded_vocabulary

GRADIENT_BYTES = MASTER_BYTES = 4


@dataclass(frozen=True)
class BytePasses:
    """Bytes read and written per element, forward and backward, by everything in a model that is no product."""

    norm: tuple[float, float]
    """Bytes per hidden feature of a token, for one norm."""
    residual: tuple[float, float]
    """Bytes per hidden feature of a token, for all of a block outside its norms, dropout included."""
    rotary: tuple[float, float]
    """Bytes per feature of queries and keys, where there are rotary positions."""
    inner: tuple[float, float]
    """Bytes per inner feature of a token: activation function, gate, bias."""
    scores: tuple[float, float]
    """Bytes per pair of positions and head; 0 where a fused kernel never writes them."""
    logits: tuple[float, float]
    """Bytes per token and id of the vocabulary."""
    weight: float
    """Bytes per weight and backward pass, in addition to the product itself: to add its gradient, and for all copies
    and casts that sharding needs."""


@dataclass(frozen=True)
class Engine:
    """Our engine, as far as prices and memory depend on its kernels. What it does otherwise than other trainers is in
    the functions of this room and of `prediction/`; `hpctrain/software/` has what others do in their place."""

    name: str
    passes: dict[int, BytePasses]
    """Bytes read and written per element, for numbers of 2 and of 4 bytes."""
    clipping_bytes: float
    """Bytes read and written per weight that a rank updates, apart from the update itself: to take the gradient's norm,
    to clip it, to zero it, and for copies."""
    block_operations: tuple[int, int]
    """Numbers of operations that a block starts, forward and backward."""
    flash: tuple[float, float] | None = None
    """Shares of a large product's speed that attention in one kernel reaches, forward and backward. The kernel computes
    only the causal half and keeps no scores. None: attention is several operations."""
    native_attention: bool = False
    """Whether the attention kernel is written for each device generation (cuDNN, FlashAttention-3 and 4), not for an
    A100."""
    again_operations: tuple[int, int] | None = None
    """Numbers of operations that `selective` recomputing starts again, of an attention and of a feed-forward part. They
    are those between products, whose results are dropped. None: attention's scores are recomputed, where these are
    kept."""
    cast_bytes: float = 4.0
    """Bytes read and written to cast a number to fp8 in both operand layouts: of a linear layer's input, or of its
    output's gradient."""
    loss_bytes: Mapping[int, int] = field(default_factory=dict)
    """Bytes of a logit while the loss is computed, in addition to what is kept; by bytes of a number."""
    capped_loss_bytes: int = 0
    """The same of a logit with a cap; 0: as of others."""
    gathers_parts: bool = False
    """Whether what comes over a slow link comes in parts, see `hpctrain.plan.transfers.gathers`."""
    dispatch_seconds: float = 8e-6
    """Seconds to start an operation on a host of `HOST_OPERATION_SECONDS`, on others in proportion: the least that each
    of several small ones takes."""


# FlashAttention-2 on A100 (Dao 2023, causal, heads of 128, 2 to 16 thousand positions): 150 to 200 TFLOP/s of the half
# that it computes forward, 140 to 170 backward, where large products come to 271.
FLASH_2 = 0.65, 0.57

# Counted by hand in model/operators and engine/step/optimizer.py: one pass for each operation. In
# half precision the product of a weight's gradient adds to fp32, which it reads and writes.
EAGER_PASSES = {
    4: BytePasses((20, 64), (24, 24), (28, 28), (20, 44), (0, 0), (24, 24), 0),
    2: BytePasses((32, 82), (12, 12), (14, 14), (10, 22), (0, 0), (30, 36), 8),
}
HPCTRAIN = Engine(
    "hpctrain",
    EAGER_PASSES,
    clipping_bytes=16,  # its norm 4, clipped 8, zeroed 4
    block_operations=(28, 60),
    flash=FLASH_2,
    again_operations=(10, 6),
    loss_bytes={4: 4, 2: 6},  # exponentials forward; backward in half precision the gradient in fp32, and cast
    capped_loss_bytes=12,  # backward, in fp32: capped logits, their share of the cap, and slopes
    gathers_parts=True,
)
# Counted in model/operators: a norm, a rotary position and a gated activation read their operands and write results
# once, and read them once more for what is summed over tokens. Norms add the gradient of the residual stream. The loss
# reads logits twice forward. The host starts 281 operations of a block instead of 402 (`benchmarks.gpu`).
FUSED_PASSES = {
    4: replace(EAGER_PASSES[4], norm=(8, 20), residual=(24, 8), rotary=(8, 8), inner=(12, 20), logits=(8, 8)),
    2: replace(EAGER_PASSES[2], norm=(4, 10), residual=(12, 4), rotary=(4, 4), inner=(6, 10), logits=(4, 4)),
}
HPCTRAIN_FUSED = replace(
    HPCTRAIN,
    passes=FUSED_PASSES,
    block_operations=(20, 40),
    again_operations=(3, 2),
    loss_bytes={4: 4, 2: 2},  # the gradient
    capped_loss_bytes=0,
)
"""With `kernels.fused`."""


def mean_by_weight(parts: Iterable[tuple[Shape, float]], value: Callable[[Shape], float]) -> float:
    """Return the mean of a value over all weights of parts of parameters, each a shape and a number of weights."""
    total = weights = 0.0
    for shape, size in parts:
        total, weights = total + size * value(shape), weights + size
    return total / weights if weights else 0.0


@lru_cache(maxsize=64)
def _mean_of_model(model: Model, value: Callable[[Shape], float]) -> float:
    return mean_by_weight(((p.shape, math.prod(p.shape)) for p in all_parameters(model).values()), value)


LEAST_CONTEXT = 8192
"""Positions of a row that a rank has at the least, where a search cuts them by c. Shorter rows fit without it."""


@dataclass(frozen=True)
class Setup:
    """The model that is trained, and how: everything about a run but its plan and its cluster."""

    model: Model
    positions: int
    dtype: str
    engine: Engine
    overlaps: frozenset[str] = frozenset()
    """What is overlapped with computation. "tensor": sums over x and y, with the products of gradients of weights.
    "z": gathers of the next item's weights, scatters of the last one's gradients."""
    _: KW_ONLY
    masks_documents: bool = False
    """Whether a mask keeps attention inside documents. No kernel skips the masked part."""
    bucket_bytes: int | None = None
    """Minimum bytes of a bucket, where holders sum gradients and gather weights while ranks compute. None: they wait
    until all is computed."""
    gathers_early: bool = True
    """Whether weights are gathered during the next forward pass, where gradients are summed while ranks compute."""
    by_family: tuple[tuple[str, str], ...] = ()
    """Families that compute in another dtype, each with its dtype. Memory and messages are priced in `dtype`."""
    linear_dtype: str | None = None
    """Dtype of linear layers of blocks, where it is another one: fp8, to which software casts operands."""
    context_shares: tuple[int, ...] = (1,)
    """The share of each rank in the positions of a row, which c cuts, or other software's context parallelism.
    `positions` are those of one rank, whose queries see the keys of all."""
    place: int = 0
    """The place along c of the rank that is priced, where shares are unequal."""
    exchanges_heads: bool = False
    """Whether attention is of all positions of a row, and of a part of the heads, which ranks of c have exchanged."""
    tensor_parts: int | None = 1
    """Number of parts into which blocks cut products next to collectives of x and y. None: a search chooses it
    (`prediction/cut_products.py`); without a search products stay whole."""
    logits_bytes: int = LOGITS_BYTES
    """Bytes of logits, counted as fp32, that may exist at once, where the head computes its tokens in parts."""
    optimizer: str = "adamw"
    """Name of the optimizer whose rule updates weights."""
    expert_spread: float = EXPERT_SPREAD
    """Standard deviation of the tokens of a layer's experts over their mean."""
    balances_rows: bool = False
    """Whether each row has an auxiliary loss against uneven load of experts."""

    splits_backward: ClassVar[bool] = True
    """Whether 1F1B sends the gradient of a stage's input before it computes those of weights."""
    sums_itself: ClassVar[bool] = True
    """Whether ranks add up in memory of their own what others send them (`buffers.py`)."""
    expected_messages: ClassVar[int] = EXPECTED_AHEAD
    """Number of messages between stages for which a rank has buffers before it comes to receive them."""

    @classmethod
    def of_job(cls, job: Job, dtype: str | None = None) -> Self:
        """Return the setup of a job, in its own dtype where none is given. Switches that are `auto` count as off, and
        kernels as fused where they are in all families."""
        dtype = dtype or job.train.resolved_dtype
        overlaps = frozenset(axis.overlap for axis in AXES.values() if getattr(job.overlap, axis.overlap))
        engine = HPCTRAIN_FUSED if job.kernels.is_fused else HPCTRAIN
        native = {job.kernels.attention, *job.kernels.attention_by_family.values()} <= {"cudnn", "flash3", "flash4"}
        engine = replace(engine, gathers_parts=job.comm.gather_messages, native_attention=native)
        data, bucket_bytes = job.data, job.overlap.bucket_bytes if job.overlap.data else None
        differing = tuple(sorted(job.precision.by_family.items()))
        return cls(
            job.model,
            data.sequence_length,
            dtype,
            engine,
            overlaps,
            masks_documents=data.mask_documents,
            bucket_bytes=bucket_bytes,
            by_family=differing,
            tensor_parts=job.overlap.tensor_parts,
            logits_bytes=job.kernels.logits_bytes,
            optimizer=job.train.optimizer,
            expert_spread=job.search.expert_spread,
            balances_rows=job.train.balance_loss > 0,
        )

    @cached_property
    def works(self) -> tuple[str, ...]:
        """Return the descriptions of work for which a profile may hold: with the other kernels (fused or separate), and
        with these."""
        fused = self.engine.passes is HPCTRAIN_FUSED.passes
        given = self.model, self.positions, self.dtype, self.by_family
        return tuple(describe_training(*given, each, self.optimizer) for each in (not fused, fused))

    @property
    def update_bytes(self) -> float:
        """The bytes that the optimizer's update reads and writes per weight, as a mean over the model."""
        return _mean_of_model(self.model, RULES[self.optimizer].update_bytes)  # pyright: ignore[reportArgumentType] - frozen, so it has a hash

    def state_bytes(self, parts: Iterable[tuple[Shape, float]] | None = None) -> float:
        """Return the bytes of the optimizer's state per weight: moments, and a master where weights in use are half
        precision.

        They are a mean over the model, or over `parts` of parameters, each a shape and a number of weights.
        """
        moments = RULES[self.optimizer].moment_bytes
        mean = _mean_of_model(self.model, moments) if parts is None else mean_by_weight(parts, moments)  # pyright: ignore[reportArgumentType]
        return mean + (MASTER_BYTES if self.item_bytes < MASTER_BYTES else 0)

    @cached_property
    def blocks(self) -> tuple[Layer, ...]:
        """Return what each layer is made of."""
        return self.model.description.blocks

    @cached_property
    def first_equal(self) -> tuple[int, ...]:
        """Return for each item the first one that costs the same: attention with and without a window are two kinds."""
        first: dict[Attention | Mlp, int] = {}
        branches = (branch for block in self.blocks for branch in (block.attention, block.mlp))
        equal = [first.setdefault(branch, number) for number, branch in enumerate(branches, 1)]
        return (0, *equal, self.model.num_items - 1)

    @cached_property
    def block_kinds(self) -> dict[Interval, float]:
        """Return a block of each kind, and which share of all blocks it is like. The first one is the first block."""
        counts: dict[tuple[int, ...], int] = {}
        first: dict[tuple[int, ...], Interval] = {}
        for number in range(self.model.num_layers):
            layer = Interval(1 + 2 * number, 3 + 2 * number)
            kind = self.first_equal[slice(*layer)]
            first.setdefault(kind, layer)
            counts[kind] = counts.get(kind, 0) + 1
        return {first[kind]: count / self.model.num_layers for kind, count in counts.items()}

    @cached_property
    def num_leading(self) -> int:
        """Return how many first blocks are of kinds that no later block is of: dense ones before those with experts."""
        kinds = [self.first_equal[slice(1 + 2 * n, 3 + 2 * n)] for n in range(self.model.num_layers)]
        first = range(1, self.model.num_layers // 2 + 1)
        return next((n for n in first if not {*kinds[:n]} & {*kinds[n:]}), 0)

    @cached_property
    def head(self) -> Interval:
        """The last layer."""
        return Interval(self.model.num_items - 1, self.model.num_items)

    def is_block(self, layer: Interval) -> bool:
        """Say whether a layer is a block, or one branch of it."""
        return 0 < layer.start < self.head.start

    def branches(self, layer: Interval) -> tuple[Attention | None, Mlp | None]:
        """Return what a layer has of its block."""
        block = self.blocks[block_of(layer.start)]
        return (
            block.attention if is_attention(layer.start) else None,
            None if is_attention(layer.stop - 1) else block.mlp,
        )

    def group_ranks(self, tile: Tile, name: str) -> tuple[int, ...]:
        """Return the ranks that exchange with a tile's first rank in a group of the tensor grid."""
        return tile.axis_ranks(GROUPS[name], tile.ranks[0])

    @cached_property
    def _by_parts(self) -> dict[tuple[tuple[int, ...], bool], Self]:
        return {((1,), False): self}

    def on(self, grid: TensorGrid) -> Self:
        """Return the setup as a rank of a grid sees it: with its own positions of each row, where c cuts them."""
        key = shares, exchanges = grid.context_shares, grid.exchanges_heads
        if key not in self._by_parts:
            own = -(-self.positions * shares[self.place] // sum(shares))
            self._by_parts[key] = replace(self, positions=own, context_shares=shares, exchanges_heads=exchanges)
        return self._by_parts[key]

    @cached_property
    def _by_place(self) -> dict[int, Self]:
        return {self.place: self}

    def at(self, place: int) -> Self:
        """Return the setup for the rank at a place along c."""
        if place not in self._by_place:
            self._by_place[place] = replace(self, place=place)
        return self._by_place[place]

    @property
    def row_positions(self) -> int:
        """Positions of a row, of all ranks that cut them."""
        return self.positions * sum(self.context_shares) // self.context_shares[self.place]

    @property
    def most_positions(self) -> int:
        """Positions of a row on the rank with the most."""
        return self.positions * max(self.context_shares) // self.context_shares[self.place]

    @cached_property
    def attending(self) -> Self:
        """Return the setup as attention sees it: with the positions of its queries."""
        if not self.exchanges_heads:
            return self
        return replace(self, positions=self.row_positions, context_shares=(1,), place=0, exchanges_heads=False)

    @property
    def context_sizes(self) -> list[int]:
        """The sizes of c that a search tries: by which each rank has many positions of a row."""
        is_even = self.positions % 2 == 0  # c cuts a row into 2 * c equal intervals
        return [c for c in divisors(self.positions // 2) if is_even and 1 < c <= self.positions // LEAST_CONTEXT]

    def sequence_parts(self, grid: TensorGrid) -> int:
        """Return the number of parts into which y cuts the positions of hidden states."""
        return grid.sequence_parts

    @property
    def overlaps_weights(self) -> bool:
        """Say whether ranks that store parts of the same weights exchange them while they compute."""
        return AXES[STORED].overlap in self.overlaps

    @property
    def block_parts(self) -> int:
        """Number of parts into which blocks cut products next to collectives of x and y, and heads that c gathers."""
        return (self.tensor_parts or 1) if "tensor" in self.overlaps else 1

    def network(self, cluster: Cluster) -> ClusterNetwork:
        """Return what prices messages and collectives."""
        return ClusterNetwork(cluster)

    def blocking_share(self, _rows: int, _grid: TensorGrid) -> float:
        """Return the share of a message between stages, of so many rows, in which its sender computes nothing."""
        return 0.0

    def tensor_slowdown(self, measured: float) -> float:
        """Return the factor by which products take longer while collectives of x and y overlap them, on a device where
        so much was `measured` of any collectives."""
        return measured

    def recomputes(self, _layer: Interval) -> bool:
        """Say whether `full` recomputing includes a layer: embedding and head too."""
        return True

    def head_columns(self, grid: TensorGrid) -> int:
        """Return how many columns of the head's product a rank computes."""
        return padded_vocabulary(self.model, grid) // grid.y

    def logits_at_once(self, tokens: int, columns: int, rows: int = 1) -> int:
        """Return of how many `tokens` of each of so many `rows` the head has logits at once."""
        return tokens_at_once(tokens, columns, self.logits_bytes // rows)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def operand_bytes(self) -> int:
        """The bytes of a number that ranks gather to multiply it in a linear layer of a block: cast before it moves."""
        return ITEM_BYTES[self.linear_dtype] if self.linear_dtype else self.item_bytes

    @property
    def gradient_bytes(self) -> int:
        """The bytes of a gradient that replicas exchange."""
        return GRADIENT_BYTES

    @property
    def gathered_bytes(self) -> int:
        """The bytes of a weight that is stored in shards, in flight, and of a number of the residual stream."""
        return self.item_bytes

    @property
    def summed_bytes(self) -> float:
        """The bytes of a number of the residual stream in a sum over x or y."""
        return self.item_bytes

    @property
    def kept_logit_bytes(self) -> int:
        """The bytes of a logit that is kept from the forward pass to the backward one."""
        return self.item_bytes

    @property
    def passes(self) -> BytePasses:
        return self.engine.passes[4 if self.item_bytes >= 4 else 2]
