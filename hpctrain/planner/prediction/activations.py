"""Bytes of activations that layers keep between their passes, and compute with, row by row. Pure."""

from collections.abc import Sequence
from functools import singledispatch
from typing import NamedTuple

from hpctrain.architectures.description import Attention, Experts, Mlp, Norm
from hpctrain.planner.prices.cost import (
    busiest_share,
    computed_pairs,
    exchanged_features,
    heads_on,
    seen_in_context,
    seen_keys,
)
from hpctrain.planner.prices.setup import Setup
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import EMBEDDING, is_attention
from hpctrain.sharding.parameters import padded_vocabulary

INDEX_BYTES, STATISTIC_BYTES, HALF_BYTES = 8, 4, 2
CAPPED_BYTES = 8
"""Bytes of an attention score with a cap. In fp32 its tanh and its exponential are 4 each. In half precision tanh is 2,
and the exponential 4 and a copy of 2."""
WORST_SPREADS = 2.0
"""How many times the spread of experts' tokens memory allows for."""
LOSS_BYTES = 28
"""Bytes per token while its loss is computed: maxima, sums, and its own logit."""


class RowBytes(NamedTuple):
    """Bytes that layers have of one row of a rank."""

    kept: float
    """Bytes kept from the forward pass to the backward one."""
    deferred: float
    """Bytes kept from the input pass to the weight pass, where the backward pass is split."""
    computing: float
    """Bytes at the peak of a pass, in addition to what is kept."""

    def minus(self, other: "RowBytes") -> "RowBytes":
        return RowBytes(*(own - its for own, its in zip(self, other, strict=True)))


def row_bytes(
    setup: Setup,
    grid: TensorGrid,
    every: Sequence[Interval],
    recompute: str,
    *,
    splits: bool,
    rows: int,
    more_rows: float = 1.0,
) -> RowBytes:
    """Return the bytes of a row that a rank with some layers keeps, and computes with.

    In the backward pass of a layer, the later layers have released their activations, or keep what their weight passes
    need. Where only a chunk of the rows is computed at once, that is of `more_rows` times as many rows. The rank
    computes `rows` at once.
    """

    setup = setup.on(grid)

    def bytes_of(layer: Interval) -> tuple[float, float, float, float]:
        """Return the bytes that a layer keeps, defers, has of inner features, and computes with."""
        kept = layer_kept(setup, grid, layer, recompute, rows)
        inner = inner_bytes(setup, grid, layer) if setup.is_block(layer) else 0.0
        deferred = layer_deferred(setup, grid, layer) if splits else 0.0
        return kept, deferred, inner, layer_computing(setup, grid, layer, recompute, rows)

    kinds = [setup.first_equal[slice(*layer)] for layer in every]
    of_kind = {kind: bytes_of(layer) for kind, layer in dict(zip(kinds, every, strict=True)).items()}
    all_kept, all_deferred, *_ = zip(*(of_kind[kind] for kind in kinds), strict=True)
    most = more = 0.0
    for kind in reversed(kinds):
        kept, deferred, inner, computing = of_kind[kind]
        most = max(most, computing + more + (inner if splits else 0.0))
        change = deferred - kept
        more += change * (more_rows if change > 0 else 1.0)
    return RowBytes(sum(all_kept), sum(all_deferred), most)


def layer_computing(setup: Setup, grid: TensorGrid, layer: Interval, recompute: str, rows: int = 1) -> float:
    """Return the bytes that a layer computes with and does not keep, for one of `rows` of a rank.

    While it goes backward, gradients of about half of what it keeps are there too; what was computed again is whole.
    While the loss is computed, logits are there more than once. When they are gone, three hidden states are there in
    addition: gradients of the head's product, of its norm, and what the norm computes with. In half precision there are
    as many in fp32, too.
    """
    kept = layer_kept(setup, grid, layer, "none", rows)
    if layer == setup.head:
        whole, chunk = _logits(setup, grid, rows)
        loss_bytes = setup.engine.loss_bytes.get(setup.item_bytes, 0)
        if setup.model.description.logit_cap is not None:
            loss_bytes = setup.engine.capped_loss_bytes or loss_bytes
        overlapped = whole * loss_bytes + chunk * (setup.item_bytes + loss_bytes) + setup.positions * LOSS_BYTES
        hidden = setup.positions * setup.model.hidden_size / grid.x / grid.sequence_parts * setup.item_bytes
        overlapped = max(
            (3 if setup.item_bytes > HALF_BYTES else 9) * hidden - whole * setup.kept_logit_bytes, overlapped
        )
    else:
        overlapped = max(kept / 2, _context_gradients(setup, grid, layer, recompute))
    # Masks of documents are there from the first attention of a pass to its end.
    has_mask = setup.masks_documents and (layer == setup.head or (setup.is_block(layer) and is_attention(layer.start)))
    mask = computed_pairs(setup, None) if has_mask else 0
    if grid.sequence_parallel and layer != EMBEDDING:
        is_whole = recompute == "full"
        overlapped = _whole_hidden_states(setup, grid, layer, is_whole, rows, overlapped)
    overlapped += _experts_computing(setup, grid, layer)
    return _again_bytes(setup, grid, layer, recompute, rows) + overlapped + mask


