"""A mixture of experts: which experts compute a token, by what weights, and the products of many experts at once.

Shape suffixes: N tokens (rows x positions, flattened), E experts of the model, K chosen for each token, M pairs of a
token and an expert of this rank, sorted by expert, H hidden features, I inner features of an expert. A rank has whole
experts, which y cuts; it computes them for all tokens of its tile, and what its experts add is summed over y as in a
row-parallel layer. So a choice moves no token, and none is dropped.

An expert's rows are a group. The host reads where groups end at most once a layer and forward pass (`Groups`).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd import Function

from hpctrain.architectures.description import Experts
from hpctrain.model.operators import activation
from hpctrain.model.operators.linear import add_product
from hpctrain.model.parallel.axes import Axes
from hpctrain.model.parallel.gathering import gathered, start_scatter
from hpctrain.model.storage.units import Weight
from hpctrain.sharding.intervals import Interval, cut_evenly

ALIGNED = 8
"""Torch's grouped products need rows of a multiple of so many features in bf16: 16 bytes."""


def scores_of(logits: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Return the scores of all experts, fp32 or wider [..., E], of the router's logits."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.softmax(-1) if experts.scores == "softmax" else wide.sigmoid()


def choose(scores: torch.Tensor, experts: Experts, balance: torch.Tensor | None = None) -> torch.Tensor:
    """Return the experts of each token, int64 [..., K]: those with the best scores, to which `balance` [E] is added.

    With groups they are of those groups whose two best scores have the largest sum.
    """
    wanted = scores.detach() if balance is None else scores.detach() + balance
    if experts.groups > 1:
        by_group = wanted.unflatten(-1, (experts.groups, -1))
        best = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1).topk(experts.chosen_groups, dim=-1)
        is_out = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, best.indices, False)
        wanted = by_group.masked_fill(is_out.unsqueeze(-1), -torch.inf).flatten(-2)
    return wanted.topk(experts.chosen, dim=-1).indices


class BalanceLoss(NamedTuple):
    """The auxiliary loss of a layer on a rank, see `add_balance_loss`."""

    axes: Axes
    gradient: torch.Tensor
    """The gradient of the loss of a row, fp32 []: it has the coefficient, and the scale of losses."""
    total: torch.Tensor
    """The sum of losses of rows without coefficient, fp64 [], to which backward passes add."""


def add_balance_loss(scores: torch.Tensor, chosen: torch.Tensor, loss: BalanceLoss) -> torch.Tensor:
    """Return the scores [rows, positions, E]; their backward pass adds the gradient of the auxiliary loss of each row.

    It is E sum(f p) over experts: f is an expert's share of all choices of the row, p the mean over its positions of
    the expert's score, divided by the sum of all (DeepSeek V3, arXiv 2412.19437, 17 to 20). An even load has 1. Ranks
    that have positions of the same rows sum their choices, and all of them must call.
    """
    ones = torch.ones_like(chosen, dtype=torch.float32).flatten(1)
    load = scores.new_zeros(scores.shape[0], scores.shape[-1], dtype=torch.float32).scatter_add_(
        1, chosen.flatten(1), ones
    )
    axes = loss.axes
    for axis in (axes.c, axes.y) if axes.sequence_parallel else (axes.c,):
        load = axis.all_reduce(load)
    choices = load.sum(-1, keepdim=True)  # of each row: K times its positions
    factor = scores.shape[-1] * chosen.shape[-1] / choices.square() * load
    return _BalanceLoss.apply(scores, factor.unsqueeze(1), loss)


class _BalanceLoss(Function):
    @staticmethod
    def forward(ctx, scores, factor, loss: BalanceLoss):
        ctx.loss = loss
        ctx.save_for_backward(scores, factor)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx, d_scores):
        scores, factor = ctx.saved_tensors
        loss: BalanceLoss = ctx.loss
        sums = scores.sum(-1, keepdim=True)
        of_position = (scores * factor).sum(-1, keepdim=True) / sums
        if loss.axes.sequence_parallel or loss.axes.y.rank == 0:  # else all ranks of y have the same positions
            loss.total.add_(of_position.sum(dtype=torch.float64))
        return d_scores + loss.gradient * (factor - of_position) / sums, None, None


