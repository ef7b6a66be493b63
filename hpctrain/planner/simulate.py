"""Runs the instructions of `hpctrain.schedule` against a clock: the very lists that the engine executes. Pure.

Time passes for each tile on its own; where ranks have several, for the first of them, which stands for all. A message
leaves when it is sent and arrives after its seconds, those of a channel one after the other; a receive waits for it; a
send waits while the channel is full. All tiles meet where gradients are summed and where the step is agreed on. What
goes on beside computation has a lane: gradients are summed from where the last backward pass has made them, and weights
gathered while the first forward pass of the next step is on its way to them. Where a tile's time goes is noted part by
part, so that the parts add up.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpctrain.errors import PlanError
from hpctrain.plan import Plan, Tile, joined
from hpctrain.schedule import COMPUTING, Instruction, Op, channel_depth

PARTS = ("compute", "tensor", "pipeline", "data", "optimizer", "bubble", "hidden")
EXPOSED = ("compute", "tensor", "pipeline", "data", "optimizer")
"""Where a rank stands, as a clock beside it would find: waits belong to what is waited for."""
PASSES = {op: op.value.replace(" ", "_") for op in COMPUTING}
"""The field of `TileCost` for each."""
SENDS = {Op.RECEIVE_ACTIVATION: Op.SEND_ACTIVATION, Op.RECEIVE_GRADIENT: Op.SEND_GRADIENT}


@dataclass(frozen=True)
class PassCost:
    """Seconds of one pass over a tile's items, for one piece of its rows."""

    compute: float
    tensor: float = 0.0
    """Collectives over the axes of its tensor grid."""
    data: float = 0.0
    """Collectives over the holders of its weights, in ZeRO 2 and 3."""

    gathered: float = 0.0
    """Of the weights that come over z beside computation, all of it."""
    scattered: float = 0.0
    """Of their gradients."""

    def __add__(self, other: "PassCost") -> "PassCost":
        return PassCost(
            self.compute + other.compute,
            self.tensor + other.tensor,
            self.data + other.data,
            self.gathered + other.gathered,
            self.scattered + other.scattered,
        )

    @property
    def seconds(self) -> float:
        return self.compute + self.tensor + self.data


def slowed_by(beside: float, moving: float, times: float) -> float:
    """Return how much longer a rank computes, as its device takes `times` as long while bytes move.

    So many seconds of communication were `beside` its computing, all of it took `moving`: where it is under way when
    computing would end, it slows what is left of that, too.
    """
    return min(moving, beside * times) * (1 - 1 / times)


@dataclass(frozen=True)
class Sharing:
    """What the same ranks exchange of their gradients and weights in a step."""

    tiles: tuple[Tile, ...]
    reduce_seconds: float
    gather_seconds: float
    ready_seconds: Mapping[Tile, float] = field(default_factory=dict)
    """How long before the end of a tile's last backward pass its gradients are final; 0 where they are not here."""
    needed_seconds: Mapping[Tile, float] | None = None
    """How long after the beginning of a tile's first forward pass it needs the weights; None: they are gathered at the
    end of a step, and nothing goes on meanwhile."""


@dataclass(frozen=True)
class TileCost:
    """What the instructions of a tile take for one microbatch, in seconds."""

    forward: tuple[PassCost, ...]
    """For each substep."""
    backward: tuple[PassCost, ...]
    update_seconds: float = 0.0
    backward_input: tuple[PassCost, ...] = ()
    """The two parts of `backward`, for schedules that split it."""
    backward_weight: tuple[PassCost, ...] = ()
    overlap_times: float = 1.0
    """How many times as long its ranks compute while they communicate."""
    before_seconds: float = 0.0
    """Before a step's first forward pass, of what comes over z, while nothing computes beside."""
    after_seconds: float = 0.0
    """After its last backward pass."""

    @property
    def seconds(self) -> float:
        """Of a microbatch, there and back."""
        return sum(each.seconds for each in (*self.forward, *self.backward))


