"""What one training step does, counted: the same on any machine, where seconds are noise.

    python -m benchmarks.counts tiny --set train.global_batch=4
    python -m benchmarks.counts tiny --block --set kernels.fused=true

Kernels are calls of PyTorch's operators that compute or move numbers; bytes are what they read and wrote. Calls, files
and moves from file to file are those of hpctrain's own Python code on the main thread. Fused kernels are not compiled
here: each counts as one, with its operands and results.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FrameType
from unittest.mock import patch

import click
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hpctrain.cli import main
from hpctrain.comm.accelerators.compiling import Compiled
from hpctrain.comm.bind import DTYPES, bind_accelerator
from hpctrain.config.job import Job, load_job
from hpctrain.engine.start.resolve import prepare_run
from hpctrain.engine.step.layout import make_kernels
from hpctrain.engine.trainer import Trainer
from hpctrain.jobs.arguments import json_option, override_option, print_result
from hpctrain.jobs.common import load_job_on, started_world
from hpctrain.model.parallel.axes import ONE_RANK, Axes
from hpctrain.model.stage import Stage
from hpctrain.model.storage.store import Store
from hpctrain.model.transformer import LayerContext
from hpctrain.plan.holdings import whole_model
from hpctrain.plan.tiling import Tile
from hpctrain.sharding.intervals import Interval

PACKAGE = f"{os.sep}hpctrain{os.sep}"
PRODUCTS = ("mm", "addmm", "linear", "add_wide_product", "_scaled_dot_product")
NO_KERNEL = ("empty", "new_empty", "detach", "alias", "is_pinned", "_local_scalar_dense")  # what moves no numbers


class KernelCount(TorchDispatchMode):
    """Counts what is given to PyTorch's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()
        self.num_bytes = self.bytes_between_products = 0
        self.is_counting = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if not func.is_view and not name.startswith(NO_KERNEL):
            self.count(name, (args, kwargs, result))
        return result

    def count(self, name: str, operands: object) -> None:
        self.by_name[name] += 1
        tensors = [leaf for leaf in tree_leaves(operands) if isinstance(leaf, torch.Tensor)]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.num_bytes += num_bytes
        self.bytes_between_products += 0 if name.startswith(PRODUCTS) else num_bytes

    def fused(self, function: Callable, *tensors: torch.Tensor, **constants):
        """Take the place of a call of `Compiled`: compute one by one what it would fuse, and count one kernel."""
        with _disable_current_modes():
            result = function(*tensors, **constants)
        if self.is_counting:
            self.count(function.__name__, (tensors, result))
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


def count(work: Callable[[], object], kernels: KernelCount) -> dict:
    """Return the counts of what has been done before: compiled, allocated."""
    calls = CallCount()
    kernels.is_counting = True
    with kernels:
        work()
    kernels.is_counting = False
    sys.setprofile(calls)
    work()
    sys.setprofile(None)
    return {
        "kernels": kernels.by_name.total(),
        "megabytes": kernels.num_bytes / 1e6,
        "megabytes_between_products": kernels.bytes_between_products / 1e6,
        "files": len(calls.by_file),
        "calls": calls.by_file.total(),
        "calls_of_model": sum(count for file, count in calls.by_file.items() if file.startswith("model")),
        "moves": calls.moves,
        "calls_into_comm": calls.into_comm,
    }


def pass_of_block(job: Job) -> Callable[[], None]:
    """Return what computes a block forward and backward, for one row: no embedding, head or optimizer is there."""
    model, dtype, device = job.model, DTYPES[job.train.dtype or "fp32"], torch.device("cpu")
    axes, layer = Axes(), Interval(model.num_items - 3, model.num_items - 1)
    store = Store([ONE_RANK], whole_model(model), axes, dtype, device)
    context = LayerContext(model, axes, store, make_kernels(job.kernels, "cpu"))
    (block,) = Stage(Tile(layer, Interval(0, 1), (0,)), context).layers
    shape = 1, job.data.sequence_length, model.hidden_size
    hidden, gradient = torch.randn(shape, dtype=dtype, requires_grad=True), torch.randn(shape, dtype=dtype)

    def both() -> None:
        hidden.grad = None
        block.forward(hidden).backward(gradient)

    return both


def print_counts(work: Callable[[], object], kernels: KernelCount, as_json: bool) -> None:
    for _ in range(2):
        work()
    counts = count(work, kernels)
    print_result(counts, "\n".join(f"{key:26} {value:,.6g}" for key, value in counts.items()), as_json)


@click.command("benchmarks.counts")
@click.argument("job")
@click.option("--block", is_flag=True, help="Count its last block, forward and backward for one row.")
@override_option
@json_option
def command(job, block, overrides, as_json):
    """Count the kernels and Python calls of one step of JOB."""
    kernels = KernelCount()
    with patch.object(Compiled, "__call__", kernels.fused):
        if block:
            print_counts(pass_of_block(load_job(job, overrides)), kernels, as_json)
            return
        with started_world() as world:
            prepared = prepare_run(world, load_job_on(world, job, overrides))
            trainer = Trainer(world, bind_accelerator(world), prepared.job, prepared.plan)
            trainer.initialise()
            print_counts(partial(trainer.step, prepared.training), kernels, as_json)


if __name__ == "__main__":
    main(command)
