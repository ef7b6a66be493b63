"""Says whether two states of the code do the same: training, predictions, plans, launch orders and messages of errors.

    cd OLD && PYTHONPATH=$PWD python NEW/benchmarks/unchanged.py record before    # NEW is the folder of the new state
    cd NEW && python -m benchmarks.unchanged record after --cases before/cases.json
    python -m benchmarks.unchanged compare before after --checkout OLD

Everything goes through the commands that a user types, so that the house behind them may be rebuilt. Losses and norms
are compared by their bits, bytes and counts of messages by operation, predictions to 1e-9. A search may choose another
plan: then the old state prices it, and may find it half a percent slower. Both records must be of one machine: another
processor has other products.
"""

import json
import os
import random
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click

from benchmarks import commands
from benchmarks.commands import ONE_THREAD, command_line
from tests.warm_start import SERVER_VARIABLE, client_command, serving

TIMEOUT_SECONDS = 300
STEPS = 6
PREDICTION_TOLERANCE = 1e-9
JOB = """\
[model]
architecture = "{architecture}"
num_layers = 4
hidden_size = 48
num_heads = 12
{kv_heads}vocab_size = 300
max_positions = 16
[data]
tokens = "tokens.h5"
sequence_length = 16
validation_fraction = 0.1
[train]
steps = 6
global_batch = 48
learning_rate = 3e-3
warmup_steps = 2
validation_sequences = 8
"""
GROUPED_HEADS = ("llama", "qwen3", "gemma2")
ARCHITECTURES = ("gpt2", *GROUPED_HEADS)
NODES = """\
[families.a100]
model = "A100-40"
[families.v100]
model = "V100-32"
[fabrics.ib]
network = "HDR"
[[nodes]]
count = {half}
devices = {{a100 = 4}}
nics = [{{fabric = "ib", count = 1}}]
[[nodes]]
count = {half}
devices = {{v100 = 4}}
nics = [{{fabric = "ib", count = 1}}]
"""
SMALL_CLUSTER = """\
[families.cpu]
kind = "cuda"
memory_bytes = 40_000_000_000
memory_bytes_per_second = 1.5e12
sustained_flops_per_second = {{fp32 = 15e12, bf16 = 200e12}}
[fabrics.ib]
network = "HDR"
[[nodes]]
count = {ranks}
devices = {{cpu = 1}}
nics = [{{fabric = "ib", count = 1}}]
"""
"""Devices that are called as the ranks of a plan are."""
SEARCHED_DEVICES = (64, 256, 1024, 4096)
MAX_RATIO = 1.005
"""Of the step that the old state predicts for the plan that the new one chose, to that of its own choice."""
SEARCH_BUDGET = 2_000
"""So that it is the number of plans that ends a search, not the time."""
TILINGS = 24
"""Of the cases; all others describe their plan by keys."""
FEW, MOST_REHEARSED_RANKS = 3, 2
"""Every how many cases of few ranks are rehearsed: more ranks on few cores take minutes each."""
LEFT = {"activations": "none", "all": "optimizer"}
"""What `plan.offload` cannot be any more, and what it is in the cases."""
TIMES = ("wall_seconds", "first_plan_seconds")
"""What a search says that differs from start to start."""
SEARCHED_JOB = ("mixed", "--set", "train.global_batch=2048")


