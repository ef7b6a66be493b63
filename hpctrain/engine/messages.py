"""What a rank's tiles exchange with those before and after them, as its schedule says."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch

from hpctrain.comm.channel import Channel
from hpctrain.engine.layout import Layout
from hpctrain.plan.schedule import EXPECTED_AHEAD, RECEIVING, Instruction, Op
from hpctrain.plan.transfers import RowShape, Transfer, owned_positions, owned_slice
from hpctrain.sharding.intervals import Interval, cut_evenly


class SlotKey(NamedTuple):
    """Where a tensor belongs."""

    virtual_stage: int
    """Which of the rank's tiles, in the order of items."""
    microbatch: int


class Incoming(NamedTuple):
    """A message that is to come."""

    channel: Channel
    buffer: torch.Tensor
    """What it fills, contiguous."""
    target: torch.Tensor
    """Where that belongs: often the same."""


class Arrival(NamedTuple):
    """A tensor that is to come, in parts; the ranks along y of the tile may have to gather theirs."""

    value: torch.Tensor
    parts: list[Incoming]
    gathers: bool


class Messages:
    """Sends and receives activations and their gradients.

    The next receives of the schedule are posted early. Messages that move only into posted memory then do so while the
    rank computes. A rank needs the same memory by every route.
    """

    def __init__(self, layout: Layout, hidden_size: int, positions: int, device: torch.device):
        self._layout, self._row_length, self._device = layout, positions, device
        tile = layout.tiles[0]  # rows and row chunks are those of all
        self.rows = tile.rows_at(layout.coordinate[2])
        row = RowShape(positions, hidden_size)
        self._tokens, self._features = owned_slice(tile, layout.rank, row)
        self._positions = owned_positions(tile, layout.rank, row)
        self.given: dict[SlotKey, torch.Tensor] = {}
        """Activations, later gradients, that are there for tiles of this rank."""
        self._to_come: deque[Instruction] = deque()
        self._expected: deque[Arrival | None] = deque()

    def start(self, schedule: Iterable[Instruction]) -> None:
        """Begin a pass through a schedule: its receives will be called for in its order, all of them."""
        self._to_come = deque(each for each in schedule if each.op in RECEIVING)
        self._expected.clear()
        self.given.clear()
        self._expect()

    def _expect(self) -> None:
        while self._to_come and len(self._expected) < EXPECTED_AHEAD:
            self._expected.append(self._arrival(self._to_come.popleft()))

    def _arrival(self, instruction: Instruction) -> Arrival | None:
        """Allocate the tensor of a receive and post it to its senders; return None where this rank has the tensor."""
        virtual_stage, forward = instruction.virtual_stage, instruction.op is Op.RECEIVE_ACTIVATION
        transfers = self._layout.transfers[virtual_stage]
        result = transfers.receive_activation if forward else transfers.receive_gradient
        if any(transfer.sender == self._layout.rank for transfer in result):
            return None
        items = self._layout.tiles[virtual_stage].items
        item = items.start if forward else items.stop
        shape = (self.rows.size, self._positions.size, self._features.size)
        value = torch.empty(shape, dtype=self._layout.dtype, device=self._device)
        parts = []
        for transfer in result:
            target = self._part(value, transfer)
            wire = self._layout.wires[transfer.sender]
            in_place = target.is_contiguous() and target.dtype == wire
            buffer = target if in_place else target.new_empty(target.shape, dtype=wire)
            channel = self._layout.channels[transfer.sender, item]
            channel.expect(buffer)
            parts.append(Incoming(channel, buffer, target))
        return Arrival(value, parts, transfers.gathers_activation if forward else transfers.gathers_gradient)

    def receive(self, instruction: Instruction) -> None:
        """Wait for what it brings, the next one of the schedule that receives; it is `given` then."""
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
        """Send what the tile has made, and what is its next one's, if this rank works on that too, give to it."""
        virtual_stage, microbatch, forward = (
            instruction.virtual_stage,
            instruction.microbatch,
            instruction.op is Op.SEND_ACTIVATION,
        )
        transfers, items = self._layout.transfers[virtual_stage], self._layout.tiles[virtual_stage].items
        to, item = (virtual_stage + 1, items.stop) if forward else (virtual_stage - 1, items.start)
        for transfer in transfers.send_activation if forward else transfers.send_gradient:
            if transfer.receiver == self._layout.rank:  # which then has all of it
                self.given[SlotKey(to, microbatch)] = value
                continue
            wire = self._layout.wires[transfer.receiver]
            self._layout.channels[transfer.receiver, item].send(self._part(value, transfer).to(wire).contiguous())

    def _part(self, value: torch.Tensor, transfer: Transfer) -> torch.Tensor:
        """Return what of a value, rows x positions x features, a message carries."""
        tokens, features = transfer.tokens.shift(-self._tokens.start), transfer.features.shift(-self._features.start)
        if self._positions.size == self._row_length and transfer.cut is None:
            return value.flatten(0, 1)[slice(*tokens), slice(*features)]
        length = self._row_length
        first = tokens.start // length
        if transfer.cut is None:
            rows = Interval(first, first + 1)
            positions = Interval(tokens.start - first * length, tokens.stop - first * length)
        else:
            rows, positions = Interval(first, tokens.stop // length), transfer.cut.positions
        positions = positions.shift(-self._positions.start)
        return value[slice(*rows), slice(*positions), slice(*features)]
