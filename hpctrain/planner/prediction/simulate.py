"""Runs a step's instructions on clocks, at the prices of `prices.py`: the very lists that the engine executes. Pure.

The loop of `plan.schedule_run` says what happens; this module says when:

- Each tile has a clock. Ranks with several tiles use that of the first.
- A message leaves when it is sent, after those before it on its channel, and arrives after its seconds. It occupies its
  wire for its bytes, not while it is under way.
- Messages that pass the same port of a node share it evenly while they are in flight (`shared_ports.py`).
- A receive waits for its message, and a send waits while the channel is full.
- All tiles synchronise to sum gradients and to agree on the step.
- Overlapped exchanges have a lane. Gradients are summed as soon as the last backward pass has computed them. Weights
  are gathered during the first forward pass of the next step.

Each second of a tile's clock belongs to one part, so that the parts add up.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from hpctrain.plan.schedule import Action, Instruction, Schedule
from hpctrain.plan.schedule_run import Runner, ScheduleRun
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prediction.shared_ports import PricedWire, SharedPorts
from hpctrain.planner.prices.prices import PASSES, Costs, GradientExchange, PassCost, TileCost, slowed_by

PARTS = ("compute", "tensor", "pipeline", "data", "optimizer", "bubble", "hidden")
EXPOSED = ("compute", "tensor", "pipeline", "data", "optimizer")
"""What a rank spends its time in, as its own clock shows: waits belong to what is waited for."""


class PredictedSpan(NamedTuple):
    """An instruction and when it runs, in seconds of the step."""

    instruction: Instruction
    begin: float
    end: float


@dataclass(eq=False)
class _Clock(Runner):
    """The ranks of a tensor grid, and where their time goes."""

    costs: tuple[TileCost, ...] = ()
    """The costs of their virtual stages."""
    now: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    exposed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(EXPOSED, 0.0))
    passes: dict[tuple[Action, int], Sequence[tuple[PassCost, float]]] = field(default_factory=dict)
    """The costs of passes and their seconds, for each row chunk, by instruction and virtual stage."""
    passed: list[PassCost] = field(default_factory=list)
    """The costs of the passes that were computed; their parts are counted at the end."""
    sending: list[PricedWire] = field(default_factory=list)
    """Wires of messages for which it may still have to wait before it computes."""
    done: list[float] = field(default_factory=list)
    """Time at which each virtual stage finished its last instruction."""
    spans: list[tuple[Instruction, float, float]] = field(default_factory=list)
    """The fields of each `PredictedSpan`."""
    gathers: dict[int, list[tuple[float, float, float]]] = field(default_factory=dict)
    """Overlapped gathers of weights, by virtual stage, with three figures each: its seconds, the time of its end, and
    the seconds of the first forward pass after which its weights are needed."""

    def __post_init__(self) -> None:
        self.done = [0.0] * len(self.virtual_stages)
        for number, cost in enumerate(self.costs):
            for action, name in PASSES.items():
                self.passes[action, number] = [(one, one.seconds) for one in getattr(cost, name)]
        self.opening = next((step for step in self.schedule if step.action in PASSES), None)
        self.closing = next((step for step in reversed(self.schedule) if step.action in PASSES), None)

    def spend(self, part: str, seconds: float) -> None:
        self.now += seconds
        self.parts[part] += seconds
        self.exposed[part] += seconds

    def count_passes(self) -> None:
        """Add the passes that were computed to the parts."""
        numbers = Counter(map(id, self.passed))
        for key, one in {id(one): one for one in self.passed}.items():
            for part in ("compute", "tensor", "data"):
                self.parts[part] += numbers[key] * getattr(one, part)
                self.exposed[part] += numbers[key] * getattr(one, part)

    def wait_until(self, until: float, exposed: str = "pipeline") -> float:
        """Return the seconds of waiting `until` a time; by the rank's own clock they count as part `exposed`."""
        waited = max(0.0, until - self.now)
        self.now += waited
        self.exposed[exposed] += waited
        return waited


