"""Messages between tiles that share ports of nodes, as a fluid: they share a port evenly. Pure."""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from hpctrain.plan.schedule import Action
from hpctrain.plan.schedule_run import Wire


@dataclass(eq=False)
class PricedWire(Wire):
    seconds: float = 0.0
    under_way: float = 0.0
    """Seconds of these after the message has left."""
    arrivals: deque[float] = field(default_factory=deque)
    """Arrival time of each message that was sent and not received."""
    free_at: float = 0.0
    """Time at which the last message has left."""
    free_slots: deque[float] = field(default_factory=deque)
    """Times at which slots became free again."""
    ports: Mapping[int, float] = field(default_factory=dict)
    """The ports that it shares with other wires, as in `Costs`."""
    sent: deque[float] = field(default_factory=deque)
    """Times at which messages were sent that have not left these ports."""

    @property
    def place(self) -> tuple[int, bool]:
        forward = self.action is Action.SEND_ACTIVATION
        return self.ends[not forward].items.stop, forward


class SharedPorts:
    """The messages in flight on such ports. Speeds change only when a message begins or ends, so time goes from one of
    these events to the next."""

    def __init__(self):
        self._now, self._num_begun = 0.0, 0
        self._beginning: list[tuple[float, int, PricedWire]] = []
        """A heap of what has not begun: its time, a number, and the wire."""
        self._left: dict[PricedWire, float] = {}
        """The seconds that each message in flight still takes if it is alone."""
        self._speeds = lru_cache(1 << 12)(speeds)

    def send(self, wire: PricedWire, at: float) -> None:
        """Let a message begin then, or when the wire's earlier ones have left."""
        wire.sent.append(at)
        if len(wire.sent) == 1:
            self._begin(wire, at)

    def _begin(self, wire: PricedWire, at: float) -> None:
        self._num_begun += 1
        heapq.heappush(self._beginning, (at, self._num_begun, wire))

    def next_left(self) -> PricedWire | None:
        """Let time pass until a message has left, and return its wire; None if there is none.

        A message that is sent afterwards for an earlier time begins now. Only senders that wait for a part of a message
        do that (`Costs.blocking_share` between 0 and 1).
        """
        while self._left or self._beginning:
            speed = self._speeds(frozenset(self._left))
            ends_at, ending = math.inf, None
            for wire, seconds in self._left.items():
                if (at := self._now + seconds / speed[wire]) < ends_at:
                    ends_at, ending = at, wire
            next_at = self._beginning[0][0] if self._beginning else math.inf
            passed = max(0.0, min(ends_at, next_at) - self._now)
            self._now += passed
            for wire in self._left if passed else ():
                self._left[wire] -= speed[wire] * passed
            if ending is None or next_at < ends_at:
                wire = heapq.heappop(self._beginning)[-1]
                self._left[wire] = wire.seconds - wire.under_way
                continue
            del self._left[ending]
            ending.sent.popleft()
            ending.free_at = self._now
            ending.arrivals.append(self._now + ending.under_way)
            if ending.sent:
                self._begin(ending, max(self._now, ending.sent[0]))
            return ending
        return None


def speeds(wires: Iterable[PricedWire]) -> dict[PricedWire, float]:
    """Return how fast the messages in flight move, as shares of their speed alone: max-min fairly, by progressive
    filling. Messages of one place count once on a port."""
    result = dict.fromkeys(wires, 1.0)
    users: dict[int, dict[object, dict[PricedWire, float]]] = {}
    for wire in result:
        for port, share in wire.ports.items():
            users.setdefault(port, {}).setdefault(wire.place, {})[wire] = share
    free, undecided = dict.fromkeys(users, 1.0), set(result)
    while users:
        needed = {port: math.fsum(max(each.values()) for each in places.values()) for port, places in users.items()}
        level, fullest = min((free[port] / seconds, port) for port, seconds in needed.items())
        if level >= 1:
            break
        for wire in [wire for of_place in users.pop(fullest).values() for wire in of_place if wire in undecided]:
            undecided.discard(wire)
            result[wire] = level
            for port in users.keys() & wire.ports.keys():
                of_place = users[port][wire.place]
                if undecided.isdisjoint(of_place):  # till then the place counts whole
                    free[port] = max(0.0, free[port] - max(result[each] * of_place[each] for each in of_place))
                    del users[port][wire.place]
                    if not users[port]:
                        del users[port]
    return result
