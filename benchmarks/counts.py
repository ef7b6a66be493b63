"""What one training step does, counted: the same on any machine, where seconds are noise.

    python -m benchmarks.counts tiny --set train.global_batch=4

Kernels are calls of PyTorch's operators that compute or move numbers; bytes are what they read and wrote. Calls, files
and moves from file to file are those of hpctrain's own Python code on the main thread.
"""

import os
import sys
from collections import Counter
from types import FrameType

import click
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpctrain.cli import main
from hpctrain.comm.bind import bind_accelerator
from hpctrain.engine.start.resolve import prepare_run
from hpctrain.engine.trainer import Trainer
from hpctrain.jobs.arguments import json_option, override_option, print_result
from hpctrain.jobs.common import load_job_on, started_world

PACKAGE = f"{os.sep}hpctrain{os.sep}"
NO_KERNEL = ("empty", "new_empty", "detach", "alias", "is_pinned", "_local_scalar_dense")  # what moves no numbers


class KernelCount(TorchDispatchMode):
    """Counts what is given to PyTorch's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if not func.is_view and not name.startswith(NO_KERNEL):
            self.by_name[name] += 1
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
            self.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


class CallCount:
    """Counts calls of hpctrain's functions, by file, and moves between files."""

    def __init__(self) -> None:
        self.by_file: Counter[str] = Counter()
        self.moves = self.into_comm = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call" or PACKAGE not in (path := frame.f_code.co_filename):
            return
        file = path.split(PACKAGE)[-1]
        self.by_file[file] += 1
        caller = frame.f_back
        while caller is not None and PACKAGE not in caller.f_code.co_filename:
            caller = caller.f_back
        if caller is not None and (before := caller.f_code.co_filename.split(PACKAGE)[-1]) != file:
            self.moves += 1
            self.into_comm += file.startswith("comm") and not before.startswith("comm")


def count_step(trainer: Trainer, sequences) -> dict:
    """Return the counts of one step of a trainer that has warmed up."""
    kernels, calls = KernelCount(), CallCount()
    with kernels:
        trainer.step(sequences)
    sys.setprofile(calls)
    trainer.step(sequences)
    sys.setprofile(None)
    return {
        "kernels": kernels.by_name.total(),
        "megabytes": kernels.num_bytes / 1e6,
        "files": len(calls.by_file),
        "calls": calls.by_file.total(),
        "calls_of_model": sum(count for file, count in calls.by_file.items() if file.startswith("model")),
        "moves": calls.moves,
        "calls_into_comm": calls.into_comm,
    }


@click.command("benchmarks.counts")
@click.argument("job")
@override_option
@json_option
def command(job, overrides, as_json):
    """Count the kernels and Python calls of one step of JOB."""
    with started_world() as world:
        prepared = prepare_run(world, load_job_on(world, job, overrides))
        trainer = Trainer(world, bind_accelerator(world), prepared.job, prepared.plan)
        trainer.initialise()
        for _ in range(2):
            trainer.step(prepared.training)
        counts = count_step(trainer, prepared.training)
        if world.rank == 0:
            print_result(counts, "\n".join(f"{key:18} {value:,.6g}" for key, value in counts.items()), as_json)


if __name__ == "__main__":
    main(command)