def _context_gradients(setup: Setup, grid: TensorGrid, layer: Interval, recompute: str) -> float:
    """Return the bytes of a row that the backward pass of attention computes with where c cuts positions.

    They are gradients of all positions that it sees: of keys and values for each head of queries, as flash attention
    has them, and as they are scattered. Keys and values that are gathered again are there too; with sinks, gradients of
    the copies. Of exchanged heads they are those of queries, keys and values, as attention returns them, as they are
    sent, and as they arrive.
    """
    attention = setup.branches(layer)[0] if setup.is_block(layer) else None
    if attention is None or grid.context_parts == 1:
        return 0.0
    if grid.head_parts > 1:
        return 3 * setup.attending.positions * exchanged_features(attention, grid)[0] * setup.item_bytes
    query, key = heads_on(attention, grid)
    copies = 2 if recompute == "selective" or attention.sinks else 1
    return 2 * seen_in_context(setup, attention.window).positions * (query + copies * key) * setup.item_bytes


def _experts_computing(setup: Setup, grid: TensorGrid, layer: Interval) -> float:
    """Return the bytes of a row that a mixture of experts computes with and that others have not.

    They are of pairs of a token and an expert: hidden states by expert and by token, and activations.
    """
    mlp = setup.branches(layer)[1] if setup.is_block(layer) else None
    if not isinstance(mlp, Experts):
        return 0.0
    hidden, inner = setup.model.hidden_size, mlp.inner
    features = 2 * hidden + 2 * inner
    if mlp.bias:  # biases of pairs, and their products with gradients; or later what a clamped activation computes with
        features = max(6 * hidden + 2 * inner, 7 * inner)
    return _pairs(setup, grid, mlp) * features * setup.item_bytes


def _pairs(setup: Setup, grid: TensorGrid, experts: Experts) -> float:
    """Return how many pairs of a token and an expert a rank has of a row, at a load that is worse than expected."""
    return setup.positions * experts.chosen * busiest_share(experts, grid.y, WORST_SPREADS * setup.expert_spread)


def _whole_hidden_states(
    setup: Setup, grid: TensorGrid, layer: Interval, again: bool, rows: int, gradients: float
) -> float:
    """Return the bytes that a block or the head computes with where y cuts positions, for one of `rows` of a rank.

    They are `gradients`, and hidden states of all positions: a product's input, or all inputs of what was computed
    `again`, and the gradient of one. With several rows some exist twice, while their positions are put in order or
    taken apart; then half of the gradients are gone. How often is fitted to tests/unit/planner/test_memory.py.
    """
    whole = setup.positions * setup.model.hidden_size / grid.x * setup.item_bytes
    if layer == setup.head:  # at the loss, or after it
        return max(gradients, (7 if rows > 1 else 5) * whole * (1 - 1 / grid.y))
    if again:
        inputs = sum(branch is not None for branch in setup.branches(layer))
        return gradients + (inputs + 1) * whole * (1 - 1 / grid.y)
    if rows > 1:
        return gradients / 2 + 2.75 * whole
    return gradients + 2 * whole * (1 - 1 / grid.y)


def _again_bytes(setup: Setup, grid: TensorGrid, layer: Interval, recompute: str, rows: int) -> float:
    """Return the bytes of recomputed results that exist at once in a layer, for one of `rows` of a rank.

    In a chain of operators only the largest result counts: the input of the last product, or capped scores.
    """
    if recompute == "none" or (recompute == "full" and not setup.recomputes(layer)):
        return 0.0
    if recompute == "full" or not setup.engine.again_operations:
        return layer_kept(setup, grid, layer, "none", rows)
    if not setup.is_block(layer):
        return 0.0
    attention, _ = setup.branches(layer)
    scores = _core_bytes(setup, grid, attention) if attention and attention.score_cap is not None else 0.0
    return max(scores, inner_bytes(setup, grid, layer))


