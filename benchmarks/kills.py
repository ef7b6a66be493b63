"""Kills ranks of runs, and their launcher, at random moments, under the script of `hpctrain mpirun`: what each start
continues from, and how long it takes.

    python -m benchmarks.kills --runs 5 --kills 3 --seed 7 --ranks 4
    python -m benchmarks.kills --stalls --runs 5

A run is killed some times, and then left alone. It has to end with the losses of a run that was not. With --stalls a
rank of each run is killed once, in every second run with copies in memory: the seconds of the stall by parts, those of
the start from its own events.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click

from hpctrain.comm.start.process import SHARED_MEMORY
from hpctrain.jobs.common import generate_tokens

STEPS = 120
JOB = """
name = "killed"
[model]
architecture = "llama"
num_layers = 2
hidden_size = 32
num_heads = 4
vocab_size = 64
[data]
tokens = "{tokens}"
sequence_length = 16
[train]
steps = {steps}
global_batch = 16
dtype = "fp32"
[plan]
data = {ranks}
zero = 1
[checkpoint]
every = {saves}
[recovery]
copies = {copies}
"""
HUNG_SECONDS = 240.0
IN_STEP, IN_SAVE, IN_COPY, IN_START = MOMENTS = "step", "save", "copy", "start"
WINDOWS = {IN_STEP: 1.5, IN_SAVE: 0.02, IN_COPY: 0.01, IN_START: 4.0}
"""Seconds after the begin of a moment within which ranks are killed."""
LAUNCHER = 0
COPIES = 20


class Kill(NamedTuple):
    """A kill: in which moment, and of how many ranks; LAUNCHER stands for mpirun alone."""

    moment: str = IN_STEP
    victims: int = 1

    def __str__(self) -> str:
        return f"{self.victims or 'mpirun'} in a {self.moment}"


class Killed(NamedTuple):
    """What became of a run with kills."""

    losses: list[float]
    kills: list[Kill]
    """The kills that came before its end."""
    origins: list[str]
    """What each start but the first continued from: memory, checkpoint or the beginning. A start that was killed before
    it continued has none."""
    code: int
    end_seconds: list[float]
    """From each kill until the last rank has ended."""
    stall_seconds: list[float]
    """From each kill in a step until a step of the next start is done."""
    parts: list[dict[str, float]]
    """Parts of each such stall. What is left of it is how late this program, and metrics, were."""


def lines_of(file: Path) -> list[dict]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def ranks_of(run: Path) -> list[int]:
    """Return the processes that train in a run folder."""
    return _processes(run, lambda words: b"python" in words[0])


def _processes(run: Path, is_wanted: Callable[[list[bytes]], bool]) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"--run" in words and str(run).encode() in words and is_wanted(words):
            found.append(int(path.name))
    return sorted(found)


def run_with_kills(
    folder: Path,
    hpctrain: Path,
    kills: Sequence[Kill],
    chance: random.Random,
    ranks: int = 4,
    saves: int = 50,
    copies: int = COPIES,
) -> Killed:
    """Train by the script of `hpctrain mpirun` in `folder`, which has tokens.bin beside it, with kills one after the
    other, and a checkpoint every `saves` steps."""
    folder.mkdir()
    tokens = folder.parent / "tokens.bin"
    (folder / "job.toml").write_text(JOB.format(tokens=tokens, steps=STEPS, ranks=ranks, saves=saves, copies=copies))
    run, quiet = folder / "run", {"stdout": subprocess.DEVNULL}
    asked = ["mpirun", "job.toml", "--nodes", "1", "--ranks-per-node", str(ranks), "--run", str(run)]
    subprocess.run([hpctrain, *asked], cwd=folder, check=True, **quiet)
    environment = os.environ | {"HPCTRAIN_RESTARTS": str(len(kills))}
    done, ended, stalls, parts, starts = [], [], [], [], 0
    with (folder / "output").open("w") as output:
        start = ["bash", str(run / "start.sh"), "--sample", "0"]
        script = subprocess.Popen(start, cwd=folder, stdout=output, stderr=output, env=environment)
        try:
            for kill in kills:
                _await_moment(run, kill.moment, starts, script)
                time.sleep(chance.uniform(0.0, WINDOWS[kill.moment]))
                victims = before = ranks_of(run)
                if script.poll() is not None:
                    break
                if kill.victims == LAUNCHER:
                    victims = _processes(run, lambda words: words[0].endswith(b"mpirun"))
                starts, since, killed = count(run, "start"), time.monotonic(), time.time()
                for victim in chance.sample(victims, min(kill.victims or 1, len(victims))):
                    os.kill(victim, signal.SIGKILL)
                done.append(kill)
                wait_for(lambda before=set(before): not before & set(ranks_of(run)), script)
                ended.append(time.monotonic() - since)
                if kill.moment == IN_STEP:
                    wait_for(lambda s=starts: count(run, "start") > s, script)
                    begun = [event for event in lines_of(run / "events.jsonl") if event["event"] == "start"][-1]
                    first = begun["step"] + 1
                    wait_for(lambda s=first: s in {line["step"] for line in lines_of(run / "metrics.jsonl")}, script)
                    stalls.append(time.monotonic() - since)
                    again = begun["time"] - sum(begun["seconds"].values()) - killed - ended[-1]
                    line = next(line for line in lines_of(run / "metrics.jsonl") if line["step"] == first)
                    step = {"first step": line["step_seconds"]}
                    parts.append({"all ended": ended[-1], "script and mpirun": again} | begun["seconds"] | step)
            code = script.wait(HUNG_SECONDS)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            script.terminate()
    starts = [event["text"] for event in lines_of(run / "events.jsonl") if event["event"] == "start"]
    kinds = ("memory", "step-")
    origins = [next((kind for kind in kinds if f"from {kind}" in text), "the beginning") for text in starts[1:]]
    return Killed([line["loss"] for line in lines_of(run / "metrics.jsonl")], done, origins, code, ended, stalls, parts)


def _await_moment(run: Path, moment: str, starts: int, script: subprocess.Popen) -> None:
    """Wait until a start is in such a moment, if so many `starts` trained before the last kill."""
    wait_for(lambda: ranks_of(run), script)
    if moment == IN_START:
        return
    wait_for(lambda: count(run, "start") > starts and len(lines_of(run / "metrics.jsonl")) > 30, script)
    copies = f"{(run / 'copies').read_text().strip()}/*/*.partial" if (run / "copies").exists() else "none"
    if moment == IN_SAVE:
        wait_for(lambda: any((run / "checkpoints").glob("*.partial")), script, 0.0)
    elif moment == IN_COPY:
        wait_for(lambda: any(SHARED_MEMORY.glob(copies)), script, 0.0)


def count(run: Path, event: str) -> int:
    return sum(line["event"] == event for line in lines_of(run / "events.jsonl"))


def wait_for(condition, script: subprocess.Popen, poll_seconds: float = 0.02) -> None:
    """Wait for a condition, or the script's end. Raises subprocess.TimeoutExpired where something hangs."""
    deadline = time.monotonic() + HUNG_SECONDS
    while not condition() and script.poll() is None:
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired("start.sh", HUNG_SECONDS)
        time.sleep(poll_seconds)


