"""Checkpoints that are large, or of many ranks: what it takes to open one and read a tensor, and to write its tables.

python -m benchmarks.checkpoint_scale tensor      a checkpoint of 2 GB by 8 ranks: the bytes and time of one tensor
python -m benchmarks.checkpoint_scale tables      one of 70 G parameters by 4,096 ranks: its tables and its index

The second has parts of the right size that are sparse: all zeros, which take no room on the disk.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import click
import h5py
import numpy as np

from hpctrain.checkpoint.contents import Contents, WrittenStream, make_tables, write_tables
from hpctrain.checkpoint.folder import commit, latest_checkpoint, partial_folder
from hpctrain.checkpoint.format import BLOCK, BLOCK_BYTES, RECTANGLE, num_blocks, part_name, tensor_shapes
from hpctrain.checkpoint.index import Index
from hpctrain.checkpoint.parts import lay_out, write_stream
from hpctrain.checkpoint.resume import verify_checkpoint
from hpctrain.config.job import Job, load_job
from hpctrain.plan.file import dump_plan
from hpctrain.plan.uniform import resolve_plan
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.parameters import all_parameters, whole_rows

RANKS_OF_A_NODE = 8
TENSOR_JOB = ("model.num_layers=28", "model.hidden_size=1024", "model.num_heads=16", "model.num_kv_heads=16")
TABLES_JOB = ("model.preset=llama-70b",)


def make_contents(job: Job, ranks: int) -> Contents:
    """Cut the flat array of all parameters, and of each moment, evenly among the ranks, as ZeRO does."""
    parameters = all_parameters(job.model)
    sizes = [int(np.prod(each.shape)) for each in parameters.values()]
    begins = np.concatenate([[0], np.cumsum(sizes)])
    edges = np.linspace(0, begins[-1], ranks + 1).astype(np.int64)
    shapes = tensor_shapes(job)
    by_rank, elements = [], []
    for rank in range(ranks):
        own, start, rectangles = Interval(int(edges[rank]), int(edges[rank + 1])), 0, []
        for kind in range(len(shapes) // len(parameters)):
            for number, (parameter, begin) in enumerate(zip(parameters.values(), begins.tolist(), strict=False)):
                taken = own.intersect(Interval(begin, begin + sizes[number]))
                if not taken.size:
                    continue
                box = tuple(Interval(0, size) for size in parameter.shape)
                for rows, columns, at in whole_rows(parameter, box, taken.shift(-begin)):
                    tensor = kind * len(parameters) + number
                    rectangles.append((tensor, 0, tuple(rows), (columns.start, columns.stop), start))
                    start += at.size
        by_rank.append(np.array(rectangles, RECTANGLE))
        elements.append(start)
    plan = resolve_plan(job.model_copy(update={"plan": load_job("tiny", ["plan.data=1"]).plan}), 1).plan
    about = {"job": job.model_dump_json(), "plan": dump_plan(plan), "data": "zeros", "tokenizer": "{}"}
    return Contents(shapes, by_rank, elements, about)


def one_tensor(folder: Path, ranks: int = 8) -> dict:
    """Write a checkpoint of random numbers, and read one tensor of it in a process of its own."""
    job = load_job("tiny", [*TENSOR_JOB, "model.vocab_size=1024", "train.dtype=fp32"])
    contents = make_contents(job, ranks)
    partial, written = partial_folder(folder, 1), []
    partial.mkdir(parents=True)
    for rank, count in enumerate(contents.elements):
        layout = lay_out({rank: count})
        buffer = np.random.default_rng(rank).random(-(-count // 32768) * 32768, np.float32).view(np.uint8)
        blocks = write_stream(partial / part_name(rank), layout, rank, buffer)
        written.append(WrittenStream(rank, layout.streams[rank].offset, blocks, layout.describe(part_name(rank))))
    write_tables(partial, make_tables(contents, written, 1))
    commit(partial, job.checkpoint)
    path = latest_checkpoint(folder)
    assert path is not None
    verify_checkpoint(path)
    result: dict = {"state_bytes": 4 * sum(contents.elements), "ranks": ranks, "files": len(list(path.iterdir()))}
    for name in ("blocks.7.attention.q.weight", "blocks.7.ffn.down.weight"):
        result[name] = _in_a_process("read", path, name)
    return result


def _in_a_process(what: str, path: Path, name: str) -> dict:
    command = [sys.executable, "-m", "benchmarks.checkpoint_scale", what, path, name]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def read_tensor(path: Path, name: str) -> dict:
    """Read a tensor whose bytes are not in memory, by hpctrain and by h5py; return times and bytes."""
    for file in path.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    since = time.perf_counter()
    index = Index(path)
    opened = time.perf_counter()
    values = index.whole("model", name)
    read = time.perf_counter()
    index.close()
    with h5py.File(path / "index.h5") as shown:
        dataset = shown["model"][name]  # pyright: ignore[reportIndexIssue] - is a group
        same = np.array_equal(dataset[:], values)  # pyright: ignore[reportIndexIssue] - is a dataset
    shown_seconds = time.perf_counter() - read
    return {
        "tensor_bytes": values.nbytes,
        "bytes_read": index.bytes_read,
        "open_seconds": opened - since,
        "read_seconds": read - opened,
        "h5py_seconds": shown_seconds,
        "same_by_h5py": bool(same),
    }


def tables(folder: Path, ranks: int, by_node: bool) -> dict:
    """Write all of a checkpoint of many ranks as rank 0 does, over sparse parts; open it; return times and memory."""
    job = load_job("tiny", [*TABLES_JOB, "train.dtype=fp32"])
    contents = make_contents(job, ranks)
    partial, written = partial_folder(folder, 1), []
    partial.mkdir(parents=True)
    zeros, group = zlib.crc32(bytes(BLOCK_BYTES)), RANKS_OF_A_NODE if by_node else 1
    for part, first in enumerate(range(0, ranks, group)):
        members = {rank: contents.elements[rank] for rank in range(first, first + group)}
        layout = lay_out(members)
        with (partial / part_name(part)).open("wb") as file:
            for offset, data in layout.writes:
                file.seek(offset)
                file.write(data)
            file.truncate(layout.num_bytes)
        for rank, count in members.items():
            blocks = np.full(num_blocks(count), zeros, BLOCK)
            blocks[-1] = zlib.crc32(bytes(4 * count - (len(blocks) - 1) * BLOCK_BYTES))
            described = layout.describe(part_name(part)) if rank == first else None
            written.append(WrittenStream(part, layout.streams[rank].offset, blocks, described))
    before, since = _peak_bytes(), time.perf_counter()
    write_tables(partial, make_tables(contents, written, 1))
    write_seconds = time.perf_counter() - since
    since = time.perf_counter()
    write_tables(partial, make_tables(contents, written, 1))
    again_seconds, peak = time.perf_counter() - since, _peak_bytes()
    files = {file.name: file.stat().st_size for file in partial.iterdir() if not file.name.startswith("part")}
    commit(partial, job.checkpoint)
    path = latest_checkpoint(folder)
    assert path is not None
    return {
        "ranks": ranks,
        "parts": -(-ranks // group),
        "parameters": sum(contents.elements) // 3,
        "rectangles": len(contents.rectangles),
        "write_tables_seconds": write_seconds,
        "write_tables_again_seconds": again_seconds,
        "peak_memory_bytes": peak,
        "of_which_before_bytes": before,
        "files": files,
        "read": _in_a_process("read", path, "blocks.7.attention.q.weight"),
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@click.group()
def command():
    """Measure checkpoints that are large, or of many ranks."""


@command.command("tensor")
@click.option("--folder", type=click.Path(path_type=Path), default=None, help="Where there are 2 GB.")
def tensor_command(folder):
    """Write 2 GB by 8 ranks, and read one tensor."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-scale-", dir=folder) as where:
        print(json.dumps(one_tensor(Path(where)), indent=1))


@command.command("tables")
@click.option("--ranks", default=4096, show_default=True)
@click.option("--by-node", is_flag=True, help="A part for each 8 ranks.")
def tables_command(ranks, by_node):
    """Write tables, index and manifest of a checkpoint of many ranks, and open it."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-scale-") as where:
        print(json.dumps(tables(Path(where), ranks, by_node), indent=1))


@command.command("read")
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("name")
def read_command(path, name):
    """Read one tensor of a checkpoint that is there."""
    print(json.dumps(read_tensor(path, name)))


if __name__ == "__main__":
    command()
