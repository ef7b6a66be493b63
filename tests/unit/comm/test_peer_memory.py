"""Two devices that copy from each other's memory, in one process: whoever looks next is drawn."""

import random
from collections import deque
from unittest.mock import patch

import pytest
import torch

from hpctrain.comm.transports import peer_memory
from hpctrain.comm.transports.peer_memory import EMPTIED, FILLED, SLOTS, PeerMemory
from tests.ranks.fake_devices import FakeAccelerator

SLOT_BYTES = 64
SIZES = [0, 1, 63, 64, 65, 800, 3, 448]


class Window:
    """Counters of two ranks that both see, and what `PeerMemory` asks of the two ranks themselves."""

    def __init__(self, rank: int, counters: list[list[int]]):
        self.rank, self.counters, self.is_open = rank, counters, True

    def fence(self) -> None:
        pass

    def publish(self, index: int, value: int) -> None:
        self.counters[self.rank][index] = value

    def close(self) -> None:
        self.is_open = False

    def barrier(self) -> None:
        pass


@pytest.fixture
def both():
    """Return the slots of two devices, each of which has opened the other's."""
    with patch.multiple(peer_memory, SLOT_BYTES=SLOT_BYTES, SharedWindow=lambda members, num_bytes: members):
        counters, devices = [[0] * 8 for _ in range(2)], [FakeAccelerator(exports=True) for _ in range(2)]
        exported = [device.export_memory(SLOTS * SLOT_BYTES) for device in devices]
        opened = [devices[i].import_memory(exported[1 - i].handle, SLOTS * SLOT_BYTES) for i in range(2)]
        memory = zip(devices, exported, opened, strict=True)
        yield [PeerMemory(Window(i, counters), each[0], each[1].memory, each[2]) for i, each in enumerate(memory)]


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    return list(tensor.split(SLOT_BYTES)) or [tensor]


@pytest.mark.parametrize("seed", range(5))
def test_bytes_arrive_in_order_whoever_looks(both, seed):
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    sent = [[torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8) for size in SIZES] for _ in both]
    received = [[torch.zeros(size, dtype=torch.uint8) for size in SIZES] for _ in both]
    queues = []
    for i, memory in enumerate(both):
        device = memory.accelerator
        queues.append(deque(memory.send(parts(device.later(each)), device.queued()) for each in sent[i]))
        queues.append(deque(memory.receive(parts(each), device.queued()) for each in received[1 - i]))
    for _ in range(20_000):
        queue = draw.choice([queue for queue in queues if queue])
        for message in queue:
            message.move()
            if not message.posted:
                break
        while queue and queue[0].done:
            queue.popleft()
        if not any(queues):
            break
    assert not any(queues), "somebody waits for ever"
    for ours, theirs in zip(sent, received, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert both[0]._me[FILLED] == both[0]._me[EMPTIED] == sum(len(parts(each)) for each in sent[0])
    for memory in both:
        memory.close()
        assert memory.accelerator.open_memory == 0 and not memory._window.is_open


def test_a_message_is_not_copied_before_it_is_computed(both):
    memory, other = both
    device = memory.accelerator
    late = device.later(torch.full((9,), 7, dtype=torch.uint8))
    message = memory.send([late], device.queued())
    message.move()  # the first look at a device finds that it is not yet there
    assert memory.sent == 0 and not message.done
    while not message.done:
        message.move()
    assert other.has_arrived() and other.other[0][:9].tolist() == [7] * 9
