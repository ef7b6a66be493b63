"""The routes of a plan's messages and groups: which are safe between families of devices, and which were taken."""

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

from hpctrain.comm.accelerators.kinds import Ability
from hpctrain.comm.bind import bind_accelerator
from hpctrain.comm.groups.group import Group
from hpctrain.comm.transports.abilities import bridged, message_route
from hpctrain.comm.transports.cuda_aware import DIRECT_VARIABLE, asked_direct
from hpctrain.comm.world import World
from hpctrain.config.errors import PlanError
from hpctrain.config.job import Job
from hpctrain.engine.step.layout import Layout
from hpctrain.plan.launch_order import Bridge, check_messages
from hpctrain.plan.tiling import Plan
from hpctrain.sharding.grid import AXES

UNPROVEN = "MPI on device memory beside a library is not proven to be safe by this plan"
NOBODY_WAITS = "no rank waits in an operation of a library for one that waits in such a message"


def choose_bridge(world: World, job: Job, plan: Plan) -> dict[str, str]:
    """Have groups that are made from now on use MPI on device memory between families where that is proven for a plan,
    or forced; return the reason by what it is of.

    `job` has values for its overlaps. All ranks must call.
    """
    if not (world.topology.has_devices and world.topology.shares_memory):
        return {}
    bind_accelerator(world)
    devices = world.settings.devices
    assert devices is not None, "there are devices, and they are bound"
    known = devices.families
    direct = bridged(list(dict.fromkeys(world.topology.places[rank].family for rank in plan.ranks)), known)
    if not direct:
        return {}
    refusal = proof = ""
    if asked_direct() is None:
        launching = frozenset(name for name, family in known.items() if family.native.works)
        bridge = Bridge(direct, launching, job.model.description.tied_head)
        refusal = world.on_first_rank(lambda: message_refusal(plan, bridge, job))
        proof = "" if refusal else f": {NOBODY_WAITS}"
        devices = replace(devices, bridge=Ability(not refusal, UNPROVEN if refusal else "proven for this plan"))
        world.configure(devices=devices)
    names = sorted(direct)
    route, why = message_route(known[names[0]], known[names[1]], devices.bridge)
    return {"messages between families": f"{route} ({' and '.join(names)}): {refusal or why + proof}"}


def message_refusal(plan: Plan, bridge: Bridge, job: Job) -> str:
    """Return why messages of device memory are not safe by a plan; nothing where they are. Pure."""
    try:
        check_messages(plan, bridge, bool(job.overlap.data), bool(job.overlap.z))
    except PlanError as error:
        return (
            "MPI on device memory may wait for the devices while a library waits on them for other ranks (where each"
            f" message is as late as it may be, {error}); {DIRECT_VARIABLE}=1 forces it"
        )
    return ""


def describe_routes(world: World, layout: Layout) -> str:
    """Return the routes of groups and messages with their reasons, on rank 0; empty for a single rank.

    All ranks must call.
    """
    every_axis = {name: [getattr(layout.axes, name)] for name in AXES} | {"data": layout.groups}
    own = {
        name: [(group.route_name, group.reason) for group in cast(list[Group], groups) if group.size > 1]
        for name, groups in every_axis.items()
    }
    own["messages"] = [(channel.route_name, channel.reason) for channel in layout.channels.values()]
    every = world.gather_objects(own)
    names: dict[str, list[str]] = {}
    for name in own:
        if text := _describe(pair for of_rank in every for pair in of_rank[name]):
            names.setdefault(text, []).append(name)
    return "; ".join(f"{', '.join(of_text)}: {text}" for text, of_text in names.items())


def _describe(pairs: Iterable[tuple[str, str]]) -> str:
    """Return each route once, with the reason of the first group that has it."""
    reasons: dict[str, list[str]] = {}
    for route, reason in dict.fromkeys(pairs):
        reasons.setdefault(route, []).append(reason)
    return " and ".join(
        f"{route} ({of_route[0]}{f', {len(of_route) - 1} others alike' if len(of_route) > 1 else ''})"
        for route, of_route in reasons.items()
    )