def drawn_cases(seed: int, count: int) -> list[dict]:
    """Return random jobs by keys: ranks and settings. Some of them are refused: the message is recorded."""
    draw, cases = random.Random(seed), []
    while len(cases) < count:
        ranks = draw.choice([1, 2, 2, 3, 4, 4, 4, 4, 6, 8])
        sizes = dict.fromkeys(("tensor.x", "tensor.y", "tensor.z", "pipeline", "data"), 1)
        left = ranks
        while left > 1:
            factor = next(prime for prime in (2, 3) if left % prime == 0)
            sizes[draw.choice(sorted(sizes))] *= factor
            left //= factor
        settings = {f"plan.{name}": size for name, size in sizes.items()}
        settings["plan.microbatch"] = sizes["tensor.z"] * draw.choice([1, 1, 2])
        settings["plan.zero"] = draw.choice([0, 1, 1, 2, 3])
        settings["plan.recompute"] = draw.choice(["none", "none", "selective", "full"])
        offload = draw.choice(["none", "none", "optimizer", "activations", "all"])
        settings["plan.offload"] = LEFT.get(offload, offload)
        settings["plan.sequence_parallel"] = sizes["tensor.y"] > 1 and draw.random() < 0.5
        if sizes["pipeline"] > 1:
            settings["plan.schedule"] = draw.choice(["1f1b", "zb-h1"])
            settings["plan.virtual_stages"] = draw.choice([1, 1, 2])
        settings["train.dtype"] = draw.choice(["fp32", "fp32", "bf16"])
        settings["train.clip_norm"] = draw.choice([1.0, 0.1])
        for key in ("tensor", "data", "z"):
            settings[f"overlap.{key}"] = draw.random() < 0.5
        cases.append({"ranks": ranks, "architecture": draw.choice(ARCHITECTURES), "settings": settings})
    return cases + drawn_tilings(seed)


def drawn_tilings(seed: int) -> list[dict]:
    """Return plans of tiles of unlike tensor grids, as the tests draw them, of two to six ranks.

    ZeRO 2 and 3 of unlike tensor grids are gone, and are 1 here.
    """
    from hypothesis import given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st

    from hpctrain.config.job import load_job
    from hpctrain.plan.file import dump_plan
    from tests.tilings import share_items_by_different_grids, tilings

    cases: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="hpctrain-unchanged-") as name:
        jobs_in(Path(name))
        models = {each: load_job(str(Path(name) / f"{each}.toml")).model for each in ARCHITECTURES}

    @seeded(seed)
    @settings(max_examples=TILINGS, deadline=None, database=None)
    @given(st.data())
    def draw(data) -> None:
        ranks, architecture = data.draw(st.integers(2, 6)), data.draw(st.sampled_from(ARCHITECTURES))
        plan = data.draw(tilings(models[architecture], ranks, 6, 2, exchanging=True))
        most_zero = 1 if share_items_by_different_grids(plan) else 3
        plan = replace(
            plan,
            tiles=tuple(
                replace(tile, offload=LEFT.get(tile.offload, tile.offload), zero=min(tile.zero, most_zero))
                for tile in plan.tiles
            ),
        )
        keys = {"train.global_batch": 12, "train.dtype": data.draw(st.sampled_from(["fp32", "bf16"]))}
        cases.append({"ranks": ranks, "architecture": architecture, "settings": keys, "plan": dump_plan(plan)})

    draw()
    return cases


def run(folder: Path, *words: str, ranks: int = 0) -> subprocess.CompletedProcess:
    """Run hpctrain as a process forked from the server of `record`, which has imported everything."""
    launcher = [str(commands.BIN / "mpirun"), "-n", str(ranks)] if ranks else []
    command = [*launcher, *client_command(Path(os.environ[SERVER_VARIABLE])), *words]
    return commands.run(command, folder, TIMEOUT_SECONDS, **ONE_THREAD, XDG_CACHE_HOME=str(folder / "cache"))


def last_lines(ended: subprocess.CompletedProcess, folder: Path) -> str:
    """Return what a command that failed said, without what differs from start to start."""
    text = (ended.stderr.strip() or ended.stdout.strip()).replace(str(folder), "FOLDER")
    return re.sub(r"\d+\.\d+ s\b", "N s", text)


def jobs_in(folder: Path) -> None:
    (folder / "text").write_text("".join(f"The number {i} times {i + 3} is {i * (i + 3)}.\n" for i in range(900)))
    ended = run(folder, "prepare", "text", "--tokenizer", "byte", "--out", "tokens.h5")
    assert not ended.returncode, ended.stderr
    for name in ARCHITECTURES:
        heads = "num_kv_heads = 6\n" if name in GROUPED_HEADS else ""
        (folder / f"{name}.toml").write_text(JOB.format(architecture=name, kv_heads=heads))


