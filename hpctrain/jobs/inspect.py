"""`hpctrain inspect`: show what a file or folder of hpctrain is and what is in it."""

import json
import math
import time
from pathlib import Path

import click

from hpctrain.config.errors import CheckpointError, JobError
from hpctrain.config.paths import exists, is_file, is_folder
from hpctrain.jobs.arguments import json_option, print_result


@click.command("inspect")
@click.argument("path", metavar="PATH")
@click.option("--verify", is_flag=True, help="Read everything and check it against its checksums.")
@click.option("--parameters", is_flag=True, help="List every parameter of a checkpoint with its shape and norm.")
@json_option
def command(path, verify, parameters, as_json):
    """Show what is in PATH: a run folder, a checkpoint, a plan, job or cluster file (.toml), or a token file.

    \b
    hpctrain inspect runs/tiny-20261123-150052
    hpctrain inspect v100-t4

    The name of a ready-made job, a preset or a ready cluster will do, too.
    """
    path = _locate(path)
    if is_checkpoint(path):
        summary = _checkpoint(path, verify, parameters)
    elif is_folder(path):
        summary = _run(path, verify, parameters)
    elif not exists(path):
        summary = _job(path.name)
    elif path.suffix == ".toml":
        summary = _described(path)
    else:
        summary = _tokens(path, verify)
    width, lines = max(map(len, summary)), []
    for key, value in summary.items():
        first, *more = str(value).splitlines() or [""]
        lines += [f"{key:{width}}  {first}", *(f"{'':{width}}  {line}" for line in more)]
    print_result(summary, "\n".join(lines), as_json)


def is_checkpoint(path: Path) -> bool:
    """Say whether a path is a checkpoint, maybe a damaged one."""
    from hpctrain.checkpoint.format import INDEX, MANIFEST, STEP_FOLDER

    return path.is_dir() and bool(
        (path / MANIFEST).is_file() or (path / INDEX).is_file() or STEP_FOLDER.fullmatch(path.resolve().name)
    )


def _locate(reference: str) -> Path:
    """Return the path of a file or folder, or of the ready-made job or cluster of that name; of a preset, which has no
    file, its name. Raises JobError."""
    from hpctrain.architectures.registry import presets
    from hpctrain.config.clusters.cluster_file import ready_clusters
    from hpctrain.config.job import ready_jobs
    from hpctrain.config.tables import did_you_mean, shorten

    ready = {name: Path(name) for name in presets()} | ready_jobs() | ready_clusters()
    path = Path(reference)
    if exists(path) or reference in ready:
        return path if exists(path) else ready[reference]
    raise JobError(
        f"{shorten(reference)}: no such file or folder, nor a ready job, preset or cluster"
        f"{did_you_mean(reference, ready)}"
    )


def _run(path: Path, verify: bool, parameters: bool) -> dict:
    from hpctrain.checkpoint.folder import complete_checkpoints, latest_checkpoint
    from hpctrain.config.saved import RESOLVED
    from hpctrain.observe.folder.run_folder import read_metrics
    from hpctrain.observe.folder.schema import DRIFT, read_saved
    from hpctrain.observe.prediction_check import format_comparison

    metrics = read_metrics(path)
    ending = _ending(path)
    if not metrics and not ending and not is_file(path / RESOLVED):
        raise JobError(f"{path}: neither a run folder nor a checkpoint (no resolved.toml, no manifest.json)")
    summary = {"run": str(path), "logged_steps": len(metrics)}
    if metrics:
        summary |= {"last_step": metrics[-1]["step"], "loss": metrics[-1].get("loss")}  # None: it had no targets
        if validated := [m for m in metrics if "validation_loss" in m]:
            summary["validation_loss"] = validated[-1]["validation_loss"]

    try:
        if compared := read_saved(path, DRIFT):
            summary["prediction"] = format_comparison(compared)
    except JobError as error:  # the run itself can be shown all the same
        summary["prediction"] = f"cannot be shown: {error}"
    summary |= ending
    if verify:
        _verify_all(complete_checkpoints(path))
    checkpoint = latest_checkpoint(path)
    return summary | (_checkpoint(checkpoint, verify, parameters) if checkpoint else {"checkpoint": None})


def _verify_all(checkpoints: list[Path]) -> None:
    """Check all checkpoints of a run. Raises CheckpointError that says which are damaged, and which are intact."""
    from hpctrain.checkpoint.resume import verify_checkpoint

    damages, intact = [], []
    for path in checkpoints:
        try:
            verify_checkpoint(path)
            intact.append(path.name)
        except CheckpointError as error:
            damages.append(str(error))
    if damages:
        raise CheckpointError("\n".join([*damages, f"intact: {', '.join(intact) or 'none'}"]))


