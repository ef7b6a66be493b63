"""Chooses what communicates while ranks compute, where the job leaves it open: a value and a reason each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from hpctrain.comm.topology import Topology, places_of
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.errors import HpctrainError, PlanError
from hpctrain.config.job import Job
from hpctrain.config.parallelism import Overlap
from hpctrain.plan.holdings import holding_of
from hpctrain.plan.launch_order import check_launch_order, shortened
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prediction.cut_products import PAYS, predict_in_parts
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.prices import gathers_while_summing
from hpctrain.planner.prices.setup import Setup
from hpctrain.sharding.grid import AXES, GROUPS

EXCHANGED = {"data": "holders of the same weights"} | {
    switch: f"groups of {' or '.join(name for name in GROUPS if AXES[name].overlap == switch)}"
    for switch in dict.fromkeys(AXES[name].overlap for name in GROUPS)
}
"""For each switch, the ranks that exchange what it overlaps."""
PARTS = "tensor_parts"


class GroupPlacement(NamedTuple):
    """Placement over hosts and families of the groups whose communication a switch overlaps."""

    crosses_hosts: bool
    """Whether any of them is on several hosts."""
    is_composite: bool
    """Whether any has several families, one of them with several devices, so that a library does parts of its
    operations."""


def placements(topology: Topology, job: Job, plan: Plan) -> dict[str, GroupPlacement]:
    """Return the placement of the plan's groups for each switch. Pure.

    Only the first and the last rank of each tile are examined. Where ranks of a host are consecutive, no group between
    these two spans more hosts. Of tiles of one kind, and of those in equal places, the first is examined.
    """
    groups: dict[str, set[tuple[int, ...]]] = {key: set() for key in EXCHANGED}
    seen: set[tuple] = set()
    for tile, first in plan.first_like.items():
        places = [topology.places[rank] for rank in tile.ranks]
        hosts = [place.host for place in places]
        where = tile.tensor, tuple(map(hosts.index, hosts)), tuple(place.family for place in places)
        if tile is not first and where in seen:
            continue
        seen.add(where)
        for rank in dict.fromkeys((tile.ranks[0], tile.ranks[-1])):
            asked = hidden_groups(job, plan, rank) if tile is first else axis_groups(tile, rank)
            for key, of_rank in asked.items():
                groups[key].update(of_rank)
    return {key: _placement(topology, of_key) for key, of_key in groups.items()}


def _placement(topology: Topology, groups: Iterable[Sequence[int]]) -> GroupPlacement:
    several = [ranks for ranks in groups if len(ranks) > 1]

    def is_composite(ranks: Sequence[int]) -> bool:
        families = topology.domains(ranks, "family")
        launching = [each for each in families if len(each) > 1 and topology.places[ranks[each[0]]].kind != "cpu"]
        return len(families) > 1 and bool(launching)

    crosses_hosts = any(len(topology.domains(ranks, "host")) > 1 for ranks in several)
    return GroupPlacement(crosses_hosts, any(map(is_composite, several)))


def launch_refusal(plan: Plan) -> str | None:
    """Return why devices that do one collective at a time may not sum gradients early; None: they may."""
    try:
        check_launch_order(plan)
    except PlanError as error:
        return str(error)
    return None


def axis_groups(tile: Tile, rank: int) -> dict[str, list[tuple[int, ...]]]:
    """Return for each switch the groups of a rank's tensor grid whose communication it overlaps. Pure."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name, along in GROUPS.items():
        groups.setdefault(AXES[name].overlap, []).append(tile.axis_ranks(along, rank))
    return groups


def hidden_groups(job: Job, plan: Plan, rank: int) -> dict[str, list[tuple[int, ...]]]:
    """Return for each switch the groups of a rank whose communication it overlaps. Pure."""
    groups = axis_groups(plan.tile_of(rank), rank)
    groups["data"] = [group.ranks for group in holding_of(job.model, plan, rank, job.overlap.bucket_bytes).shard_groups]
    return groups


