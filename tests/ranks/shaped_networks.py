"""Networks for tests of shaped routes, and how late the most punctual message may be: 5 % or 0.3 ms."""

import math
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple

import torch

from hpctrain.comm.transports.members import GroupMessages
from hpctrain.comm.waiting import wait_until
from hpctrain.rehearsal.clock import DeviceQueue
from hpctrain.rehearsal.fabric import PretendedNetwork
from hpctrain.rehearsal.shaped import ShapedNetwork, ShapedTransport
from tests.described_networks import make_network, make_nic
from tests.ranks.punctual import Measurement
from tests.virtual_ranks import fluid_of

REPEATS, ROUNDS = 9, 6
LATENCY_SECONDS = 1e-3
TOLERANCE, TOLERANCE_SECONDS = 0.05, 0.3e-3


LINK_LATENCY_SECONDS = 0.1e-3


def two_nodes(size: int, bandwidth: float, link: float = 1e9, dilation: float = 1.0) -> PretendedNetwork:
    """Half of the ranks on each; a node's ranks share one NIC."""
    nodes = [(count, [make_nic("ib", bandwidth, bandwidth)]) for count in (size // 2, size - size // 2) if count]
    return make_network(nodes, {"ib": LATENCY_SECONDS}, (link, LINK_LATENCY_SECONDS), dilation)


class Shaped:
    """A network for one test, and transports on it."""

    def __init__(self, world, network: PretendedNetwork, **options):
        self.world = world
        self.network = ShapedNetwork(world.space.members(range(world.size)), network, **options)
        self._made = []

    def transport(self, ranks, stream: DeviceQueue | None = None) -> ShapedTransport:
        self._made.append(GroupMessages(self.world.space.members(ranks)))
        return ShapedTransport(self.network, self._made[-1], stream)

    def note_starts(self) -> list[float]:
        """Return a list to which the exact time of each start of this rank's flows will be appended."""
        fluid, starts = self.network.flows, []
        start = fluid.start

        def noting(*arguments) -> bool:
            has_started = start(*arguments)
            starts.append(fluid.clock)
            return has_started

        fluid.start = noting
        return starts

    def close(self) -> None:
        for messages in self._made:
            messages.close()
        self.network.close()


@contextmanager
def shaped(world, network: PretendedNetwork, **options):
    made = Shaped(world, network, **options)
    yield made  # after an error the others do not close: nobody does
    made.close()


def wait(world, ready) -> float:
    """Return when it was true."""
    wait_until(ready, lambda: "a shaped message", world.patience)
    return time.monotonic()


def everywhere(world, value) -> list:
    """Return all ranks' values on each."""
    return world.all_objects(value)


def report(world, text: str) -> None:
    if world.rank == 0:
        print(text)


class Figure(NamedTuple):
    """Seconds over repeats."""

    what: str
    predicted: list[float]
    result: list[float]
    tolerance: float = TOLERANCE


def assert_in_time(world, measure: Callable[[], list[Figure]]) -> None:
    """Assert that nothing is early, and that of each figure one of some repeats is hardly late.

    When they are due is asserted by `measure`, whatever the machine does. How long after that ranks get a core to look
    is a matter of the machine: where other programs use its cores the lateness is said, and not asserted.
    """
    best: dict[str, float] = {}
    complaints: list[str] = []
    measurement = Measurement(world)
    for _ in range(ROUNDS):
        complaints = []
        for figure in measure():
            late = [result - predicted for result, predicted in zip(figure.result, figure.predicted, strict=True)]
            median, usual = statistics.median(late), statistics.median(figure.predicted)
            text = (
                f"{figure.what}: predicted {usual * 1e3:.3f} ms, late by {median * 1e3:.3f} ms in the median"
                f" ({median / usual:.1%}), by {min(late) * 1e3:.3f} to {max(late) * 1e3:.3f} ms"
            )
            report(world, text)
            assert min(late) > -1e-6, f"early: {text}"
            best[figure.what] = min(best.get(figure.what, math.inf), min(late))
            if best[figure.what] > max(figure.tolerance * usual, TOLERANCE_SECONDS):
                complaints.append(text)
        if not complaints:
            return
    with measurement.checking():
        assert not complaints, "; ".join(complaints)


class Times(NamedTuple):
    """By flow, of one repeat, in seconds of the same clock."""

    started: list[float]
    predicted: list[float]
    arrived: list[float]


def together(world, network: PretendedNetwork, flows, num_bytes: int, delays) -> list[Times]:
    """Send one message for each pair in `flows`, after its delay, again and again; return what each repeat took.

    Predictions are the fluid's, from the times at which flows were really started.
    """
    result = []
    with shaped(world, network) as made:
        transport, starts = made.transport(range(world.size)), made.note_starts()
        for _ in range(REPEATS):
            begin = world.broadcast_object(time.monotonic() + 0.005)
            started, arriving, leaving, arrived = {}, {}, {}, {}
            for i, (source, target) in enumerate(flows):
                if world.rank == target:
                    arriving[i] = transport.receive(source, torch.empty(num_bytes, dtype=torch.uint8))
                if world.rank == source:
                    tensor = torch.zeros(num_bytes, dtype=torch.uint8)
                    time.sleep(max(0.0, begin + delays[i] - time.monotonic()))
                    leaving[i] = transport.send(target, tensor)
                    started[i] = starts[-1]
            for i, ready in arriving.items():
                arrived[i] = wait(world, ready)
            for ready in leaving.values():
                wait(world, ready)
            every = everywhere(world, (started, arrived))
            started, arrived = (
                {i: at for times in side for i, at in times.items()} for side in zip(*every, strict=True)
            )
            fluid = fluid_of(network)
            paths = [source * network.num_ranks + target for source, target in flows]
            for i in sorted(started, key=started.get):
                fluid.start(i, paths[i], num_bytes, started[i])
            fluid.advance(1e300)
            predicted = [fluid.left(i) + network.paths[path].latency_seconds for i, path in enumerate(paths)]
            assert all(abs(ready.due - predicted[i]) < 1e-6 for i, ready in arriving.items())
            result.append(Times(*([times[i] for i in range(len(flows))] for times in (started, predicted, arrived))))
    return result


def until_all_arrived(what: str, result: list[Times]) -> Figure:
    """Compare the times from the first start to the last arrival."""
    predicted = [max(times.predicted) - min(times.started) for times in result]
    return Figure(what, predicted, [max(times.arrived) - min(times.started) for times in result])
