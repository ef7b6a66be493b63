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
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from hpctrain.checkpoint.format import BLOCK, BLOCK_BYTES, Part, stream_name

LARGE_BYTES, LARGE_ALIGNMENT, ALIGNMENT = 16 << 20, 1 << 20, 4096
"""Large streams begin at a multiple of the stripe size of parallel file systems, others at one of a page."""
AT_ONCE_BYTES = 8 << 20
SYNC_BYTES = 64 << 20
"""A thread syncs after each so many written bytes, so that little is left for the sync at the end."""


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
    streams: dict[int, Extent]
    """The extent of each rank's stream, by rank."""
    writes: tuple[tuple[int, bytes], ...]
    """Offsets and bytes that HDF5 needs outside of streams."""
    rest_crc32: int

    def describe(self, file: str) -> Part:
        return Part(file=file, bytes=self.num_bytes, rest_crc32=self.rest_crc32)


def lay_out(elements: dict[int, int]) -> PartLayout:
    """Return the layout of a part with a flat fp32 array for each rank, by its number of elements."""
    streams = {}
    large = any(4 * count >= LARGE_BYTES for count in elements.values())
    interval = LARGE_ALIGNMENT if large else ALIGNMENT
    aligned = {"alignment_threshold": ALIGNMENT, "alignment_interval": interval}
    with SparseFile() as file:
        with h5py.File(file, "w", libver="latest", **aligned) as part:  # pyright: ignore[reportArgumentType] - numbers
            for rank, count in elements.items():
                streams[rank] = _allocate(part, stream_name(rank), count)
        num_bytes = file.num_bytes
        gaps_here = gaps(list(streams.values()), num_bytes)
        rest = [(offset, os.pread(file.fileno(), size, offset)) for offset, size in gaps_here]
    crc32 = 0
    for _, data in rest:
        crc32 = zlib.crc32(data, crc32)
    return PartLayout(num_bytes, streams, tuple(rest), crc32)


def _allocate(part: h5py.File, name: str, count: int) -> Extent:
    """Allocate an array of a part; return where it will be."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_obj_track_times(False)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    space = h5py.h5s.create_simple((count,))
    dataset = h5py.h5d.create(part.id, name.encode(), h5py.h5t.IEEE_F32LE, space, properties)
    return Extent(dataset.get_offset(), 4 * count)


def gaps(extents: Sequence[Extent], num_bytes: int) -> Iterator[Extent]:
    """Yield the extents of a file that lie in none of the given ones, in order."""
    at = 0
    for offset, size in sorted(extents):
        if offset > at:
            yield Extent(at, offset - at)
        at = offset + size
    if num_bytes > at:
        yield Extent(at, num_bytes - at)


def decompress(data: bytes | bytearray, block_bytes: int) -> bytes | bytearray:
    """Return a decompressed block of `block_bytes`, as older versions packed it. Raises zlib.error, ValueError.

    Their bytes are sorted by place in a number and deflated, or stored as they were.
    """
    if len(data) == block_bytes:
        return data
    result = np.frombuffer(zlib.decompress(data, bufsize=block_bytes), np.uint8)
    return result.reshape(4, -1).T.tobytes()


def write_stream(path: Path, layout: PartLayout, rank: int, buffer: np.ndarray) -> np.ndarray:
    """Write a rank's array, uint8, into a part, and sync. The first rank of the part also writes what HDF5 needs.

    Returns the CRC-32s of the blocks. Raises OSError. Other ranks may write the same part at the same time.
    """
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        if rank == min(layout.streams):
            write_needed(handle, layout)
        blocks = _write_array(handle, layout.streams[rank], buffer)
        os.fsync(handle)
    finally:
        os.close(handle)
    return blocks


def write_needed(handle: int, layout: PartLayout) -> None:
    """Write what HDF5 needs into a part, and give it its size. Raises OSError."""
    for offset, data in layout.writes:
        _write(handle, memoryview(data), offset)
    os.ftruncate(handle, layout.num_bytes)


def _write_array(handle: int, extent: Extent, buffer: np.ndarray) -> np.ndarray:
    """Write an array while one thread computes the CRC-32s and another syncs written bytes to the disk."""
    crcs, synced, since = [], [], 0
    with ThreadPoolExecutor(1, "checksums") as checker, ThreadPoolExecutor(1, "sync") as sync:
        for start in range(0, extent.num_bytes, AT_ONCE_BYTES):
            some = buffer.data[start : min(start + AT_ONCE_BYTES, extent.num_bytes)]
            crcs.append(checker.submit(checksums, some))
            _write(handle, some, extent.offset + start)
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


def _write(handle: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written