def resolve_overlap(
    overlap: Overlap,
    topology: Topology,
    placement: Mapping[str, GroupPlacement] | None = None,
    refusal: str | None = None,
) -> tuple[Overlap, dict[str, str]]:
    """Return the overlaps with values for switches that are `auto`, and the reasons of these. Pure.

    The number of parts stays as it is.

    Overlapping pays where bytes move by something else than the cores that compute. Among CPU ranks of one host there
    is no such thing: they exchange through its memory, and overlapped messages take cores from the product. `placement`
    says by switch where something is exchanged; None: between all hosts that there are, and gradients between all
    families. `refusal` is what `launch_refusal` says of the plan.
    """
    hosts = len({place.host for place in topology.places})
    values, reasons = {}, {}
    anywhere = _placement(topology, [range(len(topology.places))])
    for key, what in EXCHANGED.items():
        if getattr(overlap, key) is not None:
            continue
        if key == "tensor" and (overlap.tensor_parts or 1) > 1:
            values[key], reasons["overlap.tensor"] = True, f"on: overlap.{PARTS} needs it"
            continue
        between_hosts, is_composite = (
            placement[key] if placement else (hosts > 1, anywhere.is_composite and key == "data")
        )
        if not topology.shares_memory:
            value, reason = True, "a rehearsal's devices and its network are described apart"
        elif topology.has_devices and key == "tensor":
            # A composite one is ended before the next launch (`LaunchOrder.begin`). The ranks of a tile launch in one
            # order, so none waits for another.
            value, reason = True, "devices compute while bytes move"
        elif topology.has_devices and is_composite:
            value, reason = False, f"there are {what} of several families, whose operations nothing else may interrupt"
        elif topology.has_devices and key == "data" and refusal:
            value, reason = False, f"sums that start early would not be launched in one order: {refusal}"
        elif topology.has_devices:
            value, reason = True, "devices compute while bytes move, and all ranks launch collectives in one order"
        elif between_hosts:
            value, reason = True, f"there are {what} on several of {hosts} hosts: bytes are on the network meanwhile"
        elif hosts > 1:
            value, reason = False, f"no {what} on several hosts, and inside one the cores that compute move the bytes"
        else:
            value, reason = False, "all ranks compute on the cores of one host, which would move the bytes too"
        values[key], reasons[f"overlap.{key}"] = value, f"{'on' if value else 'off'}: {reason}"
    return overlap.model_copy(update=values), reasons


def resolve_switches(job: Job, topology: Topology, plan: Plan) -> tuple[Overlap, dict[str, str]]:
    """Return what a run of a plan would make of a job's overlaps, but for the number of parts. Pure."""
    if not topology.shares_memory:
        return resolve_overlap(job.overlap, topology)
    decides = len(topology.families) > 1 or not topology.has_devices
    placement = placements(topology, job, plan) if decides else None
    refusal = launch_refusal(shortened(plan)) if topology.has_devices else None
    return resolve_overlap(job.overlap, topology, placement, refusal)


def resolve_for(job: Job, plan: Plan, topology: Topology, cluster: Cluster) -> tuple[Overlap, dict[str, str]]:
    """Return what a run of a plan makes of a job's overlaps, and the reasons of those that were `auto`. Pure."""
    overlap, reasons = resolve_switches(job, topology, plan)
    overlap, why, _ = resolve_parts(job.model_copy(update={"overlap": overlap}), plan, cluster)
    return overlap, reasons | why


def predictor_for(job: Job, plan: Plan, topology: Topology, cluster: Cluster) -> tuple[Predictor, dict[str, str]]:
    """Return the predictor of a run of a plan, and the reasons for the overlaps that were `auto`. Pure.

    Where a prediction says into how many parts products are cut, it is the prediction of the run. Raises as `predict`.
    """
    overlap, reasons = resolve_switches(job, topology, plan)
    job = job.model_copy(update={"overlap": overlap})
    overlap, why, predictor = resolve_parts(job, plan, cluster)
    if predictor is None:
        predictor = Predictor(Setup.of_job(job.model_copy(update={"overlap": overlap})), plan, cluster)
    return predictor, reasons | why


