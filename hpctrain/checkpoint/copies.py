"""Copies of the state in the memory of hosts, which outlive ranks and launchers: files of a folder such as /dev/shm.

    /dev/shm/hpctrain-copies-UID-RUN/HOST/
        lock                 held by a process of the run, as long as it lives
        step-00000100/       as a checkpoint (`hpctrain.checkpoint.format`), without the parts that other hosts have

A host has the parts of its own ranks, and second ones of ranks of another host: its ranks are the *keepers* of these.
On the only host there is no second one: a file outlives its rank, and nothing outlives the host. The last copy stays
until the next one is complete on all hosts. Every byte is checked before it is used, as of a checkpoint.
"""

import fcntl
import hashlib
import mmap
import os
import shutil
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from heapq import heapreplace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpctrain.checkpoint.folder import step_of
from hpctrain.checkpoint.format import ABOUT, BLOCKS, MANIFEST, PARTIAL, RECTANGLES, STEP_FOLDER, part_name, step_folder
from hpctrain.checkpoint.index import Index
from hpctrain.checkpoint.live import LiveState
from hpctrain.checkpoint.parts import PartLayout, lay_out, write_needed
from hpctrain.checkpoint.state import writing
from hpctrain.comm.start.process import PREFIX, SHARED_MEMORY
from hpctrain.comm.transports.members import GroupMessages
from hpctrain.comm.waiting import complete, until_all
from hpctrain.comm.world import World
from hpctrain.config.errors import CheckpointError, DamagedCheckpointError
from hpctrain.config.paths import read_bytes, refused_as
from hpctrain.plan.keepers import keepers

NAME_FILE = "copies"
"""File of the run folder with the name of its copies, which no other run has."""
LOCK = "lock"
MESSAGE_BYTES = 64 << 20
"""The most bytes of a message between hosts."""
LITTER_SECONDS = 6 * 3600.0
"""A copy that is older, and whose run has no process on the host, is litter."""


def copies_name(run: Path, make: bool = False) -> str | None:
    """Return the name of a run's copies; for one rank. `make` it where there is none. Raises CheckpointError.

    It begins with the user and a digest of the run folder's path. A name of another user, or of the folder that this
    one was copied from, is none.
    """
    file, path = run / NAME_FILE, str(run.resolve()).encode(errors="surrogateescape")
    begin = f"{PREFIX}copies-{os.geteuid()}-{hashlib.blake2b(path, digest_size=6).hexdigest()}-"
    with refused_as(CheckpointError, f"{file}: cannot be read or written", "set recovery.copies = 0"):
        name = read_bytes(file).decode(errors="replace").strip() if file.exists() else ""
        if make and not name.startswith(begin):
            name = begin + uuid.uuid4().hex[:12]
            file.unlink(missing_ok=True)
            file.write_text(f"{name}\n")
        return name if name.startswith(begin) and "/" not in name else None


def forget_copies(world: World, run: Path, roots: Sequence[Path]) -> None:
    """Remove the copies from which a run did not continue, and their name. All ranks must call. Raises CheckpointError.

    Copies of later steps are of another history from now on, also those on hosts that this start does not have.
    """
    name = world.on_first_rank(lambda: copies_name(run))
    if name is None:
        return
    with world.all_or_none(), writing(run / NAME_FILE):
        if world.rank == 0:
            (run / NAME_FILE).unlink(missing_ok=True)
    host = world.hosts[world.rank]
    if world.hosts.index(host) == world.rank:
        for root in roots:
            _remove(root / name / host)


