"""The checkpoint on disk, and its manifest.

    RUN/checkpoints/
        latest                       the name of the newest complete checkpoint, and the SHA-256 of its manifest
        step-00000100/
            manifest.json            all that follows, with sizes and checksums; its first line has its own SHA-256
            part-00000.h5 ...        what each writer owns, as flat arrays: one for each rank
            rectangles.bin           which rectangle of which tensor is where in these arrays
            blocks.bin               the CRC-32 of every block of these arrays
            index.h5                 every tensor whole, as HDF5 virtual datasets over the parts, for h5py
            job.json, plan.toml, cluster.toml, tokenizer.json, huggingface.json

hpctrain reads by manifest, rectangles and blocks, and never asks HDF5 to parse a file that may be damaged.
`h5py.File("index.h5")["model/blocks.3.attention.q.weight"][:]` is the weight as the unsplit model has it, whatever
layout wrote it; `optimizer/exp_avg/...` and others are the moments that the optimizer's rule names, all of them fp32
and exact.
A folder has its final name only if it is complete and synced.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, ValidationError

from hpctrain.config.errors import CheckpointError, DamagedCheckpointError
from hpctrain.config.job import Job
from hpctrain.config.paths import MOST_READ_BYTES, exists, is_file, read_bytes, refused_as
from hpctrain.config.tables import Several, Table, explain
from hpctrain.sharding.parameters import all_parameters

FORMAT = "hpctrain-checkpoint"
VERSION = 2
MANIFEST, RECTANGLES, BLOCKS, INDEX = "manifest.json", "rectangles.bin", "blocks.bin", "index.h5"
KEPT = "huggingface"
"""The files and ids of tokens of an imported Hugging Face model, which an export writes again."""
ABOUT = {
    "job": "job.json",
    "plan": "plan.toml",
    "cluster": "cluster.toml",
    "tokenizer": "tokenizer.json",
    "loss_scale": "loss-scale.json",
    "asked_plan": "asked-plan.txt",
    KEPT: "huggingface.json",
}
"""The files that say what wrote a checkpoint; those without contents are left out."""
PARTIAL = ".partial"
MODEL, OPTIMIZER = "model", "optimizer/"
"""The kind of weights, and how the kinds of moments begin."""
BLOCK_BYTES = 128 << 10
"""Bytes under one CRC-32: few, since a reader reads whole blocks; 70 G parameters have 26 MB of CRC-32s."""
STEP_FOLDER = re.compile(r"step-(\d{8,})")
FIRST_LINE = '{{"sha256": "{}",\n'
SHA256_DIGITS = 64

RECTANGLE = np.dtype(
    [("tensor", "<u4"), ("stream", "<u4"), ("rows", "<u4", (2,)), ("columns", "<u4", (2,)), ("start", "<u8")]
)
"""A rectangle of a tensor, half-open, flat and row after row from element `start` of a stream."""
BLOCK = np.dtype("<u4")
"""The CRC-32 of a block."""
STORED_BLOCK = np.dtype([("offset", "<u8"), ("bytes", "<u4"), ("crc32", "<u4")])
"""A compressed block of an older version: where it is in its part, and the CRC-32 of what is stored."""

Whole = Annotated[int, Field(ge=0)]
Crc32 = Annotated[int, Field(ge=0, lt=2**32)]


class SmallFile(Table):
    """A file of the checkpoint that is read whole."""

    bytes: Whole
    sha256: str


class Part(Table):
    """The file of one writer: a rank or a node."""

    file: Annotated[str, Field(pattern=r"^part-\d{5,}\.h5$")]
    bytes: Whole
    rest_crc32: Crc32
    """Of everything in the file that is not in a stream: what HDF5 needs."""


class PartStream(Table):
    """The dataset of a part that one rank wrote: fp32, one dim."""

    part: Whole
    dataset: str
    elements: Whole
    offset: Whole
    """Where it begins in the part, in bytes; of a compressed one see its blocks."""
    first_block: Whole


class Tensor(Table):
    """A parameter or a moment of the unsplit model."""

    name: str
    """With its kind before it, such as `model/norm.weight`."""
    shape: Annotated[Several[Annotated[int, Field(ge=1, lt=2**32)]], Field(min_length=1, max_length=2)]


class Manifest(Table):
    """Everything that there is in a checkpoint."""

    format: Literal["hpctrain-checkpoint"] = FORMAT
    version: Literal[2] = VERSION
    step: Whole
    data: str
    """The identity of the token file."""
    validation_loss: float | None = None
    block_bytes: Annotated[int, Field(ge=4, le=1 << 30, multiple_of=4)] = BLOCK_BYTES
    compression: Literal["gzip"] | None = None
    """Of blocks; older versions could compress them."""
    files: dict[str, SmallFile]
    tensors: Several[Tensor]
    parts: Several[Part]
    streams: Several[PartStream]

    @property
    def num_bytes(self) -> int:
        """All files together, but for the manifest."""
        return sum(each.bytes for each in (*self.parts, *self.files.values()))


def tensor_shapes(job: Job) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a checkpoint, by their names with the kind before them: all weights, then all
    of each moment that the optimizer's rule names."""
    parameters, moments = all_parameters(job.model), job.train.rule.moments
    names = dict.fromkeys(name for p in parameters.values() for name in moments(p.shape))
    shapes = {f"{MODEL}/{name}": p.shape for name, p in parameters.items()}
    return shapes | {
        f"{OPTIMIZER}{moment}/{name}": p.shape
        for moment in names
        for name, p in parameters.items()
        if moment in moments(p.shape)
    }