def set_options(case: dict, folder: Path) -> Iterator[str]:
    """List the options of a case, whose plan is written to the folder where it has one."""
    for key, value in case["settings"].items():
        yield from ("--set", f"{key}={json.dumps(value)}")
    if "plan" in case:
        (folder / "given.toml").write_text(case["plan"])
        yield from ("--set", 'plan.file="given.toml"')


def trained(cases: Sequence[dict], tell: Callable[[str], None]) -> dict:
    """Return losses and norms as hexadecimal numbers, and each operation's calls and bytes, by case."""
    records = {}
    with tempfile.TemporaryDirectory(prefix="hpctrain-unchanged-") as name:
        folder = Path(name)
        jobs_in(folder)
        for number, case in enumerate(cases):
            run_folder = folder / f"run{number}"
            words = ["train", f"{case['architecture']}.toml", "--run", run_folder.name, "--sample", "0"]
            ended = run(folder, *words, *set_options(case, folder), ranks=case["ranks"])
            if ended.returncode:
                records[str(number)] = {"code": ended.returncode, "text": last_lines(ended, folder)}
            else:
                records[str(number)] = record_of(run_folder)
            tell(f"{number + 1}/{len(cases)} exit code {ended.returncode}: {case}")
    return records


def record_of(run_folder: Path) -> dict:
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "grad_norm" in line]
    validations = [line for line in lines if "validation_loss" in line]
    assert len(steps) == STEPS, f"{len(steps)} steps in {run_folder}"
    traffic = json.loads((run_folder / "traffic.json").read_text())
    return {
        "losses": [line["loss"].hex() for line in steps],
        "norms": [line["grad_norm"].hex() for line in steps],
        "validations": [line["validation_loss"].hex() for line in validations],
        "plan": (run_folder / "plan.toml").read_text(),
        "operations": sorted(json.dumps(group, sort_keys=True) for group in traffic["groups"]),
    }


def predicted(cases: Sequence[dict], tell: Callable[[str], None]) -> dict:
    """Return for each plan what `predict` says of it, and whether its launches fit together, by the proof's words."""
    from hpctrain.config.errors import HpctrainError
    from hpctrain.config.job import load_job
    from hpctrain.plan.file import dump_plan, load_plan
    from hpctrain.plan.launch_order import check_launch_order
    from hpctrain.plan.uniform import resolve_plan

    records = {}
    with tempfile.TemporaryDirectory(prefix="hpctrain-unchanged-") as name:
        folder = Path(name)
        jobs_in(folder)
        for number, case in enumerate(cases):
            options = list(set_options(case, folder))
            job, record = f"{case['architecture']}.toml", {}
            (folder / "cluster.toml").write_text(SMALL_CLUSTER.format(ranks=case["ranks"]))
            try:
                if "plan" in case:
                    plan = load_plan(folder / "given.toml")
                else:
                    plan = resolve_plan(load_job(str(folder / job), options[1::2]), case["ranks"]).plan
                (folder / "plan.toml").write_text(dump_plan(plan))
                keys = [f"--set={option}" for option in options[1::2] if not option.startswith("plan.")]
                files = ["--cluster", "cluster.toml", "--plan", "plan.toml"]
                ended = run(folder, "predict", job, *files, *keys, "--json")
                record["predicted"] = last_lines(ended, folder) if ended.returncode else json.loads(ended.stdout)
                check_launch_order(plan)
            except HpctrainError as error:
                record["refused"] = str(error).replace(name, "FOLDER")
            records[str(number)] = record
            tell(f"predicted {number + 1}/{len(cases)}")
    return records