def _core_bytes(setup: Setup, grid: TensorGrid, attention: Attention) -> float:
    """Return the bytes per row that attention in one kernel keeps, in addition to its operands and its result.

    They are sums of exponentials; with a cap, tanh and exponential of each score.
    """
    heads = attention.heads / grid.y / grid.head_parts
    if attention.score_cap is None:
        return setup.attending.positions * heads * STATISTIC_BYTES
    return computed_pairs(setup, attention.window) * heads * CAPPED_BYTES


@singledispatch
def mask_bytes(setup: Setup, grid: TensorGrid, attention: Attention, recompute: str, rows: int) -> float:
    """Return the bytes of the mask that attention keeps, for one of `rows` of a rank.

    The mask has numbers that are added to scores. With a cap it has one byte per bit, and is recomputed with the
    scores. One mask serves all rows, where it does not depend on documents. Without window, cap and documents there is
    none.
    """
    is_windowed = attention.window is not None and attention.window < setup.row_positions
    is_capped = attention.score_cap is not None
    is_masked = is_windowed or is_capped or setup.masks_documents
    if not is_masked or (is_capped and recompute == "selective"):
        return 0.0
    size = computed_pairs(setup, attention.window) * (1 if is_capped else setup.item_bytes)
    return size if setup.masks_documents else size / rows


def inner_bytes(setup: Setup, grid: TensorGrid, layer: Interval) -> float:
    """Return the bytes of the inner features of a layer, for one row of a rank."""
    _, mlp = setup.branches(layer)
    inner = mlp.shared_inner if isinstance(mlp, Experts) else mlp.inner if mlp else 0
    return setup.positions * inner / grid.y * setup.item_bytes


def layer_deferred(setup: Setup, grid: TensorGrid, layer: Interval) -> float:
    """Return the bytes that a layer keeps between its input and its weight pass, for one row of a rank: both operands
    of each product that is a weight's gradient."""
    model = setup.model
    hidden = model.hidden_size / grid.x
    if layer == EMBEDDING:
        numbers = hidden
    elif layer == setup.head:
        numbers = hidden + padded_vocabulary(model, grid) / grid.y
    else:
        attention, mlp = setup.branches(layer)
        numbers = 2 * hidden + 2 * sum(heads_on(attention, grid)) if attention else 0.0
        if isinstance(mlp, Experts):
            numbers += (2 * hidden + 3 * mlp.inner) * _pairs(setup, grid, mlp) / setup.positions + hidden + mlp.count
            numbers += (2 * hidden + 3 * mlp.shared_inner / grid.y) * (mlp.shared_inner > 0)
        else:
            numbers += 2 * hidden + (mlp.inner + mlp.up_size) / grid.y if mlp else 0.0
    return setup.positions * numbers * setup.item_bytes


def _norm_statistics(setup: Setup, norm: Norm) -> float:
    """Return the bytes that a norm keeps of a row apart from its input: the scale of each token, or mean and scale."""
    return setup.positions * STATISTIC_BYTES * (2 if norm.has_bias else 1)


def _head_statistics(setup: Setup, grid: TensorGrid, attention: Attention) -> tuple[float, float]:
    """Return the bytes that norms of heads keep of a row apart from their inputs: of queries, and of keys."""
    if attention.head_norm is None:
        return 0.0, 0.0
    queries, keys = (size / attention.head_size for size in heads_on(attention, grid))
    statistics = _norm_statistics(setup, attention.head_norm)
    return queries * statistics, keys * statistics


def layer_kept(setup: Setup, grid: TensorGrid, layer: Interval, recompute: str, rows: int = 1) -> float:
    """Return the bytes that a layer keeps for its backward pass, for one of `rows` of a rank.

    For a Megatron block with nothing recomputed: s b h (10 + 24 / t + 5 a s / h t) (Korthikanti et al. 2022).
    """
    model, b = setup.model, setup.item_bytes
    cut = setup.sequence_parts(grid)
    hidden = setup.positions * model.hidden_size / grid.x
    if layer == EMBEDDING:
        own = INDEX_BYTES if recompute == "full" else 2 * INDEX_BYTES + 1  # ids, and where they are
        return setup.positions * own  # it makes the first block's input
    if recompute == "full":
        return hidden * setup.gathered_bytes / cut
    if layer == setup.head:
        logits, _ = _logits(setup, grid, rows)
        return (
            hidden * 2 * b / grid.sequence_parts
            + logits * setup.kept_logit_bytes
            + setup.positions * INDEX_BYTES  # targets
            + setup.positions * STATISTIC_BYTES * (logits > 0)  # logarithms of sums, which are of kept logits
            + _norm_statistics(setup, model.description.norm) / grid.sequence_parts
        )
    return sum(branch_kept(setup, grid, branch, recompute, rows) for branch in setup.branches(layer) if branch)


