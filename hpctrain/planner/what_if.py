"""Compares machines for a job: the best plan on each, its speed, energy and price, and where its step goes. Pure.

Each machine is searched with the same budget. The others begin with the best plan of the first machine, where they have
its devices. Then the first machine tries the best plans of all others. So more devices, bytes or bandwidth are never
worse. A difference below the tolerance of the search is none.
"""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from hpctrain.config.clusters.cluster import Cluster, Device, Family
from hpctrain.config.clusters.device_catalogue import ACCELERATORS, IDLE_SHARE, lookup
from hpctrain.config.errors import HpctrainError
from hpctrain.config.prices import FamilyPrice, PriceFile
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prediction.forecast import BUSY, INTERACTION, Forecast
from hpctrain.planner.prediction.predictor import Prediction, Predictor
from hpctrain.sharding.intervals import Interval

TOLERANCE = 0.02
"""Share of a step by which two searches of one machine may differ. They did by 2.2 %, with 100 plans and with 300 for
llama-8b on 64 devices of three families."""
CHECKPOINT_SECONDS = 3600.0
"""Assumed time between checkpoints, where a job saves none before its end."""
RESTART_SECONDS = 300.0
"""Assumed time from a failure until training continues: it is noticed, ranks start, the checkpoint is read."""


@dataclass(frozen=True)
class PossibleMachine:
    """A machine that a job may have, and what is assumed of it beyond its file."""

    name: str
    cluster: Cluster
    assumed: tuple[str, ...] = ()
    kept: tuple[int, ...] | None = None
    """The ranks of the first machine that its ranks are, where it is known to be a part of it."""


