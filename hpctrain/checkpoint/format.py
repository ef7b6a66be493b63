"""The checkpoint on disk.

    RUN/checkpoints/
        latest                       the name of the newest complete checkpoint
        step-00000100/
            index.h5                 every parameter and moment whole, as HDF5 virtual datasets; all that describes it
            part-00000.h5 ...        the pieces that each rank owns

`h5py.File("index.h5")["model/blocks.3.attention.q.weight"][:]` is the weight as the unsplit model has it, whatever
layout wrote it; `optimizer/exp_avg/...` and `optimizer/exp_avg_sq/...` are the moments, all of them fp32 and exact.
A folder has its final name only if it is complete and synced.
"""

import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.config.errors import CheckpointError

FORMAT = "hpctrain-checkpoint"
VERSION = 1
INDEX = "index.h5"
LATEST = "latest"
PARTIAL = ".partial"
KINDS = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")


@dataclass(frozen=True)
class PartRegion:
    """A rectangle of a parameter, as one dataset of a part: `rows` x `columns` of the unsplit parameter."""

    name: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    dataset: str
    """Within the part, below the kind; flat, row after row."""


@dataclass(frozen=True)
class Part:
    """One writer's file."""

    file: str
    num_bytes: int
    crc32: int
    runs: tuple[PartRegion, ...]


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def sync(path: Path) -> None:
    """Make sure that a file's content, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def crc32_of(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


def _in_memory(path: Path) -> h5py.File:
    """Open an HDF5 file that stays in memory until `_to_disk`.

    HDF5 that runs out of disk fails again, and loudly, whenever it lets go of something; a plain write fails once.
    """
    return h5py.File(path, "w", driver="core", backing_store=False, libver="latest")


def _to_disk(file: h5py.File, path: Path) -> tuple[int, int]:
    """Write an in-memory file and sync it; return its bytes and CRC32. Raises OSError."""
    file.flush()
    image = file.id.get_file_image()
    with path.open("wb", buffering=0) as out:
        view = memoryview(image)
        while view:
            view = view[out.write(view) :]
        os.fsync(out.fileno())
    return len(image), zlib.crc32(image)


def write_part(path: Path, arrays: dict[str, dict[str, np.ndarray]], runs: list[PartRegion]) -> Part:
    """Write one part, `arrays[kind][dataset]`, and sync it. Raises OSError."""
    with _in_memory(path) as file:
        for kind, datasets in arrays.items():
            for name, values in datasets.items():
                file.create_dataset(f"{kind}/{name}", data=values)
        num_bytes, crc32 = _to_disk(file, path)
    return Part(path.name, num_bytes, crc32, tuple(runs))


def write_index(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    parts: list[Part],
    about: Mapping[str, str | int],
    kinds: Sequence[str] = KINDS,
) -> None:
    """Write the index: virtual datasets over the parts, the list of parts, and `about` as attributes.

    `kinds` are those that there are: weights alone, where nothing was trained.

    Raises OSError.
    """
    runs: dict[str, list[tuple[Part, PartRegion]]] = {name: [] for name in shapes}
    for part in parts:
        for run in part.runs:
            runs[run.name].append((part, run))
    with _in_memory(path) as file:
        file.attrs["format"], file.attrs["version"] = FORMAT, VERSION
        file.attrs.update(about)
        table = file.create_dataset("parts", data=np.array([[p.num_bytes, p.crc32] for p in parts], dtype=np.int64))
        table.attrs["columns"] = ["bytes", "crc32"]
        for name, shape in shapes.items():
            for kind in kinds:
                layout = h5py.VirtualLayout(shape, dtype=np.float32)
                for part, run in runs[name]:
                    size = (run.rows[1] - run.rows[0]) * (run.columns[1] - run.columns[0])
                    source = h5py.VirtualSource(part.file, f"{kind}/{run.dataset}", shape=(size,), dtype=np.float32)
                    layout[rectangle(shape, run.rows, run.columns)] = source
                file.create_virtual_dataset(f"{kind}/{name}", layout, fillvalue=np.nan)
        _to_disk(file, path)


def rectangle(shape: tuple[int, ...], rows: tuple[int, int], columns: tuple[int, int]) -> tuple[slice, ...]:
    """Return the selection of rows x columns in a parameter of one or two dims."""
    return (slice(*rows),) if len(shape) == 1 else (slice(*rows), slice(*columns))


def commit(partial: Path, final: Path, keep: int) -> None:
    """Give a complete checkpoint its final name, move `latest` to it, and keep `keep` in all."""
    sync(partial)
    if final.exists():
        _remove(final)
    partial.rename(final)
    folder = final.parent
    sync(folder)
    pointer = folder / (LATEST + PARTIAL)
    pointer.write_text(final.name + "\n")
    sync(pointer)
    pointer.replace(folder / LATEST)
    sync(folder)
    complete = sorted(p for p in folder.glob("step-*") if not p.name.endswith(PARTIAL))
    older = [p for p in complete if p.name < final.name]
    newer = [p for p in complete if p.name > final.name]  # left from a past that this run did not go on from
    for unwanted in [*older[: len(older) - (keep - 1)], *newer, *folder.glob(f"step-*{PARTIAL}")]:
        _remove(unwanted)


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint that under its final name is always whole, even if this is interrupted."""
    if not checkpoint.name.endswith(PARTIAL):
        checkpoint = checkpoint.rename(checkpoint.with_name(checkpoint.name + ".old" + PARTIAL))
    shutil.rmtree(checkpoint)


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a run folder, or None. Raises CheckpointError if it is missing."""
    pointer = folder / "checkpoints" / LATEST
    if not pointer.is_file():
        return None
    path = pointer.parent / pointer.read_text().strip()
    if not (path / INDEX).is_file():
        raise CheckpointError(f"{pointer} names {path.name}, which is not there or has no {INDEX}")
    return path


def locate_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a path names: itself, or the newest one of a run folder. Raises CheckpointError."""
    if (path / INDEX).is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such run folder or checkpoint")
    result = latest_checkpoint(path)
    if result is None:
        raise CheckpointError(f"{path}: has no checkpoint yet; a run writes one at its end or every checkpoint.every")
    return result