def weights_of(scores: torch.Tensor, chosen: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Return by what the result of each chosen expert is multiplied, [..., K]."""
    weights = scores.gather(-1, chosen)
    if experts.normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights if experts.scale == 1.0 else weights * experts.scale


class Groups:
    """The groups of rows of a rank's experts. `ends`, int32 [experts of the rank], has where each ends."""

    def __init__(self, ends: torch.Tensor, on_host: list[int] | None = None):
        """`on_host` are `ends`, where the host has read them."""
        self.ends, self._on_host = ends, on_host

    def rows(self) -> list[tuple[int, slice]]:
        """Return the experts that have tokens, with their rows. The host waits for the device where it has not yet."""
        if self._on_host is None:
            self._on_host = self.ends.tolist()
        groups = enumerate(itertools.pairwise([0, *self._on_host]))
        return [(expert, slice(start, stop)) for expert, (start, stop) in groups if start < stop]

    def expert_of(self, count: int) -> torch.Tensor:
        """Return the expert of each of `count` rows, from 0 for the rank's first."""
        return torch.searchsorted(self.ends, torch.arange(count, device=self.ends.device).int(), right=True)


def grouped_product(x_MI: torch.Tensor, weight_EOI: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return the product of each group's rows and the transposed weight of its expert, [M, O]."""
    is_aligned = x_MI.shape[1] % ALIGNED == weight_EOI.shape[1] % ALIGNED == 0
    if x_MI.is_cuda and x_MI.dtype == torch.bfloat16 and is_aligned and hasattr(F, "grouped_mm"):
        return F.grouped_mm(x_MI, weight_EOI.transpose(1, 2), offs=groups.ends)
    result = x_MI.new_empty(x_MI.shape[0], weight_EOI.shape[1])
    for expert, rows in groups.rows():
        torch.mm(x_MI[rows], weight_EOI[expert].t(), out=result[rows])
    return result


def add_grouped_products(
    grad: torch.Tensor, dy_MO: torch.Tensor, x_MI: torch.Tensor, *, groups: Groups, overwrite: bool
) -> None:
    """Add dy^T x of each group to the gradient of its expert, of which `grad` has the rows, fp32 [E * O, I]."""
    grad_EOI = grad.view(groups.ends.numel(), dy_MO.shape[1], x_MI.shape[1])
    if overwrite:
        grad.zero_()  # experts without tokens add nothing
    for expert, rows in groups.rows():
        add_product(grad_EOI[expert], dy_MO[rows], x_MI[rows], overwrite=False)


def add_grouped_sums(
    grad: torch.Tensor, dy_MO: torch.Tensor, weights_M1: torch.Tensor | None = None, *, groups: Groups, overwrite: bool
) -> None:
    """Add the sum of each group's rows, weighted or not, to the gradient of its expert's bias, of which `grad` has all,
    fp32 [E * O]."""
    grad_EO = grad.view(groups.ends.numel(), dy_MO.shape[1])
    if overwrite:
        grad.zero_()
    for expert, rows in groups.rows():
        summed = dy_MO[rows] if weights_M1 is None else dy_MO[rows] * weights_M1[rows]
        grad_EO[expert] += summed.sum(0, dtype=torch.float32)


class Sorted(NamedTuple):
    """The choices of tokens, sorted by expert."""

    places: torch.Tensor
    """The places of a rank's choices among all, flattened [N * K]: int64 [M]."""
    groups: Groups


def sort_choices(chosen: torch.Tensor, own: Interval, count: int) -> Sorted:
    """Sort the choices of `count` experts [..., K], and keep those of a rank's `own` experts.

    Choices of one expert keep their order. Where a rank has not all experts, the host waits to know how many it has.
    """
    flat = chosen.flatten()
    places = flat.argsort(stable=True)
    ends = torch.zeros(count, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    ends = ends.cumsum(0)
    if own.size == count:
        return Sorted(places, Groups(ends.int()))
    on_host = [0, *ends.tolist()]
    first = on_host[own.start]
    of_own = [end - first for end in on_host[own.start + 1 : own.stop + 1]]
    return Sorted(places[first : first + of_own[-1]], Groups((ends[slice(*own)] - first).int(), of_own))


def add_load(grad: torch.Tensor, chosen: torch.Tensor, overwrite: bool) -> None:
    """Add to the gradient of balance [E] how many more tokens each expert has than its share, N K / E.

    They are multiplied by E / gcd(E, K). So they are whole, and their sums exact below 2^24: no layout changes them.
    """
    flat, count = chosen.flatten(), grad.numel()
    load = torch.zeros_like(grad, dtype=torch.int64).scatter_add_(0, flat, torch.ones_like(flat))
    excess = (load * count - flat.numel()).float() / math.gcd(count, chosen.shape[-1])
    if overwrite:
        grad.copy_(excess)
    else:
        grad += excess


class ExpertMixture:
    """The experts of a layer that a rank has."""

    def __init__(
        self,
        experts: Experts,
        weights: Sequence[Weight],
        axes: Axes,
        activated: Callable[[torch.Tensor], torch.Tensor],
    ):
        """`weights` are those of the first and of the second products, then their biases and the balance, where there
        are such.

        `activated` returns [M, I] of the results of the first products, [M, 2 I].
        """
        self.experts, self.activated, self.y, self.gathers = experts, activated, axes.y, axes.sequence_parallel
        self.up, self.down, *others = weights
        self.biases = others[:2] if experts.bias else []
        self.balance = others[-1] if len(others) % 2 else None
        self.own = cut_evenly(experts.count, axes.y.size)[axes.y.rank]
        self.load: torch.Tensor | None = None
        """Tokens of each expert of the rank, to which backward passes add, where they are counted."""

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return what the chosen experts add to x [rows, positions, H]; weights and chosen are [rows, positions, K].

        All ranks of y must call, and so they must for the backward pass.
        """
        return _ExpertMixture.apply(x, weights, chosen, self)

    def weight(self, of: Weight, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights of the rank's experts, [E, out, in]."""
        data = of.data.view(self.own.size, -1, of.data.shape[1])
        return data if data.dtype == dtype else data.to(dtype)

    def bias(self, number: int, expert_of: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return for each pair the bias of its expert in the first product or the second, [M, out]."""
        return self.biases[number].data.view(self.own.size, -1).to(dtype)[expert_of]

    def whole(self, value: torch.Tensor) -> torch.Tensor:
        """Return a value of all positions, [N, ...]."""
        return (gathered(value.contiguous(), self.y) if self.gathers else value).flatten(0, 1)

    def summed(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a value of all positions, [rows, positions, ...], over y; return this rank's positions."""
        if not self.gathers:
            return self.y.all_reduce(value)
        own, work = start_scatter(value, self.y)
        work.wait()
        return own


class _ExpertMixture(Function):
    """Keeps its inputs and the results of the first products; activations and sorted inputs are computed again."""

    @staticmethod
    def forward(ctx, x, weights, chosen, mixture: ExpertMixture):
        ctx.mixture, x_NH = mixture, mixture.whole(x)
        choices = mixture.whole(chosen)
        places, groups = sort_choices(choices, mixture.own, mixture.experts.count)
        given = x_NH.index_select(0, places // choices.shape[1])
        up = grouped_product(given, mixture.weight(mixture.up, x.dtype), groups)
        del given
        expert_of = groups.expert_of(places.numel()) if mixture.biases else None
        if expert_of is not None:
            up += mixture.bias(0, expert_of, x.dtype)
        of_pair = mixture.whole(weights).flatten()[places].unsqueeze(1)
        inner = mixture.activated(up).mul_(of_pair)
        added = grouped_product(inner, mixture.weight(mixture.down, x.dtype), groups)
        if expert_of is not None:
            added += mixture.bias(1, expert_of, x.dtype).mul_(of_pair)
        ctx.save_for_backward(x, weights, chosen, up, places)
        ctx.groups = groups
        return mixture.summed(_sum_of_pairs(added, places, choices.shape, mixture).view(x.shape[0], -1, x.shape[2]))

    @staticmethod
    def backward(ctx, dy):
        mixture: ExpertMixture = ctx.mixture
        groups: Groups = ctx.groups
        x, weights, chosen, up, places = ctx.saved_tensors
        count, rows = chosen.shape[-1], x.shape[0]
        d_added = mixture.whole(dy).index_select(0, places // count)
        of_pair = mixture.whole(weights).flatten()[places].unsqueeze(1)
        d_inner = grouped_product(d_added, mixture.weight(mixture.down, x.dtype).transpose(1, 2), groups)
        inner = mixture.activated(up)
        num_choices = x.shape[1] * count * (mixture.y.size if mixture.gathers else 1)
        d_weights = weights.new_zeros(rows * num_choices)
        d_weights[places] = (d_inner.to(weights.dtype) * inner).sum(-1)
        if mixture.biases:
            of_bias = mixture.bias(1, groups.expert_of(places.numel()), x.dtype)
            d_weights[places] += (d_added.to(weights.dtype) * of_bias).sum(-1)
            del of_bias
            mixture.biases[1].accumulate(partial(add_grouped_sums, groups=groups), d_added, of_pair)
        add_products = partial(add_grouped_products, groups=groups)
        mixture.down.accumulate(add_products, d_added, inner.mul_(of_pair))
        del d_added
        d_up = activation.backward(d_inner.mul_(of_pair), up, activation=mixture.experts.activation)
        del inner, d_inner
        if mixture.biases:
            mixture.biases[0].accumulate(partial(add_grouped_sums, groups=groups), d_up)
        given = mixture.whole(x).index_select(0, places // count)
        mixture.up.accumulate(add_products, d_up, given)
        del given
        d_given = grouped_product(d_up, mixture.weight(mixture.up, x.dtype).transpose(1, 2), groups)
        dx = _sum_of_pairs(d_given, places, torch.Size((d_weights.numel() // count, count)), mixture)
        if mixture.load is not None:
            mixture.load += groups.ends.diff(prepend=groups.ends.new_zeros(1))
        if mixture.balance is not None:
            mixture.balance.accumulate(add_load, chosen)
        dx = mixture.summed(dx.view(rows, -1, x.shape[2]))
        return dx, mixture.summed(d_weights.view(rows, -1, count)), None, None


def _sum_of_pairs(
    values: torch.Tensor, places: torch.Tensor, shape: torch.Size, mixture: ExpertMixture
) -> torch.Tensor:
    """Return for each of N tokens the sum over its pairs, [N, H], where `shape` is [N, K].

    They are summed in the order of a token's choices: the same bits in every run. A part of the features after the
    other: all pairs of a part are as many numbers as a rank's pairs of all features.
    """
    whole = values.new_empty if mixture.y.size == 1 else values.new_zeros
    result = values.new_empty(shape[0], values.shape[1])
    for part in cut_evenly(values.shape[1], mixture.y.size):
        features = slice(*part)
        pairs = whole(shape.numel(), part.size).index_copy_(0, places, values[:, features])
        torch.sum(pairs.view(*shape, -1), 1, out=result[:, features])
    return result
