"""The model that is trained, by which software and in which kernels: what prices and memory depend on. Pure."""

from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Self

from hpctrain.architectures.description import Attention, Layer, Mlp
from hpctrain.config.cluster import ITEM_BYTES
from hpctrain.config.job import Job, Model
from hpctrain.config.kernels import LOGITS_BYTES
from hpctrain.planner.curves import describe_training
from hpctrain.planner.stack import HPCTRAIN, HPCTRAIN_FUSED, BytePasses, Stack
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import block_of, is_attention


@dataclass(frozen=True)
class Setup:
    """What is trained, and by which software: everything about a run but its plan and its cluster."""

    model: Model
    positions: int
    dtype: str
    stack: Stack
    overlaps: frozenset[str] = frozenset()
    """What is overlapped with computation. "tensor": sums over x and y, with the products of gradients of weights.
    "z": gathers of the next item's weights, scatters of the last one's gradients. "forward": outputs of x and y, with
    the other half of the rows."""
    _: KW_ONLY
    masks_documents: bool = False
    """Attention stays inside documents: by a mask, which no kernel takes a short cut for."""
    bucket_bytes: int | None = None
    """Holders sum gradients and gather weights while ranks compute, in buckets of so many bytes or more; None: when all
    is computed."""
    by_family: tuple[tuple[str, str], ...] = ()
    """Families that compute in another dtype, and which. Memory and messages are priced in `dtype`."""
    linear_dtype: str | None = None
    """In which linear layers of blocks compute, where it is another dtype: fp8, to which software casts operands."""
    context_parts: int = 1
    """Into how many parts other software's context parallelism cuts the positions of a row; `positions` are of a part,
    whose queries see the keys of all parts."""
    tensor_parts: int | None = 1
    """Into how many parts blocks cut products next to collectives of x and y; None: a search chooses (`parts.py`), and
    what is not searched for is not cut."""
    logits_bytes: int = LOGITS_BYTES
    """Of logits, as if in fp32, that may be there at once, where the head goes through its tokens in parts."""

    @classmethod
    def of_job(cls, job: Job, dtype: str | None = None) -> Self:
        """Return the setup of a job, in its own dtype where none is given. Switches that are `auto` count as off, and
        kernels as fused where they are in all families."""
        dtype = dtype or job.train.resolved_dtype
        overlaps = frozenset(key for key in ("tensor", "z", "forward") if getattr(job.overlap, key))
        stack = HPCTRAIN_FUSED if job.kernels.is_fused else HPCTRAIN
        native = job.kernels.attention in ("cudnn", "flash3", "flash4")
        stack = replace(stack, gathers_parts=job.comm.gather_messages, native_attention=native)
        data, bucket_bytes = job.data, job.overlap.overlapped_bucket_bytes
        differing = tuple(sorted(job.precision.by_family.items()))
        return cls(
            job.model,
            data.sequence_length,
            dtype,
            stack,
            overlaps,
            masks_documents=data.mask_documents,
            bucket_bytes=bucket_bytes,
            by_family=differing,
            tensor_parts=job.overlap.tensor_parts,
            logits_bytes=job.kernels.logits_bytes,
        )

    @cached_property
    def works(self) -> tuple[str, str]:
        """What a profile may hold for: with the other kernels, fused or separate, and with those of this setup."""
        fused = self.stack.passes is HPCTRAIN_FUSED.passes
        given = self.model, self.positions, self.dtype, self.by_family
        return describe_training(*given, not fused), describe_training(*given, fused)

    @cached_property
    def blocks(self) -> tuple[Layer, ...]:
        """What each layer is made of."""
        return self.model.description.blocks

    @cached_property
    def first_equal(self) -> tuple[int, ...]:
        """For each item the first one that costs the same: attention with a window and without is of two kinds."""
        first: dict[Attention | Mlp, int] = {}
        branches = (branch for block in self.blocks for branch in (block.attention, block.mlp))
        equal = [first.setdefault(branch, number) for number, branch in enumerate(branches, 1)]
        return (0, *equal, self.model.num_items - 1)

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

    def position_parts(self, grid: TensorGrid) -> int:
        """Return into how many parts y cuts the positions of hidden states, as the grid says or the software does."""
        return grid.y if self.stack.sequence_parallel else grid.position_parts

    @property
    def block_parts(self) -> int:
        """Into how many parts blocks cut products next to collectives of x and y."""
        if "tensor" not in self.overlaps or "forward" in self.overlaps:
            return 1
        return self.tensor_parts or 1

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def gradient_bytes(self) -> int:
        """Of a gradient that replicas exchange."""
        return self.item_bytes if self.dtype in self.stack.plain_gradients else self.stack.gradient_bytes

    @property
    def gathered_bytes(self) -> int:
        """Of a weight that is stored in shards, in flight."""
        return self.stack.gathered_bytes or self.item_bytes

    @property
    def passes(self) -> BytePasses:
        return self.stack.passes[4 if self.item_bytes >= 4 else 2]
