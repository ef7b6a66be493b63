"""Gives mutated files to every command that reads them, and counts how the commands end.

    python -m benchmarks.mutations --seed 1 --scale 1 --out classes.json

Commands run in forked children of one warm process, within limits of time and memory (`benchmarks.sandbox`). A mutation
knows what is right (`benchmarks.mutants`): a file that means nothing must be refused with a message, one that still
means the same must be accepted.
"""

import json
import os
import random
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks import mutant_arguments, mutants
from benchmarks.mutants import ACCEPT, EITHER, REFUSE, SAME, Mutant
from benchmarks.sandbox import GROWTH_BYTES, Ended, copy, hpctrain, run_in_child, warm_up

GOOD = ("refused with a message", "accepted, as is right")
BAD = ("traceback", "over 5 s", "over 1 GB", "nonsense accepted", "refused without a message", "legal and refused")

JOB = """\
name = "small"
[model]
architecture = "llama"
num_layers = 1
hidden_size = 16
num_heads = 2
vocab_size = 256
[data]
tokens = "tokens.h5"
sequence_length = 16
[train]
steps = 3
global_batch = 4
dtype = "fp32"
validation_sequences = 2
[plan]
pipeline = 1
data = 1
microbatch = 2
[search]
plans = 20
"""
PLAN = """\
schedule = "1f1b"
microbatches = 2
rows = 2
[[tile]]
items = [0, 4]
rows = [0, 2]
family = "cpu"
ranks = [0]
tensor = {x = 1, y = 1, z = 1}
recompute = "none"
zero = 1
"""
CLUSTER = """\
[families.cpu]
kind = "cpu"
memory_bytes = 4_000_000_000
memory_bytes_per_second = 2e10
peak_flops_per_second = {fp32 = 5e10}
origin = "assumed"
[fabrics.ib]
latency_seconds = 2e-6
origin = "assumed"
[[nodes]]
devices = {cpu = 1}
link_latency_seconds = 1e-6
link_bytes_per_second = 1e10
nics = [{fabric = "ib", send_bytes_per_second = 1e10, receive_bytes_per_second = 1e10, origin = "assumed"}]
origin = "assumed"
"""
CSV = """\
name,accelerator,hidden,layers,heads,positions,tensor,pipeline,data,microbatch,global_batch,vocabulary,recompute,zero,\
stages,memory_bytes,step_seconds
a,A100-80,2048,24,16,2048,4,2,1,1,64,51200,none,1,,1e10,2.5
b,A100-80,2048,24,16,2048,8,1,1,4,64,51200,full,0,,2e10,3.5
"""

# The commands that read a file, by its name in the folder.
READERS: Mapping[str, Sequence[str]] = {
    "job.toml": (
        "inspect job.toml --json",
        "plan check plan.toml job.toml",
        "plan uniform job.toml --ranks 1",
        "predict job.toml --cluster cluster.toml --plan plan.toml --json",
        "plan search job.toml --cluster cluster.toml --json",
        "slurm job.toml --cluster cluster.toml --run made",
        "mpirun job.toml --cluster cluster.toml --run made",
        "train job.toml --cluster cluster.toml --run made --sample 0 --stop-after 1 --json",
    ),
    "plan.toml": (
        "inspect plan.toml --json",
        "plan draw plan.toml",
        "plan check plan.toml job.toml",
        "predict job.toml --cluster cluster.toml --plan plan.toml --json",
        "train plain.toml --cluster cluster.toml --run made --sample 0 --set plan.file=plan.toml --json",
    ),
    "cluster.toml": (
        "inspect cluster.toml --json",
        "predict job.toml --cluster cluster.toml --plan plan.toml --json",
        "plan search job.toml --cluster cluster.toml --json",
        "plan uniform job.toml --cluster cluster.toml",
        "slurm job.toml --cluster cluster.toml --run made",
        "mpirun job.toml --cluster cluster.toml --run made",
        "train job.toml --cluster cluster.toml --run made --sample 0 --json",
    ),
    "tokens.h5": (
        "inspect tokens.h5 --verify --json",
        "evaluate run --data tokens.h5 --json",
        "prepare text --tokenizer tokens.h5 --out made.h5 --json",
        "train job.toml --cluster cluster.toml --run made --sample 0 --json",
    ),
    "tokens.bin": ("inspect tokens.bin --verify --json", "evaluate run --data tokens.bin --json"),
    "records.jsonl": ("prepare records.jsonl --out made.h5 --json",),
    "records.parquet": ("prepare records.parquet --out made.h5 --json",),
    "tokenizer.json": ("prepare text --tokenizer tokenizer.json --out made.h5 --json",),
    "run": (
        "inspect run --json",
        "compare run other --json",
        "train job.toml --cluster cluster.toml --run run --sample 0 --set train.steps=4 --json",
        "generate run --tokens 3 --json",
    ),
    "checkpoint": (
        "inspect run --verify --json",
        "compare run other --exact --json",
        "train job.toml --cluster cluster.toml --run run --sample 0 --set train.steps=4 --json",
        "generate run --tokens 3 --json",
        "evaluate run --data tokens.h5 --json",
        "export run --hf made --dtype fp32 --json",
    ),
}
NEEDS = ("job.toml", "plain.toml", "plan.toml", "cluster.toml", "tokens.h5", "tokens.bin", "text", "records.jsonl",
         "records.parquet", "tokenizer.json", "run", "other", "runs.csv")  # fmt: skip
