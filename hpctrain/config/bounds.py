"""The numbers that files and command lines may hold.

The largest are far beyond any machine or model that there is, and small enough for what is enumerated: ranks, items,
microbatches. A larger number is a typing mistake, and would otherwise fill the memory of the host.
"""

from typing import Annotated

from pydantic import Field

MOST_RANKS = 100_000
"""Ranks of a plan, devices of a cluster."""
MOST_LAYERS = 10_000
MOST_WIDTH = 1 << 24
"""Features of a layer, heads, token ids."""
MOST_TOKENS = 1 << 28
"""Tokens of a sequence."""
MOST_SEQUENCES = 10_000_000
"""Sequences of a global batch."""
MOST_MICROBATCHES = 20_000
MOST_PASSES = 100_000
"""Passes of a step whose schedule is checked: of tiles, microbatches and row chunks, equal pipelines counted once."""
MOST_PARTS = 64
"""Of a product that is cut so that its collective is overlapped: each part is a message more, and a smaller product."""
MOST_NUMBER = 10**12
"""Of what is only counted, such as steps."""
MOST_RATE = 100.0
"""Of learning rates, decay and initial weights: beyond it fp32 overflows in the first step."""
MOST_SECONDS = 1e9
"""About 30 years; timers take no more than ten times that."""
LEAST_SECONDS = 1e-15
"""Of what was measured or typed of a machine: light goes less than a micrometre."""
MOST_MEMORY_BYTES, MOST_PER_SECOND = 10**18, 1e30
"""Of a device's memory; bytes or operations in a second."""
MOST_FACTOR = 1e9
"""Of scales, and of times: quotients and products of such figures stay finite."""

Count = Annotated[int, Field(ge=1, le=MOST_NUMBER)]
WholeNumber = Annotated[int, Field(ge=0, le=MOST_NUMBER)]
RankCount = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Rank = Annotated[int, Field(ge=0, lt=MOST_RANKS)]
LayerCount = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Width = Annotated[int, Field(ge=1, le=MOST_WIDTH)]
TokenCount = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
SequenceCount = Annotated[int, Field(ge=1, le=MOST_SEQUENCES)]
PartCount = Annotated[int, Field(ge=1, le=MOST_PARTS)]
MicrobatchCount = Annotated[int, Field(ge=1, le=MOST_MICROBATCHES)]
Rate = Annotated[float, Field(ge=1, le=MOST_PER_SECOND)]
"""Bytes or operations in a second."""
Seconds = Annotated[float, Field(ge=LEAST_SECONDS, le=MOST_SECONDS)]
Latency = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
Scale = Annotated[float, Field(ge=1 / MOST_FACTOR, le=MOST_FACTOR)]
Slowdown = Annotated[float, Field(ge=1, le=MOST_FACTOR)]
Timeout = Annotated[float, Field(gt=0, le=MOST_SECONDS)]
ZeroStage = Annotated[int, Field(ge=0, le=3)]
