"""Reading a checkpoint: any rectangle of any tensor, every byte checked before it is used."""

import hashlib
import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np

from hpctrain.checkpoint.format import (
    ABOUT,
    BLOCK,
    BLOCKS,
    INDEX,
    RECTANGLE,
    RECTANGLES,
    STORED_BLOCK,
    PartStream,
    num_blocks,
    part_name,
    read_manifest,
    read_small,
)
from hpctrain.checkpoint.parts import Extent, checksums, decompress, gaps
from hpctrain.checkpoint.source import Bounds, StateSource
from hpctrain.config.errors import CheckpointError, DamagedCheckpointError, describe_os_error
from hpctrain.config.paths import look_at

AT_ONCE_BYTES = 8 << 20
"""Bytes of blocks that are read together."""
NUM_CHECKERS, MAX_UNCHECKED = 2, 8
"""Threads that compute CRC-32s, and reads whose CRC-32s may be outstanding."""
REMEDY = 'use an older checkpoint: checkpoint.resume = "auto" takes the newest intact one'


class Index(StateSource):
    """An open checkpoint: slices of whole tensors, and what is known about it. Close it, or use `with`.

    Opening it checks the manifest, the tables and the descriptions; a tensor is checked block by block when it is read.
    Raises DamagedCheckpointError, then and later.
    """

    def __init__(self, checkpoint: Path):
        self.path = checkpoint
        self.bytes_read = 0
        """Bytes read from parts so far."""
        self._handles: dict[int, int] = {}
        self.unchecked: list[tuple[int, int, Future]] = []
        """Reads whose blocks are being checked: stream, first block, and the future of the CRC-32s."""
        self.manifest, _ = read_manifest(checkpoint)
        self.about = {
            key: self._file(name).decode() if name in self.manifest.files else "" for key, name in ABOUT.items()
        }
        self.about["data"] = self.manifest.data
        self._blocks = self._table(BLOCKS, STORED_BLOCK if self.manifest.compression else BLOCK)
        tensors = [(tensor.name, tensor.shape) for tensor in self.manifest.tensors]
        super().__init__(tensors, self._table(RECTANGLES, RECTANGLE))
        self._check_tables()

    @property
    def step(self) -> int:
        return self.manifest.step

    def __enter__(self) -> "Index":
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            if kind is None:
                self.check_all()
        finally:
            self.close()

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()
        if "_checker" in self.__dict__:
            self._checker.shutdown()
            del self._checker

    # ---- what is there -----------------------------------------------------------------------------------------

    def names(self, kind: str = "model") -> list[str]:
        """Return the names of the parameters that have a tensor of a kind."""
        return [name.removeprefix(f"{kind}/") for name in self.numbers if name.startswith(f"{kind}/")]

    def has(self, name: str, kind: str = "model") -> bool:
        return f"{kind}/{name}" in self.numbers

    def shape(self, name: str, kind: str = "model") -> tuple[int, ...]:
        return self.manifest.tensors[self.number(f"{kind}/{name}")].shape

    def whole(self, kind: str, name: str) -> np.ndarray:
        """Return a whole parameter or moment, fp32, in its shape."""
        shape = self.manifest.tensors[self.number(f"{kind}/{name}")].shape
        return self.read(kind, name, (0, shape[0]), (0, shape[1] if len(shape) > 1 else 1)).reshape(shape)

    def verify(self, share: tuple[int, int] = (0, 1)) -> None:
        """Check every byte of every file, or of a share of the files: (index, number of shares).

        Raises DamagedCheckpointError that names the damaged part and tensor.
        """
        number, count = share
        if number == 0:
            self._check_coverage()
            self._file(INDEX)
        for part in range(number, len(self.manifest.parts), count):
            self._check_rest(part)
        first, last = (len(self._blocks) * edge // count for edge in (number, number + 1))
        size = self.manifest.block_bytes // 4
        for stream, each in enumerate(self.manifest.streams):
            begin, end = each.first_block, each.first_block + num_blocks(each.elements, self.manifest.block_bytes)
            low, high = max(begin, first), min(end, last)
            for block in range(low - begin, high - begin, self._at_once):
                stop = min(min(block + self._at_once, high - begin) * size, each.elements)
                self.read_elements(stream, block * size, np.empty(stop - block * size, "<f4"), each.elements)
        self.check_all()

    # ---- tables ------------------------------------------------------------------------------------------------

    @cached_property
    def _at_once(self) -> int:
        return max(1, AT_ONCE_BYTES // self.manifest.block_bytes)

    @cached_property
    def _streams_of(self) -> list[list[PartStream]]:
        """The streams of each part."""
        result: list[list[PartStream]] = [[] for _ in self.manifest.parts]
        for stream in self.manifest.streams:
            result[stream.part].append(stream)
        return result

    def number(self, tensor: str) -> int:
        if tensor not in self.numbers:
            raise CheckpointError(
                f"{self.path}: has no {tensor}; a checkpoint of weights alone can be started from"
                " (train.start_from), but not continued"
            )
        return self.numbers[tensor]

    def incomplete(self, what: str, file: str = "") -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self.path / file}: {what}; {REMEDY}")

    def _file(self, name: str) -> bytes:
        """Return a file's bytes, checked."""
        if name not in self.manifest.files:
            raise self.incomplete("the manifest does not list it", name)
        expected = self.manifest.files[name]
        data = read_small(self.path / name, expected.bytes)
        if len(data) != expected.bytes:
            raise self.incomplete(f"has {len(data)} bytes instead of {expected.bytes}", name)
        if hashlib.sha256(data).hexdigest() != expected.sha256:
            raise self.incomplete("is damaged: its SHA-256 is not that of the manifest", name)
        return data

    def _table(self, name: str, dtype: np.dtype) -> np.ndarray:
        data = self._file(name)
        if len(data) % dtype.itemsize:
            raise self.incomplete(f"{len(data)} bytes are no table", name)
        return np.frombuffer(data, dtype)

    def _check_tables(self) -> None:
        """Refuse tables whose numbers lead out of each other or out of the parts."""
        manifest, rectangles = self.manifest, self.rectangles

        def require(condition, what: str) -> None:
            if not condition:
                raise self.incomplete(what)

        require(manifest.tensors and manifest.parts and manifest.streams, "has no tensors, parts or streams")
        require(len(self.numbers) == len(manifest.tensors), "lists a tensor twice")
        names = [part_name(number) for number in range(len(manifest.parts))]
        require([part.file for part in manifest.parts] == names, "its parts are not numbered from 0")
        begin = 0
        for stream in manifest.streams:
            require(stream.part < len(manifest.parts) and stream.first_block == begin, "a stream is at no part")
            begin += num_blocks(stream.elements, manifest.block_bytes)
            available = manifest.parts[stream.part].bytes - stream.offset
            require(manifest.compression or 4 * stream.elements <= available, "a stream is longer than its part")
        require(begin == len(self._blocks), f"has {len(self._blocks)} blocks instead of {begin}")
        require((np.diff(rectangles["tensor"].astype(np.int64)) >= 0).all(), "its rectangles are not in order")
        require(len(rectangles) and rectangles["tensor"].max() < len(manifest.tensors), "a rectangle is of no tensor")
        require(rectangles["stream"].max() < len(manifest.streams), "a rectangle is in no stream")
        shapes = np.array([(*t.shape, 1)[:2] for t in manifest.tensors], np.int64)[rectangles["tensor"]]
        rows, columns = rectangles["rows"].astype(np.int64), rectangles["columns"].astype(np.int64)
        is_inside = (rows[:, 0] < rows[:, 1]) & (columns[:, 0] < columns[:, 1])
        is_inside &= (rows[:, 1] <= shapes[:, 0]) & (columns[:, 1] <= shapes[:, 1])
        require(is_inside.all(), "a rectangle is not inside its tensor")
        sizes = (rows[:, 1] - rows[:, 0]) * (columns[:, 1] - columns[:, 0])
        elements = np.array([s.elements for s in manifest.streams], np.int64)[rectangles["stream"]]
        require(
            (rectangles["start"].astype(np.int64) + sizes <= elements).all(), "a rectangle is longer than its stream"
        )
        covered = np.bincount(rectangles["tensor"], sizes, len(manifest.tensors))
        for tensor, count in zip(manifest.tensors, covered, strict=True):
            size = int(np.prod(tensor.shape))
            require(count == size, f"{tensor.name} has {size} elements, and the parts have {int(count)} of them")

    def _check_coverage(self) -> None:
        """Refuse rectangles of a tensor that overlap, since some elements are then in no rectangle."""
        for number, tensor in enumerate(self.manifest.tensors):
            rectangles = self.rectangles[self.bounds[number] : self.bounds[number + 1]]
            rows, columns = np.unique(rectangles["rows"]), np.unique(rectangles["columns"])
            taken = np.zeros((len(rows), len(columns)), np.int32)
            corners = np.searchsorted(rows, rectangles["rows"]), np.searchsorted(columns, rectangles["columns"])
            for (top, bottom), (left, right) in zip(*corners, strict=True):
                taken[top:bottom, left:right] += 1
            if (taken > 1).any():
                raise self.incomplete(f"{tensor.name}: two parts have the same elements")

    # ---- parts -------------------------------------------------------------------------------------------------

    def read_rectangle(self, rectangle, rows: Bounds, columns: Bounds, out: np.ndarray) -> None:
        """Fill `out` with those rows x columns of a tensor that lie in a rectangle."""
        first, left = int(rectangle["rows"][0]), int(rectangle["columns"][0])
        width, taken, stream = int(rectangle["columns"][1]) - left, columns[1] - columns[0], int(rectangle["stream"])
        begin = int(rectangle["start"]) + columns[0] - left
        if taken == width and out.flags.c_contiguous:
            self.read_elements(stream, begin + (rows[0] - first) * width, out.reshape(-1))
            return
        is_sparse = 4 * (width - taken) > 2 * self.manifest.block_bytes
        at_once = 1 if is_sparse else max(1, AT_ONCE_BYTES // (4 * width))
        for row in range(rows[0], rows[1], at_once):
            target = out[row - rows[0] : row - rows[0] + at_once]
            values = np.empty((len(target) - 1) * width + taken, "<f4")
            self.read_elements(stream, begin + (row - first) * width, values)
            target[:] = np.lib.stride_tricks.as_strided(values, target.shape, (4 * width, 4), writeable=False)

    def read_elements(self, stream: int, start: int, out: np.ndarray, following: int = 0) -> None:
        """Fill flat fp32 `out` from a stream; the values are verified after `check_all`.

        `following` is the element up to which the caller will read next.
        """
        about, size, view = self.manifest.streams[stream], self.manifest.block_bytes, out.data.cast("B")
        low, high = 4 * start, 4 * start + len(view)
        for block in range(low // size, -(-high // size), self._at_once):
            last = min(block + self._at_once, -(-high // size))
            begin, end = block * size, min(last * size, 4 * about.elements)
            if low <= begin and end <= high and not self.manifest.compression:
                target = view[begin - low : end - low]
                self._pread_into(about.part, about.offset + begin, target, about.offset + max(high, 4 * following))
                self._start_check(stream, block, target)
                continue
            data = self._read_blocks(stream, block, last)
            begin, end = max(low, begin), min(high, last * size)
            view[begin - low : end - low] = memoryview(data)[begin - block * size : end - block * size]

    def _read_blocks(self, stream: int, first: int, last: int) -> bytearray:
        """Return the contents of some blocks of a stream, checked."""
        about, size = self.manifest.streams[stream], self.manifest.block_bytes
        if not self.manifest.compression:
            begin, end = first * size, min(last * size, 4 * about.elements)
            plain = self._pread(about.part, Extent(about.offset + begin, end - begin))
            self._check(stream, first, checksums(memoryview(plain), size))
            return plain
        result = bytearray()
        rows = self._blocks[about.first_block + first : about.first_block + last]
        for number, (offset, num_bytes, crc32) in enumerate(rows.tolist()):
            data = self._pread(about.part, Extent(offset, num_bytes))
            if zlib.crc32(data) != crc32:
                raise self._damage(stream, first + number)
            try:
                result += decompress(data, size)
            except (zlib.error, ValueError):
                raise self._damage(stream, first + number) from None
        return result

    @cached_property
    def _checker(self) -> ThreadPoolExecutor:
        """Threads that check blocks while others are read."""
        return ThreadPoolExecutor(NUM_CHECKERS, "checksums")

    def _start_check(self, stream: int, first: int, data: memoryview) -> None:
        size = self.manifest.block_bytes
        if len(data) < AT_ONCE_BYTES // 8:
            self._check(stream, first, checksums(data, size))
            return
        if len(self.unchecked) >= MAX_UNCHECKED:
            self._check_oldest()
        self.unchecked.append((stream, first, self._checker.submit(checksums, data, size)))

    def _check_oldest(self) -> None:
        stream, first, result = self.unchecked.pop(0)
        self._check(stream, first, result.result())

    def check_all(self) -> None:
        """Wait until everything read so far has been checked. Raises DamagedCheckpointError."""
        while self.unchecked:
            self._check_oldest()

    def _check(self, stream: int, first: int, crcs: list[int]) -> None:
        """Refuse blocks of a stream, from `first` on, whose CRC-32s differ from the recorded ones."""
        begin = self.manifest.streams[stream].first_block + first
        for number, expected in enumerate(self._blocks[begin : begin + len(crcs)].tolist()):
            if crcs[number] != expected:
                raise self._damage(stream, first + number)

    def _damage(self, stream: int, block: int) -> DamagedCheckpointError:
        about, size = self.manifest.streams[stream], self.manifest.block_bytes // 4
        ours = self.rectangles[self.rectangles["stream"] == stream]
        counts = (ours["rows"][:, 1] - ours["rows"][:, 0]).astype(np.int64)
        counts *= ours["columns"][:, 1] - ours["columns"][:, 0]
        start = ours["start"].astype(np.int64)
        hit = ours[(start < (block + 1) * size) & (start + counts > block * size)]
        names = [self.manifest.tensors[number].name for number in dict.fromkeys(hit["tensor"].tolist())]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        where = f"{names[0] if names else 'no tensor'}{more}"
        text = f"is damaged: block {block} of {about.dataset} has another CRC-32, in {where}"
        return self.incomplete(text, self.manifest.parts[about.part].file)

    def _check_rest(self, part: int) -> None:
        """Check the size of a part, and all its bytes outside of streams."""
        about, taken, crc32 = self.manifest.parts[part], list[Extent](), 0
        for stream in self._streams_of[part]:
            if self.manifest.compression:
                count = num_blocks(stream.elements, self.manifest.block_bytes)
                blocks = self._blocks[stream.first_block : stream.first_block + count].tolist()
                taken += [Extent(offset, num_bytes) for offset, num_bytes, _ in blocks]
            else:
                taken.append(Extent(stream.offset, 4 * stream.elements))
        for gap in gaps(taken, about.bytes):
            for start in range(0, gap.num_bytes, AT_ONCE_BYTES):
                size = min(AT_ONCE_BYTES, gap.num_bytes - start)
                crc32 = zlib.crc32(self._pread(part, Extent(gap.offset + start, size)), crc32)
        if crc32 != about.rest_crc32:
            raise self.incomplete("is damaged: what HDF5 needs has another CRC-32", about.file)

    def _pread(self, part: int, extent: Extent) -> bytearray:
        data = bytearray(extent.num_bytes)
        self._pread_into(part, extent.offset, memoryview(data))
        return data

    def _pread_into(self, part: int, offset: int, view: memoryview, end: int = 0) -> None:
        """Fill `view` from a part. The kernel may read ahead as many bytes again, up to `end`."""
        file = self.manifest.parts[part].file
        try:
            handle, following = self._handle(part), offset + len(view)
            if following < end:
                os.posix_fadvise(handle, following, min(len(view), end - following), os.POSIX_FADV_WILLNEED)
            count = os.preadv(handle, [view], offset)
        except FileNotFoundError:
            raise self.incomplete("is missing", file) from None
        except OSError as error:
            raise self.incomplete(f"cannot be read: {describe_os_error(error)}", file) from None
        self.bytes_read += count
        if count != len(view):
            raise self.incomplete(f"ends at byte {offset + count}", file)

    def _handle(self, part: int) -> int:
        """Return an open handle of a part, and check the part's size. Raises OSError, DamagedCheckpointError."""
        if part not in self._handles:
            about = self.manifest.parts[part]
            size = look_at(self.path / about.file).st_size
            if size != about.bytes:
                raise self.incomplete(f"has {size} bytes instead of {about.bytes}", about.file)
            self._handles[part] = os.open(self.path / about.file, os.O_RDONLY)
        return self._handles[part]
