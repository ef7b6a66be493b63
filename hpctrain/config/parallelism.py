"""The sections by which a job asks for its plan, for the search of a plan, and for what ranks overlap."""

import math
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from hpctrain.config.bounds import (
    MOST_RANKS,
    MOST_SECONDS,
    Count,
    LayerCount,
    PartCount,
    RankCount,
    SequenceCount,
    WholeNumber,
    ZeroStage,
)
from hpctrain.config.tables import AUTO, FilePath, Table


class TensorSizes(Table):
    x: RankCount = 1
    y: RankCount = 1
    z: RankCount = 1
    c: RankCount = 1

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis by its name."""
        return self.model_dump()


class PlanRequest(Table):
    """An even plan in short form; a general one is a file of its own."""

    file: FilePath | None = None
    """A plan file, relative to the job file. No other key of this section may be given with it."""
    tensor: Annotated[TensorSizes, BeforeValidator(lambda size: {"y": size} if isinstance(size, int) else size)] = (
        TensorSizes()
    )
    """The tensor grid: x, y, z and c. A number is y alone: `tensor = 8` is TP8."""
    sequence_parallel: bool = False
    """Cut hidden states by positions over y, outside of attention and feed-forward parts: norms, activations that are
    kept and messages between stages are a y-th as large."""
    exchange_heads: bool = False
    """Where c cuts positions, exchange heads for positions in attention (Ulysses), and gather no keys and values."""
    pipeline: RankCount = 1
    """Pipeline stages (PP)."""
    data: RankCount = 1
    """Data replicas (DP)."""
    microbatch: Annotated[SequenceCount | None, AUTO] = None
    """Sequences of one data replica that go through the pipeline at once; auto: 2,048 tokens at most with CPUs, on
    devices 16,384, or as many as are predicted to fit."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What is computed again in the backward pass and not kept: nothing; what lies between the products of a block
    (norms, rotary positions, activations, capped scores); or all of a block but its input."""
    offload: Literal["none", "optimizer"] = "none"
    """What is kept in host memory and moved to the device for its use: moments and fp32 master weights of the
    optimizer."""
    zero: ZeroStage = 1
    """What replicas share: 1: the optimizer's state; 2: gradients too; 3: weights too; 0: nothing."""
    schedule: Literal["1f1b", "zb-h1"] = "1f1b"
    """zb-h1: weight passes fill the pipeline's bubble; every stage keeps as many microbatches as the first."""
    virtual_stages: LayerCount = 1
    """Tiles of each stage: with several the pipeline is interleaved, and its bubble as many times shorter."""

    @property
    def num_ranks(self) -> int:
        return math.prod(self.tensor.sizes.values()) * self.pipeline * self.data

    @model_validator(mode="after")
    def _few_enough(self) -> Self:
        if self.num_ranks > MOST_RANKS:
            raise ValueError(
                f"tensor, pipeline and data ask for {self.num_ranks:,} ranks; lower them to {MOST_RANKS:,}"
            )
        return self

    @model_validator(mode="after")
    def _file_alone(self) -> Self:
        fields = type(self).model_fields
        others = {key for key in self.model_fields_set - {"file"} if getattr(self, key) != fields[key].default}
        if self.file and others:  # a checkpoint's job has them all, at their defaults
            raise ValueError(f"plan.file excludes other keys; remove {', '.join(sorted(others))}")
        return self


EXPERT_SPREAD = 0.2
"""Where a job says nothing else. On 8 ranks the busiest has 1.29 times the mean load of experts in Mixtral 8x7B, and
1.07 times in Qwen 3 30B-A3B. Published steps take 8 to 20 % longer with real routing than with forced balance."""


class SearchBudget(Table):
    """The limits of one rank's search for the plan where it is `auto`, while the others wait."""

    seconds: Annotated[float, Field(gt=0, le=MOST_SECONDS)] = 10.0
    """The most that the search takes. Where it ends the search, the plan depends on the speed of this machine."""
    plans: Count = 2000
    """How many plans are scored. The best of them are simulated."""
    must_fit: bool = True
    """Whether a plan that is predicted not to fit into memory is refused."""
    expert_spread: Annotated[float, Field(ge=0, le=10)] = EXPERT_SPREAD
    """With experts: the standard deviation of an expert's tokens over their mean that predictions assume."""


class Overlap(Table):
    """The communication that ranks overlap with computation. Results are the same bits, on or off, but for
    `tensor_parts`."""

    tensor: Annotated[bool | None, AUTO] = None
    """Sum the gradient of a product's input over the tensor grid while that of its weight is computed."""
    data: Annotated[bool | None, AUTO] = None
    """Sum the gradients of items over their holders while the last microbatch goes back through the items before."""
    z: Annotated[bool | None, AUTO] = None
    """Gather the weights of the next block over z, and scatter the gradients of the last one, while one computes."""
    tensor_parts: Annotated[PartCount | None, AUTO] = None
    """Where `tensor` is on, into how many parts blocks cut a product next to a collective over the tensor grid: by
    rows, or by positions of a single row. Each part is gathered while the last one is computed, or summed while the
    next one is. 1: not cut. Products and sums of fewer rows may have other last bits. Keys and values over c are
    gathered in so many parts of their heads."""
    keep_gathered: WholeNumber = 0
    """How many of a tile's first layers (embedding, blocks) keep their gathered weights until the update: they are
    gathered once a step."""
    bucket_bytes: Count = 4 << 20
    """Gradients (fp32) are summed over their holders in buckets of whole blocks, of at least so many bytes.

    It also decides which rank owns which element, and with it the last bit of the gradient's norm.
    """
