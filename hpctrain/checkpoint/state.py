"""Loading the state of a run from a checkpoint of any layout, and whether a job may continue from it."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import ValidationError

from hpctrain.checkpoint.format import MODEL, OPTIMIZER, tensor_shapes
from hpctrain.checkpoint.index import Index
from hpctrain.checkpoint.source import StateSource
from hpctrain.comm.world import World
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.config.errors import CheckpointError, HpctrainError, describe_os_error
from hpctrain.config.job import Job, Model
from hpctrain.config.saved import ignore, saved_job, with_other_numbers
from hpctrain.config.tables import explain
from hpctrain.model.storage.shard import Shard
from hpctrain.plan.checks import check_tiling
from hpctrain.plan.file import parse_plan
from hpctrain.plan.holdings import check_zero
from hpctrain.plan.stored import StoredRegion
from hpctrain.plan.tiling import Plan
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.parameters import check_grid, whole_rows

# What must be the same for a resumed run to have the same numbers; model is compared key by key.
SAME_TO_RESUME = ("data.sequence_length", "train.global_batch", "train.seed", "train.optimizer")


def make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


@contextmanager
def writing(where: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Wrap code that writes a checkpoint of so many bytes. Raises CheckpointError where the disk refuses."""
    try:
        yield
    except OSError as error:
        sizes = ""
        if num_bytes is not None:
            there = next((path for path in where.parents if path.is_dir()), None)
            about = there and os.statvfs(there)
            free = f", {about.f_bavail * about.f_frsize:,} are free" if about else ""
            sizes = f" ({num_bytes:,} bytes are to be written{free})"
        raise CheckpointError(
            f"{where}: cannot be written: {describe_os_error(error)}{sizes}; earlier checkpoints are untouched,"
            " free space or choose another --run"
        ) from None


class StateTensor(NamedTuple):
    """A tensor of one kind, which holds some of the elements of a shard."""

    kind: str
    at: Interval
    """The interval in the group's flat array."""
    values: torch.Tensor
    """fp32 [at.size]."""


def tensors_of(shard: Shard) -> list[StateTensor]:
    """Return the tensors of a shard, the masters first."""
    moments = [
        StateTensor(OPTIMIZER + name, state.at, values)
        for state in shard.states
        for name, values in state.moments.items()
    ]
    return [StateTensor(MODEL, shard.updated, shard.master), *moments]


def load(world: World, checkpoint: Path, shards: list[Shard]) -> int:
    """Fill weights and moments from a checkpoint of any layout; return its step. All ranks must call.

    Every byte is checked before it is used. Raises CheckpointError on all ranks.
    """
    with world.all_or_none(), Index(checkpoint) as index:
        for shard in shards:
            _load_weights(index, shard)
            for tensor in tensors_of(shard)[1:]:
                for region in shard.group.regions(tensor.at):
                    read_region(index, tensor.kind, region, tensor.values[tensor.at.place_of(region.at)])
        return index.step


def load_weights(world: World, checkpoint: Path, model: Model, shards: list[Shard]) -> None:
    """Fill weights from a checkpoint of any layout, to start from them. All ranks must call.

    Raises CheckpointError on all ranks, also where the checkpoint is of another model.
    """
    with world.all_or_none(), Index(checkpoint) as index:
        theirs, ours = read_job(index).model, model
        for key in (key for key in Model.model_fields if key not in ("preset", "init_std")):
            if getattr(theirs, key) != getattr(ours, key):
                raise CheckpointError(
                    f"{checkpoint}: is of another model: model.{key} is {getattr(theirs, key)} there and"
                    f" {getattr(ours, key)} in the job, which starts from it (train.start_from); set it to the same"
                )
        for shard in shards:
            _load_weights(index, shard)


def _load_weights(index: Index, shard: Shard) -> None:
    """Fill weights and masters of a shard; elements that both hold in fp32 are read once."""
    for region in shard.group.regions(shard.group.stored):
        weights, both = shard.group.weights_at(region.at), region.at.intersect(shard.updated)
        read_region(index, MODEL, region, weights)
        if both.size and weights.dtype == torch.float32:
            shard.master[shard.updated.place_of(both)].copy_(weights[region.at.place_of(both)])
    if shard.group.weights.dtype != torch.float32:
        for region in shard.group.regions(shard.updated):
            read_region(index, MODEL, region, shard.master[shard.updated.place_of(region.at)])


def read_region(source: StateSource, kind: str, region: StoredRegion, target: torch.Tensor) -> None:
    """Fill flat `target` with a stored region, taken from the whole parameter; padding is zero."""
    values = host_values(target)
    read_values(source, kind, region, values)
    if values is not target:
        target.copy_(values)


def host_values(target: torch.Tensor) -> torch.Tensor:
    """Return host memory for the fp32 values of a tensor: itself, where it is such memory."""
    is_direct = target.dtype == torch.float32 and target.device.type == "cpu"
    return target if is_direct else torch.empty(target.numel())