TIMED = ("wall_seconds", "step_seconds", "tokens_per_second", "seconds", "plan", "path", "drift", "predicted",
         "prediction", "resumed_from", "overrun", "run", "checkpoint")  # fmt: skip
"""Of JSON output: what differs from one run to the next, or is not of the file that was damaged."""


@dataclass(frozen=True)
class Case:
    """A mutant, and a command that reads it."""

    mutant: Mutant
    command: str
    environment: tuple[str, str] | None = None
    """A variable, and its value."""

    def __str__(self) -> str:
        variable = f" with {self.environment[0]}={self.environment[1]:.20}" if self.environment else ""
        return f"{self.mutant.name}: {self.mutant.what}: {self.command}{variable}"


def build(template: Path) -> None:
    """Make the intact files, the runs among them."""
    import numpy as np
    import pyarrow
    import pyarrow.parquet
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = [f"def function_{i}(value):\n    return value + {i}\n" * 20 for i in range(12)]
    (template / "text").mkdir(parents=True)
    for i, text in enumerate(texts):
        (template / "text" / f"module_{i}.py").write_text(text)
    (template / "records.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), template / "records.parquet")
    np.arange(2000, dtype="<u2").__mod__(256).astype("<u2").tofile(template / "tokens.bin")
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=280, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    )
    (template / "tokenizer.json").write_text(library.to_str())
    for name, text in (("job.toml", JOB), ("plan.toml", PLAN), ("cluster.toml", CLUSTER), ("runs.csv", CSV)):
        (template / name).write_text(text)
    (template / "plain.toml").write_text(JOB.replace("[plan]\npipeline = 1\ndata = 1\nmicrobatch = 2\n", ""))
    for command in (
        "prepare text --out tokens.h5",
        "train job.toml --cluster cluster.toml --run run --sample 0",
        "train job.toml --cluster cluster.toml --run other --sample 0",
    ):
        ended = run_in_child(hpctrain(command.split()), template)
        if ended.code:
            raise RuntimeError(f"{command}: {ended.err}")
    flight = template / "run" / "flight" / "rank-00000.bin"
    data = bytearray(flight.read_bytes())
    data[512:520] = struct.pack("@Q", 0)  # as if it had been killed
    flight.write_bytes(data)


def toml_cases(seed: int, scale: float) -> Iterator[Case]:
    """Yield job, plan and cluster files."""
    kinds = (
        ("job", "job.toml", JOB, mutants.JOB_KEYS, 90),
        ("plan", "plan.toml", PLAN, mutants.PLAN_KEYS, 70),
        ("cluster", "cluster.toml", CLUSTER, mutants.CLUSTER_KEYS, 70),
    )
    dice = random.Random(seed)
    for kind, name, text, keys, garbled in kinds:
        made = mutants.structural(kind, name, text)
        made += mutants.extended(name, text) if kind == "job" else []
        values = mutants.wrong_values(kind, name, text, keys)
        kept = dice.sample(values, min(len(values), round(len(values) * min(scale, 1.0))))
        made += kept + mutants.garbled_text(kind, name, text, round(garbled * scale), seed)
        readers = READERS[name]
        for number, mutant in enumerate(made):
            yield Case(mutant, readers[number % len(readers)])


