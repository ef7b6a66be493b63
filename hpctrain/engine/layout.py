"""A plan made real for one rank: its tile, its communicators, its store of weights.

Communicators are made in one plan-wide order (axes, then holders by unit, then channels by pair), each by its own ranks
only, so that nobody waits for somebody who waits for him, and 4,096 ranks make no more than they use.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hpctrain.comm.channel import Channel
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.world import World
from hpctrain.job import Job
from hpctrain.model.axes import Axes
from hpctrain.model.stage import Stage
from hpctrain.model.store import Store
from hpctrain.parameters import UnitLayout, holders, units
from hpctrain.plan import Plan, Tile
from hpctrain.schedule import channel_depth
from hpctrain.transfers import Transfer, receives, sends


@dataclass(frozen=True)
class Transfers:
    """This rank's messages for each microbatch."""

    receive_activation: list[Transfer]
    send_activation: list[Transfer]
    receive_gradient: list[Transfer]
    send_gradient: list[Transfer]


@dataclass(frozen=True)
class Layout:
    """What one rank has of a plan. Made by `make_layout`."""

    plan: Plan
    rank: int
    tile: Tile
    everyone: Communicator
    axes: Axes
    groups: list[Communicator]
    """For each group of the store the ranks that hold the same pieces."""
    stage: Stage
    transfers: Transfers
    channels: dict[int, Channel]
    """By the rank at the other end."""
    dtype: torch.dtype

    @property
    def store(self) -> Store:
        return self.stage.store

    @property
    def coordinate(self) -> tuple[int, int, int]:
        return self.tile.coordinate(self.rank)


def group_units(job: Job, plan: Plan, rank: int) -> list[tuple[tuple[int, ...], list[UnitLayout]]]:
    """Return this rank's units by the ranks that hold the same pieces, in the plan-wide order. Pure."""
    tile = plan.tile_of(rank)
    x, y, _ = tile.coordinate(rank)
    found: dict[tuple[int, ...], list[UnitLayout]] = {}
    for unit in units(job.model, tile.tensor):
        if any(tile.holds(item) for item in unit.items):
            found.setdefault(holders(unit, job.model, plan, rank), []).append(unit.layout(tile.tensor, x, y))
    return list(found.items())


def make_layout(world: World, job: Job, plan: Plan, dtype: torch.dtype, device: torch.device) -> Layout:
    """Make this rank's part of a plan. All ranks of the plan must call."""
    rank, tile = world.rank, plan.tile_of(world.rank)
    hidden, length = job.model.hidden_size, job.data.sequence_length
    everyone = world.group(plan.ranks, "everyone")
    axes = Axes(*(world.group(tile.axis_ranks(axis, rank), axis) for axis in "xyz"))
    grouped = group_units(job, plan, rank)
    groups = [world.group(ranks, "data") for ranks, _ in grouped]
    transfers = Transfers(
        receive_activation=receives(plan, rank, hidden, forward=True),
        send_activation=sends(plan, rank, hidden, forward=True),
        receive_gradient=receives(plan, rank, hidden, forward=False),
        send_gradient=sends(plan, rank, hidden, forward=False),
    )
    channels = _make_channels(world, plan, rank, transfers, length * torch.empty((), dtype=dtype).element_size())
    store = Store([(made, layouts) for made, (_, layouts) in zip(groups, grouped, strict=True)], axes, dtype, device)
    stage = Stage(job.model, tile, axes, store)
    return Layout(plan, rank, tile, everyone, axes, groups, stage, transfers, channels, dtype)


def _make_channels(world: World, plan: Plan, rank: int, transfers: Transfers, row_feature_bytes: int):
    """Make a channel to every rank that this one exchanges activations or gradients with."""
    largest: dict[int, int] = {}
    depth: dict[int, int] = {}
    other_end: dict[str, Callable[[Transfer], int]] = {"receive": lambda t: t.sender, "send": lambda t: t.receiver}
    for name, pieces in vars(transfers).items():
        for piece in pieces:
            peer = other_end[name.split("_")[0]](piece)
            num_bytes = piece.rows.size * piece.features.size * row_feature_bytes
            largest[peer] = max(largest.get(peer, 0), num_bytes)
            depth[peer] = channel_depth(plan, plan.tile_of(rank), plan.tile_of(peer))
    pairs = sorted(largest, key=lambda peer: (min(rank, peer), max(rank, peer)))
    return {peer: world.channel(peer, largest[peer], depth[peer]) for peer in pairs}