@dataclass(frozen=True)
class Simulated:
    """A simulated step: its seconds, and where each tile's time went. `hidden` is negative; the parts add up to the
    step."""

    step_seconds: float
    parts: dict[Tile, dict[str, float]]
    """Seconds of each part (`PARTS`), by the first tile of the ranks, as in the schedules."""
    exposed: dict[Tile, dict[str, float]]
    """Seconds of each part by the ranks' own clocks (`EXPOSED`); they add up to the step too."""
    span_fields: Mapping[Tile, Sequence[tuple[Instruction, float, float]]]

    @cached_property
    def spans(self) -> dict[Tile, list[PredictedSpan]]:
        """Return the spans of passes, sums and updates. Tiles that do the same at the same times have one list."""
        lists = {id(spans): spans for spans in self.span_fields.values()}
        made = {key: list(map(PredictedSpan._make, spans)) for key, spans in lists.items()}
        return {tile: made[id(spans)] for tile, spans in self.span_fields.items()}


def simulate(plan: Plan, schedules: Mapping[Tile, Schedule], costs: Costs) -> Simulated:
    """Run a step. Raises PlanError where the schedule deadlocks."""
    return Simulation(plan, schedules, costs).simulated()


class Simulation(ScheduleRun):
    """The run of a plan's schedules with clocks and prices."""

    passes_together = False  # what a pass exchanges is in its price
    runners: dict[Tile, _Clock]
    runner_of: dict[Tile, _Clock]

    def __init__(self, plan: Plan, schedules: Mapping[Tile, Schedule], costs: Costs):
        self._costs = costs
        objects, numbers = {id(cost): cost for cost in costs.tiles.values()}, {}
        self._cost_numbers = {key: numbers.setdefault(cost, len(numbers)) for key, cost in objects.items()}
        """A number of each cost, by its identity: equal costs have one. So each is hashed once, however many tiles."""
        super().__init__(plan, schedules)
        self._clocks: list[_Clock] = list(self.runners.values())
        self._shared = SharedPorts()
        self._members: dict[int, list[tuple[_Clock, Tile, int]]] = {}
        self._start_gathers()

    def runner(self, virtual_stages: tuple[Tile, ...], schedule: Schedule) -> _Clock:
        return _Clock(virtual_stages, schedule, costs=tuple(self._costs.tiles[tile] for tile in virtual_stages))

    def wire(self, ends: tuple[Tile, Tile], *rest) -> PricedWire:
        costs = self._costs
        figures = {"under_way": costs.under_way.get(ends, 0.0), "ports": costs.ports.get(ends, {})}
        return PricedWire(ends, *rest, seconds=costs.messages[ends], **figures)

    def prices(self, tiles: Sequence[Tile]) -> object:
        pairs = (ends for a in tiles for b in self._plan.downstream(a) for ends in ((a, b), (b, a)))
        costs = self._costs
        messages = tuple(
            (costs.messages[pair], costs.under_way.get(pair), tuple(costs.ports.get(pair, {}).items()))
            for pair in pairs
        )
        return tuple(self._cost_numbers[id(costs.tiles[tile])] for tile in tiles), messages

    def compute(self, clock: _Clock, step: Instruction) -> None:
        number, begin = step.virtual_stage, clock.now
        one, seconds = clock.passes[step.action, number][step.row_chunk]
        if step is clock.opening:
            cost = clock.costs[number]
            clock.spend(cost.exposed_part, max(0.0, cost.before_seconds - clock.now))
        if number in clock.gathers:
            self._await_weights(clock, clock.costs[number].overlap_slowdown, clock.gathers.pop(number))
        clock.now += seconds
        clock.passed.append(one)
        if step is clock.closing:
            cost = clock.costs[number]
            clock.spend(cost.exposed_part, cost.after_seconds)
        clock.done[number] = clock.now
        clock.spans.append((step, begin, clock.now))

    def send(self, clock: _Clock, step: Instruction, wires: Sequence[PricedWire]) -> None:
        for wire in wires:
            if len(wire.microbatches) + len(wire.free_slots) >= wire.depth:
                clock.parts["bubble"] += clock.wait_until(wire.free_slots.popleft())
            if wire.ports:
                self._shared.send(wire, clock.now)
                continue
            wire.free_at = max(clock.now, wire.free_at) + wire.seconds - wire.under_way
            wire.arrivals.append(wire.free_at + wire.under_way)
        if self._costs.blocking_share:
            clock.sending.extend(wires)
            self._have_left(clock)
        clock.done[step.virtual_stage] = clock.now

    def _have_left(self, clock: _Clock) -> bool:
        """Let a sender wait that may not compute meanwhile; return False while nobody knows for how long."""
        while clock.sending and not clock.sending[-1].sent:
            wire = clock.sending.pop()
            end = wire.free_at - (wire.seconds - wire.under_way) * (1 - self._costs.blocking_share)
            clock.parts["pipeline"] += clock.wait_until(end)
        return not clock.sending

    def may_pass(self, runner: _Clock, step: Instruction) -> bool:
        if runner.sending and not self._have_left(runner):
            runner.waits_for = runner.sending[-1]
        return not runner.sending

    def has_arrived(self, wire: PricedWire) -> bool:
        return bool(wire.arrivals)

    def wakes_later(self) -> bool:
        while not self._runnable and (wire := self._shared.next_left()):
            for runner in (wire.source, wire.target):
                self.wake(runner, wire)
        return bool(self._runnable)

    def receive(self, clock: _Clock, step: Instruction, wires: Sequence[PricedWire]) -> None:
        longest, arrival = 0.0, clock.now
        for wire in wires:
            longest = max(longest, wire.seconds)
            arrival = max(arrival, wire.arrivals.popleft())
        waited = clock.wait_until(arrival) if arrival > clock.now else 0.0
        seen, parts = min(waited, longest), clock.parts
        parts["pipeline"] += longest
        parts["hidden"] -= longest - seen
        parts["bubble"] += waited - seen
        for wire in wires:
            wire.free_slots.append(clock.now)
        clock.done[step.virtual_stage] = clock.now

    def simulated(self) -> Simulated:
        """Run the step to its end. Raises PlanError where the schedules deadlock."""
        self.run()
        for clock in self._clocks:
            clock.count_passes()
        self._finish()
        end = max(clock.now for clock in self._clocks)
        for clock in self._clocks:
            clock.parts["bubble"] += clock.wait_until(end)
        firsts = self._plan.first_tiles
        of_tiles = ({t: getattr(self.runner_of[t], name) for t in firsts} for name in ("parts", "exposed", "spans"))
        parts, exposed, spans = of_tiles
        return Simulated(end, parts, exposed, spans)

    def _clocks_of(self, exchange: GradientExchange) -> list[tuple[_Clock, Tile, int]]:
        """Return the clocks of an exchange, with a tile of each and the number of that virtual stage."""
        if id(exchange.tiles) not in self._members:
            clocks: dict[_Clock, tuple[_Clock, Tile, int]] = {}
            for tile in exchange.tiles:
                number = self._plan.virtual_stages(tile).index(tile)
                clocks.setdefault(self.runner_of[tile], (self.runner_of[tile], tile, number))
            self._members[id(exchange.tiles)] = list(clocks.values())
        return self._members[id(exchange.tiles)]

    def _finish(self) -> None:
        """Sum gradients, agree, update, gather weights: all tiles together, as all ranks call it in one order."""
        begin = {clock: clock.now for clock in self._clocks}
        self._reduce()
        reduced = {clock: clock.now for clock in self._clocks}
        together = max(reduced.values())
        for clock in self._clocks:
            clock.parts["bubble"] += clock.wait_until(together)
            clock.spend("optimizer", self._costs.agree_seconds + clock.costs[0].update_seconds)
        for exchange in self._costs.exchanges:
            if exchange.needed_seconds is None:
                self._exchange([clock for clock, *_ in self._clocks_of(exchange)], exchange.gather_seconds)
        for clock in self._clocks:
            clock.spans.append((Instruction(Action.REDUCE_GRADIENTS), begin[clock], reduced[clock]))
            clock.spans.append((Instruction(Action.UPDATE), reduced[clock], clock.now))

    def _start_gathers(self) -> None:
        """Schedule the gathers that are overlapped with the first forward pass, for each clock one after the other."""
        ends = dict.fromkeys(self._clocks, 0.0)
        for exchange in self._costs.exchanges:
            if exchange.needed_seconds is None or not exchange.gather_seconds:
                continue
            clocks = self._clocks_of(exchange)
            end = max(ends[clock] for clock, *_ in clocks) + exchange.gather_seconds
            for clock, tile, number in clocks:
                ends[clock] = end
                gather = exchange.gather_seconds, end, exchange.needed_seconds(tile)
                clock.gathers.setdefault(number, []).append(gather)

    def _await_weights(self, clock: _Clock, times: float, gathers: Sequence[tuple[float, float, float]]) -> None:
        """Wait for gathered weights in the first forward pass. It computes what it can before they arrive, `times` as
        long while they move."""
        taken, all_there = sum(seconds for seconds, _, _ in gathers), max(end for _, end, _ in gathers)
        until, computed, waited, slowed = clock.now, 0.0, 0.0, 0.0
        for _, end, needed in sorted(gathers, key=lambda gather: gather[2]):
            alone, computed = needed - computed, needed
            moving = max(0.0, all_there - until)
            longer = slowed_by(min(alone, moving), moving, times)
            late = max(0.0, end - until - alone - longer)
            until += alone + longer + late
            waited, slowed = waited + late, slowed + longer
        clock.spend("compute", slowed)
        self._wait_overlapped(clock, taken, waited)

    def _reduce(self) -> None:
        """Sum gradients: each exchange starts when all its tiles have made them and the exchange before it is done.

        The gradients of the last items are final first and summed first. Their sums slow the computation that they
        overlap.
        """
        lane, taken, slowed = (dict.fromkeys(self._clocks, 0.0) for _ in range(3))
        for exchange in sorted(self._costs.exchanges, key=self._order_of_sums):
            if not exchange.reduce_seconds:
                continue
            clocks, ready = self._clocks_of(exchange), exchange.ready_seconds
            made = (
                slowed[clock] + (clock.done[number] - ready(tile) if ready else clock.now)
                for clock, tile, number in clocks
            )
            start = max(*made, *(lane[clock] for clock, *_ in clocks))
            for clock, tile, _ in clocks:
                lane[clock] = start + exchange.reduce_seconds
                taken[clock] += exchange.reduce_seconds
                overlapped = min(exchange.reduce_seconds, max(0.0, clock.now + slowed[clock] - start))
                times = self._costs.tiles[tile].overlap_slowdown
                slowed[clock] += slowed_by(overlapped, exchange.reduce_seconds, times)
        for clock in self._clocks:
            clock.spend("compute", slowed[clock])
            self._wait_overlapped(clock, taken[clock], max(0.0, lane[clock] - clock.now))

    def _order_of_sums(self, exchange: GradientExchange) -> tuple[int, float]:
        clocks, ready = self._clocks_of(exchange), exchange.ready_seconds
        virtual_stage = max(number for *_, number in clocks)
        return -virtual_stage, -max(ready(tile) for _, tile, _ in clocks) if ready else 0.0

    @staticmethod
    def _wait_overlapped(clock: _Clock, seconds: float, waited: float) -> None:
        """Account for overlapped exchanges of so many `seconds`, for whose end a tile `waited`."""
        seen = min(waited, seconds)
        clock.now += waited
        clock.exposed["data"] += waited
        clock.parts["data"] += seconds
        clock.parts["hidden"] -= seconds - seen
        clock.parts["bubble"] += waited - seen

    @staticmethod
    def _exchange(clocks: Sequence[_Clock], seconds: float) -> None:
        if not seconds:
            return
        start = max(clock.now for clock in clocks)
        for clock in clocks:
            clock.parts["bubble"] += clock.wait_until(start, "data")
            clock.spend("data", seconds)