def _remove(folder: Path) -> None:
    """Remove the copies of a host, and what is then empty."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()


def remove_litter(root: Path = SHARED_MEMORY, name: str | None = None) -> list[str]:
    """Remove copies of other runs than `name` that are old, and that no process holds; return their names."""
    removed = []
    for folder in root.glob(f"{PREFIX}copies-{os.geteuid()}-*"):
        with suppress(OSError):
            newest = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
            is_old = time.time() - newest > LITTER_SECONDS
            if folder.name != name and is_old and not any(map(_is_held, folder.glob(f"*/{LOCK}"))):
                shutil.rmtree(folder)
                removed.append(folder.name)
    return removed


def _is_held(lock: Path) -> bool:
    with lock.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class HostCopies:
    """The copies of a leg on this rank's host. All ranks make one, and all call the same methods.

    `hpctrain.checkpoint.saving.Saver` writes into it what else it would write into the run folder.
    """

    def __init__(self, world: World, folder: Path, counts: Sequence[int], step: int):
        """`folder` is that of this host. `counts` are the elements of each rank's stream.

        Copies of later steps than `step`, from which the run did not continue, and incomplete ones are removed. Raises
        CheckpointError.
        """
        self._world, self.folder = world, folder
        ranks = [rank for rank, count in enumerate(counts) if count]
        self._numbers = {rank: number for number, rank in enumerate(ranks)}
        own, by_rank = world.rank, keepers(world.hosts, counts)
        self._keeper, exchanged = by_rank[own], any(keeper is not None for keeper in by_rank)
        members = {own: counts[own]} if counts[own] else {}
        self.own_part = self._numbers.get(own, 0), lay_out(members) if members else None, members
        """Number, layout and members of the part that this rank writes, as a `Saver` has them of a checkpoint."""
        self.refusal: OSError | None = None
        """Why this rank cannot keep a part of the copy in flight for another host."""
        self._kept = {rank: lay_out({rank: counts[rank]}) for rank in ranks if by_rank[rank] == own}
        self._is_first = world.hosts.index(world.hosts[own]) == own
        self._requests: list = []
        self._buffers: list = []
        with world.all_or_none(), writing(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._is_first:
                self._lock = (folder / LOCK).open("wb")
                fcntl.flock(self._lock, fcntl.LOCK_SH)
                kept = [copy for copy in complete_copies(folder) if step_of(copy) <= step]
                for old in folder.iterdir():
                    if old.is_dir() and old not in kept:
                        shutil.rmtree(old)
        self._messages = GroupMessages(world.space.members(range(world.size))) if exchanged else None

    def partial(self, step: int) -> Path:
        return self.folder / (step_folder(step) + PARTIAL)

    def begin(self, step: int, stream: np.ndarray) -> None:
        """Take over the files of the last copy but one, and exchange parts with other hosts from now on.

        What cannot be written raises later, in the thread that writes this rank's own part.
        """
        self.refusal = None
        names = {part_name(number): layout for number, layout in self._parts().items() if layout}
        with suppress(OSError):
            self.partial(step).mkdir(exist_ok=True)
            for old in complete_copies(self.folder)[:-1]:
                for name, layout in names.items():
                    with suppress(FileNotFoundError):
                        fits = (old / name).stat().st_size == layout.num_bytes
                        (old / name).rename(self.partial(step) / name) if fits else (old / name).unlink()
        if self._messages is None:
            return
        incoming = {rank: self._map(step, rank, layout) for rank, layout in self._kept.items()}
        for rank, buffer in incoming.items():
            self._requests += [self._messages.receive(piece, rank) for piece in _pieces(buffer)]
        layout = self.own_part[1]
        if self._keeper is not None and layout is not None:
            own = stream[: layout.streams[self._world.rank].num_bytes]
            self._requests += [self._messages.send(piece, self._keeper) for piece in _pieces(own)]
        self._buffers = [stream, *incoming.values()]

    def _parts(self) -> Mapping[int, PartLayout | None]:
        own = {self.own_part[0]: self.own_part[1]} if self.own_part[1] else {}
        return own | {self._numbers[rank]: layout for rank, layout in self._kept.items()}

    def _map(self, step: int, rank: int, layout: PartLayout) -> np.ndarray:
        """Return the memory of a file for another rank's part. Where there is no space it is memory without a file,
        so that the exchange ends; the copy then fails for the `refusal`."""
        extent = layout.streams[rank]
        try:
            path = self.partial(step) / part_name(self._numbers[rank])
            handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
            try:
                write_needed(handle, layout)
                os.posix_fallocate(handle, 0, layout.num_bytes)
                memory = mmap.mmap(handle, layout.num_bytes)
            finally:
                os.close(handle)
            return np.frombuffer(memory, np.uint8)[extent.offset : extent.offset + extent.num_bytes]
        except OSError as error:
            self.refusal = error
            return np.empty(extent.num_bytes, np.uint8)

    def have_moved(self) -> bool:
        """Say whether the parts that this rank sends and receives have moved."""
        self._requests = [request for request in self._requests if not request.Test()]
        return not self._requests

    def wait(self) -> None:
        """Wait until parts have moved. Raises CommError."""
        ready = [request.Test for request in self._requests]
        complete(until_all(ready, "parts of copies to move"), "copy", self._world.patience)
        self._requests, self._buffers = [], []

    def commit(self, step: int, tables: Mapping[str, bytes]) -> Path:
        """Complete the copy on this host, and remove all but the last two; return its path. Raises OSError."""
        final = self.folder / step_folder(step)
        if self._is_first:
            self.partial(step).mkdir(exist_ok=True)
            for name, data in tables.items():
                (self.partial(step) / name).write_bytes(data)
            shutil.rmtree(final, ignore_errors=True)
            self.partial(step).rename(final)
            for old in self.folder.iterdir():
                if old.is_dir() and old not in complete_copies(self.folder)[-2:]:
                    shutil.rmtree(old, ignore_errors=True)
        return final

    def discard(self, step: int) -> None:
        """Remove what was written of a copy that failed."""
        if self._is_first:
            shutil.rmtree(self.partial(step), ignore_errors=True)

    def close(self, forget: bool = False) -> None:
        """Release the messages' tag and the lock; `forget` the copies of a run that ended in order. All ranks must
        call, with no copy in flight."""
        if self._messages:
            self._messages.close()
        if self._is_first:
            if forget:
                _remove(self.folder)
            self._lock.close()


def _pieces(buffer: np.ndarray) -> list[np.ndarray]:
    return [buffer[at : at + MESSAGE_BYTES] for at in range(0, len(buffer), MESSAGE_BYTES)]


def complete_copies(folder: Path) -> list[Path]:
    """Return the complete copies of a host, the oldest first; none in a folder of another user, who could have written
    anything."""
    with suppress(OSError):
        if folder.stat().st_uid != os.geteuid():
            return []
        named = [path for path in folder.iterdir() if STEP_FOLDER.fullmatch(path.name)]
        return sorted((path for path in named if (path / MANIFEST).is_file()), key=step_of)
    return []


class HostCopy(NamedTuple):
    """The files that a host has of a copy."""

    step: int
    manifest: bytes
    parts: frozenset[str]
    folder: Path


class WholeCopy(NamedTuple):
    """A copy that is whole, and its state in the memory of this start's ranks."""

    path: Path
    """The folder on this rank's host, which describes it."""
    state: LiveState


