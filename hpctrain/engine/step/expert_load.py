"""The load of experts in a step: tokens of each, and the auxiliary loss; kept on the devices, summed over all ranks."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from hpctrain.architectures.description import Experts
from hpctrain.comm.groups.group import Group
from hpctrain.config.job import Model
from hpctrain.config.training.train import Train
from hpctrain.model.feed_forward import WithExperts
from hpctrain.model.operators.experts import BalanceLoss
from hpctrain.model.stage import Stage
from hpctrain.model.transformer import Block
from hpctrain.observe.folder.schema import SavedExperts, SavedLayerLoad
from hpctrain.sharding.items import block_of


class LoadFigures(NamedTuple):
    """Figures of the load of experts in a step."""

    ratio: float
    """The largest load of an expert over the mean of its layer."""
    layer: int
    """That layer, from 0."""
    spread: float
    """Standard deviation of the tokens of a layer's experts over their mean: of all layers the root mean square."""
    balance_loss: float
    """What the auxiliary loss adds to the loss; 0 without one."""
    tokens: dict[int, torch.Tensor]
    """The tokens of each expert by layer, fp64, on the host."""

    def saved(self, step: int) -> SavedExperts:
        """Return what a run folder keeps of the tokens."""
        layers: list[SavedLayerLoad] = [{"layer": n, "tokens": of.long().tolist()} for n, of in self.tokens.items()]
        return {"step": step, "layers": layers}


class ExpertLoad:
    """The tokens of each expert in the backward passes of a step.

    Ranks of y have experts of their own, and all others tokens of their own. So the sum over all ranks counts each
    token of an expert once, whatever the plan.
    """

    def __init__(self, model: Model, stages: Iterable[Stage], device: torch.device, train: Train):
        mixed = {number: of.mlp for number, of in enumerate(model.description.blocks) if isinstance(of.mlp, Experts)}
        self.layers = tuple(mixed)
        self._counts = torch.tensor([each.count for each in mixed.values()], dtype=torch.int64).view(-1, 1)
        widest = max((each.count for each in mixed.values()), default=0)
        self.tokens = torch.zeros(len(mixed), widest, dtype=torch.int64, device=device)
        """Tokens of this rank, by layer with experts and by expert; a layer with fewer experts is filled with zeros."""
        self._row_coefficient = train.balance_loss / train.global_batch
        gradient, self._loss = (torch.zeros((), dtype=dtype, device=device) for dtype in (torch.float32, torch.float64))
        self._gradient = gradient if train.balance_loss and mixed else None
        for layer in (layer for stage in stages for layer in stage.layers):
            if isinstance(layer, Block) and isinstance(layer.feed_forward, WithExperts):
                mixture = layer.feed_forward.mixture
                mixture.load = self.tokens[self.layers.index(block_of(layer.items.start)), slice(*mixture.own)]
                if self._gradient is not None:
                    layer.feed_forward.balance_loss = BalanceLoss(layer.axes, self._gradient, self._loss)

    def begin(self, loss_scale: float) -> None:
        """Begin the backward passes of a step whose losses are multiplied by a number."""
        if self._gradient is not None:
            self._gradient.fill_(self._row_coefficient * loss_scale)

    def start_sum(self, everyone: Group) -> Callable[[], LoadFigures | None]:
        """Start to sum the tokens over all ranks, and count from 0 again. The host waits for the device.

        Return what waits for the sum and returns the figures, None without experts. All ranks must call.
        """
        if not self.layers:
            return lambda: None
        sums = torch.cat([self.tokens.double().flatten(), self._loss.view(1)]).cpu()
        self.tokens.zero_()
        self._loss.zero_()
        pending = everyone.start_all_reduce(sums)

        def figures() -> LoadFigures:
            pending.wait()
            total = sums[:-1].view(self.tokens.shape)
            shares = total / (total.sum(1, keepdim=True) / self._counts)
            there = torch.arange(total.shape[1]) < self._counts
            ratios, spread = shares.amax(1), (shares[there] - 1).square().mean().sqrt().item()
            worst, balance_loss = int(ratios.argmax()), sums[-1].item() * self._row_coefficient
            tokens = {n: row[:count] for n, row, count in zip(self.layers, total, self._counts, strict=True)}
            return LoadFigures(ratios[worst].item(), self.layers[worst], spread, balance_loss, tokens)

        return figures
