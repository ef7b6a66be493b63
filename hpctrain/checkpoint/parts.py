"""The part files: HDF5 around flat arrays, one for each rank that writes into a part.

HDF5 lays out the file in memory, without the arrays (`lay_out`). Then every rank writes its own array to its place with
plain writes: several ranks into one file at once, nothing is copied, and a full disk is an OSError of that write.
"""

import io
import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from hpctrain.checkpoint.format import BLOCK, BLOCK_BYTES, STORED_BLOCK, Part, stream_name

LARGE_BYTES, LARGE_ALIGNMENT, ALIGNMENT = 16 << 20, 1 << 20, 4096
"""Where a stream is large it begins at a multiple of what parallel file systems stripe by; others at one of a page."""
AT_ONCE_BYTES = 8 << 20
SYNC_BYTES = 64 << 20
"""The disk begins with what is written when there is so much of it, rather than at the end."""
COMPRESSION_LEVEL = 1
BOTH_FILTERS = 0b11
"""Of a chunk: that neither of its two filters was applied."""


class SparseFile(io.RawIOBase):
    """A file in memory that keeps only what is written to it; all else is zero."""

    def __init__(self):
        self.writes: list[tuple[int, bytes]] = []
        """Offsets and bytes, the last one counts."""
        self.num_bytes, self._at, self._drops = 0, 0, False

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Drop what is written in this block, but keep its space in the file."""
        self._drops = True
        yield
        self._drops = False

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.num_bytes}[whence]
        return self._at

    def truncate(self, size: int | None = None) -> int:
        self.num_bytes = self._at if size is None else size
        return self.num_bytes

    def write(self, data) -> int:
        view = memoryview(data)
        if not (self._drops and view.nbytes and view[0] == 0):
            self.writes.append((self._at, bytes(view)))
        self._at += view.nbytes
        self.num_bytes = max(self.num_bytes, self._at)
        return view.nbytes

    def readinto(self, buffer) -> int:
        view = memoryview(buffer).cast("B")
        view[:] = self.bytes_at(self._at, view.nbytes)
        self._at += view.nbytes
        return view.nbytes

    def bytes_at(self, start: int, count: int) -> bytes:
        result = bytearray(count)
        for offset, data in self.writes:
            low, high = max(offset, start), min(offset + len(data), start + count)
            if low < high:
                result[low - start : high - start] = data[low - offset : high - offset]
        return bytes(result)


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
    """What HDF5 needs."""
    rest_crc32: int
    is_compressed: bool = False

    def describe(self, file: str) -> Part:
        return Part(file=file, bytes=self.num_bytes, rest_crc32=self.rest_crc32)


def lay_out(elements: dict[int, int], stored: Sequence[int] | None = None) -> PartLayout:
    """Return the layout of a part with a flat fp32 array for each rank, by its number of elements.

    `stored` are the bytes of the compressed blocks of the only rank; a block as long as it was is stored as it is.
    """
    file, streams = SparseFile(), {}
    large = any(4 * count >= LARGE_BYTES for count in elements.values())
    interval = 1 if stored is not None else LARGE_ALIGNMENT if large else ALIGNMENT
    aligned = {"alignment_threshold": ALIGNMENT, "alignment_interval": interval}
    with h5py.File(file, "w", libver="latest", **aligned) as part:  # pyright: ignore[reportArgumentType] - are numbers
        for rank, count in elements.items():
            name, space = stream_name(rank).encode(), h5py.h5s.create_simple((count,))
            if stored is not None:  # a chunk may be longer than what is there
                space = h5py.h5s.create_simple((count,), (h5py.h5s.UNLIMITED,))
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_obj_track_times(False)
            properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            if stored is None:
                properties.set_layout(h5py.h5d.CONTIGUOUS)
                properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
                dataset = h5py.h5d.create(part.id, name, h5py.h5t.IEEE_F32LE, space, properties)
                streams[rank] = (Extent(dataset.get_offset(), 4 * count),)
            else:
                properties.set_chunk((BLOCK_BYTES // 4,))
                properties.set_shuffle()
                properties.set_deflate(COMPRESSION_LEVEL)
                dataset = h5py.h5d.create(part.id, name, h5py.h5t.IEEE_F32LE, space, properties)
                streams[rank] = _chunks(file, dataset, stored)
    taken = [extent for extents in streams.values() for extent in extents]
    crc32 = 0
    for gap in gaps(taken, file.num_bytes):
        crc32 = zlib.crc32(file.bytes_at(*gap), crc32)
    return PartLayout(file.num_bytes, streams, tuple(file.writes), crc32, stored is not None)


def _chunks(file: SparseFile, dataset: h5py.h5d.DatasetID, stored: Sequence[int]) -> tuple[Extent, ...]:
    """Allocate the compressed chunks; return where each will be."""
    zeros = bytes(BLOCK_BYTES)
    for number, num_bytes in enumerate(stored):
        mask = BOTH_FILTERS if num_bytes == BLOCK_BYTES else 0
        with file.dropping():
            dataset.write_direct_chunk((number * BLOCK_BYTES // 4,), zeros[:num_bytes], filter_mask=mask)
    at = {}
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
