"""The part files: HDF5 around flat arrays, one for each rank that writes into a part.

HDF5 lays out the file in memory, without the arrays (`lay_out`). Then every rank writes its own array to its place with
plain writes: several ranks into one file at once, nothing is copied, and a full disk is an OSError of that write.
"""

import io
import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from hpctrain.checkpoint.format import BLOCK, BLOCK_BYTES, STORED_BLOCK, Part, stream_name

LARGE_BYTES, LARGE_ALIGNMENT, ALIGNMENT = 16 << 20, 1 << 20, 4096
"""Large streams begin at a multiple of the stripe size of parallel file systems, others at one of a page."""
AT_ONCE_BYTES = 8 << 20
SYNC_BYTES = 64 << 20
"""After so many bytes a thread syncs what is written, so that the sync at the end has little to do."""
COMPRESSION_LEVEL = 1
BOTH_FILTERS = 0b11
"""The filter mask of a chunk that neither shuffle nor deflate was applied to."""


class SparseFile(io.FileIO):
    """A file in memory, in which zeros take no space."""

    def __init__(self):
        super().__init__(os.memfd_create("checkpoint part"), "r+")

    def write(self, data) -> int:
        view = memoryview(data)
        if view.nbytes and not bytes(view).strip(b"\0"):
            end = self.seek(view.nbytes, os.SEEK_CUR)
            self.truncate(max(end, self.num_bytes))
            return view.nbytes
        return super().write(view)

    @property
    def num_bytes(self) -> int:
        return os.fstat(self.fileno()).st_size


class Extent(NamedTuple):
    """Consecutive bytes of a file."""

    offset: int
    num_bytes: int


@dataclass(frozen=True)
class PartLayout:
    """The places of everything in a part that several ranks write."""

    num_bytes: int
    streams: dict[int, tuple[Extent, ...]]
    """By rank: one extent, or one for each compressed block."""
    writes: tuple[tuple[int, bytes], ...]
    """What HDF5 needs, all that is in no stream: offsets and bytes."""
    rest_crc32: int
    is_compressed: bool = False

    def describe(self, file: str) -> Part:
        return Part(file=file, bytes=self.num_bytes, rest_crc32=self.rest_crc32)


def lay_out(elements: dict[int, int], stored: Sequence[int] | None = None) -> PartLayout:
    """Return the layout of a part with a flat fp32 array for each rank, by its number of elements.

    `stored` are the bytes of the compressed blocks of the only rank; a block as long as it was is stored as it is.
    """
    streams = {}
    large = any(4 * count >= LARGE_BYTES for count in elements.values())
    interval = 1 if stored is not None else LARGE_ALIGNMENT if large else ALIGNMENT
    aligned = {"alignment_threshold": ALIGNMENT, "alignment_interval": interval}
    with SparseFile() as file:
        with h5py.File(file, "w", libver="latest", **aligned) as part:  # pyright: ignore[reportArgumentType] - numbers
            for rank, count in elements.items():
                streams[rank] = _allocate(part, stream_name(rank), count, stored)
        num_bytes = file.num_bytes
        taken = [extent for extents in streams.values() for extent in extents]
        rest = [(offset, os.pread(file.fileno(), size, offset)) for offset, size in gaps(taken, num_bytes)]
    crc32 = 0
    for _, data in rest:
        crc32 = zlib.crc32(data, crc32)
    return PartLayout(num_bytes, streams, tuple(rest), crc32, stored is not None)


