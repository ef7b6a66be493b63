"""Runs a rank's schedule: the one place where instructions become operations, and tiles exchange tensors."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from hpctrain.comm.groups.channel import Channel
from hpctrain.comm.progress.instruments import UNTRACED
from hpctrain.config.errors import CorruptionError
from hpctrain.data.order import Batch
from hpctrain.engine.step.expert_load import LoadFigures
from hpctrain.engine.step.layout import Layout
from hpctrain.engine.step.loss_scale import gradient_of_loss
from hpctrain.engine.step.optimizer import Optimizer
from hpctrain.model.operators.attention import Documents
from hpctrain.model.stage import Saved, Stage
from hpctrain.model.transformer import IGNORED
from hpctrain.plan.schedule import (
    EXPECTED_AHEAD,
    RECEIVING,
    Action,
    Instruction,
    forward_only,
    layers_in_order,
    schedule_of,
)
from hpctrain.plan.transfers import Transfer, common_part_of
from hpctrain.sharding.intervals import Interval, cut_evenly, place_in


class SlotKey(NamedTuple):
    """The place of a tensor in the schedule."""

    virtual_stage: int
    """Index of the rank's tile, in the order of items."""
    microbatch: int


class Incoming(NamedTuple):
    """A message that is expected."""

    channel: Channel
    buffer: torch.Tensor
    """The contiguous buffer that the message fills."""
    target: torch.Tensor
    """The view to which the buffer's contents belong: often the buffer itself."""


class Arrival(NamedTuple):
    """A tensor that is expected in parts. The ranks along y of the tile may have to gather their parts."""

    value: torch.Tensor
    parts: list[Incoming]
    gathers: bool