def _ending(path: Path) -> dict:
    """Return the end of a run according to its flight records; empty if it ended in order."""
    from hpctrain.comm.watchdog.diagnosis import post_mortem
    from hpctrain.comm.watchdog.flight import FOLDER

    result = post_mortem(path / FOLDER, time.time())
    if result is None:
        return {}
    state, diagnosis = result
    return {"state": state, "cause": "\n".join(diagnosis.sentences), "last_operations": "\n".join(diagnosis.table)}


def _checkpoint(path: Path, verify: bool, parameters: bool) -> dict:
    from hpctrain.checkpoint.index import Index
    from hpctrain.checkpoint.resume import verify_checkpoint
    from hpctrain.checkpoint.state import read_job
    from hpctrain.config.saved import say_on_stderr

    if verify:
        verify_checkpoint(path)
    with Index(path) as index:
        job = read_job(index, say_on_stderr)
        manifest, names = index.manifest, index.names()
        summary = {
            "checkpoint": str(path),
            "step": index.step,
            "model": ", ".join(f"{k} {v}" for k, v in job.model.model_dump(mode="json", exclude_none=True).items()),
            "parameters": sum(math.prod(index.shape(name)) for name in names),
            "bytes": manifest.num_bytes,
            "parts": len(manifest.parts),
            "plan": index.about["plan"],
        }
        if verify:
            summary["verified"] = "all files match their checksums"
        if parameters:
            import numpy as np

            for name in names:
                values = index.whole("model", name)
                if np.isnan(values).any():
                    raise CheckpointError(f"{path}: {name} has elements that are not a number")
                summary[name] = f"{list(values.shape)}  norm {np.linalg.norm(values.astype(np.float64)):.6g}"
    return summary


def _described(path: Path) -> dict:
    from hpctrain.config.tables import parse_toml_once, read_text
    from hpctrain.plan.checks import check_tiling
    from hpctrain.plan.file import load_plan

    tree, _ = parse_toml_once(read_text(path, JobError), str(path), JobError)
    if not tree:
        raise JobError(f"{path}: has nothing in it; docs/cluster-file.md and docs/job.md say what files have")
    if {"families", "fabrics", "nodes"} & set(tree):
        return _cluster(path)
    if "tile" in tree:
        plan = load_plan(path)
        check_tiling(plan, max(tile.items.stop for tile in plan.tiles))
        return {"plan": plan.describe(), "ranks": len(plan.ranks), "tiles": len(plan.tiles)}
    return _job(str(path))


def _job(reference: str) -> dict:
    from hpctrain.config.job import load_job
    from hpctrain.config.tables import flatten
    from hpctrain.sharding.parameters import count_parameters

    job = load_job(reference)
    sections = job.model_dump(mode="json", exclude_none=True, exclude={"name"})
    summary = {"job": job.name}
    for name, section in sections.items():
        pairs = ((key, value) for key, value in flatten(section) if not isinstance(value, dict))
        summary[name] = "\n".join(f"{key} = {json.dumps(value)}" for key, value in pairs)
    if job.model.vocab_size:
        summary["parameters"] = f"{count_parameters(job.model):,}"
    return summary


def _cluster(path: Path) -> dict:
    from hpctrain.config.clusters.cluster import assumed_figures
    from hpctrain.config.clusters.cluster_defaults import describe_sources
    from hpctrain.config.clusters.cluster_file import read_cluster_file
    from hpctrain.config.clusters.links import slowest_links

    cluster, _, sources = read_cluster_file(path)
    summary = {"cluster": cluster.describe(), "devices": cluster.num_devices, "nodes": cluster.num_nodes}
    for where, link in slowest_links(cluster).items():
        summary[f"slowest_link_{where}"] = (
            f"{link.latency_seconds * 1e6:.4g} us, {link.message_bytes_per_second / 1e9:.4g} GB/s"
            + ", one for each two devices" * link.fully_connected
        )
    for number, line in enumerate(describe_sources(sources), 1):
        summary[f"filled_{number}"] = line
    if warnings := cluster.without_effect:
        summary["warning"] = "\n".join(warnings)
    return summary | {"assumed_inputs": ", ".join(assumed_figures(cluster)) or "nothing"}


def _tokens(path: Path, verify: bool) -> dict:
    from hpctrain.data.tokens import open_tokens

    source = open_tokens(path)
    summary = {
        "tokens": source.num_tokens,
        "documents": len(source.documents),
        "vocab_size": source.vocab_size,
        "tokenizer": type(source.tokenizer).__name__ if source.tokenizer else None,
        "unigram_entropy": source.unigram_entropy(),
    }
    if verify:
        source.verify()
        summary["verified"] = "all blocks match their checksums"
    return summary