def measure_stalls(runs: int, ranks: int, seed: int) -> None:
    """Print the median of each part of a stall, of so many starts from memory and from disk in turn."""
    hpctrain, found = Path(sys.executable).with_name("hpctrain"), {"memory": [], "disk": []}
    with tempfile.TemporaryDirectory() as name:
        generate_tokens(Path(name) / "tokens.bin", 64)
        for number in range(2 * runs):
            road = list(found)[number % 2]
            more = {"saves": STEPS, "copies": COPIES} if road == "memory" else {"saves": COPIES, "copies": 0}
            result = run_with_kills(
                Path(name) / f"{number}", hpctrain, [Kill()], random.Random(seed + number // 2), ranks, **more
            )
            print(road, result.code, *result.origins, *(f"{s:.2f}" for s in result.stall_seconds), flush=True)
            found[road] += [parts | {"whole": s} for parts, s in zip(result.parts, result.stall_seconds, strict=True)]
    print(f"{'median seconds of':20} {'memory':>8} {'disk':>8}")
    for part in found["memory"][0]:
        print(f"{part:20}", *(f"{median(parts[part] for parts in each):8.2f}" for each in found.values()))


@click.command(help=__doc__)
@click.option("--runs", default=5)
@click.option("--kills", default=3, help="Kills of each run.")
@click.option("--ranks", default=4)
@click.option("--seed", default=7, help="Of the first run; each later one has the next.")
@click.option("--stalls", "only_stalls", is_flag=True, help="Measure stalls by parts, from memory and from disk.")
def main(runs, kills, ranks, seed, only_stalls):
    if only_stalls:
        measure_stalls(runs, ranks, seed)
        return
    hpctrain, origins, moments, stalls, ends = Path(sys.executable).with_name("hpctrain"), Counter(), Counter(), [], []
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        generate_tokens(base / "tokens.bin", 64)
        whole = run_with_kills(base / "whole", hpctrain, [], random.Random(seed), ranks)
        for each in range(seed, seed + runs):
            chance = random.Random(each)
            asked = [Kill(chance.choice(MOMENTS), chance.choice((1, 2, 3, LAUNCHER))) for _ in range(kills)]
            result = run_with_kills(base / f"{each}", hpctrain, asked, chance, ranks)
            right = result.code == 0 and result.losses == whole.losses
            what = ", ".join(map(str, result.kills))
            print(f"seed {each}: {'right' if right else f'WRONG, code {result.code}'}; killed {what};"
                  f" from {', '.join(result.origins)}", flush=True)  # fmt: skip
            if not right:
                print((base / f"{each}" / "output").read_text()[-3000:], flush=True)
            origins.update(result.origins)
            moments.update(map(str, result.kills))
            stalls += result.stall_seconds
            ends += result.end_seconds
    print(f"kills: {dict(moments)}; starts continued from: {dict(origins)}")
    print(f"from a kill to the end of all ranks {[round(s, 2) for s in ends]} s; of a kill in a step to the next step")
    print([round(s, 2) for s in stalls])


if __name__ == "__main__":
    main()