def data_cases(seed: int, scale: float, template: Path) -> Iterator[Case]:
    """Yield token files, JSON Lines, Parquet, tokenizers."""
    for name, count, right in (
        ("tokens.h5", 160, SAME),
        ("tokens.bin", 30, EITHER),
        ("records.parquet", 60, EITHER),
        ("records.jsonl", 40, EITHER),
        ("tokenizer.json", 60, EITHER),
    ):
        data, readers = (template / name).read_bytes(), READERS[name]
        made = list(mutants.damaged_binary(name, name, data, round(count * scale), seed, right))
        made += mutants.odd_files(name, name)
        if name == "records.jsonl":
            made += mutants.odd_records(name)
        if name == "tokenizer.json":
            made += mutants.odd_json(name, name, data, ("model",))
        for number, mutant in enumerate(made):
            yield Case(mutant, readers[number % len(readers)])


def csv_cases(seed: int, scale: float) -> Iterator[Case]:
    """Yield tables of measured runs for the fit of the predictor."""
    for mutant in mutants.odd_tables("csv", "runs.csv", CSV, round(60 * scale), seed):
        yield Case(mutant, "evidence runs.csv --check --json")


def run_cases(seed: int, scale: float, template: Path) -> Iterator[Case]:
    """Yield the files of run folders, and those of their checkpoints."""
    run = template / "run"
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = str(path.relative_to(template))
        kind, readers = (
            ("checkpoint", READERS["checkpoint"]) if "checkpoints" in name else ("run folder", READERS["run"])
        )
        data = path.read_bytes()
        count = round((60 if path.suffix in (".h5", ".bin") else 24) * scale)
        made = list(mutants.damaged_binary(kind, name, data, count, seed, SAME if kind == "checkpoint" else EITHER))
        made += mutants.odd_files(kind, name, SAME if kind == "checkpoint" else EITHER)
        if path.suffix in (".jsonl", ".json"):
            made += mutants.odd_json(kind, name, data)
        for number, mutant in enumerate(made):
            yield Case(mutant, readers[number % len(readers)])


def argument_cases() -> Iterator[Case]:
    """Yield command lines that ask for too much, or for nothing."""
    for text, right in ((mutant_arguments.REFUSED, REFUSE), (mutant_arguments.ACCEPTED, ACCEPT)):
        for line in mutant_arguments.command_lines(text):
            yield Case(Mutant("arguments", "the intact files", "all", right, make=lambda path: None), line)


def environment_cases() -> Iterator[Case]:
    """Yield variables of launchers, of OpenMP and of hpctrain with values that mean nothing, and legal ones."""
    lines = ("inspect job.toml", "train job.toml --cluster cluster.toml --run made --sample 0 --stop-after 1 --json")
    for values, right in ((mutant_arguments.WRONG_VARIABLES, REFUSE), (mutant_arguments.VARIABLES, ACCEPT)):
        for name, text in values:
            for line in lines[-1:] if name in mutant_arguments.OF_RANKS else lines:
                mutant = Mutant("environment", "the intact files", "all", right, make=lambda path: None)
                yield Case(mutant, line, (name, text))


def command_of(case: Case) -> Callable[[], None]:
    """Return what runs a command line: of hpctrain, or of the evidence for its predictor."""
    words = [mutant_arguments.spoken(word) for word in case.command.split()]
    if words[0] != "evidence":
        command = hpctrain(words)

        def with_variable() -> None:
            os.environ.update([case.environment] if case.environment else [])
            command()

        return with_variable

    def run() -> None:
        from benchmarks.evidence.fit_runs import command
        from hpctrain.cli import main

        command.main = lambda **options: type(command).main(command, words[1:], **options)  # type: ignore[method-assign]
        main(command)

    return run