def _logits(setup: Setup, grid: TensorGrid, rows: int) -> tuple[float, float]:
    """Return how many logits of each of `rows` a rank keeps, and how many more exist while it computes.

    They are all and none, or none and those of as many tokens as the rank computes at once.
    """
    columns = padded_vocabulary(setup.model, grid) // grid.y
    at_once = setup.logits_at_once(setup.positions, columns, rows)
    return (0.0, at_once * columns) if at_once < setup.positions else (at_once * columns, 0.0)


@singledispatch
def branch_kept(setup: Setup, grid: TensorGrid, branch: Attention | Mlp, recompute: str, rows: int) -> float:
    """Return the bytes that a rank keeps of a branch, for one of `rows`: its input, normed, too; queries, keys,
    values, mixed; gate and up. Selective recomputing drops what is between products."""
    drops, b = recompute == "selective", setup.item_bytes
    hidden = setup.positions * setup.model.hidden_size / grid.x
    norms = [norm for norm in (branch.norm, branch.out_norm) if norm]
    kept = b * (1 + len(norms) - drops) * hidden / setup.sequence_parts(grid)
    kept += sum(_norm_statistics(setup, norm) for norm in norms) / grid.sequence_parts
    if isinstance(branch, Experts):
        kept += setup.positions / grid.sequence_parts * (branch.count + 3 * branch.chosen) * STATISTIC_BYTES
        kept += setup.positions / grid.sequence_parts * branch.chosen * INDEX_BYTES
        kept += _pairs(setup, grid, branch) * (branch.up_size * b + INDEX_BYTES)
        return kept + b * setup.positions * branch.shared_inner / grid.y * (3 - drops)
    if isinstance(branch, Mlp):
        return kept + b * setup.positions * branch.inner / grid.y * ((3 if branch.gated else 2) - drops)
    query, key = (setup.positions * features for features in heads_on(branch, grid))
    kept += mask_bytes(setup, grid, branch, recompute, rows) + sum(_head_statistics(setup, grid, branch))
    if branch.sinks:
        # Copies of queries, and of the keys and values that each interval sees, behind a sink, with more features; a
        # result with these, and one without.
        times, seen = branch.kernel_size / branch.head_size, key * seen_keys(setup, branch.window) / setup.positions
        kept += b * (query + 2 * times * (query + seen))
        return kept + _core_bytes(setup, grid, branch)
    kept += _context_kept(setup, grid, branch, drops)
    if branch.score_cap is not None and not drops:
        # Products of single operations: keys and values are repeated for each query head, and nothing else is kept.
        return kept + b * 4 * query + _core_bytes(setup, grid, branch)
    kept += b * (2 * query + 2 * key)
    if drops:
        return kept + (0.0 if branch.score_cap is not None else _core_bytes(setup, grid, branch))
    # Rotary positions keep nothing of what norms of heads return: attention reads one copy, whichever there are.
    kept += b * (query + key) * (branch.rotary is not None or branch.head_norm is not None)
    return kept + _core_bytes(setup, grid, branch)


def _context_kept(setup: Setup, grid: TensorGrid, attention: Attention, drops: bool) -> float:
    """Return the bytes that a rank keeps of a row because c cuts positions.

    Gathered keys and values are those of all ranks, in place of its own where attention read them from a tensor that
    nobody else keeps; or, where they are gathered again, a copy of its own. Exchanged heads are kept in place of its
    own, unless norms keep these; and attention's result before it is moved back.
    """
    if grid.context_parts == 1:
        return 0.0
    query, key = heads_on(attention, grid)
    if grid.head_parts > 1:
        features = setup.row_positions / setup.positions * sum(exchanged_features(attention, grid)) - query - 2 * key
        features += (query + 2 * key) * (attention.head_norm is not None)
        if not drops and attention.score_cap is None:
            features -= (query + key) * (attention.rotary is not None or attention.head_norm is not None)
        return setup.item_bytes * setup.positions * features
    features = 2 * key * (1 if drops else seen_in_context(setup, attention.window).positions / setup.positions)
    if attention.score_cap is None:
        features += query  # kernels keep the result of each interval, and the next product keeps them as one tensor
    if not drops and attention.rotary is not None and attention.head_norm is None and attention.score_cap is None:
        features -= query + 2 * key
    return setup.item_bytes * setup.positions * features
