"""What communicates while ranks compute, where the job leaves it open: a value and a reason each."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpctrain.comm.topology import Topology, places_of
from hpctrain.config.cluster import Cluster
from hpctrain.config.errors import HpctrainError
from hpctrain.config.job import Job
from hpctrain.config.parallelism import Overlap
from hpctrain.plan.holders import rank_shards_of
from hpctrain.plan.tiling import Plan
from hpctrain.planner.cost import Setup
from hpctrain.planner.predictor import predict

if TYPE_CHECKING:
    from hpctrain.comm.world import World

EXCHANGED = {"tensor": "groups of x or y", "data": "holders of the same weights", "z": "groups of z"}
"""By switch, who exchanges what it hides."""
PAYS = 0.99
"""Of a step without, one with `forward` must be predicted to take less than this: predictions are not exact."""


def crossings(world: "World", job: Job, plan: Plan) -> dict[str, bool]:
    """Return of each switch whether any group of the plan whose communication it hides is on several hosts.

    All ranks must call: each looks at its own groups.
    """
    topology = world.topology
    if len({place.host for place in topology.places}) == 1:
        return dict.fromkeys(EXCHANGED, False)
    own = crossings_of(topology, job, plan, world.rank)
    return {key: bool(world.largest(value)) for key, value in own.items()}


def crossings_of(topology: Topology, job: Job, plan: Plan, rank: int) -> dict[str, bool]:
    """Return the same of the groups of one rank. Pure."""
    groups = hidden_groups(job, plan, rank)
    return {key: any(len(topology.domains(ranks, "host")) > 1 for ranks in groups[key]) for key in EXCHANGED}


def hidden_groups(job: Job, plan: Plan, rank: int) -> dict[str, list[tuple[int, ...]]]:
    """Return of each switch the groups of a rank whose communication it hides. Pure."""
    tile = plan.tile_of(rank)
    x, y, z = (tuple(tile.axis_ranks(axis, rank)) for axis in "xyz")
    shard_groups = rank_shards_of(job.model, plan, rank, job.overlap.bucket_bytes).shard_groups
    return {"tensor": [x, y], "data": [shard_group.ranks for shard_group in shard_groups], "z": [z]}


def resolve_overlap(
    overlap: Overlap, topology: Topology, crosses: Mapping[str, bool] | None = None
) -> tuple[Overlap, dict[str, str]]:
    """Return the switches, but for `forward`, with values for those that are `auto`, and the reasons of these. Pure.

    It pays where bytes move by something else than the cores that compute. Among CPU ranks of one host there is no such
    thing: they exchange through its memory, and overlapped messages take cores from the product. `crosses`
    says by switch whether it is between hosts that something is exchanged; None: as soon as there are several.
    """
    hosts = len({place.host for place in topology.places})
    values, reasons = {}, {}
    for key, what in EXCHANGED.items():
        if getattr(overlap, key) is not None:
            continue
        if key == "tensor" and overlap.forward:
            values[key], reasons["overlap.tensor"] = True, "on: overlap.forward needs it"
            continue
        between_hosts = hosts > 1 if crosses is None else crosses[key]
        if not topology.shares_memory:
            value, reason = True, "a rehearsal's devices and its network are described apart"
        elif topology.has_devices and key == "tensor":
            value, reason = True, "devices compute while bytes move"
        elif topology.has_devices:
            several = "collectives of several groups that are in flight together may wait for each other on a device"
            value, reason = False, several
        elif between_hosts:
            value, reason = True, f"there are {what} on several of {hosts} hosts: bytes are on the network meanwhile"
        elif hosts > 1:
            value, reason = False, f"no {what} on several hosts, and inside one the cores that compute move the bytes"
        else:
            value, reason = False, "all ranks compute on the cores of one host, which would move the bytes too"
        values[key], reasons[f"overlap.{key}"] = value, f"{'on' if value else 'off'}: {reason}"
    return overlap.model_copy(update=values), reasons


def resolve_on(
    job: Job, cluster: Cluster, is_pretended: bool, plan: Plan | None = None
) -> tuple[Overlap, dict[str, str]]:
    """Return what a run on a cluster's devices would make of a job's overlaps, for a prediction. Pure.

    Without a plan `forward` stays as it is, and groups count as being on several hosts where there are several.
    """
    kinds = {name: family.kind for name, family in cluster.families.items()}
    places = tuple(place._replace(kind=kinds[place.family]) for place in places_of(cluster))
    topology, crosses = Topology(places, shares_memory=not is_pretended), None
    if plan is not None and topology.shares_memory and not topology.has_devices:
        result = [crossings_of(topology, job, plan, tile.ranks[0]) for tile in plan.tiles]
        crosses = {key: any(of_rank[key] for of_rank in result) for key in EXCHANGED}
    overlap, reasons = resolve_overlap(job.overlap, topology, crosses)
    if plan is None:
        return overlap, reasons
    overlap, why = resolve_forward(job.model_copy(update={"overlap": overlap}), plan, topology, cluster)
    return overlap, reasons | why


def resolve_forward(job: Job, plan: Plan, topology: Topology, cluster: Cluster) -> tuple[Overlap, dict[str, str]]:
    """Return the overlaps with a value for `forward`, and its reason if it was `auto`: what a prediction says. Pure.

    The rest of the job is resolved. It pays where sums take longer than products of fewer rows cost.
    """
    if job.overlap.forward is not None:
        return job.overlap, {}
    value, reason = False, ""
    if not any(tile.tensor.cuts_weights for tile in plan.tiles):
        reason = "no tile has x or y, so there is nothing to sum"
    elif not job.overlap.tensor:
        reason = "sums over x and y are not overlapped"
    elif topology.has_devices and topology.shares_memory and any(tile.tensor.x > 1 for tile in plan.tiles):
        reason = (
            "norms are summed over x meanwhile, and collectives of several groups may wait for each other on a device"
        )
    else:
        try:
            setups = [Setup.of_job(switched(job, {"forward": each})) for each in (False, True)]
            off, on = (predict(setup, plan, cluster).step_seconds for setup in setups)
            value = on < off * PAYS
            reason = f"a step is predicted to take {on / off:.3f} of the time with it, and {PAYS} pays"
        except HpctrainError as error:
            reason = f"no prediction: {error}"
    summary = {"overlap.forward": f"{'on' if value else 'off'}: {reason}"}
    return job.overlap.model_copy(update={"forward": value}), summary


def switched(job: Job, switches: Mapping[str, bool]) -> Job:
    """Return the job with other overlaps."""
    return job.model_copy(update={"overlap": job.overlap.model_copy(update=switches)})


def continued(overlap: Overlap, theirs: Overlap) -> tuple[Overlap, dict[str, str]]:
    """Return the overlaps of a run that continues another one, whose job is resolved, and whose bits it must have.

    What is `auto` becomes theirs, given with its value by key; theirs may be from before there was `forward`. Pure.
    """
    result = {key: getattr(theirs, key) for key in (*EXCHANGED, "forward") if getattr(overlap, key) is None}
    values = {key: bool(value) for key, value in result.items() if value is not None or key == "forward"}
    return overlap.model_copy(update=values), {f"overlap.{k}": "on" if value else "off" for k, value in values.items()}
