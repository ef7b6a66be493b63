"""Causal attention in a window, with a cap on scores, and inside of documents: by torch's kernels where these can.

Shapes: queries [rows, heads, positions, head size], keys and values [rows, key/value heads, all positions, head size].
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.attention as attention_of_torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpctrain.architectures.description import SINK_FEATURES, Attention
from hpctrain.model.operators.activation import capped
from hpctrain.model.operators.linear import add_sum
from hpctrain.model.storage.units import Weight
from hpctrain.sharding.intervals import Interval, intersections, place_in, seen_by


class Documents:
    """The starts of the documents of a microbatch, and the masks that keep attention inside of them.

    A mask is made once for each window size; all layers and heads with that window share it.
    """

    def __init__(self, starts: torch.Tensor, on_host: np.ndarray | None = None):
        """`starts`, int64 [rows, all positions], is where in its row each token's document starts. `on_host` has the
        same, if the host is asked where they begin."""
        self.starts, self._on_host = starts, on_host
        self._masks: dict[tuple, Any] = {}

    def mask(self, queries: torch.Tensor, first: int, total: int, window: int | None) -> torch.Tensor:
        """Return which positions each query may attend to, bool [rows, 1, queries, all positions]."""
        key = queries.shape[2], first, total, window
        if key not in self._masks:
            begins = torch.arange(total, device=queries.device) >= self.starts[:, None, :, None]
            self._masks[key] = visible(queries, first, total, window) & begins
        return self._masks[key]

    def blocks(self, queries: torch.Tensor, total: int, window: int | None) -> Any:
        """Return the mask of all positions for FlexAttention, which takes no memory for each pair of positions."""
        key = "blocks", queries.shape[2], total, window
        if key not in self._masks:
            self._masks[key] = _visible_blocks(queries.shape[2], total, window, queries.device, self.starts)
        return self._masks[key]

    def of(self, queries: slice, first_key: int) -> "Documents":
        """Return the documents of some queries, whose keys begin at `first_key`. All layers share their masks."""
        if queries == slice(0, self.starts.shape[1]) and not first_key:
            return self
        key = "of", queries.start, queries.stop, first_key
        if key not in self._masks:
            self._masks[key] = Documents(self.starts[:, queries] - first_key)
        return self._masks[key]

    def begin(self, position: int) -> int:
        """Return the first position that tokens at a position of any row may attend to."""
        assert self._on_host is not None, "the host knows the starts"
        return int(self._on_host[:, position].min())

    def forget_masks(self) -> None:
        """Drop the masks; graphs keep those that they still need."""
        self._masks.clear()


def visible(queries: torch.Tensor, first: int, total: int, window: int | None) -> torch.Tensor:
    """Return which positions each query may attend to, bool [queries, all positions]."""
    places = torch.arange(total, device=queries.device)
    behind = places[first : first + queries.shape[2], None] - places
    return (behind >= 0) & (behind < (window or total))


ATTENTION_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Backends of torch's own attention function, by their name in jobs. The others are `flash4` and `flex`."""


def _select_flash(backend: str) -> None:
    """Have torch use version 3 of flash attention, of another package, or its own. Raises RuntimeError."""
    wanted = "FA3" if backend == "flash3" else None
    current = getattr(attention_of_torch, "current_flash_attention_impl", None)
    if wanted == (current and current()):
        return
    try:
        if wanted is None:
            attention_of_torch.restore_flash_attention_impl()
        else:
            attention_of_torch.activate_flash_attention_impl(wanted)
    except (AttributeError, ImportError, RuntimeError, ValueError) as error:
        raise RuntimeError(f"torch {torch.__version__} cannot use {wanted}: {error}") from None


@cache
def _flash4() -> Callable:
    """Return the function of flash-attn-4: torch's own binding expects results that newer versions do not return."""
    try:
        from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports] - an extra
    except Exception as error:  # whatever a package raises that compiles its own kernels
        raise RuntimeError(f"no flash-attn-4: {type(error).__name__}: {error}") from error
    return flash_attn_func