def seal(contents: dict) -> bytes:
    """Return the bytes of a manifest file: JSON, whose first line has the SHA-256 of all other lines."""
    body = f'"contents": {json.dumps(contents, sort_keys=True, indent=0)}\n}}\n'.encode()
    return FIRST_LINE.format(hashlib.sha256(body).hexdigest()).encode() + body


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """Return the manifest of a checkpoint and the SHA-256 of its bytes.

    Raises DamagedCheckpointError where a byte is not as it was written, CheckpointError for another version.
    """
    path = folder / MANIFEST
    if not exists(path) and is_file(folder / INDEX):
        raise DamagedCheckpointError(
            f"{path}: is missing; checkpoints of version 1 had none, and are not read any more"
        )
    data = read_small(path)
    length = len(FIRST_LINE.format("0" * SHA256_DIGITS))
    digest = hashlib.sha256(data[length:]).hexdigest()
    if data[:length] != FIRST_LINE.format(digest).encode():
        raise DamagedCheckpointError(f"{path}: is damaged: its SHA-256 is not the one in its first line")
    try:
        contents = json.loads(data)["contents"]
        if contents.get("version") != VERSION or contents.get("format") != FORMAT:
            raise CheckpointError(
                f"{path}: format {contents.get('format')!r} version {contents.get('version')}; this hpctrain reads"
                f" {FORMAT!r} version {VERSION}"
            )
        manifest = Manifest.model_validate(contents)
    except ValidationError as error:
        raise DamagedCheckpointError(f"{path}: {explain(error, Manifest)[0][1]}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path}: is not a manifest: {error!r:.100}") from None
    return manifest, hashlib.sha256(data).hexdigest()


def read_small(path: Path, most_bytes: int = MOST_READ_BYTES) -> bytes:
    """Return a file's bytes. Raises DamagedCheckpointError, also where it is no regular file or has more bytes."""
    with refused_as(DamagedCheckpointError, f"{path}: cannot be read"):
        try:
            return read_bytes(path, most_bytes)
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{path}: is missing") from None


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and sync it. Raises OSError."""
    with path.open("wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def part_name(number: int) -> str:
    return f"part-{number:05d}.h5"


def stream_name(rank: int) -> str:
    return f"rank-{rank:05d}"


def num_blocks(elements: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Return how many blocks a stream of so many fp32 elements has."""
    return -(-4 * elements // block_bytes)