def setups_by_plan(asked: Job, priced: Job, topology: Topology) -> Callable[[Plan], Setup]:
    """Return a function that makes the setup by which a search times a plan, with the overlaps of a real run.

    `asked` has overlaps that are `auto`; `priced` is the same job as plans are scored.
    """

    def setup_of(plan: Plan) -> Setup:
        return Setup.of_job(priced.model_copy(update={"overlap": resolve_switches(asked, topology, plan)[0]}))

    return setup_of


def topology_of(cluster: Cluster, is_pretended: bool) -> Topology:
    """Return the topology that a run on a cluster's devices has."""
    kinds = {name: family.kind for name, family in cluster.families.items()}
    places = tuple(place._replace(kind=kinds[place.family]) for place in places_of(cluster))
    return Topology(places, shares_memory=not is_pretended)


def resolve_parts(job: Job, plan: Plan, cluster: Cluster) -> tuple[Overlap, dict[str, str], Predictor | None]:
    """Return the overlaps with a value for `tensor_parts`, and the reason if that was `auto`. Pure.

    The rest of the job is resolved. A prediction says whether collectives take longer than products of fewer rows cost;
    its predictor is returned too.
    """
    overlap, count, predictor = job.overlap, 1, None
    if overlap.tensor_parts is not None:
        return overlap, {}, None
    if not any(tile.tensor.overlaps_parts for tile in plan.tiles):
        reason = "no tile has x or y, or c that gathers, so there is nothing to overlap"
    elif not overlap.tensor:
        reason = "overlap.tensor is off, so collectives over x, y and c are not overlapped"
    elif gathers_while_summing([tile.tensor for tile in plan.tiles]):
        reason = "positions are gathered over y while x sums, and collectives of several groups may wait for each other"
        reason += " on a device"
    else:
        try:
            predictor, reason = _predicted_parts(job, plan, cluster)
            count = predictor.setup.block_parts
        except HpctrainError as error:
            reason = f"no prediction: {error}"
    return overlap.model_copy(update={PARTS: count}), {f"overlap.{PARTS}": f"{count}: {reason}"}, predictor


def predict_best_parts(setup: Setup, plan: Plan, cluster: Cluster) -> list[Predictor]:
    """Return the predictor of a plan in its best number of parts, where the setup leaves it open; and all others that
    were compared with it, the one of whole products first."""
    tried: list[Predictor] = []

    def make(setup: Setup, like: Predictor | None) -> Predictor:
        tried.append(Predictor(setup, plan, cluster, prices=like and like.prices, like=like))
        return tried[-1]

    best, _ = predict_in_parts(setup, plan, make)
    return [best, *tried]


def _predicted_parts(job: Job, plan: Plan, cluster: Cluster) -> tuple[Predictor, str]:
    """Return the predictor in the number of parts with which a step is the fastest, and why. Raises as `predict`."""
    best, whole, *_ = predict_best_parts(Setup.of_job(job), plan, cluster)
    if best is whole:
        return best, f"with no other number a step is predicted to take {PAYS} of the time or less"
    share = best.simulated.step_seconds / whole.simulated.step_seconds
    return best, f"with it a step is predicted to take {share:.3f} of the time; it is used at {PAYS} or less"


def format_value(value: bool | int) -> str:
    """Return a value of an overlap as text for reasons."""
    return str(value) if value is not True and value is not False else "on" if value else "off"


def continued(overlap: Overlap, theirs: Overlap) -> tuple[Overlap, dict[str, str]]:
    """Return the overlaps of a run that continues another one, whose job is resolved, and whose bits it must have.

    What is `auto` gets the value of the other run; a run from before there were parts had one. The values are returned
    by key too, as text. Pure.
    """
    defaults = dict.fromkeys(EXCHANGED) | {PARTS: 1}
    result = {key: getattr(theirs, key) for key in defaults if getattr(overlap, key) is None}
    values = {key: defaults[key] if value is None else value for key, value in result.items()}
    values = {key: value for key, value in values.items() if value is not None}
    return overlap.model_copy(update=values), {f"overlap.{key}": format_value(value) for key, value in values.items()}
