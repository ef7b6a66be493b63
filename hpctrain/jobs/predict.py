"""`hpctrain predict`: how long a step of a plan would take on a cluster. Needs neither ranks nor torch."""

from collections.abc import Sequence

import click
from rich.table import Table

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.job import Job
from hpctrain.engine.start.facts import MachineDescription
from hpctrain.engine.start.resolve_overlap import predictor_for, resolve_overlap, topology_of
from hpctrain.jobs.arguments import PATH, cluster_option, complete_job, json_option, override_option, print_result
from hpctrain.jobs.common import check_runs, load_job_for
from hpctrain.jobs.predict_other import predict_other
from hpctrain.observe.text_tables import table, text_of
from hpctrain.plan.file import load_plan
from hpctrain.plan.tiling import Plan
from hpctrain.plan.uniform import check_families
from hpctrain.planner.choose import memory_warnings, with_dtypes
from hpctrain.planner.prediction.forecast import LEAST_SHARE, Forecast
from hpctrain.planner.prediction.predictor import Prediction, Predictor
from hpctrain.planner.prices.network import ClusterNetwork


@click.command("predict")
@click.argument("job", required=False, shell_complete=complete_job)
@override_option
@cluster_option()
@click.option("--plan", "plan_file", type=PATH, help="A plan file.")
@click.option(
    "--from",
    "launch_line",
    type=(click.Choice(["megatron", "torchtitan"]), str),
    metavar="SOFTWARE LINE",
    help="In place of JOB and --plan: `megatron` and its flags in quotes, a script or a model_config.yaml; or"
    " `torchtitan` and its configuration.",
)
@json_option
def command(job, overrides, cluster, plan_file, launch_line, as_json):
    """Predict a training step of JOB by a plan on a cluster: seconds by part, memory by stage.

    \b
    hpctrain plan search mixed --cluster v100-t4 --out plan.toml
    hpctrain predict mixed --cluster v100-t4 --plan plan.toml
    hpctrain predict --cluster a100-80-40 --from megatron '--num-layers 8 --hidden-size 1024 --bf16
        --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 --tensor-model-parallel-size 8'
    hpctrain predict --cluster cluster.toml --from megatron pretrain.sh
    hpctrain predict --cluster cluster.toml --from torchtitan llama3_8b.toml

    Figures that were measured count more than those of data sheets; what was assumed is listed. Keys of `[overlap]`
    that are `auto` have the values of a run there. With --from, better flags and the best plan of hpctrain follow.
    """
    if launch_line and (job or plan_file or overrides):
        raise click.UsageError("--from is in place of JOB, --plan and --set: leave these out")
    if launch_line:
        software, line = launch_line
        predict_other(software, line, cluster, as_json)
        return
    if not job or not plan_file:
        raise click.UsageError("give JOB and --plan, or --from SOFTWARE LINE")
    loaded, described = load_job_for(job, overrides, cluster)
    plan, machine = load_plan(plan_file), described.cluster
    check_runs(loaded, plan, str(plan_file))
    used = sorted({machine.devices[rank].family for rank in plan.ranks if rank < machine.num_devices})
    loaded, reason = with_dtypes(loaded, machine, used, cluster)
    ClusterNetwork(machine).check_ranks(len(plan.ranks))
    check_families(loaded, plan, [device.family for device in machine.devices], str(plan_file))
    predictor, resolved = predictor_of_run(loaded, described, plan)
    setup = predictor.setup
    summary = prediction_data(Forecast.of(predictor).prediction, setup.dtype) | {
        "resolved": resolved,
        "warnings": memory_warnings(setup, machine),
    }
    if reason:
        summary["assumed_inputs"].append(reason)
    print_result(summary, format_prediction(summary, plan, machine), as_json)


def with_kernels(job: Job, described: MachineDescription) -> tuple[Job, dict[str, str]]:
    """Return the job with the kernels that ranks would find on a cluster, and the reasons by key."""
    if described.is_rehearsed:
        return job, {}
    kernels, reasons = job.kernels.assumed(described.cluster), {}
    if kernels.fused and job.kernels.fused is None:
        reasons["kernels.fused"] = "on: devices compile kernels, which a run tries at its start"
    return job.model_copy(update={"kernels": kernels}), reasons


def with_overlap(job: Job, described: MachineDescription) -> tuple[Job, dict[str, str]]:
    """Return the job as plans are scored, with values for what of its overlaps and kernels is `auto`, and the reasons
    by key. What cuts rows stays as it is."""
    job, resolved = with_kernels(job, described)
    overlap, reasons = resolve_overlap(job.overlap, topology_of(described.cluster, described.is_rehearsed))
    return job.model_copy(update={"overlap": overlap}), resolved | reasons


