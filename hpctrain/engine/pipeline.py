"""Runs a tile's schedule: the one place where instructions become work."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hpctrain.engine.layout import Layout
from hpctrain.engine.optimizer import Optimizer
from hpctrain.errors import TrainingError
from hpctrain.intervals import Interval, cut_evenly
from hpctrain.model.stage import Saved
from hpctrain.schedule import Instruction, Op, forward_only, schedule_of
from hpctrain.transfers import Transfer, held


class Batch(Protocol):
    """The sequences of one step, by their place in the global batch."""

    def rows(self, rows: Interval) -> np.ndarray:
        """Return int64 [rows.size, positions + 1]: each row's tokens, and the one that follows."""
        ...


@dataclass(frozen=True)
class Totals:
    """What all ranks of a plan agree on after a step."""

    loss: float
    """Summed over tokens."""
    norm: float
    """Global norm of the gradient before clipping; 0 without an update."""
    stop: bool
    """Whether any rank was asked to stop."""


class Pipeline:
    """Executes the instructions of one tile on one rank."""

    def __init__(self, layout: Layout, optimizer: Optimizer, hidden_size: int, positions: int, device: torch.device):
        self._layout, self._optimizer = layout, optimizer
        self._device = device
        self._positions = positions
        self._rows, self._features = held(layout.tile, layout.rank, hidden_size)
        self._substeps = cut_evenly(self._rows.size, layout.tile.substeps)

    def train(self, batch: Batch, step: int, loss_tokens: int, stop: bool = False) -> Totals:
        """Run a whole training step on the mean loss over `loss_tokens` tokens. All ranks of the plan must call.

        Raises TrainingError, on all ranks alike, if loss or gradient is not finite; the weights are untouched then.
        """
        layout = self._layout
        schedule = schedule_of(layout.plan, layout.tile, layout.reduces_early)
        return self._run(schedule, batch, step, loss_tokens, training=True, stop=stop)

    def evaluate(self, batch: Batch) -> Totals:
        """Run the forward passes of one batch. All ranks of the plan must call."""
        return self._run(forward_only(self._layout.plan, self._layout.tile), batch, 0, 1, training=False, stop=False)

    def _run(
        self, schedule: Sequence[Instruction], batch: Batch, step: int, loss_tokens: int, training: bool, stop: bool
    ) -> Totals:
        stage, transfers = self._layout.stage, self._layout.transfers
        given: dict[int, torch.Tensor] = {}  # by microbatch: an activation, later a gradient, that came in
        made: dict[int, torch.Tensor] = {}  # and one that is to go out
        saved: dict[tuple[int, int], Saved] = {}
        loss = 0.0
        totals = None
        for instruction in schedule:
            m, s = instruction.microbatch, instruction.substep
            passed = self._optimizer.start_reduce if instruction.starts_reducing else None
            match instruction.op:
                case Op.RECEIVE_ACTIVATION:
                    given[m] = self._receive(transfers.receive_activation)
                case Op.FORWARD:
                    ids, targets = self._tokens(batch, m, s)
                    value, kept = stage.forward(self._take(given, m, s) if ids is None else ids, targets, training)
                    if stage.is_last:
                        loss += float(value)
                    else:
                        self._put(made, m, s, value)
                    if training:
                        saved[m, s] = kept
                case Op.SEND_ACTIVATION:
                    self._send(transfers.send_activation, made.pop(m))
                case Op.RECEIVE_GRADIENT:
                    given[m] = self._receive(transfers.receive_gradient)
                case Op.BACKWARD | Op.BACKWARD_INPUT:
                    gradient = self._gradient_of_loss(loss_tokens) if stage.is_last else self._take(given, m, s)
                    if instruction.op is Op.BACKWARD:
                        gradient = stage.backward(saved.pop((m, s)), gradient, passed)
                    else:
                        gradient = stage.backward_input(saved[m, s], gradient)
                    if gradient is not None:
                        self._put(made, m, s, gradient)
                case Op.BACKWARD_WEIGHT:
                    stage.backward_weight(saved.pop((m, s)), passed)
                case Op.SEND_GRADIENT:
                    self._send(transfers.send_gradient, made.pop(m))
                case Op.REDUCE_GRADIENTS:
                    self._optimizer.reduce()
                case Op.UPDATE:
                    totals = self._agree(loss, self._optimizer.squared_norm(), stop)
                    if not (math.isfinite(totals.loss) and math.isfinite(totals.norm)):
                        raise TrainingError(
                            f"step {step}: the loss is {totals.loss / loss_tokens} and the norm of the gradient"
                            f" {totals.norm}; lower train.learning_rate or clip (train.clip_norm)"
                        )
                    self._optimizer.update(step, totals.norm)
        return totals or self._agree(loss, 0.0, stop)

    def _gradient_of_loss(self, loss_tokens: int) -> torch.Tensor:
        return torch.tensor(1.0 / loss_tokens, dtype=torch.float64, device=self._device)

    def _agree(self, loss: float, squared_norm: float, stop: bool) -> Totals:
        """Sum over all ranks; the ranks that differ in x or y alone have the same loss, and one of them brings it."""
        x, y, _ = self._layout.coordinate
        own = torch.tensor([loss if x == y == 0 else 0.0, squared_norm, float(stop)], dtype=torch.float64)
        total = self._layout.everyone.all_reduce(own).tolist()
        return Totals(total[0], math.sqrt(total[1]), total[2] > 0)

    def _tokens(self, batch: Batch, microbatch: int, substep: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return (ids, targets), each [rows, positions] or None where this stage does not need it."""
        stage = self._layout.stage
        if not (stage.is_first or stage.is_last):
            return None, None
        rows = self._substeps[substep].shift(self._rows.start + microbatch * self._layout.plan.rows)
        tokens = torch.from_numpy(batch.rows(rows)).to(self._device)
        return tokens[:, :-1] if stage.is_first else None, tokens[:, 1:] if stage.is_last else None

    def _take(self, waiting: dict[int, torch.Tensor], microbatch: int, substep: int) -> torch.Tensor:
        """Return the rows of a substep; the last substep takes what waits away."""
        last = substep == len(self._substeps) - 1
        value = waiting.pop(microbatch) if last else waiting[microbatch]
        return value if len(self._substeps) == 1 else value[slice(*self._substeps[substep])]

    def _put(self, waiting: dict[int, torch.Tensor], microbatch: int, substep: int, value: torch.Tensor) -> None:
        """Add the rows of a substep to what waits to be sent."""
        if len(self._substeps) == 1:
            waiting[microbatch] = value
            return
        if microbatch not in waiting:
            waiting[microbatch] = value.new_empty(self._rows.size, *value.shape[1:])
        waiting[microbatch][slice(*self._substeps[substep])] = value

    def _inside(self, piece: Transfer) -> tuple[slice, slice, slice]:
        rows, features = piece.rows.shift(-self._rows.start), piece.features.shift(-self._features.start)
        return slice(*rows), slice(None), slice(*features)

    def _send(self, pieces: list[Transfer], value: torch.Tensor) -> None:
        for piece in pieces:
            self._layout.channels[piece.receiver].send(value[self._inside(piece)].contiguous())

    def _receive(self, pieces: list[Transfer]) -> torch.Tensor:
        shape = (self._rows.size, self._positions, self._features.size)
        value = torch.empty(shape, dtype=self._layout.dtype, device=self._device)
        for piece in pieces:
            target = value[self._inside(piece)]
            buffer = target if target.is_contiguous() else target.new_empty(target.shape)
            self._layout.channels[piece.sender].receive(buffer)
            if buffer is not target:
                target.copy_(buffer)
        return value
