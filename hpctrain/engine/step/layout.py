"""A plan made real for one rank: its tiles, its communicators, its store of weights."""

from dataclasses import dataclass

import torch

from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.accelerators.compiling import Compiled
from hpctrain.comm.bind import DTYPES
from hpctrain.comm.groups.channel import Channel
from hpctrain.comm.groups.group import Group
from hpctrain.comm.groups.offline_world import OfflineWorld
from hpctrain.comm.progress.instruments import UNTRACED, Tracer
from hpctrain.comm.world import World
from hpctrain.config.job import Job
from hpctrain.config.kernels import KernelChoice
from hpctrain.engine.step.expert_load import ExpertLoad
from hpctrain.model.operators.running import Kernels, run_eagerly
from hpctrain.model.parallel.axes import ONE_RANK, Axes, Axis
from hpctrain.model.stage import Stage
from hpctrain.model.storage.store import Store
from hpctrain.model.transformer import LayerContext
from hpctrain.plan.holdings import Holding
from hpctrain.plan.role import Transfers, role_of
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.plan.transfers import RowShape, everywhere
from hpctrain.sharding.grid import AXES
from hpctrain.sharding.items import layers


@dataclass(frozen=True)
class Layout:
    """The part of a plan that one rank has. Made by `make_layout`."""

    plan: Plan
    rank: int
    tiles: tuple[Tile, ...]
    """Tiles of this rank in the order of items, on one tensor grid; several in an interleaved pipeline."""
    everyone: Group
    axes: Axes
    holding: Holding
    groups: list[Axis]
    """Groups of ranks, one for each shard group."""
    store: Store
    """Weights of all tiles."""
    stages: tuple[Stage, ...]
    """Stages, one for each tile."""
    expert_load: ExpertLoad
    transfers: tuple[Transfers, ...]
    """Transfers of activations, for each tile."""
    channels: dict[tuple[int, int], Channel]
    """Channels by peer rank and the first item of the tile that follows."""
    dtype: torch.dtype
    """Dtype in which this rank computes."""
    wires: dict[int, torch.dtype]
    """Dtype of exchanged activations and their gradients, by peer rank."""
    row: RowShape
    """The size of activations between tiles."""
    accelerator: Accelerator
    tracer: Tracer
    reduces_early: bool
    """Whether gradients are summed over their holders during the backward pass of the last micro-batch."""


def make_kernels(choice: KernelChoice, family: str) -> Kernels:
    """Return the kernels of a rank of a family. They are not fused where the choice is still open."""
    run = Compiled() if choice.fused_of(family) else run_eagerly
    return Kernels(run, choice.attention_of(family), choice.logits_bytes)


def make_layout(world: World | OfflineWorld, job: Job, plan: Plan, accelerator: Accelerator) -> Layout:
    """Make this rank's part of a plan. All ranks of the plan must call. The job is resolved.

    Communicators are created in the order in which the role lists them, so that no ranks wait for each other. Each is
    created by its own ranks only, so that 4,096 ranks create no more than they use.
    """
    overlap = job.overlap
    near = world.is_near if job.comm.gather_messages else everywhere
    role = role_of(job.model, job.data.sequence_length, plan, world.rank, overlap.bucket_bytes, near)
    everyone = world.group(plan.ranks, "everyone", on_host=True)

    def group(ranks: tuple[int, ...], name: str, overlapped: bool | None) -> Axis:
        return ONE_RANK if len(ranks) == 1 else world.group(ranks, name, overlapped=bool(overlapped))

    along = {name: group(ranks, name, getattr(overlap, AXES[name].overlap)) for name, ranks in role.axes.items()}
    grid = role.tiles[0].tensor
    axes = Axes(
        **along,
        sequence_parallel=grid.sequence_parallel,
        exchanges_heads=grid.exchanges_heads,
        position_shares=grid.position_shares,
    )
    shard_groups = role.holding.shard_groups
    sets = dict.fromkeys(shard_group.ranks for shard_group in shard_groups)
    made = {ranks: group(ranks, "data", overlap.data) for ranks in sets}
    groups = [made[shard_group.ranks] for shard_group in shard_groups]
    own = role.tiles[0].family
    dtype = DTYPES[job.dtype_of(own)]
    wires = {need.peer: DTYPES[job.wire_dtype(own, plan.tile_of(need.peer).family)] for need in role.channels}
    channels = {
        (need.peer, need.item): world.channel(
            need.peer, need.elements * wires[need.peer].itemsize, need.depth, f"before item {need.item}"
        )
        for need in role.channels
    }
    kept = [i for tile in role.tiles for layer in layers(tile.items)[: overlap.keep_gathered] for i in range(*layer)]
    used = [{job.dtype_of(plan.tile_of(rank).family) for rank in group.ranks} for group in shard_groups]
    exchanged = [None if len(dtypes) == 1 else torch.float32 for dtypes in used]
    store = Store(groups, role.holding, axes, dtype, accelerator.device, kept, exchanged)
    dtypes = {operator: DTYPES[name] for operator, name in job.precision.overrides.items()}
    kernels = make_kernels(job.kernels, accelerator.family)
    context = LayerContext(job.model, axes, store, kernels, overlap.tensor_parts or 1, dtypes)
    tracer = None if world.tracer is UNTRACED else world.tracer
    stages = tuple(Stage(tile, context, tracer) for tile in role.tiles)
    return Layout(
        plan,
        world.rank,
        role.tiles,
        everyone,
        axes,
        role.holding,
        groups,
        store,
        stages,
        ExpertLoad(job.model, stages, accelerator.device, job.train),
        role.transfers,
        channels,
        dtype,
        wires,
        RowShape(job.data.sequence_length, job.model.hidden_size),
        accelerator,
        world.tracer,
        bool(overlap.data),
    )
