"""Saving and loading the state of a run: weights, moments and position, exactly, from any layout into any other."""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from pydantic import ValidationError

from hpctrain.checkpoint.format import (
    KINDS,
    PARTIAL,
    Index,
    Part,
    PartRegion,
    commit,
    part_name,
    step_folder,
    write_index,
    write_part,
)
from hpctrain.comm.world import World
from hpctrain.config.cluster import Cluster
from hpctrain.config.cluster_file import parse_cluster
from hpctrain.config.errors import CheckpointError, describe_os_error
from hpctrain.config.job import Job, Model
from hpctrain.config.tables import explain
from hpctrain.model.groups import StoredRegion
from hpctrain.model.shard import Shard
from hpctrain.plan.file import dump_plan, parse_plan
from hpctrain.plan.tiling import Plan
from hpctrain.sharding.parameters import all_parameters, whole_rows

# What must be the same for a resumed run to go on with the same numbers; model is compared key by key.
SAME_TO_RESUME = ("data.sequence_length", "train.global_batch", "train.seed")


def save(world: World, folder: Path, step: int, shards: list[Shard], job: Job, plan: Plan, about: dict) -> Path:
    """Write the checkpoint after `step` steps under `folder`/checkpoints; return its path. All ranks must call.

    Every rank writes what it owns; `about` (strings) is kept with it. Raises CheckpointError on all ranks if one
    cannot write; what was there before stays, and the unfinished folder is removed.
    """
    final = folder / "checkpoints" / step_folder(step)
    partial = final.with_name(final.name + PARTIAL)
    part = None
    try:
        with world.all_or_none():
            if world.rank == 0:
                attempt(partial, lambda: make_empty(partial))
        with world.all_or_none():
            part = attempt(partial, lambda: _write_own(partial / part_name(world.rank), shards))
        parts = world.gather_objects(part)
        with world.all_or_none():
            if world.rank == 0:
                described = {"step": step, "job": job.model_dump_json(), "plan": dump_plan(plan), **about}
                shapes = {name: p.shape for name, p in all_parameters(job.model).items()}
                attempt(partial, lambda: write_index(partial / "index.h5", shapes, parts, described))
                attempt(partial, lambda: commit(partial, final, job.checkpoint.keep))
    except CheckpointError:
        if world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def attempt(where: Path, work):
    try:
        return work()
    except OSError as error:
        raise CheckpointError(
            f"{where}: cannot be written: {describe_os_error(error)}; earlier checkpoints are untouched,"
            " free space or choose another --run"
        ) from None


def _write_own(path: Path, shards: list[Shard]) -> Part:
    arrays: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in KINDS}
    runs = []
    for shard in shards:
        for region in shard.group.regions(shard.owned):
            if not region.counts:
                continue
            for rows, columns, taken in whole_rows(region.parameter, region.box, region.elements):
                name = region.parameter.name
                dataset = f"{name}/{rows.start}-{columns.start}"
                at = taken.shift(region.at.start - region.elements.start)
                for kind, tensor in _tensors(shard).items():
                    arrays[kind][dataset] = shard.of(tensor, at).cpu().numpy()
                runs.append(PartRegion(name, (rows.start, rows.stop), (columns.start, columns.stop), dataset))
    return write_part(path, arrays, runs)


def _tensors(shard: Shard) -> dict[str, torch.Tensor]:
    return dict(zip(KINDS, (shard.master, shard.moments["exp_avg"], shard.moments["exp_avg_sq"]), strict=True))


def load(world: World, checkpoint: Path, shards: list[Shard]) -> int:
    """Fill weights and moments from a checkpoint of any layout; return its step. All ranks must call.

    The parts are verified first, each by one rank. Raises CheckpointError on all ranks.
    """
    with world.all_or_none(), Index(checkpoint) as index:
        index.verify(slice(world.rank, None, world.size))
        for shard in shards:
            for region in shard.group.regions(shard.group.stored):
                shard.group.weights_at(region.at).copy_(read_region(index, "model", region))
            for kind, tensor in _tensors(shard).items():
                for region in shard.group.regions(shard.updated):
                    shard.of(tensor, region.at).copy_(read_region(index, kind, region))
        return int(index.about["step"])


def load_weights(world: World, checkpoint: Path, model: Model, shards: list[Shard]) -> None:
    """Fill weights from a checkpoint of any layout, to start from them. All ranks must call.

    Raises CheckpointError on all ranks, also where it is of another model.
    """
    with world.all_or_none(), Index(checkpoint) as index:
        theirs, ours = read_job(index).model, model
        for key in (key for key in Model.model_fields if key not in ("preset", "init_std")):
            if getattr(theirs, key) != getattr(ours, key):
                raise CheckpointError(
                    f"{checkpoint}: is of another model: model.{key} is {getattr(theirs, key)} there and"
                    f" {getattr(ours, key)} in the job, which starts from it (train.start_from); set it to the same"
                )
        index.verify(slice(world.rank, None, world.size))
        for shard in shards:
            for region in shard.group.regions(shard.group.stored):
                shard.group.weights_at(region.at).copy_(read_region(index, "model", region))
            for region in shard.group.regions(shard.updated):
                shard.of(shard.master, region.at).copy_(read_region(index, "model", region))


def read_region(index: Index, kind: str, region: StoredRegion) -> torch.Tensor:
    """Return the elements of a piece, fp32, from the whole parameter; padding is zero."""
    values = torch.zeros(region.at.size)
    for rows, columns, taken in whole_rows(region.parameter, region.box, region.elements):
        result = index.read(kind, region.parameter.name, rows, (columns.start, columns.stop))
        values[slice(*taken.shift(-region.elements.start))] = torch.from_numpy(result)
    return values


def read_job(index: Index) -> Job:
    """Return the job that a checkpoint is of. Raises CheckpointError if this version does not know such jobs."""
    try:
        return Job.model_validate(json.loads(index.about["job"]))
    except ValidationError as error:
        raise CheckpointError(
            f"{index.path}: was written by another version of hpctrain: its job says {explain(error, Job)[0][1]}"
        ) from None


def check_same_run(checkpoint: Path, job: Job, data_identity: str) -> tuple[Job, Plan, Cluster | None]:
    """Refuse a checkpoint that this job cannot continue from.

    Return the job and the plan that wrote it, and the cluster whose links chose its algorithms, where it was a run's.

    Raises CheckpointError that names the first key that differs, with both values.
    """
    with Index(checkpoint) as index:
        their_job, plan = read_job(index), parse_plan(index.about["plan"], f"{checkpoint}: plan")
        their_data, cluster = index.about["data"], index.about.get("cluster")
    theirs = json.loads(their_job.model_dump_json())
    ours = json.loads(job.model_dump_json())
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
    return their_job, plan, parse_cluster(cluster, f"{checkpoint}: cluster") if cluster else None
