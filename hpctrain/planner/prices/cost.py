"""Counts what a layer of the model costs a rank: products, passes over memory, what is exchanged. Pure.

The same for every device; `seconds` then says how long one takes. It follows hpctrain/model/transformer.py: weights
are cut by x over one dim and by y over the other; blocks go from features cut by x to heads cut by y and back.
With x = z = 1 that is 1D tensor parallelism (Shoeybi et al. 2019).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, singledispatch
from statistics import NormalDist
from typing import NamedTuple

from hpctrain.architectures.description import Attention, Experts, Mlp, Norm
from hpctrain.config.errors import PlanError
from hpctrain.config.job import Model
from hpctrain.planner.prices.devices import DeviceModel
from hpctrain.planner.prices.linear_cost import gathering_linear, joining_bytes, linear, scattering_linear
from hpctrain.planner.prices.setup import EAGER_PASSES, Setup
from hpctrain.planner.prices.work import Exchange, LayerCost, MatrixProduct, PassWork
from hpctrain.sharding.grid import CONTEXT, STORED, TensorGrid
from hpctrain.sharding.grid_parts import parts_of
from hpctrain.sharding.intervals import Interval, cut_evenly, cut_zigzag, intersections, seen_by_each
from hpctrain.sharding.parameters import item_units

RECOMPUTE = ("none", "selective", "full")
STATISTIC_BYTES = 4  # means and sums of norms and of the loss are fp32
CAPPED_SCORES_PASSED = 18, 24
"""Times that scores are read or written, forward and backward, where a cap keeps them out of fused attention."""
CLAMPED_PASSED = 16, 64
"""Times that inner features of experts are read or written by the clamped activation, forward and backward, where it is
also computed again. Counted in model/operators/activation.py."""
CONTEXT_OPERATIONS = 7, 6
"""Operations that c adds to attention, forward and backward, but for the copies of each interval: keys and values are
put together and among those of others; a second interval of queries is attended to, and joined with the first."""
EXCHANGE_OPERATIONS = 9
"""Operations of an exchange of heads for each rank of c, forward or backward: of queries, keys and values three copies
for a rank and two from it; of the result two and one; and one for memory."""
EXCHANGE_PASSES = 4, 6
"""Times that queries, keys and values are read or written around an exchange of heads, forward and backward: they are
cut by rank, and put in order. Gradients are put together before that."""
EXPERT_OPERATIONS = 24, 20
"""Operations of a mixture of experts that are no products, forward and backward: the router's, sorts, gathers, sums."""
ALIGNED = 8
"""Sizes of experts in bf16 must be multiples of it, or their products are not one operation; see
model/operators/experts.py."""
SQUARES_PASSED = 4
"""Bytes read per feature of a norm for its statistics, which are kept when the rest is computed again."""


@lru_cache(maxsize=4096)
def _most_elements(model: Model, grid: TensorGrid, item: int) -> int:
    units = item_units(model, grid, item)
    return max(sum(part.layout(unit).size for unit in units) for part in parts_of(grid) if not part.stored_place)


def unit_elements(setup: Setup, grid: TensorGrid, item: int) -> int:
    """Return how many weights of an item ranks have together that use the same: of those with the most.

    A tied head's are the embedding's.
    """
    return _most_elements(setup.model, grid, setup.first_equal[item])  # pyright: ignore[reportArgumentType] - frozen, so it has a hash


def layer_elements(setup: Setup, grid: TensorGrid, layer: Interval) -> int:
    """Return how many weights of a layer ranks have together that use the same: of those with the most."""
    return sum(unit_elements(setup, grid, item) for item in range(*layer))


def layer_cost(
    setup: Setup, grid: TensorGrid, layer: Interval, rows: int, recompute: str = "none", zero: int = 1
) -> LayerCost:
    """Return what a layer costs one rank of a tensor grid for `rows` sequences of its own.

    Raises PlanError for an unknown value of `recompute`.
    """
    if recompute not in RECOMPUTE:
        raise PlanError(f"recompute = '{recompute}': set it to one of {', '.join(RECOMPUTE)}")
    setup, regathers = setup.on(grid), recompute != "full"
    if setup.is_block(layer):
        cost, selected = _block(setup, grid, layer, rows, regathers)
    else:
        cost, selected = (_embedding if layer.start == 0 else _head)(setup, grid, rows, regathers), PassWork()
    again = PassWork()
    if recompute == "full" and setup.recomputes(layer):
        again = cost.forward
    elif recompute == "selective":
        again = selected
        # What c gathers again waits for the scatter before it, and attention for the gather: nothing is overlapped.
        for work in (again, cost.backward_input):
            work.exchanges = [each._replace(behind=()) if each.axis == CONTEXT else each for each in work.exchanges]
    return _with_weights(
        setup, grid, layer, zero, replace(cost, backward_input=PassWork.joined((again, cost.backward_input)))
    )