def _attend_by_flash4(queries, keys, values, window: int | None, scale: float) -> torch.Tensor:
    """Return attention of queries that are the last positions. Sums have one order where those of torch have."""
    by_position = (each.transpose(1, 2) for each in (queries, keys, values))
    mixed, _ = _flash4()(
        *by_position,
        softmax_scale=scale,
        causal=window is None,
        window_size=(None, None) if window is None else (window - 1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return mixed.transpose(1, 2)


@cache
def _flex(*_: object) -> Callable:
    """Return FlexAttention, compiled for these arguments: its gradients sum in one order."""
    from torch.nn.attention.flex_attention import flex_attention

    def attending(queries, keys, values, block_mask, scale: float, is_grouped: bool):
        return flex_attention(queries, keys, values, block_mask=block_mask, scale=scale, enable_gqa=is_grouped)

    attending.__code__ = attending.__code__.replace()  # torch keeps what is compiled, and a limit, for each code object
    return torch.compile(attending, fullgraph=True, dynamic=False, options={"compile_threads": 1})


@lru_cache(maxsize=16)
def _causal_blocks(count: int, total: int, window: int | None, device: torch.device) -> Any:
    """Return the blocks of masks without documents, which are the same in all layers, rows and steps."""
    return _visible_blocks(count, total, window, device)


BLOCK = 128
"""Positions of a block of FlexAttention's masks, torch's default."""


def _visible_blocks(
    count: int, total: int, window: int | None, device: torch.device, starts: torch.Tensor | None = None
) -> Any:
    """Return which blocks of keys each block of queries attends to, and inside of them which positions.

    It is computed by blocks: `create_block_mask` makes a mask of all pairs of positions, 10 GB for 32,768 of them.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def sees(row, head, query, key):
        result = key <= query
        if window is not None:
            result = result & (key > query - window)
        return result if starts is None else result & (key >= starts[row, query])

    first_query = torch.arange(0, count, BLOCK, device=device)
    last_query = (first_query + BLOCK - 1).clamp(max=count - 1)
    first_key = torch.arange(0, total, BLOCK, device=device)
    last_key = first_key + BLOCK - 1
    some = first_key <= last_query[:, None]
    every = (last_key <= first_query[:, None]) & (first_query + BLOCK <= count)[:, None]
    if window is not None:
        some = some & (last_key > first_query[:, None] - window)
        every = every & (first_key > last_query[:, None] - window)
    some, every = some[None], every[None]
    if starts is not None:  # they do not decrease along a row
        some = some & (last_key >= starts[:, first_query, None])
        every = every & (first_key >= starts[:, last_query, None])

    def ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = blocks[:, None].int()
        return blocks.sum(-1, dtype=torch.int32), blocks.argsort(dim=-1, descending=True, stable=True).int()

    return BlockMask.from_kv_blocks(
        *ordered(some & ~every), *ordered(every), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(count, total)
    )


def attend_at(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention: Attention,
    positions: Sequence[Interval],
    key_positions: Sequence[Interval],
    documents: Documents | None = None,
    backend: str = "torch",
) -> torch.Tensor:
    """Mix values as `attend` does, for queries of some intervals of positions, and keys and values of others, among
    which are all that the queries see.

    An interval's queries attend to the keys up to its end, and from the first one that a window shows to one of them.
    """
    mixed, before = [], 0
    for interval in positions:
        # Where an interval's first document begins, a batch says: FlexAttention would be compiled for each.
        own_backend = "torch" if backend == "flex" and interval.start else backend
        own = slice(before, before + interval.size)
        before = own.stop
        seen = intersections(key_positions, seen_by([interval], attention.window))[-1]
        inside = documents and documents.of(slice(*interval), seen.start)
        first, at = interval.start - seen.start, slice(*place_in(key_positions, seen))
        mixed.append(
            attend(queries[:, :, own], keys[:, :, at], values[:, :, at], attention, first, inside, backend=own_backend)
        )
    if len(mixed) == 1:
        return mixed[0]
    return torch.cat([each.transpose(1, 2) for each in mixed], dim=1).transpose(1, 2)


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention: Attention,
    first: int = 0,
    documents: Documents | None = None,
    backend: str = "torch",
) -> torch.Tensor:
    """Mix values by causal attention, in the window and with the cap that the description has.

    queries: [rows, heads, positions, head size]; keys, values: [rows, key/value heads, all positions, head size];
    result as queries. With sinks, queries are those of `WithSinks`, and the result has the head size. Queries are those
    of positions `first`, `first` + 1, ...; with `documents` each attends to no position before its own document.
    `backend` is a key of `ATTENTION_BACKENDS`, `flash4` (no documents; queries are the last positions), `flex` or
    `torch`, its own choice; for scores without a cap. Sinks have no `flash4` and `flex`. Without a mask, the last
    queries of a row, and queries with sinks, have torch's own choice in place of `cudnn`.

    Raises RuntimeError, or whatever a package raises, where there is no such kernel for the inputs.
    """
    size = queries.shape[-1] - (SINK_FEATURES if attention.sinks else 0)
    scale = (attention.score_divisor or size) ** -0.5
    if attention.sinks and backend in ("flash4", "flex"):
        raise RuntimeError(f"kernels.attention = {backend!r} computes no attention with sinks; set another")
    count, total = queries.shape[2], keys.shape[2]
    is_windowed = attention.window is not None and attention.window < total
    window = attention.window if is_windowed else None
    if attention.score_cap is None and backend == "flash4":
        if documents is not None or first + count != total:
            raise RuntimeError("flash-attn-4 has no masks of documents, and queries are the last positions")
        return _attend_by_flash4(queries, keys, values, window, scale)
    if attention.score_cap is None and backend == "flex" and first == 0:  # else each token would be compiled for
        blocks = (
            documents.blocks(queries, total, window)
            if documents
            else _causal_blocks(count, total, window, queries.device)
        )
        grouped = queries.shape[1] != keys.shape[1]
        made = _flex(queries.shape, keys.shape, queries.dtype, window, documents is None)
        return made(queries, keys, values, blocks, scale, grouped)
    if attention.score_cap is None:
        is_causal = not is_windowed and first + count == total and documents is None
        mask = None if is_causal else _mask(queries, first, total, attention.window, documents)
        if attention.sinks:
            keys, values = _behind_sink(keys, size), F.pad(values, (0, SINK_FEATURES, 1, 0))
            first, total, mask = first + 1, total + 1, None if mask is None else F.pad(mask, (1, 0), value=True)
        if is_causal and first and backend == "cudnn":  # it would get a mask of all pairs, which each layer keeps
            backend = "torch"
        if is_causal and first and queries.device.type == "cpu" and backend in ("torch", "flash"):
            mixed = _LastQueries.apply(queries, keys, values, scale)
            return mixed[..., :size] if attention.sinks else mixed
        if repeats_heads(queries, keys, is_causal and backend != "efficient"):
            keys, values = (_repeated(each, queries.shape[1]) for each in (keys, values))
        if is_causal and first:  # kernels know what the last queries see: no mask takes memory for each pair
            from torch.nn.attention.bias import causal_lower_right  # it imports Dynamo, which takes as long as torch

            mask = causal_lower_right(count, total)
        _select_flash(backend)
        with sdpa_kernel(ATTENTION_BACKENDS[backend]) if backend in ATTENTION_BACKENDS else nullcontext():
            mixed = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=queries.shape[1] != keys.shape[1],
            )
        return mixed[..., :size] if attention.sinks else mixed
    keys, values = (_repeated(each, queries.shape[1]) for each in (keys, values))
    scores = capped(queries @ keys.transpose(2, 3) * scale, attention.score_cap)
    scores = scores.masked_fill(~_mask(queries, first, total, attention.window, documents), -torch.inf)
    return scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype) @ values


class WithSinks(Function):
    """Queries [rows, heads, positions, size] with a further feature: the sink of their head, over the scale of scores.

    A first key has 1 there, and others have 0. So its score is the sink, for every kernel of attention.
    """

    @staticmethod
    def forward(ctx, queries: torch.Tensor, sinks: Weight, scale: float):
        ctx.sinks, ctx.scale = sinks, scale
        result = F.pad(queries, (0, SINK_FEATURES))
        result[..., queries.shape[-1]] = (sinks.data.to(queries.dtype) / scale).unsqueeze(-1)
        return result

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        size = gradient.shape[-1] - SINK_FEATURES
        of_sinks = gradient[..., size].transpose(1, 2).flatten(0, 1)
        ctx.sinks.accumulate(add_sum, of_sinks / ctx.scale)
        return gradient[..., :size], None, None


def _behind_sink(keys: torch.Tensor, size: int) -> torch.Tensor:
    """Return keys behind that of the sink, with the features that queries have in addition."""
    result = F.pad(keys, (0, SINK_FEATURES, 1, 0))
    result[:, :, 0, size] = 1.0
    return result


class _LastQueries(Function):
    """Causal attention of the last positions of a row, by the kernel of CPUs, which knows no such mask: among
    themselves, and to what is before them. Sums of exponentials join both, and give each its own gradient."""

    @staticmethod
    def forward(ctx, queries, keys, values, scale: float):
        parts = _before_and_among(queries, keys, values)
        results = [_CPU_ATTENTION(queries, *of, 0.0, is_causal, scale=scale) for _, of, is_causal in parts]
        sums = torch.logaddexp(results[0][1], results[1][1])
        before, among = (result * (own - sums).exp().unsqueeze(-1) for result, own in results)
        mixed = (before + among).to(queries.dtype)
        ctx.save_for_backward(queries, keys, values, mixed, sums)
        ctx.scale = scale
        return mixed

    @staticmethod
    def backward(ctx, gradient):
        queries, keys, values, mixed, sums = ctx.saved_tensors
        of_queries = torch.zeros_like(queries)
        of_keys, of_values = torch.empty_like(keys), torch.empty_like(values)
        for at, of, is_causal in _before_and_among(queries, keys, values):
            given = gradient, queries, *of, mixed, sums, 0.0, is_causal
            own, of_keys[:, :, at], of_values[:, :, at] = _CPU_ATTENTION_BACKWARD(*given, scale=ctx.scale)
            of_queries += own
        return of_queries, of_keys, of_values, None


_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _before_and_among(queries: torch.Tensor, *keys_and_values: torch.Tensor):
    """Return the keys and values before queries, then those of the queries' own positions: where they are, they
    themselves, and whether they are seen causally."""
    first = keys_and_values[0].shape[2] - queries.shape[2]
    cuts = ((slice(0, first), False), (slice(first, None), True))
    return [(at, [each[:, :, at] for each in keys_and_values], is_causal) for at, is_causal in cuts]


def repeats_heads(queries: torch.Tensor, keys: torch.Tensor, is_causal: bool) -> bool:
    """Say whether each key/value head is repeated for the query heads that share it, before a kernel sees them.

    Kernels that share heads by themselves are that of CPUs, and on NVIDIA the one for half precision without a mask.
    For all else torch would take its slow path, which writes all scores to memory.
    """
    if queries.shape[1] == keys.shape[1] or queries.device.type == "cpu":
        return False
    shares = queries.device.type == "cuda" and torch.version.hip is None and queries.dtype.itemsize == 2
    return not (shares and is_causal)


def _repeated(heads: torch.Tensor, count: int) -> torch.Tensor:
    """Return [rows, count, positions, head size] of fewer heads, each repeated for its neighbours."""
    return heads.repeat_interleave(count // heads.shape[1], dim=1)


def _mask(
    queries: torch.Tensor, first: int, total: int, window: int | None, documents: Documents | None
) -> torch.Tensor:
    return documents.mask(queries, first, total, window) if documents else visible(queries, first, total, window)
