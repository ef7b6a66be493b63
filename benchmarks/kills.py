"""Kills ranks of a run at random moments, under the script of `hpctrain mpirun`: how each start goes on, and how long
it takes.

    python -m benchmarks.kills --runs 5 --kills 3 --seed 7

A run is killed some times, and then left alone. It has to end with the losses of a run that was not.
"""

import json
import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import click

RANKS, STEPS = 4, 120
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
data = 4
zero = 1
[recovery]
copies = 20
"""
HUNG_SECONDS = 240.0


class Killed(NamedTuple):
    """What became of a run with kills."""

    losses: list[float]
    origins: list[str]
    """What each start but the first continued from: memory, checkpoint or the beginning."""
    code: int
    end_seconds: list[float]
    """From each kill until the last rank has ended."""
    stall_seconds: list[float]
    """From each kill until a step of the next start is done."""


def lines_of(file: Path) -> list[dict]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def ranks_of(run: Path) -> list[int]:
    """Return the processes that train in a run folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"--run" in words and str(run).encode() in words and b"python" in words[0]:
            found.append(int(path.name))
    return sorted(found)


def run_with_kills(folder: Path, hpctrain: Path, kills: int, chance: random.Random, victims: int = 1) -> Killed:
    """Train by the script of `hpctrain mpirun` in `folder`, which has tokens.bin, and kill ranks in some steps."""
    folder.mkdir()
    (folder / "job.toml").write_text(JOB.format(tokens=folder.parent / "tokens.bin", steps=STEPS))
    run, quiet = folder / "run", {"stdout": subprocess.DEVNULL}
    asked = ["mpirun", "job.toml", "--nodes", "1", "--ranks-per-node", str(RANKS), "--run", str(run)]
    subprocess.run([hpctrain, *asked], cwd=folder, check=True, **quiet)
    environment = os.environ | {"HPCTRAIN_RESTARTS": str(kills)}
    with (folder / "output").open("w") as output:
        start = ["bash", str(run / "start.sh"), "--sample", "0"]
        script = subprocess.Popen(start, cwd=folder, stdout=output, stderr=output, env=environment)
        ended, stalls = [], []
        for _ in range(kills):
            begun = len([event for event in lines_of(run / "events.jsonl") if event["event"] == "start"])
            wait_for(lambda b=begun: count(run, "start") > b - 1 and len(lines_of(run / "metrics.jsonl")) > 30, script)
            time.sleep(chance.uniform(0.0, 1.5))
            ranks, since = ranks_of(run), time.monotonic()
            if script.poll() is not None or not ranks:
                break
            begun = count(run, "start")
            for rank in chance.sample(ranks, min(victims, len(ranks))):
                os.kill(rank, signal.SIGKILL)
            wait_for(lambda before=set(ranks): not before & set(ranks_of(run)), script)
            ended.append(time.monotonic() - since)
            wait_for(lambda b=begun: count(run, "start") > b, script)
            steps = len(lines_of(run / "metrics.jsonl"))
            wait_for(lambda s=steps: len(lines_of(run / "metrics.jsonl")) > s, script)
            stalls.append(time.monotonic() - since)
        try:
            code = script.wait(HUNG_SECONDS)
        except subprocess.TimeoutExpired:
            script.terminate()
            code = -1
    starts = [event["text"] for event in lines_of(run / "events.jsonl") if event["event"] == "start"]
    kinds = ("memory", "step-")
    origins = [next((kind for kind in kinds if f"from {kind}" in text), "the beginning") for text in starts[1:]]
    return Killed([line["loss"] for line in lines_of(run / "metrics.jsonl")], origins, code, ended, stalls)


def count(run: Path, event: str) -> int:
    return sum(line["event"] == event for line in lines_of(run / "events.jsonl"))


def wait_for(condition, script: subprocess.Popen) -> None:
    """Wait for a condition, the script's end, or so long that something hangs."""
    deadline = time.monotonic() + HUNG_SECONDS
    while not condition() and script.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


@click.command(help=__doc__)
@click.option("--runs", default=5)
@click.option("--kills", default=3)
@click.option("--victims", default=1, help="Ranks that are killed at once.")
@click.option("--seed", default=7)
def main(runs, kills, victims, seed):
    import sys

    from hpctrain.jobs.common import generate_tokens

    hpctrain, totals, stalls, ends = Path(sys.executable).with_name("hpctrain"), {}, [], []
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        generate_tokens(base / "tokens.bin", 64)
        whole = run_with_kills(base / "whole", hpctrain, 0, random.Random(seed))
        for number in range(runs):
            result = run_with_kills(base / f"{number}", hpctrain, kills, random.Random(seed + number), victims)
            right = result.code == 0 and result.losses == whole.losses
            print(f"seed {seed + number}: code {result.code}, same bits: {right}, from {', '.join(result.origins)}")
            if result.code:
                print((base / f"{number}" / "output").read_text()[-3000:])
            for origin in result.origins:
                totals[origin] = totals.get(origin, 0) + 1
            stalls += result.stall_seconds
            ends += result.end_seconds
    print(f"starts: {totals}; from a kill to the end of all ranks {[round(s, 2) for s in ends]} s; to the next step")
    print([round(s, 2) for s in stalls])


if __name__ == "__main__":
    main()