def _allocate(part: h5py.File, name: str, count: int, stored: Sequence[int] | None) -> tuple[Extent, ...]:
    """Allocate an array of a part, or the compressed chunks of one; return where it will be, or each of them."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_obj_track_times(False)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    create = partial(h5py.h5d.create, part.id, name.encode(), h5py.h5t.IEEE_F32LE)
    if stored is None:
        properties.set_layout(h5py.h5d.CONTIGUOUS)
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        dataset = create(h5py.h5s.create_simple((count,)), properties)
        return (Extent(dataset.get_offset(), 4 * count),)
    properties.set_chunk((BLOCK_BYTES // 4,))
    properties.set_shuffle()
    properties.set_deflate(COMPRESSION_LEVEL)
    # Without a limit, as a chunk may be longer than what is there.
    dataset = create(h5py.h5s.create_simple((count,), (h5py.h5s.UNLIMITED,)), properties)
    zeros, at = bytes(BLOCK_BYTES), {}
    for number, num_bytes in enumerate(stored):
        mask = BOTH_FILTERS if num_bytes == BLOCK_BYTES else 0
        dataset.write_direct_chunk((number * BLOCK_BYTES // 4,), zeros[:num_bytes], filter_mask=mask)
    dataset.chunk_iter(lambda chunk: at.__setitem__(chunk.chunk_offset[0], Extent(chunk.byte_offset, chunk.size)))
    return tuple(at[start] for start in sorted(at))


def gaps(extents: Sequence[Extent], num_bytes: int) -> Iterator[Extent]:
    """Yield what is in none of some extents of a file, in order."""
    at = 0
    for offset, size in sorted(extents):
        if offset > at:
            yield Extent(at, offset - at)
        at = offset + size
    if num_bytes > at:
        yield Extent(at, num_bytes - at)


def compress(buffer: np.ndarray) -> list[int]:
    """Compress each block of uint8 `buffer` in place; return how many bytes of each block are taken now.

    A block that would not become shorter stays as it is.
    """
    stored = []
    for start in range(0, len(buffer), BLOCK_BYTES):
        block = buffer[start : start + BLOCK_BYTES]
        packed = zlib.compress(block.reshape(-1, 4).T.tobytes(), COMPRESSION_LEVEL)
        if len(packed) < BLOCK_BYTES:
            block[: len(packed)] = np.frombuffer(packed, np.uint8)
        stored.append(min(len(packed), BLOCK_BYTES))
    return stored


def decompress(data: bytes | bytearray, block_bytes: int) -> bytes | bytearray:
    """Return a block of `block_bytes` that `compress` has packed. Raises zlib.error, ValueError."""
    if len(data) == block_bytes:
        return data
    result = np.frombuffer(zlib.decompress(data, bufsize=block_bytes), np.uint8)
    return result.reshape(4, -1).T.tobytes()


def write_stream(path: Path, layout: PartLayout, rank: int, buffer: np.ndarray) -> np.ndarray:
    """Write a rank's array, uint8, into a part, what HDF5 needs if the rank is the part's first, and sync.

    Returns the blocks. Raises OSError; the others of the part may write at the same time.
    """
    extents = layout.streams.get(rank, ())
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        if rank == min(layout.streams):
            for offset, data in layout.writes:
                _write(handle, memoryview(data), offset)
            os.ftruncate(handle, layout.num_bytes)
        write = _write_compressed if layout.is_compressed else _write_plain
        blocks = write(handle, extents, buffer)
        os.fsync(handle)
    finally:
        os.close(handle)
    return blocks


def _write_plain(handle: int, extents: Sequence[Extent], buffer: np.ndarray) -> np.ndarray:
    """Write while a thread computes the CRC-32s and another moves what is written on to the disk."""
    crcs, synced, since = [], [], 0
    with ThreadPoolExecutor(1, "checksums") as checker, ThreadPoolExecutor(1, "sync") as sync:
        for offset, num_bytes in extents:
            for start in range(0, num_bytes, AT_ONCE_BYTES):
                some = buffer.data[start : min(start + AT_ONCE_BYTES, num_bytes)]
                crcs.append(checker.submit(checksums, some))
                _write(handle, some, offset + start)
                since += len(some)
                if since >= SYNC_BYTES:
                    synced.append(sync.submit(os.fdatasync, handle))
                    since = 0
        for each in synced:
            each.result()
        return np.array([crc32 for each in crcs for crc32 in each.result()], BLOCK)


def checksums(some: memoryview, block_bytes: int = BLOCK_BYTES) -> list[int]:
    """Return the CRC-32 of each block."""
    return [zlib.crc32(some[at : at + block_bytes]) for at in range(0, len(some), block_bytes)]


def _write_compressed(handle: int, extents: Sequence[Extent], buffer: np.ndarray) -> np.ndarray:
    blocks = np.zeros(len(extents), STORED_BLOCK)
    for number, (offset, num_bytes) in enumerate(extents):
        data = buffer.data[number * BLOCK_BYTES :][:num_bytes]
        blocks[number] = offset, num_bytes, zlib.crc32(data)
        _write(handle, data, offset)
    return blocks


def _write(handle: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written