def predictor_of_run(job: Job, described: MachineDescription, plan: Plan) -> tuple[Predictor, dict[str, str]]:
    """Return the predictor of a run by a plan on a cluster, and the reasons for what of the job was `auto`, by key."""
    job, resolved = with_kernels(job, described)
    topology = topology_of(described.cluster, described.is_rehearsed)
    predictor, reasons = predictor_for(job, plan, topology, described.cluster)
    return predictor, resolved | reasons


def prediction_data(prediction: Prediction, dtype: str) -> dict:
    """Return a prediction as plain data, for JSON."""
    stages = []
    for stage in prediction.memory:
        tile, memory = stage.tile, stage.memory
        items = [list(each) for each in stage.items]
        where = {"items": items if len(items) > 1 else items[0], "rows": list(tile.rows), "family": tile.family}
        available = {"total": memory.total, "available": stage.available_bytes, "fits": stage.fits}
        stages.append(where | vars(memory) | available)
    return {
        "step_seconds": prediction.step_seconds,
        "interval_seconds": list(prediction.interval_seconds),
        "breakdown_seconds": prediction.breakdown_seconds,
        "waterfall_seconds": dict(prediction.waterfall_seconds),
        "memory_bytes": stages,
        "host_shortage": prediction.host_shortage,
        "fits": prediction.fits,
        "tokens_per_second": prediction.tokens_per_second,
        "mfu": prediction.mfu,
        "dtype": dtype,
        "assumed_inputs": list(prediction.assumed_inputs),
        "profiled": list(prediction.profiled),
    }


def profile_source(families: Sequence[str]) -> str:
    """Say what of a prediction is from a profile of the job; nothing where nothing is."""
    return f"compute seconds of {', '.join(families)}: profile of this job" if families else ""


def _waterfall_table(summary: dict) -> Table:
    """Return the parts of a step in seconds and as shares of it."""
    rows = table("part", "s", "of the step", numbers={"s", "of the step"})
    step = summary["step_seconds"]
    for part, seconds in summary["waterfall_seconds"].items():
        if abs(seconds) >= LEAST_SHARE * step:
            rows.add_row(part, f"{seconds:.4g}", f"{seconds / step:.1%}")
    rows.add_row("step", f"{step:.4g}", "")
    return rows


def _memory_table(stages: Sequence[dict]) -> Table:
    """Return what a rank of each stage holds, in MiB; columns are left out that no stage has."""
    parts = ("weights", "gradients", "moments", "activations", "gathered", "buffers", "on_host")
    held = [part for part in parts if any(stage[part] for stage in stages)]
    columns = ["total", "of", *(part.replace("_", " ") for part in held)]
    rows = table("items", "family", "", *columns, numbers=columns)
    for stage in stages:
        figures = (stage[key] / 2**20 for key in ("total", "available", *held))
        verdict = "fits" if stage["fits"] else "DOES NOT FIT"
        rows.add_row(f"{stage['items']}", stage["family"], verdict, *(f"{figure:,.0f}" for figure in figures))
    return rows


def format_prediction(summary: dict, plan: Plan, cluster: Cluster) -> str:
    """Return a prediction as text for people."""
    low, high = summary["interval_seconds"]
    lines = [
        f"{plan.describe()}, on {cluster.describe()}, in {summary['dtype']}",
        f"step      {summary['step_seconds']:.4g} s, between {low:.4g} and {high:.4g}",
        f"speed     {summary['tokens_per_second']:,.0f} tokens/s, {summary['mfu']:.1%} of peak (MFU)",
        *([f"source    {source}"] if (source := profile_source(summary["profiled"])) else []),
        "where the time goes: each cause has the seconds that the step would be shorter without it",
        text_of(_waterfall_table(summary)),
        "memory of a rank, MiB",
        text_of(_memory_table(summary["memory_bytes"])),
    ]
    lines += [f"  DOES NOT FIT on a host: {summary['host_shortage']}"] if summary["host_shortage"] else []
    for name in sorted({stage["family"] for stage in summary["memory_bytes"]} & set(cluster.families)):
        family = cluster.families[name]
        if family.reserve_bytes:
            reserved, total = family.reserve_bytes / 2**20, family.memory_bytes / 2**20
            lines.append(f"  reserved on {name}: {reserved:,.0f} of {total:,.0f} ({family.reserve_reason})")
    lines += [f"resolved  {key}: {reason}" for key, reason in summary["resolved"].items()]
    lines += [f"warning   {warning}" for warning in summary["warnings"]]
    lines += ["assumed", *(f"  {name}" for name in summary["assumed_inputs"] or ["nothing"])]
    return "\n".join(lines)