class Index:
    """An open index: slices of whole parameters, and what is known about the checkpoint. Close it, or use `with`."""

    def __init__(self, checkpoint: Path):
        self.path = checkpoint
        try:
            self._file = h5py.File(checkpoint / INDEX, "r", locking=False)
            self.about: dict[str, Any] = dict(self._file.attrs)
        except (OSError, RuntimeError) as error:  # HDF5 reports damage inside the file as RuntimeError
            raise CheckpointError(
                f"{checkpoint / INDEX}: cannot be read: {error}; use an older checkpoint: put its name in"
                f" {checkpoint.parent / LATEST}"
            ) from None
        if self.about.get("format") != FORMAT or self.about.get("version") != VERSION:
            self.close()
            raise CheckpointError(
                f"{checkpoint / INDEX}: format {self.about.get('format')!r} version {self.about.get('version')};"
                f" this hpctrain reads {FORMAT!r} version {VERSION}"
            )

    def __enter__(self) -> "Index":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def _dataset(self, name: str) -> h5py.Dataset:
        dataset = self._file[name]
        if not isinstance(dataset, h5py.Dataset):
            raise CheckpointError(f"{self.path / INDEX}: {name} is no dataset; use an older checkpoint")
        return dataset

    def names(self) -> list[str]:
        group = self._file["model"]
        return list(group) if isinstance(group, h5py.Group) else []

    def has(self, name: str) -> bool:
        return f"model/{name}" in self._file

    def shape(self, name: str) -> tuple[int, ...]:
        return self._dataset(f"model/{name}").shape

    def read(self, kind: str, name: str, rows: tuple[int, int], columns: tuple[int, int]) -> np.ndarray:
        """Return fp32 rows x columns of a parameter (columns are ignored for one dim), flat."""
        dataset = self._dataset(f"{kind}/{name}")
        return np.asarray(dataset[rectangle(dataset.shape, rows, columns)]).reshape(-1)

    def whole(self, kind: str, name: str) -> np.ndarray:
        """Return a whole parameter or moment, fp32, in its shape."""
        return np.asarray(self._dataset(f"{kind}/{name}"))

    def verify(self, some: slice = slice(None)) -> None:
        """Check size and CRC of the parts `some` selects. Raises CheckpointError that names the damaged file."""
        older = f"use an older checkpoint: put its name in {self.path.parent / LATEST}"
        for number, (num_bytes, crc32) in list(enumerate(np.asarray(self._dataset("parts")).tolist()))[some]:
            part = self.path / part_name(number)
            if not part.is_file():
                raise CheckpointError(f"{part}: is missing; {older}")
            size = part.stat().st_size
            if size != num_bytes:
                raise CheckpointError(f"{part}: has {size} bytes instead of {num_bytes}; {older}")
            if (result := crc32_of(part)) != crc32:
                raise CheckpointError(f"{part}: is damaged (CRC32 {result:08x} instead of {crc32:08x}); {older}")


def part_name(number: int) -> str:
    return f"part-{number:05d}.h5"
