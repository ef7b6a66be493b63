"""Write run folders of the code as it is now, for later versions to read: `python -m tests.old_runs.make NAME`.

NAME is the folder to make beside this file, such as the date of the state that writes it. It gets a token file, a job,
and a run folder of each layout, stopped after its second step of three. `losses.json` has the losses of all three steps
as one rank computes them without a stop.

A state keeps what it wrote: a layout that a later state cannot write any more leaves `LAYOUTS` and stays in its folder.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.started import BIN

HERE = Path(__file__).parent
STEPS, SAVED_STEP = 3, 2
JOB = """\
[model]
architecture = "llama"
num_layers = 2
hidden_size = 16
num_heads = 4
num_kv_heads = 2
ffn_size = 32
max_positions = 32
[data]
tokens = "tokens.h5"
validation_fraction = 0.1
sequence_length = 16
[train]
steps = 3
global_batch = 8
learning_rate = 1e-2
dtype = "fp32"
validation_sequences = 8
[search]
must_fit = false
"""
LAYOUTS = {
    "one": (1, ("plan.data=1",)),
    "pipeline-node": (4, ("plan.pipeline=2", "plan.data=2", 'checkpoint.parts="node"')),
    "sharded": (4, ("plan.tensor.z=2", "plan.data=2", "plan.zero=3", "plan.microbatch=4")),
    "offload-optimizer": (1, ('plan.offload="optimizer"',)),
    "offload-activations": (1, ('plan.offload="activations"', "plan.microbatch=4")),
    "offload-all": (2, ('plan.offload="all"', "plan.pipeline=2", "plan.microbatch=4")),
    "unlike-zero2": (4, ("plan.file=unlike-zero2.toml",)),
    "unlike-zero3": (4, ("plan.file=unlike-zero3.toml",)),
}
"""By name the number of ranks, and what differs in the job."""
UNLIKE = """\
schedule = "1f1b"
microbatches = 1
rows = 8

[[tile]]
items = [0, 6]
rows = [0, 4]
ranks = [0, 1]
tensor = {{x = 2}}
zero = {zero}

[[tile]]
items = [0, 6]
rows = [4, 8]
ranks = [2, 3]
tensor = {{y = 2}}
zero = {zero}
"""
"""A plan whose holders have unlike tensor grids and exchange while they compute."""
CACHE = "/tmp/hpctrain-old-runs"
"""Where the description of the machine goes, which is of no use to others."""
LEFT_OUT = ("flight", "lock", "timeline.json", "traffic.json")
"""Of a run folder: what no later start reads, or is large."""


def main(name: str) -> None:
    made = HERE / name
    made.mkdir()
    (made / "job.toml").write_text(JOB)
    text = made / "text.txt"
    text.write_text("".join(f"The number {i} times {i + 3} is {i * (i + 3)}.\n" for i in range(150)))
    _start(made, 0, "prepare", text.name, "--tokenizer", "bpe", "--vocab-size", "300", "--out", "tokens.h5")
    text.unlink()
    _write_losses(made, "losses.json")
    for zero in (2, 3):
        (made / f"unlike-zero{zero}.toml").write_text(UNLIKE.format(zero=zero))
    for layout, (ranks, changes) in LAYOUTS.items():
        sets = [word for change in changes for word in ("--set", change)]
        stop = ("--stop-after", str(SAVED_STEP), "--sample", "0")
        _start(made, ranks, "train", "job.toml", "--run", layout, *stop, *sets)
        for left in LEFT_OUT:
            path = made / layout / left
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _write_losses(made: Path, name: str, *changes: str) -> None:
    sets = [word for change in ("plan.data=1", *changes) for word in ("--set", change)]
    _start(made, 1, "train", "job.toml", "--run", "reference", "--sample", "0", *sets)
    lines = [json.loads(line) for line in (made / "reference" / "metrics.jsonl").read_text().splitlines()]
    (made / name).write_text(json.dumps([line["loss"] for line in lines]) + "\n")
    shutil.rmtree(made / "reference")


def _start(folder: Path, ranks: int, *words: str) -> None:
    """Run `hpctrain WORDS` on so many ranks (0: without mpirun) in a folder."""
    start = [str(BIN / "mpirun"), "-n", str(ranks)] if ranks else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HPCTRAIN_CACHE": CACHE}
    subprocess.run([*start, str(BIN / "hpctrain"), *words], cwd=folder, check=True, env=environment)


if __name__ == "__main__":
    main(*sys.argv[1:])
