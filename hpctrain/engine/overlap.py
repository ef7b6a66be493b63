"""What communicates while ranks compute, where the job leaves it open: a value and a reason each."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpctrain.comm.topology import Topology
from hpctrain.holders import holdings_of
from hpctrain.job import Job, Overlap
from hpctrain.plan import Plan

if TYPE_CHECKING:
    from hpctrain.comm.world import World

EXCHANGED = {"tensor": "groups of x or y", "data": "holders of the same weights", "z": "groups of z"}
"""By switch, who exchanges what it hides."""


def crossings(world: "World", job: Job, plan: Plan) -> dict[str, bool]:
    """Return of each switch whether any group of the plan whose communication it hides is on several hosts.

    All ranks must call: each looks at its own groups.
    """
    topology = world.topology
    if len({place.host for place in topology.places}) == 1:
        return dict.fromkeys(EXCHANGED, False)
    return {
        key: world.largest(max((len(topology.domains(ranks, "host")) for ranks in groups), default=1)) > 1
        for key, groups in hidden_groups(job, plan, world.rank).items()
    }


def hidden_groups(job: Job, plan: Plan, rank: int) -> dict[str, list[tuple[int, ...]]]:
    """Return of each switch the groups of a rank whose communication it hides. Pure."""
    tile = plan.tile_of(rank)
    x, y, z = (tuple(tile.axis_ranks(axis, rank)) for axis in "xyz")
    holdings = holdings_of(job.model, plan, rank, job.overlap.bucket_bytes).holdings
    return {"tensor": [x, y], "data": [holding.ranks for holding in holdings], "z": [z]}


def resolve_overlap(
    overlap: Overlap, topology: Topology, crosses: Mapping[str, bool] | None = None
) -> tuple[Overlap, dict[str, str]]:
    """Return the switches with values for those that are `auto`, and the reasons of these by key. Pure.

    It pays where bytes move by something else than the cores that compute. Among CPU ranks of one host there is no such
    thing: they exchange through its memory, and what is moved beside a product is taken from the product. `crosses`
    says by switch whether it is between hosts that something is exchanged; None: as soon as there are several.
    """
    hosts = len({place.host for place in topology.places})
    values, reasons = {}, {}
    for key, what in EXCHANGED.items():
        if getattr(overlap, key) is not None:
            continue
        between_hosts = hosts > 1 if crosses is None else crosses[key]
        if not topology.shares_memory:
            value, reason = True, "a rehearsal's devices and its network are described apart"
        elif topology.has_devices and key == "tensor":
            value, reason = True, "devices compute while bytes move"
        elif topology.has_devices:
            several = "collectives of several groups that are under way together may wait for each other on a device"
            value, reason = False, several
        elif between_hosts:
            value, reason = True, f"there are {what} on several of {hosts} hosts: bytes are on the network meanwhile"
        elif hosts > 1:
            value, reason = False, f"no {what} on several hosts, and inside one the cores that compute move the bytes"
        else:
            value, reason = False, "all ranks compute on the cores of one host, which would move the bytes too"
        values[key], reasons[f"overlap.{key}"] = value, f"{'on' if value else 'off'}: {reason}"
    return overlap.model_copy(update=values), reasons