class Messages:
    """Sends and receives activations and their gradients.

    The next receives of the schedule are posted early. Messages that move only into posted memory then do so while the
    rank computes. A rank needs the same memory by every route.
    """

    def __init__(self, layout: Layout):
        self._layout, self._row_length, self._device = layout, layout.row.positions, layout.accelerator.device
        tile = layout.tiles[0]  # all tiles of a rank have the same rows and row chunks
        self.rows = layout.holding.part.rows(tile.rows)
        common = common_part_of(tile, layout.rank, layout.row)
        self._tokens, self._features = common.tokens, common.features
        self._positions = layout.holding.part.positions(layout.row.positions)
        self.given: dict[SlotKey, torch.Tensor] = {}
        """Received activations, or gradients, for tiles of this rank."""
        self._to_come: deque[Instruction] = deque()
        self._expected: deque[Arrival | None] = deque()

    def start(self, schedule: Iterable[Instruction]) -> None:
        """Begin a pass through a schedule: the caller will ask for all its receives, in its order."""
        self._to_come = deque(each for each in schedule if each.action in RECEIVING)
        self._expected.clear()
        self.given.clear()
        self._expect()

    def _expect(self) -> None:
        while self._to_come and len(self._expected) < EXPECTED_AHEAD:
            self._expected.append(self._arrival(self._to_come.popleft()))

    def _arrival(self, instruction: Instruction) -> Arrival | None:
        """Allocate the tensor of a receive and post it to its senders; return None where this rank has the tensor."""
        virtual_stage, forward = instruction.virtual_stage, instruction.action is Action.RECEIVE_ACTIVATION
        transfers = self._layout.transfers[virtual_stage]
        messages = transfers.messages[instruction.action]
        if any(transfer.sender == self._layout.rank for transfer in messages):
            return None
        items = self._layout.tiles[virtual_stage].items
        item = items.start if forward else items.stop
        shape = (self.rows.size, sum(each.size for each in self._positions), self._features.size)
        value = torch.empty(shape, dtype=self._layout.dtype, device=self._device)
        parts = []
        for transfer in messages:
            target = self._part(value, transfer)
            wire = self._layout.wires[transfer.sender]
            in_place = target.is_contiguous() and target.dtype == wire
            buffer = target if in_place else target.new_empty(target.shape, dtype=wire)
            channel = self._layout.channels[transfer.sender, item]
            channel.expect(buffer)
            parts.append(Incoming(channel, buffer, target))
        return Arrival(value, parts, transfers.gathers[instruction.action])

    def receive(self, instruction: Instruction) -> None:
        """Wait for the tensor of a receive, the next in the schedule's order; it is then in `given`."""
        arrival = self._expected.popleft()
        self._expect()
        if arrival is None:
            return
        value, parts, gathers = arrival
        for channel, buffer, target in parts:
            channel.receive(buffer)
            if buffer is not target:
                target.copy_(buffer)
        if gathers:
            y, num_features = self._layout.axes.y, self._features.size
            y.all_gather(value.view(-1), [cut.scale(num_features) for cut in cut_evenly(self._tokens.size, y.size)])
        self.given[SlotKey(instruction.virtual_stage, instruction.microbatch)] = value

    def send(self, instruction: Instruction, value: torch.Tensor) -> None:
        """Send the tile's result; parts for another tile of this rank are put into `given`."""
        action, virtual_stage = instruction.action, instruction.virtual_stage
        items = self._layout.tiles[virtual_stage].items
        to, item = (
            (virtual_stage + 1, items.stop) if action is Action.SEND_ACTIVATION else (virtual_stage - 1, items.start)
        )
        for transfer in self._layout.transfers[virtual_stage].messages[action]:
            if transfer.receiver == self._layout.rank:  # this rank then has the whole tensor
                self.given[SlotKey(to, instruction.microbatch)] = value
                continue
            wire = self._layout.wires[transfer.receiver]
            self._layout.channels[transfer.receiver, item].send(self._part(value, transfer).to(wire).contiguous())

    def _part(self, value: torch.Tensor, transfer: Transfer) -> torch.Tensor:
        """Return the part of a value, rows x positions x features, that a message carries."""
        tokens, features = transfer.tokens.shift(-self._tokens.start), transfer.features.shift(-self._features.start)
        if self._positions == (Interval(0, self._row_length),) and transfer.cut is None:
            return value.flatten(0, 1)[slice(*tokens), slice(*features)]
        length = self._row_length
        first = tokens.start // length
        if transfer.cut is None:
            rows = Interval(first, first + 1)
            positions = Interval(tokens.start - first * length, tokens.stop - first * length)
        else:
            rows, positions = Interval(first, tokens.stop // length), transfer.cut.positions
        return value[slice(*rows), slice(*place_in(self._positions, positions)), slice(*features)]


@dataclass(frozen=True)
class Totals:
    """The sums that all ranks of a plan agree on after a step."""

    loss: float
    """The loss, summed over tokens."""
    norm: float
    """Global norm of the gradient before clipping; 0 without an update."""
    flags: tuple[bool, ...]
    """For each flag, whether any rank has set it."""
    skipped: bool = False
    """Whether the gradient overflowed in fp16, so that no weights were changed."""
    load: LoadFigures | None = None
    """The largest load of an expert, in a training step with experts."""


class Pipeline:
    """Executes the instructions of one rank, on its tiles."""

    def __init__(self, layout: Layout, optimizer: Optimizer):
        self._layout, self._optimizer = layout, optimizer
        self._tracer, self._is_traced = layout.tracer, layout.tracer is not UNTRACED
        self._accelerator, self._device = layout.accelerator, layout.accelerator.device
        self._messages = Messages(layout)
        self._rows = self._messages.rows
        self._row_chunks = cut_evenly(self._rows.size, layout.tiles[0].row_chunks)  # the same of all tiles

    def train(self, batch: Batch, step: int, loss_tokens: int, flags: Sequence[bool] = ()) -> Totals:
        """Run a whole training step on the mean loss over `loss_tokens` tokens. All ranks of the plan must call.

        `flags`, as many on all ranks, come back with the totals: each is set where any rank has set it.

        Raises CorruptionError, on all ranks, if loss or gradient is not finite; the weights are untouched then.
        """
        layout = self._layout
        schedule = schedule_of(layout.plan, layout.tiles[0], layout.reduces_early)
        scale = self._optimizer.loss_scale
        layout.expert_load.begin(scale.value if scale else 1.0)
        return self._run(schedule, batch, step, loss_tokens, training=True, flags=flags)

    def evaluate(self, batch: Batch) -> Totals:
        """Run the forward passes of one batch. All ranks of the plan must call."""
        schedule = forward_only(self._layout.plan, self._layout.tiles[0])
        return self._run(schedule, batch, 0, 1, training=False)

    def _run(
        self,
        schedule: Sequence[Instruction],
        batch: Batch,
        step: int,
        loss_tokens: int,
        training: bool,
        flags: Sequence[bool] = (),
    ) -> Totals:
        of_loss = gradient_of_loss(self._optimizer.loss_scale, loss_tokens, self._device)
        made: dict[SlotKey, torch.Tensor] = {}  # activations, or gradients, to be sent
        saved: dict[tuple[SlotKey, int], Saved] = {}
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        totals = None
        messages = self._messages
        messages.start(schedule)
        self._layout.store.traffic.expect(layers_in_order(schedule, self._layout.tiles))
        for instruction in schedule:
            place, s = SlotKey(instruction.virtual_stage, instruction.microbatch), instruction.row_chunk
            stage = self._layout.stages[place.virtual_stage]
            passed = self._optimizer.start_reduce if instruction.starts_reducing else None
            since = self._tracer.now() if self._is_traced else 0.0
            match instruction.action:
                case Action.RECEIVE_ACTIVATION | Action.RECEIVE_GRADIENT:
                    messages.receive(instruction)
                case Action.SEND_ACTIVATION | Action.SEND_GRADIENT:
                    messages.send(instruction, made.pop(place))
                case Action.FORWARD:
                    ids, targets, documents = self._tokens(batch, stage, place.microbatch, s)
                    given = self._take(place, s) if ids is None else ids
                    value, kept = stage.forward(given, targets, training, documents)
                    if not stage.is_last:
                        self._put(made, place, s, value)
                    elif not training:
                        loss += value  # on the device: the host waits for it once a step
                    if training:
                        saved[place, s] = kept
                case Action.BACKWARD | Action.BACKWARD_INPUT:
                    gradient = of_loss if stage.is_last else self._take(place, s)
                    kept = saved[place, s]
                    if instruction.action is Action.BACKWARD:
                        gradient = stage.backward(saved.pop((place, s)), gradient, passed)
                    else:
                        gradient = stage.backward_input(kept, gradient)
                    if kept.loss is not None:
                        loss += kept.loss
                    if gradient is not None:
                        self._put(made, place, s, gradient)
                case Action.BACKWARD_WEIGHT:
                    stage.backward_weight(saved.pop((place, s)), passed)
                case Action.REDUCE_GRADIENTS:
                    self._optimizer.reduce()
                case Action.UPDATE:
                    totals = self._update(self._agree(loss, self._optimizer.squared_norm(), flags), step, loss_tokens)
            if self._is_traced:
                self._tracer.computed(instruction, since)
        return totals or self._agree(loss, None)

    def _update(self, totals: Totals, step: int, loss_tokens: int) -> Totals:
        """Update the weights, or skip that on all ranks where fp16 overflowed; return the totals, unscaled."""
        may_overflow = self._optimizer.loss_scale is not None
        if not math.isfinite(totals.loss) or not (may_overflow or math.isfinite(totals.norm)):
            raise CorruptionError(
                f"step {step + 1}: the loss is {totals.loss / loss_tokens} and the norm of the gradient {totals.norm};"
                " the weights were not updated"
            )
        largest_load = self._layout.expert_load.start_sum(self._layout.everyone)  # the device is idle now
        norm = self._optimizer.update(step, totals.norm)
        return replace(totals, norm=norm or 0.0, skipped=norm is None, load=largest_load())

    def _agree(self, loss: torch.Tensor, squared_norm: torch.Tensor | None, flags: Sequence[bool] = ()) -> Totals:
        """Sum over all ranks; of those that computed the same loss one brings it (`GridPart.counts_loss`).

        Here the host waits for the device, and nowhere else in a step without experts.
        """
        norm = torch.zeros_like(loss) if squared_norm is None else squared_norm
        both = torch.stack([loss, norm])
        self._await_device()
        loss, norm = both.tolist()
        own = torch.tensor([loss if self._layout.holding.part.counts_loss else 0.0, norm, *flags], dtype=torch.float64)
        total = self._layout.everyone.all_reduce(own).tolist()
        return Totals(total[0], math.sqrt(total[1]), tuple(flag > 0 for flag in total[2:]))

    def _await_device(self) -> None:
        """Return when the device has done all queued work. Raises CommError where it waits for a lost rank."""
        queued, launches = self._accelerator.queued(), self._accelerator.launches

        def done() -> bool:
            passed = queued.query()
            launches.look()  # after it: an error is recorded before it ends the device's wait
            return passed

        self._layout.everyone.await_ready(done, "the device")

    def _tokens(
        self, batch: Batch, stage: Stage, microbatch: int, row_chunk: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Documents | None]:
        """Return ids and targets, each [rows, positions], and documents; None where one is not needed.

        Documents are those of whole rows, for a rank attends to positions of others too.
        """
        rows = self._row_chunks[row_chunk].shift(self._rows.start + microbatch * self._layout.plan.rows)
        starts = batch.document_starts(rows)
        documents = None if starts is None else Documents(self._on_device(starts), starts)
        if not (stage.is_first or stage.is_last):
            return None, None, documents
        tokens = batch.rows(rows)
        wanted = [tokens[:, :-1]] * stage.is_first + [tokens[:, 1:]] * stage.is_last
        both = self._on_device(self._own(np.stack(wanted)))
        targets = both[-1] if stage.is_last else None
        if targets is not None and (learnt := batch.loss_mask(rows)) is not None:
            targets = targets.masked_fill(~self._on_device(self._own(learnt)), IGNORED)
        return both[0] if stage.is_first else None, targets, documents

    def _own(self, values: np.ndarray) -> np.ndarray:
        """Return what this rank has of values, [..., positions], which are of all positions."""
        context = self._layout.holding.part.context(values.shape[-1])
        return np.concatenate([values[..., slice(*each)] for each in context], axis=-1)

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        """Copy to the device after all queued work, through pinned memory, so that the host does not wait."""
        tensor = torch.from_numpy(values)
        if self._device.type == "cpu":
            return tensor.to(self._device)
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _take(self, place: SlotKey, row_chunk: int) -> torch.Tensor:
        """Return the rows of a row chunk of a received tensor; the last row chunk removes the tensor."""
        waiting = self._messages.given
        value = waiting.pop(place) if row_chunk == len(self._row_chunks) - 1 else waiting[place]
        return value if len(self._row_chunks) == 1 else value[slice(*self._row_chunks[row_chunk])]

    def _put(self, waiting: dict[SlotKey, torch.Tensor], place: SlotKey, row_chunk: int, value: torch.Tensor) -> None:
        """Add the rows of a row chunk to a tensor that waits to be sent."""
        if len(self._row_chunks) == 1:
            waiting[place] = value
            return
        if place not in waiting:
            waiting[place] = value.new_empty(self._rows.size, *value.shape[1:])
        waiting[place][slice(*self._row_chunks[row_chunk])] = value