def find_copy(world: World, folders: Sequence[Path], after: int) -> tuple[WholeCopy | None, list[str]]:
    """Return the newest copy of a later step than `after` that is whole, and messages about others. All ranks must
    call.

    This rank's host may have copies in any of `folders`. The ranks of a host share what is read there; they need not be
    those that wrote it, nor as many.
    """
    host, news = world.hosts[world.rank], []
    is_first = world.hosts.index(host) == world.rank
    own = [_look(path) for folder in folders for path in complete_copies(folder)] if is_first else []
    known = [(world.hosts[rank], copy) for rank, copies in enumerate(world.all_objects(own)) for copy in copies]
    for step, manifest in sorted({copy[:2] for _, copy in known if copy.step > after}, reverse=True):
        here = {name: copy for name, copy in known if copy[:2] == (step, manifest)}
        try:
            path = _description(world, here, here[host].folder if host in here else folders[0] / step_folder(step))
            return WholeCopy(path, _read(world, here, path)), news
        except CheckpointError as error:  # on all ranks
            news.append(f"the copy of step {step} in the memory of hosts is not whole: {error}")
    return None, news


def _look(path: Path) -> HostCopy:
    parts = frozenset(part.name for part in path.glob("part-*.h5"))
    try:
        return HostCopy(step_of(path), read_bytes(path / MANIFEST), parts, path)
    except OSError:
        return HostCopy(-1, b"", parts, path)


