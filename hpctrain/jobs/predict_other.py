"""Predicts a run of other software by its own launch line, for `hpctrain predict --from`."""

from hpctrain.config.errors import PlanError
from hpctrain.jobs.arguments import print_result
from hpctrain.jobs.common import load_described
from hpctrain.observe.text_tables import table, text_of
from hpctrain.planner.prediction.predictor import Prediction
from hpctrain.software.advice import Advice, better_flags, own_engine
from hpctrain.software.launched import LaunchedRun
from hpctrain.software.megatron_flags import read_flags, run_of
from hpctrain.software.torchtitan import read_config, titan_run

SEARCH_SECONDS = 20.0
"""Limit of the search for a plan of our own engine."""
LEAST_NAMED = 0.02
"""The least share of a step of a part that is named."""


def predict_other(software: str, text: str, cluster: str, as_json: bool) -> None:
    """Print whether a launch line of other software fits, how fast it is, what bounds it, and what would be faster.

    Raises JobError for what cannot be predicted, and PlanError where the layout does not go with the model.
    """
    machine = load_described(cluster).cluster
    own: LaunchedRun
    own = run_of(read_flags(text), machine) if software == "megatron" else titan_run(read_config(text), machine)
    prediction = own.run.predict(own.software)
    other = better_flags(own, prediction)
    try:
        ours, why_not = own_engine(own.run, SEARCH_SECONDS), ""
    except PlanError as error:
        ours, why_not = None, str(error)
    rows = {own.software.name: Advice("as given", prediction)}
    rows |= {"better flags": other} if other else {}
    rows |= {"our engine": ours} if ours else {}
    assumed = [*own.assumed, *prediction.assumed_inputs]
    summary = {name: {"flags": each.flags} | _figures(each.prediction) for name, each in rows.items()}
    print_result(summary | {"assumed_inputs": assumed}, _text(own, rows, machine.describe(), why_not, assumed), as_json)


def _figures(prediction: Prediction) -> dict:
    return {
        "step_seconds": prediction.step_seconds,
        "interval_seconds": list(prediction.interval_seconds),
        "tokens_per_second": prediction.tokens_per_second,
        "mfu": prediction.mfu,
        "fits": prediction.fits,
        "memory_bytes": max(stage.memory.total for stage in prediction.memory),
        "breakdown_seconds": prediction.breakdown_seconds,
    }


def _text(own: LaunchedRun, rows: dict[str, Advice], machine: str, why_not: str, assumed: list[str]) -> str:
    run, given = own.run, rows[own.software.name].prediction
    stage = max(given.memory, key=lambda stage: stage.memory.total / stage.available_bytes)
    needed, available = stage.memory.total / 2**30, stage.available_bytes / 2**30
    low, high = given.interval_seconds
    # Only what is exposed bounds a step; waits that are for no message are the bubble.
    parts = {name: min(given.breakdown_seconds[name], s) for name, s in given.exposed_seconds.items()}
    parts["bubble"] = given.step_seconds - sum(parts.values())
    largest = sorted(parts.items(), key=lambda part: -part[1])
    shares = [f"{name} {s / given.step_seconds:.0%}" for name, s in largest if s > LEAST_NAMED * given.step_seconds]
    lines = [
        f"tensor {run.tensor} x pipeline {run.pipeline} x context {run.context} x data {run.data}, on {machine}",
        f"memory    {'fits' if given.fits else 'DOES NOT FIT'}: {needed:.1f} of {available:.1f} GiB",
        f"step      {given.step_seconds:.4g} s, between {low:.4g} and {high:.4g}",
        f"bound by  {', '.join(shares)}",
    ]
    columns = ("step, s", "tokens/s", "MFU", "")
    result = table("", *columns, "flags or plan", numbers=set(columns))
    for name, each in rows.items():
        made = each.prediction
        gain = f"{given.step_seconds / made.step_seconds:.2f}x"
        result.add_row(
            name, f"{made.step_seconds:.4g}", f"{made.tokens_per_second:,.0f}", f"{made.mfu:.1%}", gain, each.flags
        )
    lines.append(text_of(result))
    lines += [] if "better flags" in rows else ["no other flags are predicted to be faster by 2 %"]
    lines += [f"our engine: {why_not}"] if why_not else []
    return "\n".join([*lines, "assumed", *(f"  {each}" for each in assumed or ["nothing"])])