def read_values(source: StateSource, kind: str, region: StoredRegion, values: torch.Tensor) -> None:
    """Read a stored region into flat fp32 host memory; padding is zero."""
    parts = list(whole_rows(region.parameter, region.box, region.elements))
    if sum(taken.size for _, _, taken in parts) < region.at.size:
        values.detach().zero_()
    for rows, columns, taken in parts:
        out = values.detach()[slice(*taken.shift(-region.elements.start))].numpy()
        source.read(kind, region.parameter.name, rows, (columns.start, columns.stop), out)


def read_job(index: Index, say: Callable[[str], None] = ignore) -> Job:
    """Return the job that wrote a checkpoint, without keys that no longer exist; these are reported by `say`.

    Raises CheckpointError if this version does not know such jobs.
    """
    try:
        tree = json.loads(index.about["job"])
        if not isinstance(tree, dict):
            raise ValueError("it is no table")
        return Job.model_validate(saved_job(tree, Job, str(index.path), CheckpointError, say))
    except ValidationError as error:
        raise CheckpointError(
            f"{index.path}: was written by another version of hpctrain: its job says {explain(error, Job)[0][1]}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index.path}: its job is not valid JSON: {error}") from None


def read_plan(index: Index, job: Job, say: Callable[[str], None] = ignore) -> Plan:
    """Return the plan that wrote a checkpoint of a job, without keys that no longer exist; these are reported by `say`.

    Raises CheckpointError where the plan does not fit the job's model.
    """
    try:
        plan = parse_plan(index.about["plan"], f"{index.path}: plan", say)
        check_tiling(plan, job.model.num_items)
        for tile in plan.tiles:
            check_grid(job.model, tile.tensor)
        check_zero(plan, f"{index.path}: plan")
    except HpctrainError as error:
        raise CheckpointError(f"{index.path}: its plan cannot be used: {error}") from None
    return plan


def check_contents(index: Index) -> None:
    """Refuse a checkpoint whose tensors are not those of its own job and plan. Raises CheckpointError."""
    job = read_job(index)
    read_plan(index, job)
    _read_cluster(index)
    wanted, there = tensor_shapes(job), {tensor.name: tensor.shape for tensor in index.manifest.tensors}
    if not any(name.startswith(OPTIMIZER) for name in there):  # weights alone
        wanted = {name: shape for name, shape in wanted.items() if not name.startswith(OPTIMIZER)}
    if odd := sorted(there.keys() ^ wanted.keys()):
        what = "has no" if odd[0] in wanted else "has a"
        raise CheckpointError(f"{index.path}: {what} {odd[0]}, other than its job says")
    for name, shape in wanted.items():
        if there[name] != shape:
            raise CheckpointError(f"{index.path}: {name} has shape {list(there[name])}, and its job says {list(shape)}")


def _read_cluster(index: Index) -> Cluster | None:
    text = index.about["cluster"]
    try:
        return parse_cluster(text, f"{index.path}: cluster").without_environment() if text else None
    except HpctrainError as error:
        raise CheckpointError(f"{index.path}: its cluster cannot be used: {error}") from None


def check_same_run(
    checkpoint: Path, job: Job, data_identity: str, say: Callable[[str], None] = ignore
) -> tuple[Job, Plan, Cluster | None, str]:
    """Refuse a checkpoint that this job cannot continue from.

    Return the job and the plan that wrote it, the cluster whose links chose its algorithms, where it was a run's, and
    why a file asked for that plan, if one did.

    `say` reports keys of that job which no longer exist. Raises CheckpointError that names the first key that differs,
    with both values.
    """
    with Index(checkpoint) as index:
        their_job = read_job(index, say)
        if gone := with_other_numbers(json.loads(index.about["job"])):
            raise CheckpointError(
                f"{checkpoint}: was trained with {gone}, which is gone, so that other numbers would follow; inspect,"
                " evaluate or export it, or start a new run from its weights (train.start_from)"
            )
        plan, their_data, cluster = read_plan(index, their_job, say), index.about["data"], _read_cluster(index)
        asked = index.about["asked_plan"]
    theirs = json.loads(their_job.model_dump_json())
    ours = json.loads(job.model_dump_json())
    if plan.microbatches * plan.rows != their_job.train.global_batch:
        raise CheckpointError(
            f"{checkpoint}: its plan has {plan.microbatches} microbatches of {plan.rows} rows, and its job a global"
            f" batch of {their_job.train.global_batch}; use an older checkpoint"
        )
    for key in [f"model.{k}" for k in ours["model"] if k != "preset"] + list(SAME_TO_RESUME):
        section, name = key.split(".")
        if theirs[section].get(name) != ours[section][name]:
            what = "is of another model" if section == "model" else "cannot be continued by this job"
            raise CheckpointError(
                f"{checkpoint}: {what}: {key} is {theirs[section].get(name)} there and {ours[section][name]} in the"
                " job; set it to the same, or start a new run with another --run"
            )
    if their_data != data_identity:
        raise CheckpointError(
            f"{checkpoint}: was trained on other data ({their_data}, where the job's are {data_identity}); set"
            " data.tokens and data.validation_fraction as they were, or start a new run with another --run"
        )
    return their_job, plan, cluster, asked