def _description(world: World, here: Mapping[str, HostCopy], path: Path) -> Path:
    """Bring a copy's files that are no parts to the hosts that lack them, into `path`. All ranks must call."""
    if here.keys() >= set(world.hosts):
        return path
    host = world.hosts[world.rank]
    source, is_first, tables = world.hosts.index(next(iter(here))), world.hosts.index(host) == world.rank, {}
    with world.all_or_none(), writing(path):
        if world.rank == source:
            files = [path / name for name in (MANIFEST, RECTANGLES, BLOCKS, *ABOUT.values())]
            tables = {file.name: file.read_bytes() for file in files if file.exists()}
    tables = world.all_objects(tables)[source]
    with world.all_or_none(), writing(path):
        if is_first and host not in here:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            for name, data in tables.items():
                (path / name).write_bytes(data)
    return path


def _read(world: World, here: Mapping[str, HostCopy], path: Path) -> LiveState:
    """Read all parts of a copy, each by one rank; a part that is damaged on one host is read on another one.

    All ranks must call. Raises CheckpointError on all of them.
    """
    with world.all_or_none():
        index = Index(path)
    names = [part.file for part in index.manifest.parts]
    holders = {(host, name) for host, copy in here.items() for name in copy.parts}
    while True:
        readers = readers_of(names, world.hosts, holders)
        if lacking := [name for name, reader in zip(names, readers, strict=True) if reader is None]:
            raise CheckpointError(f"{path.name}: no host has a sound {lacking[0]}, and {len(lacking) - 1} others")
        streams, rectangles, damaged, start = [np.zeros(0, "<f4")], [index.rectangles[:0]], [], 0
        for number in (number for number, reader in enumerate(readers) if reader == world.rank):
            values = np.empty(index.manifest.streams[number].elements, "<f4")
            try:
                index.read_elements(number, 0, values)
                index.check_all()
            except DamagedCheckpointError:
                index.unchecked.clear()
                damaged.append((world.hosts[world.rank], names[number]))
                continue
            own = index.rectangles[index.rectangles["stream"] == number].copy()
            own["start"] += start
            streams, rectangles, start = [*streams, values], [*rectangles, own], start + len(values)
        everywhere = world.all_objects(damaged)
        if not any(everywhere):
            break
        holders.difference_update(*everywhere)
    index.close()
    shapes = {tensor.name: tensor.shape for tensor in index.manifest.tensors}
    stream = streams[1] if len(streams) == 2 else np.concatenate(streams)
    return LiveState(world, shapes, np.concatenate(rectangles), stream, index.step, index.about)


def readers_of(names: Sequence[str], hosts: Sequence[str], holders: Collection[tuple[str, str]]) -> list[int | None]:
    """Return the rank that reads each part, one on a host that has it; None where no host has it. Pure."""
    able: dict[str, list[str]] = {}
    for host, name in holders:
        able.setdefault(name, []).append(host)
    ranks: dict[str, list[tuple[int, int]]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append((0, rank))
    readers: list[int | None] = []
    for name in names:
        queue = min((ranks[host] for host in able.get(name, ())), default=[])
        readers.append(queue[0][1] if queue else None)
        if queue:
            heapreplace(queue, (queue[0][0] + 1, queue[0][1]))
    return readers