@dataclass(frozen=True)
class Costs:
    """All that a simulation needs to know of model and machine."""

    tiles: Mapping[Tile, TileCost]
    """Of each microbatch."""
    messages: Mapping[tuple[Tile, Tile], float]
    """Of an activation, or its gradient, from a tile to another."""
    sharings: tuple[Sharing, ...] = ()
    """In the order in which all ranks exchange them."""
    agree_seconds: float = 0.0
    """Until all ranks agree on the loss and the norm."""
    blocking_sends: bool = False
    """Whether a tile computes nothing while it sends."""

    def of(self, tiles: Mapping[Tile, Tile]) -> "Costs":
        """Return the same for other tiles in the place of these."""

        def placed(seconds: Mapping[Tile, float] | None) -> dict[Tile, float] | None:
            return None if seconds is None else {tiles[tile]: each for tile, each in seconds.items()}

        return replace(
            self,
            tiles={tiles[tile]: cost for tile, cost in self.tiles.items()},
            messages={(tiles[a], tiles[b]): seconds for (a, b), seconds in self.messages.items()},
            sharings=tuple(
                replace(
                    each,
                    tiles=tuple(tiles[tile] for tile in each.tiles),
                    ready_seconds=placed(each.ready_seconds),
                    needed_seconds=placed(each.needed_seconds),
                )
                for each in self.sharings
            ),
        )


@dataclass
class _Clock:
    now: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    exposed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(EXPOSED, 0.0))

    def spend(self, part: str, seconds: float) -> None:
        self.now += seconds
        self.parts[part] += seconds
        self.exposed[part] += seconds

    def wait_until(self, moment: float, exposed: str = "pipeline") -> float:
        """Return how long nothing is done until a moment; to whoever looks it is part `exposed` that takes it."""
        waited = max(0.0, moment - self.now)
        self.now += waited
        self.exposed[exposed] += waited
        return waited


@dataclass
class _Wire:
    """Messages of one kind from a tile to another; each of these stands for the first tile of its ranks."""

    source: Tile
    target: Tile
    depth: int
    seconds: float
    arriving: deque[tuple[int, float]] = field(default_factory=deque)
    free_at: float = 0.0
    """When the last one has left."""
    taken: deque[float] = field(default_factory=deque)
    """When slots became free again."""
    under_way: int = 0


@dataclass(frozen=True)
class Simulated:
    """A step: how long it took, and where each tile's time went; `hidden` is negative, the parts add up to the step."""

    step_seconds: float
    parts: dict[Tile, dict[str, float]]
    """By the first tile of the ranks, as the schedules are."""
    busy_until: dict[Tile, float]
    """When these had done their last backward pass."""
    exposed: dict[Tile, dict[str, float]]
    """Where each tile stood (`EXPOSED`); adds up to the step too."""


def simulate(plan: Plan, schedules: Mapping[Tile, tuple[Instruction, ...]], costs: Costs) -> Simulated:
    """Run a step. Raises PlanError where the schedule deadlocks."""
    return _Simulation(plan, schedules, costs).run()


def _alike(plan: Plan, costs: Costs) -> dict[Tile, Tile]:
    """Return for each tile the one in whose place it is in the first pipeline that takes as long.

    Replicas that are alike are run once, which makes the time of even plans independent of how many there are.
    """
    first: dict[tuple, list[Tile]] = {}
    like: dict[Tile, Tile] = {}
    for tiles in joined(plan):
        number = {tile: i for i, tile in enumerate(tiles)}
        each = tuple((costs.tiles[t], t.substeps, plan.warm_up(t), number[plan.chunks(t)[0]]) for t in tiles)
        ways = tuple(
            (number[a], number[b], costs.messages[a, b], costs.messages[b, a])
            for a in tiles
            for b in plan.downstream(a)
        )
        like |= dict(zip(tiles, first.setdefault((each, ways), tiles), strict=True))
    return like