def rehearsed(cases: Sequence[dict], tell: Callable[[str], None]) -> dict:
    """Return the peak bytes of ranks in rehearsals of some plans, which are counted exactly."""
    records = {}
    with tempfile.TemporaryDirectory(prefix="hpctrain-unchanged-") as name:
        folder = Path(name)
        jobs_in(folder)
        small = [(number, case) for number, case in enumerate(cases) if case["ranks"] <= MOST_REHEARSED_RANKS]
        for number, case in small[::FEW]:
            (folder / "cluster.toml").write_text(SMALL_CLUSTER.format(ranks=case["ranks"]))
            run_folder = folder / f"run{number}"
            words = ["train", f"{case['architecture']}.toml", "--rehearse", "cluster.toml", "--run", run_folder.name]
            ended = run(folder, *words, *set_options(case, folder), "--stop-after", "3", ranks=case["ranks"])
            if ended.returncode:
                records[str(number)] = last_lines(ended, folder)
            else:
                memory = json.loads((run_folder / "drift.json").read_text())["memory"]
                records[str(number)] = sorted(json.dumps(each, sort_keys=True) for each in memory)
            tell(f"rehearsed {number}: exit code {ended.returncode}")
    return records


def searched(cases: Sequence[dict], tell: Callable[[str], None]) -> dict:
    """Return the plan and the predictions of a search on each ready cluster, and on large ones."""
    from hpctrain.config.clusters.cluster_file import ready_clusters

    records = {}
    with tempfile.TemporaryDirectory(prefix="hpctrain-unchanged-") as name:
        folder = Path(name)
        large_clusters_in(folder)
        for cluster in [*ready_clusters(), *(f"{devices}.toml" for devices in SEARCHED_DEVICES)]:
            words = ["plan", "search", *SEARCHED_JOB, "--cluster", cluster, "--json", "--budget", str(SEARCH_BUDGET)]
            ended = run(folder, *words, "--set", "search.seconds=600")
            records[cluster] = (
                last_lines(ended, folder)
                if ended.returncode
                else untimed(json.loads(ended.stdout.replace(name, "FOLDER")))
            )
            tell(f"searched {cluster}: exit code {ended.returncode}")
    return records


