"""Describes how the groups of a plan communicate: a route that is slower than it could be is said at the start."""

from collections.abc import Iterable
from typing import cast

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.world import World
from hpctrain.engine.layout import Layout


def describe_routes(world: World, layout: Layout) -> str:
    """Return the routes of groups and messages with their reasons, on rank 0; empty for a single rank.

    All ranks must call.
    """
    every_axis = {name: [getattr(layout.axes, name)] for name in "xyz"} | {"data": layout.groups}
    own = {
        name: [(group.route, group.reason) for group in cast(list[Communicator], axes) if group.size > 1]
        for name, axes in every_axis.items()
    }
    own["messages"] = [(channel.route, channel.reason) for channel in layout.channels.values()]
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