class _Simulation:
    def __init__(self, plan: Plan, schedules: Mapping[Tile, tuple[Instruction, ...]], costs: Costs):
        self._plan, self._schedules, self._costs = plan, schedules, costs
        self._own = {tile: plan.chunks(tile) for tile in schedules}
        self._first = {tile: first for first, tiles in self._own.items() for tile in tiles}
        self._clocks = {tile: _Clock() for tile in schedules}
        self._done = dict.fromkeys(self._first, 0.0)
        """When each tile did something for the last time."""
        self._at = dict.fromkeys(schedules, 0)
        self._wires: dict[tuple[Tile, Tile, Op], _Wire] = {}
        self._ends: dict[int, tuple[int, int]] = {}
        self._found_wires: dict[tuple[Tile, Op], tuple[_Wire, ...]] = {}
        self._gathers = self._start_gathers()

    def run(self) -> Simulated:
        like = _alike(self._plan, self._costs)
        runnable = deque(tile for tile in self._schedules if like.get(tile, tile) is tile)
        waiting = set(runnable)
        while runnable:
            tile = runnable.popleft()
            waiting.discard(tile)
            for woken in self._advance(tile):
                if woken not in waiting:
                    waiting.add(woken)
                    runnable.append(woken)
        for tile, other in like.items():
            self._done[tile] = self._done[other]
            if other is not tile and tile in self._clocks:
                self._at[tile] = self._at[other]
                like_it = self._clocks[other]
                self._clocks[tile] = _Clock(like_it.now, dict(like_it.parts), dict(like_it.exposed))
        stuck = [t for t, at in self._at.items() if at < len(self._schedules[t]) and not self._is_at_end(t)]
        if stuck:
            tile = stuck[0]
            raise PlanError(
                f"the schedule deadlocks: tile items {list(tile.items)} rows {list(tile.rows)} waits at"
                f" '{self._schedules[tile][self._at[tile]]}'"
            )
        busy = {tile: clock.now for tile, clock in self._clocks.items()}
        self._finish()
        end = max(clock.now for clock in self._clocks.values())
        for clock in self._clocks.values():
            clock.parts["bubble"] += clock.wait_until(end)
        parts, exposed = ({t: getattr(c, name) for t, c in self._clocks.items()} for name in ("parts", "exposed"))
        return Simulated(end, parts, busy, exposed)

    def _is_at_end(self, tile: Tile) -> bool:
        return self._schedules[tile][self._at[tile]].op in (Op.REDUCE_GRADIENTS, Op.UPDATE)

    def _advance(self, first: Tile) -> set[Tile]:
        """Execute what the ranks of a tile can; return the tiles whose ranks may go on because of it."""
        woken: set[Tile] = set()
        schedule, clock, chunks = self._schedules[first], self._clocks[first], self._own[first]
        opening, closing = self._passes_of(schedule)
        for place in range(self._at[first], len(schedule)):
            self._at[first] = place
            step = schedule[place]
            tile = chunks[step.chunk]
            match step.op:
                case op if name := PASSES.get(op):
                    cost = self._costs.tiles[tile]
                    one = getattr(cost, name)[step.substep]
                    if place == opening:
                        clock.spend("tensor", max(0.0, cost.before_seconds - clock.now))
                    if tile in self._gathers:
                        self._await_weights(clock, cost.overlap_times, self._gathers.pop(tile))
                    clock.spend("compute", one.compute)
                    if one.tensor or one.data:
                        clock.spend("tensor", one.tensor)
                        clock.spend("data", one.data)
                    if place == closing:
                        clock.spend("tensor", cost.after_seconds)
                case Op.SEND_ACTIVATION | Op.SEND_GRADIENT:
                    wires = self._wires_of(tile, step)
                    if not self._send(clock, step.microbatch, wires):
                        return woken
                    woken.update(wire.target for wire in wires)
                case Op.RECEIVE_ACTIVATION | Op.RECEIVE_GRADIENT:
                    wires = self._wires_of(tile, step)
                    if not self._receive(clock, step.microbatch, wires):
                        return woken
                    woken.update(wire.source for wire in wires)
                case _:
                    return woken
            self._done[tile] = clock.now
        self._at[first] = len(schedule)
        return woken - {first}

    def _passes_of(self, schedule: tuple[Instruction, ...]) -> tuple[int, int]:
        """Return the places of the first and the last pass of a schedule, found once for tiles that have the same."""
        if id(schedule) not in self._ends:
            places = [place for place, step in enumerate(schedule) if step.op in PASSES]
            self._ends[id(schedule)] = (places[0], places[-1]) if places else (-1, -1)
        return self._ends[id(schedule)]

    def _wires_of(self, tile: Tile, step: Instruction) -> tuple[_Wire, ...]:
        """Return the wires by which a tile sends or receives in an instruction."""
        key = tile, step.op
        if key not in self._found_wires:
            downstream = step.op in (Op.SEND_ACTIVATION, Op.RECEIVE_GRADIENT)
            peers = (self._plan.downstream if downstream else self._plan.upstream)(tile)
            is_sent = step.op not in SENDS
            ends = ((tile, peer, step.op) if is_sent else (peer, tile, SENDS[step.op]) for peer in peers)
            self._found_wires[key] = tuple(self._wire(*each) for each in ends)
        return self._found_wires[key]

    def _wire(self, source: Tile, target: Tile, op: Op) -> _Wire:
        key = source, target, op
        if key not in self._wires:
            depth, seconds = channel_depth(self._plan, source, target), self._costs.messages[source, target]
            self._wires[key] = _Wire(self._first[source], self._first[target], depth, seconds)
        return self._wires[key]

    def _send(self, clock: _Clock, microbatch: int, wires: Sequence[_Wire]) -> bool:
        if any(wire.under_way >= wire.depth and not wire.taken for wire in wires):
            return False
        for wire in wires:
            if wire.under_way >= wire.depth:
                clock.parts["bubble"] += clock.wait_until(wire.taken.popleft())
                wire.under_way -= 1
            wire.under_way += 1
            wire.free_at = max(clock.now, wire.free_at) + wire.seconds
            wire.arriving.append((microbatch, wire.free_at))
        if self._costs.blocking_sends:
            clock.parts["pipeline"] += clock.wait_until(max(wire.free_at for wire in wires))
        return True

    def _receive(self, clock: _Clock, microbatch: int, wires: Sequence[_Wire]) -> bool:
        if not all(wire.arriving for wire in wires):
            return False
        longest, arrival = 0.0, clock.now
        for wire in wires:
            got, arrives = wire.arriving.popleft()
            if got != microbatch:
                items = list(wire.target.items)
                raise PlanError(f"tile items {items} expects microbatch {microbatch} and is sent {got}")
            longest = max(longest, wire.seconds)
            arrival = max(arrival, arrives)
        waited = clock.wait_until(arrival)
        seen = min(waited, longest)
        clock.parts["pipeline"] += longest
        clock.parts["hidden"] -= longest - seen
        clock.parts["bubble"] += waited - seen
        for wire in wires:
            wire.taken.append(clock.now)
        return True

    def _finish(self) -> None:
        """Sum gradients, agree, update, gather weights: all tiles together, as all ranks call it in one order."""
        clocks = self._clocks
        self._reduce()
        together = max(clock.now for clock in clocks.values())
        for tile, clock in clocks.items():
            clock.parts["bubble"] += clock.wait_until(together)
            clock.spend("optimizer", self._costs.agree_seconds + self._costs.tiles[tile].update_seconds)
        for sharing in self._costs.sharings:
            if sharing.needed_seconds is None:
                self._exchange(sharing.tiles, sharing.gather_seconds)

    def _start_gathers(self) -> dict[Tile, list[tuple[float, float, float]]]:
        """Return for each tile of the weights that are gathered beside: seconds taken, when they are there, and how
        long after the beginning of the first forward pass they are needed."""
        lane = dict.fromkeys(self._schedules, 0.0)
        found: dict[Tile, list[tuple[float, float, float]]] = {}
        for sharing in self._costs.sharings:
            if sharing.needed_seconds is None or not sharing.gather_seconds:
                continue
            end = max(lane[self._first[tile]] for tile in sharing.tiles) + sharing.gather_seconds
            for tile in sharing.tiles:
                lane[self._first[tile]] = end
                found.setdefault(tile, []).append((sharing.gather_seconds, end, sharing.needed_seconds[tile]))
        return found

    def _await_weights(self, clock: _Clock, times: float, gathers: Sequence[tuple[float, float, float]]) -> None:
        """Wait in the first forward pass, which computes what it can before, and `times` as long while weights come."""
        taken, all_there = sum(seconds for seconds, _, _ in gathers), max(end for _, end, _ in gathers)
        moment, computed, waited, slowed = clock.now, 0.0, 0.0, 0.0
        for _, end, needed in sorted(gathers, key=lambda gather: gather[2]):
            alone, computed = needed - computed, needed
            moving = max(0.0, all_there - moment)
            longer = slowed_by(min(alone, moving), moving, times)
            late = max(0.0, end - moment - alone - longer)
            moment += alone + longer + late
            waited, slowed = waited + late, slowed + longer
        clock.spend("compute", slowed)
        self._wait_beside(clock, taken, waited)

    def _reduce(self) -> None:
        """Sum gradients, each sharing when all its tiles have made them and the one before it is done.

        What is made first, by the last items, is summed first, and slows what is computed then.
        """
        lane = dict.fromkeys(self._clocks, 0.0)
        taken, slowed = dict.fromkeys(self._clocks, 0.0), dict.fromkeys(self._clocks, 0.0)
        for sharing in sorted(self._costs.sharings, key=self._order_of_sums):
            if not sharing.reduce_seconds:
                continue
            firsts = [self._first[tile] for tile in sharing.tiles]
            ready = sharing.ready_seconds
            made = (
                slowed[first] + (self._done[tile] - ready[tile] if ready else self._clocks[first].now)
                for tile, first in zip(sharing.tiles, firsts, strict=True)
            )
            start = max(*made, *(lane[first] for first in firsts))
            for tile, first in zip(sharing.tiles, firsts, strict=True):
                lane[first] = start + sharing.reduce_seconds
                taken[first] += sharing.reduce_seconds
                beside = min(sharing.reduce_seconds, max(0.0, self._clocks[first].now + slowed[first] - start))
                times = self._costs.tiles[tile].overlap_times
                slowed[first] += slowed_by(beside, sharing.reduce_seconds, times)
        for first, clock in self._clocks.items():
            clock.spend("compute", slowed[first])
            self._wait_beside(clock, taken[first], max(0.0, lane[first] - clock.now))

    def _order_of_sums(self, sharing: Sharing) -> tuple[int, float]:
        chunk = max(self._own[self._first[tile]].index(tile) for tile in sharing.tiles)
        return -chunk, -max(sharing.ready_seconds.values(), default=0.0)

    @staticmethod
    def _wait_beside(clock: _Clock, seconds: float, waited: float) -> None:
        """Account for what took so long beside computation, of which the end was waited for."""
        seen = min(waited, seconds)
        clock.now += waited
        clock.exposed["data"] += waited
        clock.parts["data"] += seconds
        clock.parts["hidden"] -= seconds - seen
        clock.parts["bubble"] += waited - seen

    def _exchange(self, tiles: tuple[Tile, ...], seconds: float) -> None:
        if not seconds:
            return
        clocks = [self._clocks[self._first[tile]] for tile in tiles]
        start = max(clock.now for clock in clocks)
        for clock in clocks:
            clock.parts["bubble"] += clock.wait_until(start, "data")
            clock.spend("data", seconds)