def _with_weights(setup: Setup, grid: TensorGrid, layer: Interval, zero: int, cost: LayerCost) -> LayerCost:
    """Add what is exchanged of the weights while a layer computes: over z, and over holders for ZeRO 2 and 3."""

    def weights(axis: str, elements: int) -> Exchange:
        return Exchange(axis, "all_gather", elements * setup.gathered_bytes, purpose="weights")

    def gradients(axis: str, elements: int) -> Exchange:
        return Exchange(axis, "reduce_scatter", elements * setup.gradient_bytes, purpose="gradients")

    before: list[Exchange] = []
    after: list[Exchange] = []
    placed = added = 0.0  # bytes passed over to put a rank's shard among the gathered, to add to it what was scattered
    for item in range(*layer):
        elements = unit_elements(setup, grid, item)
        if zero == 3:
            before.append(weights("data", elements // grid.stored_parts))
        if grid.stored_parts > 1:
            before.append(weights(STORED, elements))
            after.append(gradients(STORED, elements))
            if setup.sums_itself:
                placed += 2 * setup.item_bytes * elements / grid.stored_parts
                added += 3 * setup.gradient_bytes * elements / grid.stored_parts if zero < 2 else 0.0
        if zero >= 2:
            after.append(gradients("data", elements // grid.stored_parts))
    gather, scatter = PassWork(passed_bytes=placed, exchanges=before), PassWork(passed_bytes=added, exchanges=after)
    return LayerCost(
        PassWork.joined((gather, cost.forward)),
        PassWork.joined((gather, cost.backward_input)),
        PassWork.joined((cost.backward_weight, scatter)),
    )


def _norm(setup: Setup, grid: TensorGrid, tokens: int, norm: Norm) -> LayerCost:
    features = setup.model.hidden_size // grid.x
    tokens = -(-tokens // setup.sequence_parts(grid))
    statistics = 2 if norm.has_bias else 1
    passes = setup.passes.norm
    forward, backward = (PassWork(passed_bytes=tokens * features * each) for each in passes)
    if grid.x > 1:
        forward.exchanges += [Exchange("x", "all_reduce", tokens * STATISTIC_BYTES)] * statistics
        backward.exchanges.append(Exchange("x", "all_reduce", tokens * STATISTIC_BYTES * statistics))
    return LayerCost(forward, backward, PassWork())  # its weights' gradients are by-products


def heads_on(attention: Attention, grid: TensorGrid) -> tuple[int, int]:
    """Return how many features of queries, and of keys, a rank of a grid has."""
    size = attention.head_size
    return attention.heads // grid.y * size, max(1, attention.kv_heads // grid.y) * size


def _block(setup: Setup, grid: TensorGrid, layer: Interval, rows: int, regathers: bool) -> tuple[LayerCost, PassWork]:
    """Return what a block costs, or one branch of it, and what selective recomputing runs again; see
    `linear_cost.py`."""
    attention, mlp = setup.branches(layer)
    branches = [_attention_branch(setup, grid, attention, rows, regathers)] if attention else []
    branches += [FEED_FORWARD[type(mlp)](setup, grid, mlp, rows, regathers)] if mlp else []
    parts = [part for branch in branches for part in branch.parts]
    backward = PassWork.joined(branch.backward_input for branch in branches)
    weight = PassWork.joined(branch.backward_weight for branch in branches)
    again = PassWork.joined(branch.again for branch in branches).as_pass("block", 0, rows)
    return _labelled("block", rows, LayerCost(PassWork.joined(parts), backward, weight)), again


class Branch(NamedTuple):
    """A residual branch: a norm, two linear layers with something between, and the sum."""

    parts: list[PassWork]
    """Work of the forward pass, in the order of its operations."""
    backward_input: PassWork
    backward_weight: PassWork
    again: PassWork = PassWork()
    """Work that selective recomputing runs again: see `computed_again`."""


def _attention_branch(setup: Setup, grid: TensorGrid, attention: Attention, rows: int, regathers: bool) -> Branch:
    passes, tokens = setup.passes, rows * setup.positions
    query, key = heads_on(attention, grid)
    rotary = tokens * (query + key) if attention.rotary else 0
    normed = tokens * (query + key) if attention.head_norm else 0
    is_gathered = grid.context_parts > grid.head_parts
    parts = min(setup.block_parts, key // attention.head_size) if is_gathered else 1
    core, core_backward = _attention(setup, attention, rows, grid, parts)
    if grid.head_parts > 1:
        moved = [_exchange(setup, grid, attention, rows, times) for times in EXCHANGE_PASSES]
    else:
        moved = _context(setup, grid, attention.window, rows * 2 * key, core, core_backward, parts)
    work = branch_cost(setup, grid, attention, rows, (query + 2 * key, query), regathers)
    # With sinks, queries, keys and values are copied behind a first position, and their gradients back.
    padded = 2 * setup.item_bytes * tokens * (query + 2 * key) if attention.sinks else 0
    forward, backward = (rotary * passes.rotary[i] + normed * passes.norm[i] + padded for i in (0, 1))
    work.parts[1:1] = [PassWork(passed_bytes=forward), moved[0], core]
    backward_input = PassWork.joined((work.backward_input, core_backward, moved[1], PassWork(passed_bytes=backward)))
    # Copies with sinks are kept, and what they are copies of is not needed again.
    again = computed_again(setup, grid, tokens, attention, 0 if attention.sinks else forward)
    if grid.head_parts == 1 and not attention.sinks:  # what was exchanged is kept
        again = PassWork.joined((again, moved[0]))
    if attention.score_cap is not None or not setup.engine.flash:
        again = PassWork.joined((again, core))
    return work._replace(backward_input=backward_input, again=again)


def _context(
    setup: Setup,
    grid: TensorGrid,
    window: int | None,
    numbers: int,
    core: PassWork,
    core_backward: PassWork,
    parts: int,
) -> tuple[PassWork, PassWork]:
    """Return what c exchanges: keys and values, so many `numbers` of a position, are gathered, and gradients scattered;
    or those that a window shows are sent.

    Of several parts each but one overlaps attention of another one, which has as many of the products. Both pass over
    what a rank receives, to put positions in order, and over a rank's own, to put that among the others'. A gather
    takes as long as if all ranks had as many positions as the one with the most, and a window as if all sent as much as
    the one that sends or receives the most. Documents, which no plan knows, count as one.
    """
    c = grid.context_parts
    if c == 1:
        return PassWork(), PassWork()
    keys = seen_in_context(setup, window)
    own, seen, moved = (numbers * setup.item_bytes * each for each in (setup.positions, keys.positions, keys.moved))
    works = []
    operations = ("all_gather", "reduce_scatter") if keys.is_gather else ("all_to_all", "all_to_all")
    for computed, operation, count in zip((core, core_backward), operations, CONTEXT_OPERATIONS, strict=True):
        each = len(computed.products) // parts
        behind = [(), *(tuple(computed.products[i * each : (i + 1) * each]) for i in range(1, parts))]
        exchanges = [Exchange(CONTEXT, operation, moved // parts, products) for products in behind]
        works.append(PassWork([], 2.0 * seen + 4.0 * own, parts * (count + keys.pieces), exchanges))
    return works[0], works[1]


class SeenKeys(NamedTuple):
    """The keys and values that a rank of c receives, and how they are moved."""

    is_gather: bool
    """Whether all ranks receive all. Else each sends others what these see."""
    positions: int
    """How many a rank receives, its own among them."""
    moved: int
    """Positions of a collective: as if all ranks had, or sent, as much as the one with the most."""
    pieces: int
    """Copies of intervals."""


def seen_in_context(setup: Setup, window: int | None) -> SeenKeys:
    """Return what a rank of c sees of a row. Of equal shares it is the most that any has, else that of one rank."""
    return _seen_keys(setup.row_positions, setup.context_shares, setup.place, window)


@lru_cache(maxsize=256)
def _seen_keys(row_positions: int, shares: tuple[int, ...], place: int, window: int | None) -> SeenKeys:
    contexts, c = cut_zigzag(row_positions, shares), len(shares)
    received = [[intersections(own, theirs) for own in contexts] for theirs in seen_by_each(contexts, window)]
    sizes = [[sum(each.size for each in part) for part in of_rank] for of_rank in received]
    positions = max(map(sum, sizes)) if len(set(shares)) == 1 else sum(sizes[place])
    if min(map(sum, sizes)) == row_positions:
        return SeenKeys(True, positions, c * (row_positions * max(shares) // sum(shares)), 2 * c)
    sent = zip(*sizes, strict=True)
    most = max(max(sum(one), sum(other)) - one[n] for n, (one, other) in enumerate(zip(sizes, sent, strict=True)))
    pieces = [sum(map(len, of_rank)) for of_rank in (*received, *zip(*received, strict=True))]
    return SeenKeys(False, positions, c * most // (c - 1), max(map(sum, zip(pieces[:c], pieces[c:], strict=True))))


def _exchange(setup: Setup, grid: TensorGrid, attention: Attention, rows: int, times: int) -> PassWork:
    """Return what c exchanges of heads in one pass: queries, keys and values, which are passed over so many `times`,
    and attention's result; or their gradients."""
    sizes = [rows * setup.item_bytes * size for size in exchanged_features(attention, grid)]
    there, back = (setup.row_positions * size for size in sizes)
    moved = (grid.context_parts * setup.most_positions * size for size in sizes)
    exchanges = [Exchange(CONTEXT, "all_to_all", int(num_bytes)) for num_bytes in moved]
    return PassWork([], times * there + 4.0 * back, EXCHANGE_OPERATIONS * grid.head_parts, exchanges)


def exchanged_features(attention: Attention, grid: TensorGrid) -> tuple[float, float]:
    """Return the features of queries, keys and values that a rank has of each position after an exchange of heads, and
    of the result. Keys and values of fewer heads than ranks are there for several of them."""
    query, key = (features / attention.head_size for features in heads_on(attention, grid))
    query, key = query / grid.head_parts, max(1.0, key / grid.head_parts)
    return (query + 2 * key) * attention.head_size, query * attention.head_size


def _mlp_branch(setup: Setup, grid: TensorGrid, mlp: Mlp, rows: int, regathers: bool) -> Branch:
    inner, up = mlp.inner // grid.y, mlp.up_size // grid.y
    work = branch_cost(setup, grid, mlp, rows, (up, inner), regathers)
    forward, backward = (PassWork(passed_bytes=rows * setup.positions * inner * each) for each in setup.passes.inner)
    work.parts.insert(1, forward)
    again = computed_again(setup, grid, rows * setup.positions, mlp, forward.passed_bytes)
    return work._replace(backward_input=PassWork.joined((work.backward_input, backward)), again=again)


def busiest_share(experts: Experts, y: int, spread: float) -> float:
    """Return the expected share of all pairs of a token and an expert that the busiest of y ranks has.

    The tokens of experts are taken for independent and normal, and a rank has the sum over E / y of them. The largest
    of y sums is expected at the normal score of Blom (1958). No rank has more pairs than experts for a token.
    """
    if y == 1:
        return 1.0
    own = experts.count // y
    score = NormalDist().inv_cdf((y - 0.375) / (y + 0.25))
    return min((1.0 + spread * own**-0.5 * score) / y, min(experts.chosen, own) / experts.chosen)


def load_guesses(setup: Setup, grids: Iterable[TensorGrid]) -> tuple[str, ...]:
    """Say what is assumed of the load of experts, where y cuts them."""
    mixed, sizes = {block.mlp for block in setup.blocks if isinstance(block.mlp, Experts)}, {grid.y for grid in grids}
    times = [busiest_share(each, y, setup.expert_spread) * y for each in mixed for y in sizes if y > 1]
    key = f"search.expert_spread = {setup.expert_spread:g}"
    return (f"{key}: the busiest rank of a layer computes {max(times):.2f} times the mean of experts",) if times else ()


@singledispatch
def experts_branch(setup: Setup, grid: TensorGrid, experts: Experts, rows: int, regathers: bool) -> Branch:
    """Return what a mixture of experts costs the busiest rank, see model/operators/experts.py. Its experts have equal
    loads.

    With no shared expert, the linear layers of the branch have no features.
    """
    tokens, hidden, passes = rows * setup.positions, setup.model.hidden_size, setup.passes
    of_shared = experts.shared_inner // grid.y
    branch = branch_cost(setup, grid, experts, rows, (2 * of_shared, of_shared), regathers)
    router = linear(setup, -(-tokens // grid.sequence_parts), hidden, experts.count, ("x", "y"), {"x": 1, "y": 1})
    own = experts.count // grid.y
    pairs = tokens * experts.chosen * busiest_share(experts, grid.y, setup.expert_spread)
    load, up, inner = math.ceil(pairs / own), experts.up_size, experts.inner
    is_grouped = setup.dtype == "bf16" and hidden % ALIGNED == inner % ALIGNED == 0

    def grouped(m: int, k: int, n: int) -> list[MatrixProduct]:
        """Return a product of each expert: one operation for all in bf16, where devices have it for these sizes."""
        count, batch = (1, own) if is_grouped else (own, 1)
        return [MatrixProduct(m, k, n, batch, tokens=load)] * count

    b, summed = setup.item_bytes, int(tokens * hidden * setup.summed_bytes)
    # Rows are gathered, and put in the order of tokens, and added: read and written, twice; backward twice more. Those
    # of experts of other ranks are zeros, which are written, and added too. Activations of experts are never fused.
    added = tokens * experts.chosen * (1 if grid.y == 1 else 2)
    moved = [(pairs * times + added) * hidden * b for times in (4, 8)]
    passed = EAGER_PASSES[4 if b >= 4 else 2].inner
    if experts.activation == "clamped":
        passed = [times * b for times in CLAMPED_PASSED]
    activated, d_activated = (pairs * inner * (each + 3 * b) for each in passed)
    shared = [tokens * of_shared * each for each in passes.inner]
    forward = PassWork(grouped(load, hidden, up) + grouped(load, inner, hidden), moved[0] + activated + shared[0])
    backward = PassWork(grouped(load, hidden, inner) + grouped(load, up, hidden), moved[1] + d_activated + shared[1])
    forward.operations, backward.operations = EXPERT_OPERATIONS
    if experts.bias:  # taken for each pair, added, and multiplied by its weight; backward read twice more, and summed
        forward.passed_bytes += pairs * (5 * up + 7 * hidden) * b
        backward.passed_bytes += pairs * (up + 9 * hidden) * b
    of_weights = (MatrixProduct(out, load, into, tokens=load) for out, into in ((up, hidden), (hidden, inner)))
    weight = PassWork([product for product in of_weights for _ in range(own)])
    weight.passed_bytes = passes.weight * own * (up + inner) * hidden
    if grid.sequence_parallel:
        gathers, scatters = Exchange("y", "all_gather", summed), Exchange("y", "reduce_scatter", summed)
        forward.exchanges += [gathers, scatters]
        backward.exchanges += [gathers, gathers, scatters]  # of the sum's gradient, and of the input again
    elif grid.y > 1:
        forward.exchanges.append(Exchange("y", "all_reduce", summed))
        backward.exchanges.append(Exchange("y", "all_reduce", summed))
    if setup.balances_rows:
        load = 4 * rows * experts.count
        forward.exchanges += [Exchange(axis, "all_reduce", load) for axis in (CONTEXT, *grid.sequence_axes)]
    branch.parts[1:1] = [router.forward, forward]
    return branch._replace(
        backward_input=PassWork.joined((branch.backward_input, router.backward_input, backward)),
        backward_weight=PassWork.joined((branch.backward_weight, router.backward_weight, weight)),
        again=computed_again(setup, grid, tokens, experts, shared[0]),
    )


FEED_FORWARD: dict[type[Mlp], Callable[..., Branch]] = {Mlp: _mlp_branch, Experts: experts_branch}
"""What a feed-forward branch costs, by what describes it."""


@singledispatch
def computed_again(setup: Setup, grid: TensorGrid, tokens: int, branch: Attention | Mlp, passed: float) -> PassWork:
    """Return what selective recomputing runs again of a branch, apart from attention's scores.

    That is the norm, with its kept statistics, and operations between the products, which pass over so many bytes.
    """
    operations = setup.engine.again_operations
    if operations is None:
        return PassWork()
    tokens = -(-tokens // setup.sequence_parts(grid))
    normed = tokens * (setup.model.hidden_size // grid.x) * (setup.passes.norm[0] - SQUARES_PASSED)
    return PassWork(passed_bytes=normed + passed, operations=operations[isinstance(branch, Mlp)])


def branch_cost(
    setup: Setup, grid: TensorGrid, branch: Attention | Mlp, rows: int, features: tuple[int, int], regathers: bool
) -> Branch:
    """Return what a branch costs without what is between its two linear layers.

    The first of these has `features[0]` out, the second `features[1]` in.
    """
    engine, passes = setup.engine, setup.passes
    tokens, hidden = rows * setup.positions, setup.model.hidden_size // grid.x
    sizes, (out, into) = {"x": grid.x, "y": grid.y}, features
    norm = _norm(setup, grid, tokens, branch.norm)
    if grid.sequence_parallel:
        first = gathering_linear(setup, rows, hidden, out, grid, regathers, setup.block_parts)
        second = scattering_linear(setup, rows, into, hidden, grid, setup.block_parts)
    else:
        first = linear(setup, tokens, hidden, out, ("x", "y"), sizes, setup.block_parts)
        second = linear(setup, tokens, into, hidden, ("y", "x"), sizes, setup.block_parts)
    residual = tokens * hidden / setup.sequence_parts(grid)
    ends = [PassWork(passed_bytes=residual * each / 2) for each in passes.residual]  # half of a block's
    if not out:  # a mixture of experts alone
        first = second = LayerCost(PassWork(), PassWork(), PassWork())
    costs = [norm, first, second]
    if branch.out_norm:
        costs.append(_norm(setup, grid, tokens, branch.out_norm))
        ends[0] = PassWork.joined((costs[-1].forward, ends[0]))
    for end, operations in zip(ends, engine.block_operations, strict=True):
        end.operations += cut_evenly(operations, 2)[isinstance(branch, Mlp)].size
    return Branch(
        [PassWork.joined((norm.forward, first.forward)), second.forward, ends[0]],
        PassWork.joined((*(cost.backward_input for cost in costs), ends[1])),
        PassWork.joined((first.backward_weight, second.backward_weight)),
    )


def _labelled(item: str, rows: int, cost: LayerCost) -> LayerCost:
    return LayerCost(
        cost.forward.as_pass(item, 0, rows),
        cost.backward_input.as_pass(item, 1, rows),
        cost.backward_weight.as_pass(item, 1, rows),
    )


def _attention(
    setup: Setup, attention: Attention, rows: int, grid: TensorGrid, parts: int = 1
) -> tuple[PassWork, PassWork]:
    """Return the products between heads: two forward; backward four, and the scores' again where they were not kept.

    They are in so many parts, one after the other.
    """
    setup = setup.attending
    positions, size, batch = (
        setup.positions,
        attention.kernel_size,
        rows * (attention.heads // grid.y // grid.head_parts),
    )
    flash, passes = setup.engine.flash, setup.passes.scores
    if attention.score_cap is not None:
        flash, passes = None, tuple(times * setup.item_bytes for times in CAPPED_SCORES_PASSED)
    pairs = computed_pairs(setup, attention.window)
    share = pairs / positions**2
    if flash and not setup.masks_documents:
        share = seen_share(attention, setup.row_positions) * setup.row_positions / positions
    forward, backward = PassWork(), PassWork()
    for work, fused, passed in zip((forward, backward), flash or (None, None), passes, strict=True):
        work.passed_bytes = batch * pairs * passed
        for part in cut_evenly(batch, min(parts, batch)):
            scores = MatrixProduct(positions, size, positions, part.size, share, fused)
            mixed = MatrixProduct(positions, positions, size, part.size, share, fused)
            work.products += [scores, mixed]
            if work is backward:
                work.products += [mixed, scores] + ([scores] if flash else [])
    return forward, backward


def computed_pairs(setup: Setup, window: int | None) -> int:
    """Return the pairs of a query and a key that masks and scores of a row have, on the rank with the most."""
    return max(sum(own.size * num_keys for own, num_keys in of_rank) for of_rank in _intervals_and_keys(setup, window))


def seen_keys(setup: Setup, window: int | None) -> int:
    """Return the keys that queries of each interval of a row's positions have, each with a sink, on the rank with the
    most."""
    return max(sum(num_keys + 1 for _, num_keys in of_rank) for of_rank in _intervals_and_keys(setup, window))


def _intervals_and_keys(setup: Setup, window: int | None) -> list[list[tuple[Interval, int]]]:
    """Return the intervals of positions of each rank of c, with how many keys their queries have: all up to the
    interval's end, from the first one that a window shows. Where shares are unequal they are those of one rank."""
    setup = setup.attending
    shares, parts = setup.context_shares, cut_zigzag(setup.row_positions, setup.context_shares)
    parts = parts if len(set(shares)) == 1 else parts[setup.place : setup.place + 1]
    return [[(own, min(own.stop, own.size + (window or own.stop) - 1)) for own in part] for part in parts]


def seen_share(attention: Attention, positions: int) -> float:
    """Return the share of all pairs of positions that attention computes with: half of them, or those in the window."""
    window = min(attention.window or positions, positions)
    return window / positions - (window / positions) ** 2 / 2


def _embedding(setup: Setup, grid: TensorGrid, rows: int, _regathers: bool) -> LayerCost:
    tokens, features = rows * setup.positions, setup.model.hidden_size // grid.x
    num_bytes = tokens * features * setup.item_bytes
    forward, weight = (
        PassWork(passed_bytes=3 * num_bytes, operations=3),
        PassWork(passed_bytes=5 * num_bytes, operations=3),
    )
    if grid.sequence_parallel:
        forward.exchanges.append(Exchange("y", "reduce_scatter", num_bytes))
        weight.exchanges.append(Exchange("y", "all_gather", num_bytes))
        forward.passed_bytes += joining_bytes(rows, num_bytes)
        weight.passed_bytes += joining_bytes(rows, num_bytes)
    elif grid.y > 1:
        forward.exchanges.append(Exchange("y", "all_reduce", num_bytes))
    return _labelled("embedding", rows, LayerCost(forward, PassWork(), weight))


def _head(setup: Setup, grid: TensorGrid, rows: int, regathers: bool) -> LayerCost:
    setup = replace(setup, linear_dtype=None)
    model, passes = setup.model, setup.passes
    tokens, vocabulary = rows * setup.positions, setup.head_columns(grid)
    norm = _norm(setup, grid, tokens, model.description.norm)
    if grid.sequence_parallel:
        product = gathering_linear(setup, rows, model.hidden_size // grid.x, vocabulary, grid, regathers)
    else:
        sizes = {"x": grid.x, "y": grid.y}
        product = linear(setup, tokens, model.hidden_size // grid.x, vocabulary, ("x", "y"), sizes)
    of_loss = PassWork.joined((product.forward, PassWork(passed_bytes=tokens * vocabulary * passes.logits[0])))
    forward, backward = norm.forward, PassWork.joined((norm.backward_input, product.backward_input))
    backward.passed_bytes += tokens * vocabulary * passes.logits[1]
    for work in (of_loss, backward):
        work.operations += 12
    if grid.y > 1:
        of_loss.exchanges += [Exchange("y", "all_reduce", tokens * STATISTIC_BYTES * n) for n in (1, 2)]
    in_parts = setup.logits_at_once(tokens, vocabulary) < tokens
    if (
        in_parts and regathers
    ):  # while some logits are there, so is their gradient; recomputed whole, both passes have them
        backward = PassWork.joined((of_loss, backward))
    else:
        forward = PassWork.joined((forward, of_loss))
    return _labelled("head", rows, LayerCost(forward, backward, product.backward_weight))


def update_seconds(setup: Setup, device: DeviceModel, num_elements: int) -> float:
    """Return what a rank's part of the optimizer takes, for the elements that it updates: as profiled, where it was."""
    if device.element_seconds is not None:
        return num_elements * device.element_seconds
    return device.pass_seconds(num_elements * (setup.engine.clipping_bytes + setup.update_bytes))


def model_flops(setup: Setup, tokens: int) -> float:
    """Return the FLOP of a step by the usual count (Chowdhery et al. 2022): 6 for each weight of a product and token,
    and 12 x features of queries x positions seen for attention of each layer; embeddings count nothing, nor do experts
    that a token does not take."""
    hidden = setup.model.hidden_size
    weights, pairs = hidden * setup.model.num_ids, 0
    for attention, mlp in ((block.attention, block.mlp) for block in setup.blocks):
        features = (mlp.up_size // mlp.inner + 1) * mlp.token_inner + mlp.router_size
        weights += hidden * (2 * attention.query_size + 2 * attention.key_size + features)
        pairs += attention.query_size * min(attention.window or math.inf, setup.row_positions)
    return tokens * (6.0 * weights + 12.0 * pairs)