def large_clusters_in(folder: Path) -> None:
    for devices in SEARCHED_DEVICES:
        (folder / f"{devices}.toml").write_text(NODES.format(half=devices // 8))


def untimed(found: dict) -> dict:
    """Return what a search found, without how long it took."""
    plan = re.sub("(?m)^# searched .*\n", "", found["plan"])
    return {key: value for key, value in found.items() if key not in TIMES} | {"plan": plan}


def refused(cases: Sequence[dict], tell: Callable[[str], None]) -> dict:
    """Return what commands say of bad input: one case of nine of those of `benchmarks.mutations`."""
    from benchmarks import mutations
    from benchmarks.sandbox import warm_up

    warm_up()
    with tempfile.TemporaryDirectory(prefix="hpctrain-unchanged-") as name:
        template = Path(name) / "template"
        mutations.build(template)
        chosen = mutations.all_cases(5, 1.0, template)[::9]
        results = mutations.run_cases_in(Path(name) / "case", template, chosen, tell)
    texts = {}
    for case, verdict, ended in results:
        if verdict == mutations.GOOD[0]:
            texts[str(case)] = re.sub(r"\d+\.\d+ s\b", "N s", ended.err.replace(name, "FOLDER"))
    return texts


SECTIONS: dict[str, Callable[[Sequence[dict], Callable[[str], None]], dict]] = {
    "predicted": predicted,
    "rehearsed": rehearsed,
    "searched": searched,
    "refused": refused,
    "trained": trained,
}


def differences(before: object, after: object, place: str = "") -> Iterator[str]:
    """List the places where two records differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before | after:
            yield from differences(before.get(key), after.get(key), f"{place}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{place}/{i}")
    elif isinstance(before, float) and isinstance(after, float):
        if abs(before - after) > PREDICTION_TOLERANCE * max(abs(before), abs(after)):
            yield f"{place}: {before!r}, then {after!r}"
    elif place.endswith("/plan") and before and after:
        if tiles_of(str(before)) != tiles_of(str(after)):
            yield f"{place}: {str(before)[:300]!r}, then {str(after)[:300]!r}"
    elif before != after:
        yield f"{place}: {str(before)[:300]!r}, then {str(after)[:300]!r}"


def tiles_of(plan: str) -> dict:
    """Return a plan file as data, without the number of its schema and axes of one rank, which came later."""
    data = tomllib.loads(plan)
    data.pop("schema", None)
    for tile in data["tile"]:
        tile["tensor"] = {axis: size for axis, size in tile["tensor"].items() if size > 1}
    return data


def choices_priced(before: dict, after: dict, checkout: Path) -> Iterator[tuple[str, float, str]]:
    """Yield each cluster for which another plan was chosen, and how the old state prices it, to its own choice."""
    with tempfile.TemporaryDirectory(prefix="hpctrain-unchanged-") as name:
        folder = Path(name)
        large_clusters_in(folder)
        for cluster in before:
            one, other = before[cluster], after.get(cluster)
            if not (isinstance(one, dict) and isinstance(other, dict)):
                continue
            if tiles_of(one["plan"]) == tiles_of(other["plan"]):
                continue
            (folder / "plan.toml").write_text(re.sub("(?m)^schema = .*\n", "", other["plan"]))
            words = command_line("predict", *SEARCHED_JOB, "--cluster", cluster, "--plan", "plan.toml", "--json")
            ended = commands.run(words, folder, TIMEOUT_SECONDS, **ONE_THREAD, PYTHONPATH=str(checkout))
            if ended.returncode:
                yield cluster, float("inf"), last_lines(ended, folder)
            else:
                ratio = json.loads(ended.stdout)["step_seconds"] / one["step_seconds"]
                yield cluster, ratio, f"{one['layout']}, then {other['layout']}"


@click.group("benchmarks.unchanged")
def main():
    """Record what the code does, and compare two records."""


@main.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--cases", type=click.Path(exists=True, path_type=Path), help="Those of another record.")
@click.option("--seed", default=1, show_default=True)
@click.option("--count", default=80, show_default=True, help="How many random jobs.")
@click.option("--only", multiple=True, type=click.Choice(list(SECTIONS)), help="Sections; may be repeated.")
def record(out, cases, seed, count, only):
    """Write what the code of this folder does to the folder OUT."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hpctrain-unchanged-") as folder, serving(Path(folder) / "server"):
        os.environ[SERVER_VARIABLE] = f"{folder}/server"
        chosen = json.loads(cases.read_text()) if cases else drawn_cases(seed, count)
        (out / "cases.json").write_text(json.dumps(chosen, indent=1) + "\n")
        for name in only or SECTIONS:
            found = SECTIONS[name](chosen, lambda line: click.echo(line, err=True))
            (out / f"{name}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


@main.command()
@click.argument("before", type=click.Path(exists=True, path_type=Path))
@click.argument("after", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--checkout", type=click.Path(exists=True, path_type=Path), help="The old state: it prices other choices."
)
@click.option("--shown", default=20, show_default=True, help="How many differences of each section to print.")
def compare(before, after, checkout, shown):
    """Print what differs between two records. Exit code 1 if anything does."""
    is_same = True
    for name in SECTIONS:
        files = [folder / f"{name}.json" for folder in (before, after)]
        if not all(file.exists() for file in files):
            click.echo(f"{name}: not in both records")
            continue
        one, other = (json.loads(file.read_text()) for file in files)
        if name == "searched" and checkout:
            for cluster, ratio, text in choices_priced(one, other, checkout.resolve()):
                click.echo(f"  {cluster}: {ratio:.4f} of the step before, as priced before: {text}")
                if ratio <= MAX_RATIO:
                    del one[cluster], other[cluster]
        different = list(differences(one, other))
        is_same = is_same and not different
        click.echo(f"{name}: {len(one)} cases, {len(different)} differences")
        for line in different[:shown]:
            click.echo(f"  {line}")
    raise SystemExit(not is_same)


if __name__ == "__main__":
    main()