@dataclass(frozen=True)
class ComparedMachine:
    """The worth of a machine to a job."""

    machine: PossibleMachine
    plan: Plan | None
    """Its best plan; None where none fits."""
    prediction: Prediction | None
    change: float | None
    """Tokens/s more than on the first machine, as a share; None where the difference is less than the tolerance."""
    effective_share: float
    """Share of time in which losses let the job train."""
    watts: float | None
    """The mean power of all devices; None where a family's is not known."""
    money_per_hour: float | None
    """The price of an hour with its energy; None without a price file."""
    assumed: tuple[str, ...]
    refusal: str = ""
    """Why no plan fits."""

    @property
    def tokens_per_second(self) -> float:
        """The tokens of a second, on the mean over losses; 0 where no plan fits."""
        return self.prediction.tokens_per_second * self.effective_share if self.prediction else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The range of the tokens of a second."""
        if self.prediction is None:
            return 0.0, 0.0
        step, (low, high) = self.prediction.step_seconds, self.prediction.interval_seconds
        return self.tokens_per_second * step / high, self.tokens_per_second * step / low

    @property
    def tokens_per_money(self) -> float | None:
        return 3600 * self.tokens_per_second / self.money_per_hour if self.money_per_hour else None

    @property
    def tokens_per_kwh(self) -> float | None:
        return 3.6e6 * self.tokens_per_second / self.watts if self.watts else None

    @property
    def bounded_by(self) -> str:
        """The share of the step in which devices compute, and the largest other cause, by the waterfall."""
        if self.prediction is None:
            return self.refusal
        parts, step = self.prediction.waterfall_seconds, self.prediction.step_seconds
        cause = max((each for each in parts if each not in (BUSY, INTERACTION)), key=parts.__getitem__)
        return f"computing {parts[BUSY] / step:.0%}, {cause} {parts[cause] / step:.1%}"

    def data(self) -> dict:
        """Return it as plain data, for JSON."""
        prediction = self.prediction
        return {
            "machine": self.machine.name,
            "devices": self.machine.cluster.describe(),
            "plan": self.plan.describe() if self.plan else None,
            "step_seconds": prediction.step_seconds if prediction else None,
            "tokens_per_second": self.tokens_per_second,
            "interval": list(self.interval),
            "change": self.change,
            "effective_share": self.effective_share,
            "watts": self.watts,
            "money_per_hour": self.money_per_hour,
            "tokens_per_money": self.tokens_per_money,
            "tokens_per_kwh": self.tokens_per_kwh,
            "waterfall_seconds": dict(prediction.waterfall_seconds) if prediction else {},
            "bounded_by": self.bounded_by,
            "assumed": list(self.assumed),
        }


def what_if(
    machines: Sequence[PossibleMachine],
    search: Callable[[Cluster, float], Predictor],
    predict: Callable[[Cluster, Plan], Predictor],
    prices: PriceFile | None = None,
    mtbf_seconds: float | None = None,
    checkpoint_steps: int = 0,
) -> list[ComparedMachine]:
    """Return what each machine is worth, compared with the first one.

    `search` returns the best plan of a cluster, where a plan of so many seconds is known, and `predict` that of a given
    plan; both raise HpctrainError where none fits. `mtbf_seconds` is the mean time between failures of one device.
    """
    results: list[Predictor | HpctrainError] = []

    def moved(number: int, other: int) -> Predictor | None:
        """Return the plan of another machine on a machine; None where it does not run or fit there."""
        theirs, here = results[other], machines[number].cluster
        part, ranks = machines[number if other == 0 else other].kept, None
        if part is not None:  # ranks there by those here, or the other way round
            ranks = {old: new for new, old in enumerate(part)} if other == 0 else dict(enumerate(part))
        plan = moved_plan(theirs.plan, machines[other].cluster, here, ranks) if isinstance(theirs, Predictor) else None
        if plan is None:
            return None
        with suppress(HpctrainError):  # such as a family that computes in another dtype here
            predictor = predict(here, plan)
            return predictor if predictor.predict().fits else None
        return None

    def faster(result: Predictor | HpctrainError, other: Predictor | HpctrainError | None):
        """Return the faster one; of equals the first."""
        if not isinstance(other, Predictor):
            return result
        return result if isinstance(result, Predictor) and _seconds(result) <= _seconds(other) else other

    for number, machine in enumerate(machines):
        start = moved(number, 0) if number else None
        try:
            own: Predictor | HpctrainError = search(machine.cluster, _seconds(start) if start else math.inf)
        except HpctrainError as error:
            own = error
        results.append(faster(start, own) if start else own)
    first = None
    while results[0] is not first:  # without the rows that a machine does not have, a plan may be faster than both
        first = results[0]
        for other in range(1, len(machines)):
            results[0] = faster(results[0], moved(0, other))
        if results[0] is not first:
            results[1:] = [faster(results[number], moved(number, 0)) for number in range(1, len(machines))]
    rows: list[ComparedMachine] = []
    for machine, best in zip(machines, results, strict=True):
        rows.append(_row(machine, best, rows[:1], prices, mtbf_seconds, checkpoint_steps))
    return rows


def _seconds(predictor: Predictor) -> float:
    return predictor.simulated.step_seconds


def _row(
    machine: PossibleMachine,
    result: Predictor | HpctrainError,
    first: Sequence[ComparedMachine],
    prices: PriceFile | None,
    mtbf_seconds: float | None,
    checkpoint_steps: int,
) -> ComparedMachine:
    best, refusal = (result, "") if isinstance(result, Predictor) else (None, str(result))
    assumed, prediction, share = [*machine.assumed], None, 1.0
    if best is not None:
        prediction = Forecast.of(best).prediction
        assumed += [each for each in prediction.assumed_inputs if each not in assumed]
        if mtbf_seconds:
            lost = checkpoint_steps * prediction.step_seconds / 2 if checkpoint_steps else CHECKPOINT_SECONDS / 2
            lost += RESTART_SECONDS
            between = mtbf_seconds / len(best.plan.ranks)
            share = between / (between + lost)
            text = "" if checkpoint_steps else f" and {CHECKPOINT_SECONDS:,.0f} s between checkpoints"
            assumed.append(f"a failure: {RESTART_SECONDS:,.0f} s until training continues{text}")
    watts = _mean_watts(machine.cluster, best, prices or PriceFile(), assumed) if best else None
    money = None
    if prices is not None and best is not None:
        money = prices.kwh * (watts or 0.0) / 1000
        if watts is None and prices.kwh:
            assumed.append("prices: no energy is counted, as the power of a family is not known")
        for family in machine.cluster.families:
            hourly = prices.hourly(family)
            money += (hourly or 0.0) * machine.cluster.num_of(family)
            if hourly is None and machine.cluster.num_of(family):
                assumed.append(f"prices: families.{family} costs nothing but its energy")
    change = None
    row = ComparedMachine(
        machine, best.plan if best else None, prediction, None, share, watts, money, tuple(assumed), refusal
    )
    if first and first[0].tokens_per_second:
        change = row.tokens_per_second / first[0].tokens_per_second - 1
    return replace(row, change=None if change is None or abs(change) < TOLERANCE else change)


def _mean_watts(cluster: Cluster, best: Predictor, prices: PriceFile, assumed: list[str]) -> float | None:
    """Return the mean power of all devices of a cluster in a step: those that wait, and unused ones, take less."""
    powers: dict[str, tuple[float, float]] = {}
    used = {name: family for name, family in cluster.families.items() if cluster.num_of(name)}
    for name, family in used.items():
        power = power_of(name, family, prices.families.get(name, FamilyPrice()), assumed)
        if power is None:
            return None
        powers[name] = power
    total, step = sum(powers[device.family][1] for device in cluster.devices), best.simulated.step_seconds
    for tile, parts in best.simulated.parts.items():
        for rank in tile.ranks:
            busy, idle = powers[cluster.devices[rank].family]
            total += (busy - idle) * (1 - parts["bubble"] / step)
    return total


def power_of(name: str, family: Family, price: FamilyPrice, assumed: list[str]) -> tuple[float, float] | None:
    """Return the power of a device at work and while it waits, by the price file or else the catalogue; None where
    neither has it. What is assumed is added to `assumed`."""
    model = lookup(family.model or family.like or "", ACCELERATORS)
    watts = price.watts if price.watts is not None else ACCELERATORS[model].watts if model else None
    if watts is None:
        assumed.append(f"families.{name}: no power is known; set families.{name}.watts in the price file")
        return None
    if price.watts is None:
        assumed.append(
            f"families.{name}: {watts:g} W at work, its data sheet's limit; hosts and cooling are not counted"
        )
    idle = price.idle_watts if price.idle_watts is not None else IDLE_SHARE * watts
    if price.idle_watts is None:
        assumed.append(f"families.{name}: {idle:g} W while it waits, {IDLE_SHARE:.0%} of its power at work")
    return watts, min(idle, watts)


def moved_plan(plan: Plan, here: Cluster, there: Cluster, ranks: Mapping[int, int] | None = None) -> Plan | None:
    """Return a plan of one cluster on the same devices of another, by their `ranks` there. All others there rest.

    Where some are not there, the plan goes on without the rows that they compute; None where that is all rows.

    Left out: devices are the same by their table of nodes, node, family and number. Tables of the second cluster are
    those of the first without the families that it does not have, and then new ones; or the other way round. On new
    devices the job is not started, so that they do not even agree on the step.
    """
    everyone: Collection[int] = range(there.num_devices) if ranks is not None else ()
    if ranks is None:
        places = _places(there, here)
        ranks = {rank: places[key] for key, rank in _places(here, there).items() if key in places}
    left = without_rows(plan, [rank for tile in plan.tiles for rank in tile.ranks if rank not in ranks])
    if left is None:
        return None
    tiles = tuple(replace(tile, ranks=tuple(ranks[rank] for rank in tile.ranks)) for tile in left.tiles)
    idle = {ranks[rank] for rank in left.unused if rank in ranks}.union(everyone)
    idle -= {rank for tile in tiles for rank in tile.ranks}
    return replace(left, tiles=tiles, unused=tuple(sorted(idle)))


def without_rows(plan: Plan, gone: Sequence[int]) -> Plan | None:
    """Return a plan without the rows that some ranks compute, and all tiles of these. The other tiles get more rows, in
    proportion; None where there is no other."""
    if not gone:
        return plan
    dropped = [tile for tile in plan.tiles if not set(gone).isdisjoint(tile.ranks)]
    kept = [tile for tile in plan.tiles if tile not in dropped]
    for tile in dropped:  # grows: tiles that share rows with these, one after the other
        more = [other for other in kept if other.rows.intersect(tile.rows).size]
        dropped += more
        kept = [other for other in kept if other not in more]
    bounds = sorted({bound for tile in kept for bound in tile.rows})
    bands = [band for band in itertools.starmap(Interval, itertools.pairwise(bounds)) if _is_inside(band, kept)]
    total, place, places = sum(band.size for band in bands), 0, {}
    for band in bands:
        places[band.start] = place * plan.rows // total
        place += band.size
        places[band.stop] = place * plan.rows // total
    if not kept:
        return None
    tiles = tuple(replace(tile, rows=Interval(places[tile.rows.start], places[tile.rows.stop])) for tile in kept)
    idle = {rank for tile in dropped for rank in tile.ranks}.difference(gone, *(tile.ranks for tile in kept))
    return replace(plan, tiles=tiles, unused=tuple(sorted({*plan.unused, *idle})))


def _is_inside(band: Interval, tiles: Sequence[Tile]) -> bool:
    return any(tile.rows.intersect(band).size for tile in tiles)


def _places(cluster: Cluster, other: Cluster) -> Mapping[tuple, int]:
    """Return the ranks of the devices that another cluster may have too, by what is the same of them."""
    shared = (table for table, nodes in enumerate(cluster.nodes) if not other.families.keys().isdisjoint(nodes.devices))
    numbers = {table: number for number, table in enumerate(shared)}
    result = {}
    for table, devices in itertools.groupby(sorted(cluster.devices, key=_place), key=lambda device: device.table):
        first = None
        counts: dict[tuple, int] = {}
        for device in devices:
            first = device.node if first is None else first
            if device.family not in other.families or table not in numbers:
                continue
            node = device.node - first, device.family
            counts[node] = counts.get(node, -1) + 1
            result[(numbers[table], *node, counts[node])] = device.rank
    return result


def _place(device: Device) -> tuple[int, int, int]:
    return device.table, device.node, device.index
