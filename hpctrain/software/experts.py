"""Prices a mixture of experts of software whose ranks have different tokens and experts (expert parallelism).

A rank sends each of its tokens to the ranks that have its experts, by an all-to-all, and gets the results back by
another one. Ranks that have parts of the same experts gather their tokens first. Our engine, whose ranks of a tensor
grid have the same tokens, is in `planner/prices/cost.py`.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from hpctrain.architectures.description import Experts
from hpctrain.plan.holdings import ShardGroup
from hpctrain.planner.prices.cost import Branch, branch_cost, experts_branch
from hpctrain.planner.prices.linear_cost import linear
from hpctrain.planner.prices.setup import Setup
from hpctrain.planner.prices.work import Exchange, MatrixProduct, PassWork
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.parameters import UnitLayout
from hpctrain.software.nccl import targets
from hpctrain.software.software import EXPERT_RANKS, SoftwareSetup

MOVED = 4, 6
"""Times that hidden states of pairs of a token and an expert are read or written, forward and backward: put in order of
ranks and then of experts, and back; backward tokens are also added up."""
OPERATIONS = 24, 24
"""Operations that are no products, forward and backward: the router's, counts, permutations, activation."""


@experts_branch.register
def _(setup: SoftwareSetup, grid: TensorGrid, experts: Experts, rows: int, regathers: bool) -> Branch:
    parts, cut = setup.expert_parts, setup.expert_cut
    if parts * cut == 1:
        return experts_branch.dispatch(Setup)(setup, grid, experts, rows, regathers)
    branch = branch_cost(setup, grid, experts, rows, (0, 0), regathers)
    tokens, hidden, b = rows * setup.positions // setup.sequence_parts(grid), setup.model.hidden_size, setup.item_bytes
    router = linear(setup, tokens, hidden, experts.count, ("x", "y"), {"x": 1, "y": 1})
    own, inner, up = experts.count // parts, experts.inner // cut, experts.up_size // cut
    pairs = tokens * experts.chosen * cut
    copies = targets(parts, experts.chosen) if setup.dispatches_once else experts.chosen
    sent = int(tokens * copies * hidden * b)
    load, dtype = math.ceil(pairs / own), setup.linear_dtype

    def grouped(m: int, k: int, n: int) -> MatrixProduct:
        return MatrixProduct(m, k, n, own, dtype=dtype, tokens=load)

    cast = setup.engine.cast_bytes if dtype else 0.0
    fused = setup.fuses_experts
    activated = (0.0, 0.0) if fused else tuple(inner * (each + cast) for each in setup.passes.inner)
    ups, downs = grouped(load, hidden, up), grouped(load, inner, hidden)
    d_downs, d_ups = grouped(load, hidden, inner), grouped(load, up, hidden)
    forward = PassWork([ups, downs], pairs * (activated[0] + cast * hidden), OPERATIONS[0])
    backward = PassWork([d_downs, d_ups], pairs * (activated[1] + cast * hidden), OPERATIONS[1])
    weight = PassWork([grouped(up, load, hidden), grouped(hidden, load, inner)])
    if experts.bias:  # added to the last product of each expert, multiplied by the pair's weight; their gradients
        forward.passed_bytes += pairs * 6 * hidden * b
        backward.passed_bytes += pairs * (6 * hidden + up) * b
    weight.passed_bytes = setup.passes.weight * own * (up + inner) * hidden
    for work, times in ((forward, MOVED[0]), (backward, MOVED[1])):
        work.passed_bytes += (times / 2 if fused else times) * pairs * hidden * b
        # One there and one back, which overlap a product each: no second of computing hides two.
        work.exchanges += [Exchange(EXPERT_RANKS, "all_to_all", sent, behind=(product,)) for product in work.products]
        if cut > 1:
            work.exchanges += [Exchange("y", each, pairs * hidden * b) for each in ("all_gather", "reduce_scatter")]
    branch.parts[1:1] = [router.forward, forward]
    return branch._replace(
        backward_input=PassWork.joined((branch.backward_input, router.backward_input, backward)),
        backward_weight=PassWork.joined((branch.backward_weight, router.backward_weight, weight)),
    )


def parts_by_experts(group: ShardGroup, rank: int, step: int) -> Iterator[ShardGroup]:
    """Yield what a group holds of all but experts, and what is of experts, which every `step`-th of its ranks has."""
    first = group.ranks.index(rank) % step
    for are_experts, own in ((False, slice(None)), (True, slice(first, None, step))):
        layouts = []
        for layout in group.layouts:
            pairs = zip(layout.unit.parameters, layout.boxes, strict=True)
            kept = [pair for pair in pairs if (".experts." in pair[0].name) == are_experts]
            if kept:
                parameters, boxes = zip(*kept, strict=True)
                layouts.append(UnitLayout(replace(layout.unit, parameters=parameters), boxes))
        if layouts or (group.regions and not are_experts):
            regions = () if are_experts else group.regions
            ranks, shares = group.ranks[own], group.shares[own]
            yield replace(group, ranks=ranks, shares=shares, layouts=tuple(layouts), regions=regions)