def classify(case: Case, ended: Ended, intact: Ended | None, idle_bytes: int) -> str:
    """Return one of `GOOD` and `BAD`."""
    said = ended.err + ended.out
    if "MemoryError" in said or "Cannot allocate memory" in said or ended.growth_bytes - idle_bytes > GROWTH_BYTES:
        return "over 1 GB"
    if ended.is_late:
        return "over 5 s"
    if "Traceback (most recent" in said or ended.code < 0 or ended.code == 70:
        return "traceback"
    differs = case.command.startswith("compare") and ended.code == 1
    if ended.code and not differs:
        if not any(line.startswith(("hpctrain: ", "Error: ")) or "Error: " in line for line in ended.err.splitlines()):
            return "refused without a message"
        return "legal and refused" if case.mutant.right == ACCEPT else "refused with a message"
    if case.mutant.right == REFUSE:
        return "nonsense accepted"
    if case.mutant.right == SAME and intact and _result(ended) != _result(intact):
        return "nonsense accepted"
    return "accepted, as is right"


def _result(ended: Ended) -> object:
    """Return what a command printed, without what differs from run to run."""
    try:
        tree = json.loads(ended.out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return ended.code
    return {key: value for key, value in tree.items() if key not in TIMED} if isinstance(tree, dict) else tree


def all_cases(seed: int, scale: float, template: Path) -> list[Case]:
    """Return every case; `scale` says how many of the random ones."""
    return [
        *toml_cases(seed, scale),
        *data_cases(seed, scale, template),
        *csv_cases(seed, scale),
        *run_cases(seed, scale, template),
        *argument_cases(),
        *environment_cases(),
    ]


def run_cases_in(
    folder: Path, template: Path, cases: Sequence[Case], tell: Callable[[str], None]
) -> list[tuple[Case, str, Ended]]:
    """Run cases one by one; return each with its class and how it ended."""
    idle = run_in_child(lambda: None, template).growth_bytes
    intact: dict[str, Ended] = {}
    results = []
    for number, case in enumerate(cases, 1):
        if case.mutant.right == SAME and case.command not in intact:
            copy(template, NEEDS, folder)
            intact[case.command] = run_in_child(command_of(case), folder)
        copy(template, NEEDS, folder)
        mutants.loop(folder / "loop")
        case.mutant.write(folder)
        ended = run_in_child(command_of(case), folder)
        verdict = classify(case, ended, intact.get(case.command), idle)
        results.append((case, verdict, ended))
        if verdict in BAD:
            last = (ended.err.strip() or ended.out.strip()).rpartition("\n")[2]
            tell(f"{number}/{len(cases)} {verdict}: {case} [{ended.seconds:.1f} s] {last[:160]}")
    return results


def counted(results: Sequence[tuple[Case, str, Ended]]) -> dict[str, dict[str, int]]:
    """Return how many cases of each kind ended in each class."""
    kinds: dict[str, Counter[str]] = {}
    for case, verdict, _ in results:
        kinds.setdefault(case.mutant.kind, Counter())[verdict] += 1
    return {kind: dict(counter) for kind, counter in kinds.items()}


def table(counts: Mapping[str, Mapping[str, int]]) -> str:
    """Return the counts as text."""
    columns = [*GOOD, *BAD]
    lines = [f"{'':16}{'cases':>7}" + "".join(f"{name[:18]:>20}" for name in columns)]
    total: Counter[str] = Counter()
    for kind, counter in [*counts.items(), ("all", total)]:
        if kind != "all":
            total.update(counter)
        row = "".join(f"{counter.get(name, 0):>20}" for name in columns)
        lines.append(f"{kind:16}{sum(counter.values()):>7}{row}")
    return "\n".join(lines)


@click.command("benchmarks.mutations")
@click.option("--seed", default=1, show_default=True)
@click.option("--scale", default=1.0, show_default=True, help="How many random mutations, of the usual ones.")
@click.option("--only", multiple=True, help="Kinds of files; may be repeated.")
@click.option("--every", default=1, show_default=True, help="Run every so many-th case.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the counts as JSON.")
def command(seed, scale, only, every, out):
    """Mutate files, run the commands that read them, and count how they end. Exit code 1 if any ended badly."""
    warm_up()
    with tempfile.TemporaryDirectory(prefix="hpctrain-mutations-") as name:
        template = Path(name) / "template"
        build(template)
        cases = [case for case in all_cases(seed, scale, template) if not only or case.mutant.kind in only][::every]
        results = run_cases_in(Path(name) / "case", template, cases, lambda line: click.echo(line, err=True))
    counts = counted(results)
    click.echo(table(counts))
    if out:
        out.write_text(json.dumps(counts, indent=1) + "\n")
    raise SystemExit(any(verdict in BAD for _, verdict, _ in results))


if __name__ == "__main__":
    command()
