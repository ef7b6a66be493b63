"""Saving the state of a run behind its steps: a snapshot to host memory, then writing while training continues."""

import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from hpctrain.checkpoint.contents import Contents, WrittenStream, make_tables, write_tables
from hpctrain.checkpoint.copies import HostCopies
from hpctrain.checkpoint.folder import commit, complete_checkpoints, partial_folder
from hpctrain.checkpoint.format import BLOCK_BYTES, RECTANGLE, Part, part_name, tensor_shapes
from hpctrain.checkpoint.live import LiveState
from hpctrain.checkpoint.parts import lay_out, write_stream
from hpctrain.checkpoint.state import StateTensor, tensors_of, writing
from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.world import World
from hpctrain.config.errors import CheckpointError, CorruptionError, HpctrainError, shorten_list
from hpctrain.config.job import Job, save_job
from hpctrain.model.storage.shard import Shard
from hpctrain.plan.file import dump_plan
from hpctrain.plan.tiling import Plan
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.parameters import whole_rows

T = TypeVar("T")
BY_NODE_ABOVE = 512
"""With more ranks than this, each node writes one part, unless the job says otherwise."""


class ShardSlice(NamedTuple):
    """Elements of a tensor of a shard, and the position in this rank's stream where they begin."""

    shard: Shard
    tensor: StateTensor
    at: Interval
    start: int


def lay_out_own(shards: list[Shard], tensor_numbers: Mapping[str, int]) -> tuple[np.ndarray, list[ShardSlice], int]:
    """Lay out what a rank owns as one stream: weights first, then each moment. It is the same for every checkpoint.

    Return the rectangles of the stream, its slices, and how many elements it has.
    """
    rectangles, slices, start = [], [], 0
    tensors = [(shard, tensor) for shard in shards for tensor in tensors_of(shard)]
    for kind in dict.fromkeys(tensor.kind for _, tensor in tensors):
        for shard, tensor in ((shard, tensor) for shard, tensor in tensors if tensor.kind == kind):
            for region in shard.group.regions(shard.owned.intersect(tensor.at)):
                if not region.counts:
                    continue
                for rows, columns, taken in whole_rows(region.parameter, region.box, region.elements):
                    at = taken.shift(region.at.start - region.elements.start)
                    number = tensor_numbers[f"{kind}/{region.parameter.name}"]
                    rectangles.append((number, 0, tuple(rows), (columns.start, columns.stop), start))
                    last = slices[-1] if slices else None
                    if last and last.tensor is tensor and last.at.stop == at.start:
                        slices[-1] = last._replace(at=Interval(last.at.start, at.stop))
                    else:
                        slices.append(ShardSlice(shard, tensor, at, start))
                    start += at.size
    return np.array(rectangles, RECTANGLE), slices, start


def in_background(work: Callable[[], T]) -> "Future[T]":
    """Run a function in a thread that does not keep the process from ending."""
    future = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # of any kind: it is raised where it is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


