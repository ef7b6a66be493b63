"""Small checkpoints that tests write without ranks, and what can happen to them."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hpctrain.checkpoint.contents import Contents, WrittenStream, make_tables, write_tables
from hpctrain.checkpoint.folder import commit, partial_folder
from hpctrain.checkpoint.format import MANIFEST, RECTANGLE, part_name, seal, tensor_shapes
from hpctrain.checkpoint.parts import lay_out, write_stream
from hpctrain.config.job import Checkpoint, load_job
from hpctrain.plan.file import dump_plan
from hpctrain.plan.uniform import resolve_plan

SMALL = ("model.vocab_size=61", "model.num_layers=2", "model.hidden_size=48", "model.num_heads=4")
KINDS = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")

FORGED = {
    "negative step": lambda m: m.update(step=-5),
    "no parts": lambda m: m.update(parts=[]),
    "no tensors": lambda m: m.update(tensors=[]),
    "a tensor less": lambda m: m["tensors"].pop(),
    "another shape": lambda m: m["tensors"][0].update(shape=[3, 3]),
    "a part outside": lambda m: m["parts"][0].update(file="../part-00000.h5"),
    "a part that is not there": lambda m: m["parts"].append({"file": "part-00002.h5", "bytes": 5, "rest_crc32": 0}),
    "a long stream": lambda m: m["streams"][0].update(elements=10**12),
    "a stream elsewhere": lambda m: m["streams"][0].update(offset=10**15),
    "a stream of no part": lambda m: m["streams"][0].update(part=9),
    "no tables": lambda m: m.update(files={}),
    "a word": lambda m: m.update(step="five"),
}
"""Changes to the contents of a manifest, which then gets a right checksum again."""


def forge(checkpoint: Path, change: Callable[[dict], object]) -> None:
    """Change the contents of a manifest and give it a right checksum again."""
    contents = json.loads((checkpoint / MANIFEST).read_bytes())["contents"]
    change(contents)
    (checkpoint / MANIFEST).write_bytes(seal(contents))


def forge_file(checkpoint: Path, name: str, data: bytes) -> None:
    """Write another small file into a checkpoint, with right checksums, also in `latest`."""
    (checkpoint / name).write_bytes(data)
    about = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    forge(checkpoint, lambda manifest: manifest["files"].update({name: about}))
    digest = hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
    (checkpoint.parent / "latest").write_text(f"{checkpoint.name} {digest}\n")


def small_job(*changes: str):
    return load_job("tiny", [*SMALL, "train.dtype=fp32", "plan.data=1", *changes])


def write_checkpoint(
    run: Path,
    step: int = 1,
    writers: int = 3,
    parts: int = 2,
    seed: int = 0,
    validation_loss: float | None = None,
    keep: Checkpoint | None = None,
) -> dict[str, np.ndarray]:
    """Write a checkpoint whose tensors are cut among some writers, in bands of rows and columns; return its tensors."""
    job = small_job()
    rng = np.random.default_rng(seed)
    shapes = tensor_shapes(job)
    tensors = {name: rng.standard_normal(shape).astype("<f4").round(3) for name, shape in shapes.items()}
    rectangles, values = [[] for _ in range(writers)], [[] for _ in range(writers)]
    for number, tensor in enumerate(tensors.values()):
        dim = number % tensor.ndim  # by rows, or by columns
        edges = np.linspace(0, tensor.shape[dim], writers + 1).astype(int)
        for writer in range(writers):
            band = [(0, size) for size in (*tensor.shape, 1)[:2]]
            band[dim] = (int(edges[writer]), int(edges[writer + 1]))
            if band[dim][0] < band[dim][1]:
                start = sum(map(len, values[writer]))
                rectangles[writer].append((number, 0, *band, start))
                values[writer].append(tensor[tuple(slice(*each) for each in band[: tensor.ndim])].reshape(-1))
    partial = partial_folder(run, step)
    partial.mkdir(parents=True)
    buffers = []
    for each in values:
        data = np.concatenate(each).view(np.uint8)
        buffers.append(np.concatenate([data, np.zeros(-len(data) % (128 << 10), np.uint8)]))
    elements = [sum(map(len, each)) for each in values]
    written = []
    for part in range(parts):
        members = {writer: elements[writer] for writer in range(writers) if writer * parts // writers == part}
        layout = lay_out(members)
        for writer in members:
            blocks = write_stream(partial / part_name(part), layout, writer, buffers[writer])
            described = layout.describe(part_name(part)) if writer == min(members) else None
            written.append(WrittenStream(part, layout.streams[writer].offset, blocks, described))
    plan = resolve_plan(job, 1).plan
    about = {"job": job.model_dump_json(), "plan": dump_plan(plan), "data": "61 tokens", "tokenizer": json.dumps({})}
    contents = Contents(shapes, [np.array(each, RECTANGLE) for each in rectangles], elements, about)
    write_tables(partial, make_tables(contents, written, step, validation_loss))
    commit(partial, keep or job.checkpoint)
    return tensors
