"""The files that one rank writes in addition to the parts: tables of rectangles and blocks, the index for h5py,
the manifest."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from hpctrain.checkpoint.format import (
    ABOUT,
    BLOCKS,
    INDEX,
    MANIFEST,
    RECTANGLE,
    RECTANGLES,
    Manifest,
    Part,
    PartStream,
    SmallFile,
    Tensor,
    part_name,
    seal,
    stream_name,
    write_synced,
)


def make_index(tensors: Sequence[Tensor], sources: Sequence[tuple[str, str, int]], rectangles: np.ndarray) -> bytes:
    """Return the bytes of an index file.

    `sources` are the streams: file, dataset, number of elements. `rectangles` are sorted by tensor.
    """
    parents = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    parents.set_create_intermediate_group(True)
    bounds = np.searchsorted(rectangles["tensor"], np.arange(len(tensors) + 1))
    flat = [(file.encode(), name.encode(), h5py.h5s.create_simple((count,))) for file, name, count in sources]
    with h5py.File("index", "w", driver="core", backing_store=False, libver="latest") as index:
        for number, tensor in enumerate(tensors):
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_obj_track_times(False)
            properties.set_fill_value(np.array(np.nan, "<f4"))
            space = h5py.h5s.create_simple(tensor.shape)
            for rectangle in rectangles[bounds[number] : bounds[number + 1]].tolist():
                _, stream, (top, bottom), (left, right), start = rectangle
                file, name, source = flat[stream]
                num_dims, counts = len(tensor.shape), (bottom - top, right - left)
                space.select_hyperslab((top, left)[:num_dims], counts[:num_dims])
                source.select_hyperslab((start,), (math.prod(counts),))
                properties.set_virtual(space, file, name, source)
            space.select_all()
            h5py.h5d.create(index.id, tensor.name.encode(), h5py.h5t.IEEE_F32LE, space, properties, lcpl=parents)
        index.flush()
        return index.id.get_file_image()


class WrittenStream(NamedTuple):
    """A stream as its rank has written it."""

    part: int
    offset: int
    blocks: np.ndarray
    described: Part | None
    """The part that this stream is in, reported by the first rank of the part; None on its other ranks."""


@dataclass
class Contents:
    """The parts of a description that are the same in every checkpoint of a run."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all tensors by name; the name begins with the kind, such as `model/norm.weight`."""
    rectangles_by_rank: Sequence[np.ndarray]
    """Rectangles of each rank, in order of ranks. Tensor numbers index `shapes`; stream numbers are not set yet."""
    elements: Sequence[int]
    """Number of elements in each rank's stream; 0: the rank writes none."""
    about: Mapping[str, str]

    @property
    def writers(self) -> list[int]:
        """The ranks that have a stream, in order of streams."""
        return [rank for rank, count in enumerate(self.elements) if count]

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(Tensor(name=name, shape=shape) for name, shape in self.shapes.items())

    @cached_property
    def rectangles(self) -> np.ndarray:
        """All rectangles, sorted by tensor and then by place."""
        parts = [self.rectangles_by_rank[rank].copy() for rank in self.writers]
        for number, part in enumerate(parts):
            part["stream"] = number
        rectangles = np.concatenate(parts) if parts else np.zeros(0, RECTANGLE)
        return rectangles[np.lexsort((rectangles["columns"][:, 0], rectangles["rows"][:, 0], rectangles["tensor"]))]

    def index(self, parts: Sequence[int]) -> bytes:
        """Return the bytes of the index, which are made once for each way to cut streams into parts; `parts` are the
        parts of the streams."""
        key = tuple(parts)
        if key not in self._indexes:
            sources = [
                (part_name(part), stream_name(rank), self.elements[rank])
                for rank, part in zip(self.writers, parts, strict=True)
            ]
            self._indexes[key] = make_index(self.tensors, sources, self.rectangles)
        return self._indexes[key]

    _indexes: dict[tuple[int, ...], bytes] = field(default_factory=dict)


def make_tables(
    contents: Contents,
    written: Sequence[WrittenStream | None],
    step: int,
    validation_loss: float | None = None,
    texts: Mapping[str, str] | None = None,
) -> dict[str, bytes]:
    """Return all files of a checkpoint but its parts, by name, the manifest last.

    `written` is in order of ranks; `texts` are those of this checkpoint alone.
    """
    about = {**contents.about, **(texts or {})}
    streams, begin = [], 0
    of_writers = [each for each in written if each is not None]
    for rank, each in zip(contents.writers, of_writers, strict=True):
        elements, name = contents.elements[rank], stream_name(rank)
        streams.append(
            PartStream(part=each.part, dataset=name, elements=elements, offset=each.offset, first_block=begin)
        )
        begin += len(each.blocks)
    blocks = np.concatenate([each.blocks for each in of_writers])
    data = {
        RECTANGLES: contents.rectangles.tobytes(),
        BLOCKS: blocks.tobytes(),
        INDEX: contents.index([each.part for each in of_writers]),
        **{name: text.encode() for key, name in ABOUT.items() if (text := about.get(key))},
    }
    files = {name: SmallFile(bytes=len(each), sha256=hashlib.sha256(each).hexdigest()) for name, each in data.items()}
    manifest = Manifest(
        step=step,
        data=about.get("data", ""),
        validation_loss=validation_loss,
        files=files,
        tensors=contents.tensors,
        parts=tuple(each.described for each in of_writers if each.described),
        streams=tuple(streams),
    )
    return data | {MANIFEST: seal(manifest.model_dump())}


def write_tables(folder: Path, tables: Mapping[str, bytes]) -> None:
    """Write the files of a checkpoint that are no parts, and sync them. Raises OSError."""
    for name, data in tables.items():
        write_synced(folder / name, data)