class Saver:
    """Writes the checkpoints of a run, one at a time. All ranks create one, and all call each method.

    `start` takes a snapshot and returns. All ranks call `advance` whenever no rank `is_writing`. The first call lets
    rank 0 complete the checkpoint; the second returns it. `finish` waits for that.
    """

    def __init__(
        self,
        world: World,
        accelerator: Accelerator,
        run: Path,
        shards: list[Shard],
        job: Job,
        plan: Plan,
        about: Mapping[str, str],
        state: Callable[[], Mapping[str, str]] = dict,
    ):
        """`about` has `data` and, where known, `tokenizer` and `cluster`. `state` is asked at each snapshot for texts
        that change; all ranks return the same.
        """
        self._world, self._accelerator, self._run, self._keeping = world, accelerator, run, job.checkpoint
        self._kept_step = job.train.kept_step
        if world.rank == 0:  # later it is not made again
            with writing(run):
                run.mkdir(parents=True, exist_ok=True)
        shapes = tensor_shapes(job)
        self._state, self._texts = state, dict[str, str]()
        numbers = {name: number for number, name in enumerate(shapes)}
        self._shapes = shapes
        self._rectangles, self._slices, self._elements = lay_out_own(shards, numbers)
        described = {"job": save_job(job), "plan": dump_plan(plan), **about}
        self.counts = counts = world.all_objects(self._elements)
        """The fp32 elements that each rank writes."""
        rectangles = world.gather_objects(self._rectangles)
        self._contents = Contents(shapes, rectangles, counts, described) if world.rank == 0 else None
        self._num_bytes = 4 * sum(counts)
        self._part, members = self._part_of(counts)
        self._members = {rank: counts[rank] for rank in members}
        self._layout = lay_out(self._members) if self._members else None
        self._buffer: torch.Tensor | None = None
        self._background: Future | None = None
        self.copies: HostCopies | None = None
        """Where the state in flight goes, if not into a checkpoint of the run folder."""
        self._committing = False
        self.step, self._validation_loss, self._since = 0, None, 0.0
        self.seconds = 0.0
        """Duration of the last save in seconds, from the snapshot to the complete checkpoint."""
        self.longest_seconds = 0.0
        """Duration of the longest save so far, in seconds."""

    def _part_of(self, counts: list[int]) -> tuple[int, tuple[int, ...]]:
        """Return the number of the part that this rank writes into, and the part's ranks; no ranks if it has no
        elements."""
        own, world, parts = self._world.rank, self._world, self._keeping.parts
        by_node = parts == "node" or (parts == "auto" and world.size > BY_NODE_ABOVE)
        groups: dict[object, list[int]] = {}
        for rank, count in enumerate(counts):
            if count:
                groups.setdefault(world.topology.places[rank].host if by_node else rank, []).append(rank)
        own_group = ((number, tuple(ranks)) for number, ranks in enumerate(groups.values()) if own in ranks)
        return next(own_group, (0, ()))

    @property
    def own_bytes(self) -> int:
        """The bytes of weights and moments that this rank writes."""
        return 4 * self._elements

    @property
    def is_writing(self) -> bool:
        """Say whether this rank's thread is still writing."""
        is_moving = self.copies is not None and not self.copies.have_moved()
        return is_moving or (self._background is not None and not self._background.done())

    @property
    def in_flight(self) -> bool:
        """Say whether a checkpoint was started and is not complete yet; all ranks say the same."""
        return self._background is not None

    def start(self, step: int, validation_loss: float | None = None, copies: HostCopies | None = None) -> None:
        """Take a snapshot of the state after a step, and begin to write it, into the run folder or among `copies`.

        The last one must be complete.
        """
        assert not self.in_flight, "one save is in flight at a time"
        self._since = time.monotonic()
        self.step = step
        self._validation_loss = validation_loss if validation_loss and math.isfinite(validation_loss) else None
        buffer, self._texts = self._snapshot(), dict(self._state())
        self._committing, self.copies = False, copies
        if copies:
            copies.begin(step, buffer)
        self._background = in_background(lambda: self._write(buffer))

    @property
    def _partial(self) -> Path:
        return self.copies.partial(self.step) if self.copies else partial_folder(self._run, self.step)

    def _snapshot(self) -> np.ndarray:
        """Copy this rank's state into host memory that each save reuses; return it as uint8."""
        if self._buffer is None:
            size = 4 * self._elements
            self._buffer = self._accelerator.host_buffer(-(-size // BLOCK_BYTES) * BLOCK_BYTES)
            self._buffer[size:].zero_()
        values = self._buffer.view(torch.float32)
        self._accelerator.synchronize()  # what is in host memory is read at once, and may still be in transfer
        for _, tensor, at, start in self._slices:
            values[start : start + at.size].copy_(tensor.values[tensor.at.place_of(at)], non_blocking=True)
        self._accelerator.synchronize()
        return self._buffer.numpy()

    def _write(self, buffer: np.ndarray) -> WrittenStream | None:
        if not self._run.is_dir():
            raise CheckpointError(f"{self._run}: the run folder is gone: it was deleted or moved while the run trained")
        with writing(self._partial, self._num_bytes):
            self._partial.mkdir(parents=True, exist_ok=True)
            number, layout, members = self._part, self._layout, self._members
            if self.copies:
                number, layout, members = self.copies.own_part
                if self.copies.refusal:
                    raise self.copies.refusal
            rank, name = self._world.rank, part_name(number)
            if layout is None:  # this rank has nothing to save
                return None
            if bad := self._not_finite(buffer):
                raise CorruptionError(bad)
            blocks = write_stream(self._partial / name, layout, rank, buffer)
            part: Part | None = layout.describe(name) if rank == min(members) else None
            return WrittenStream(number, layout.streams[rank].offset, blocks, part)

    def check_finite(self, step: int) -> None:
        """Refuse a state after `step` that is not finite. All ranks must call.

        Raises CorruptionError on all ranks.
        """
        bad = self._world.all_objects(self._not_finite(self._snapshot()))
        if any(bad):
            raise CorruptionError(self._refusal(step, bad))

    def _not_finite(self, buffer: np.ndarray) -> str | None:
        """Describe the part of a snapshot that is not finite; None where everything is."""
        values = torch.from_numpy(buffer).view(torch.float32)[: self._elements]
        if not values.numel() or all(map(math.isfinite, torch.aminmax(values))):
            return None
        bad = dict[str, None]()
        for shard, tensor, at, start in self._slices:
            for region in shard.group.regions(at):
                part = values[slice(*region.at.shift(start - at.start))]
                if not part.isfinite().all():
                    bad[f"{tensor.kind}/{region.parameter.name}"] = None
        place = self._world.place
        return f"rank {self._world.rank} (host {place.host}, {place.family}): {shorten_list(list(bad))}"

    def _refusal(self, step: int, bad: Sequence[str | None]) -> str:
        newest = complete_checkpoints(self._run)[-1:]
        where = f"the newest, {newest[0]}" if newest else "none, as there is none yet"
        ranks = shorten_list([text for text in bad if text], "; ")
        return (
            f"the state after step {step} is not finite on {ranks}; it is not saved; start the same command again, the"
            f" checkpoint that it continues from is {where}"
        )

    def advance(self) -> Path | None:
        """Continue a checkpoint that no rank is writing any more; return its path once it is complete.

        Raises on all ranks: CheckpointError where one could not write, CorruptionError where the state is not finite.
        Earlier checkpoints stay. All ranks must call.
        """
        assert self._background is not None, "something was started"
        if self.copies and not self._committing:
            self.copies.wait()
        error = self._background.exception()
        if error is not None and not isinstance(error, HpctrainError):
            raise error
        outcome = error or self._background.result()  # errors of writing go to rank 0, which removes what there is
        if not self._committing:
            written = self._world.gather_objects(outcome)
            self._committing = True
            if self._world.rank == 0:
                self._background = in_background(lambda: self._commit(written))
            return None
        result = self._world.broadcast_object(outcome if self._world.rank == 0 else None)
        self._background = None
        self.seconds = time.monotonic() - self._since
        copies, self.copies = self.copies, None
        if copies is None:
            self.longest_seconds = max(self.longest_seconds, self.seconds)
        elif not isinstance(result, HpctrainError):
            with self._world.all_or_none(), writing(copies.folder):
                return copies.commit(self.step, result)
        else:
            copies.discard(self.step)
        if isinstance(result, HpctrainError):
            raise result
        return result

    def live_state(self, step: int) -> LiveState:
        """Return the state after a step in host memory, to be moved to another plan. All ranks must call.

        The last checkpoint must be complete, and no other one is started: its memory holds the state.
        """
        assert not self.in_flight, "a checkpoint in flight has the same memory"
        stream = self._snapshot().view("<f4")
        return LiveState(self._world, self._shapes, self._rectangles, stream, step, dict(self._state()))

    def finish(self) -> Path | None:
        """Wait until the started checkpoint is complete; return its path, or None without one. All ranks must call.

        Raises CheckpointError as `advance` does.
        """
        path = None
        while self.in_flight:
            path = self.advance()
        return path

    def _commit(self, written: list) -> Path | dict[str, bytes]:
        """Complete a checkpoint, and return its path; of a copy return the files that each host writes."""
        assert self._contents is not None, "of rank 0"
        contents, partial = self._contents, self._partial
        try:
            for outcome in written:
                if isinstance(outcome, CheckpointError):
                    raise outcome
            if bad := [str(outcome) for outcome in written if isinstance(outcome, CorruptionError)]:
                raise CorruptionError(self._refusal(self.step, bad))
            with writing(partial, self._num_bytes):
                tables = make_tables(contents, written, self.step, self._validation_loss, self._texts)
                if self.copies:
                    return tables
                write_tables(partial, tables)
                return commit(partial, self._keeping, self._kept_step)
        except HpctrainError:
            if not self.copies:
                shutil.rmtree(partial, ignore_errors=True)
            raise
