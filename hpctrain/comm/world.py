"""The World: all ranks that were started together, where they run, and how they end together.

mpi4py is started here, explicitly, and not at import. Everything that has to do with the launcher is here too.
"""

import os
import socket
import sys
import time
import traceback
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from hpctrain.comm.accelerators.kinds import detect_device, use_device_early
from hpctrain.comm.groups.settings import Settings
from hpctrain.comm.mpi_communicators import FamilyCommunicators, gather_places
from hpctrain.comm.progress.instruments import Instruments, Tracer
from hpctrain.comm.start import pmi
from hpctrain.comm.start.launcher import TORCHRUN_VARIABLES, promised_size, ranks_on_host, record_exit
from hpctrain.comm.start.process import remove_dead_segments, require_shared_memory
from hpctrain.comm.topology import Place, Topology
from hpctrain.comm.transports.members import FAREWELL, NUMBERS, MessageSpace
from hpctrain.comm.waiting import Patience, Phase, Steps
from hpctrain.comm.watchdog.watchdog import HEARD_SECONDS, TICK_SECONDS, Watchdog
from hpctrain.config.errors import CommError, HpctrainError, LaunchError, RankLossError
from hpctrain.sharding.grid import GROUPS, STORED

if TYPE_CHECKING:
    from hpctrain.comm.accelerators.base import Accelerator
    from hpctrain.comm.groups.channel import Channel
    from hpctrain.comm.groups.group import Group
    from hpctrain.comm.progress.lanes import Lane, ProgressEngine
    from hpctrain.comm.progress.operation import Operation


T = TypeVar("T")

# The name of a rank's host, set by tests; of its device see hpctrain.comm.accelerators.kinds.
HOST_VARIABLE = "HPCTRAIN_HOST"
UNCAUGHT_EXIT_CODE = 1
PAIRED = tuple(name for name in GROUPS if name != STORED)
"""Groups whose sums in half precision are exchanges, for which each pair of ranks is connected."""
# Seconds that a failed rank waits for the others to report that they failed too, before it aborts all.
AGREEMENT_SECONDS = 2.0
# Where all ranks fail by the same error, nobody has to be told: they come within this time.
EQUALLY_SECONDS = 0.5
# The first rank to report ends the others, which wait for it: briefly, where they cannot know of such a rank.
STAGGER_SECONDS, LONGEST_STAGGER_SECONDS, SECOND_SECONDS = 0.6, 2.0, 5.0


class World:
    """All ranks of this start. Made once by `World.start`, passed on, closed by `close`."""

    def __init__(
        self,
        communicators: FamilyCommunicators,
        places: Sequence[Place],
        timeout_seconds: float,
        owns_mpi: bool = False,
    ):
        """It closes its `communicators`, and ends MPI if it `owns_mpi`. No other rank is involved."""
        self._mpi, self._owns_mpi, self.communicators = communicators.mpi, owns_mpi, communicators
        self.rank, self.size = communicators.rank, len(places)
        self.hosts = tuple(place.host for place in places)
        """The hosts of all ranks. In a rehearsal those in `topology` are pretended ones."""
        self.settings = Settings(Topology(tuple(places)))
        self.patience = Patience(Phase("the start", timeout_seconds, "observe.start_timeout_seconds"))
        self.space = MessageSpace(communicators, self.patience)
        self.everybody = self.space.members(range(self.size))
        """The members of all ranks, for small objects."""
        self.watchdog = Watchdog(communicators, places, self.patience, self._abort)
        self._record = self.watchdog.recorder.add_group("world", range(self.size))
        self._engine: ProgressEngine | None = None
        self._numbers: Lane | None = None
        """Lane of `gather_numbers`."""
        self._made: list[Group | Channel] = []

    @classmethod
    def start(
        cls, timeout_seconds: float = 1800.0, watched: bool = True, rehearsed: Sequence[Place] | None = None
    ) -> "World":
        """Start MPI and check that it has as many ranks as the launcher promised. All ranks must call.

        Without `watched` a rank that waits for too long raises CommError itself, and does not end the others. Where
        ranks impersonate the `rehearsed` devices, MPI's communicators are made for these devices' families. If the
        number of devices is not that of ranks, `rehearse` refuses it later.

        Raises LaunchError where `srun` or `mpirun` of another MPI started N jobs of one rank instead of one of N.
        """
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise LaunchError(
                f"{sys.prefix}: mpi4py cannot load an MPI library: {str(error).splitlines()[0]}; load your site's MPI"
                " module, pip install 'hpctrain[mpi]', or ask hpctrain doctor"
            ) from None

        promised, variable = promised_size()
        device = detect_device()
        ours = not MPI.Is_initialized()
        if ours:
            remove_dead_segments()
            require_shared_memory(ranks_on_host())
            use_device_early(device)
            pmi.init_thread(MPI)
        if MPI.COMM_WORLD.size == 1 and promised > 1 and variable in TORCHRUN_VARIABLES:
            raise LaunchError(
                f"torchrun started {promised} processes ({variable}), and each would train alone: hpctrain is an MPI"
                f" program; start it with mpirun -n {promised} hpctrain ..., or with srun. Without torchrun, unset"
                f" {' and '.join(TORCHRUN_VARIABLES)}"
            )
        if MPI.COMM_WORLD.size == 1 and promised > 1:
            raise LaunchError(
                f"{variable} promises {promised} ranks, but MPI started this one alone: the launcher and the MPI"
                f" library ({MPI.Get_library_version().split(chr(10))[0][:60]}) do not belong together."
                " Use the mpirun that came with this MPI, or srun --mpi=pmi2 for MPICH, srun --mpi=pmix for Open MPI"
            )
        place = Place(os.environ.get(HOST_VARIABLE, socket.gethostname()), device.family, device.kind)
        places = gather_places(MPI, place, device.memory_bytes)
        of_families = rehearsed if rehearsed and len(rehearsed) == len(places) else places
        communicators = FamilyCommunicators(MPI, [each.family for each in of_families])
        world = cls(communicators, places, timeout_seconds, owns_mpi=ours)
        if watched:
            world.watchdog.start(world.everybody)
        return world

    def configure(self, **changes) -> None:
        """Change some of the `Settings` of new groups. All ranks must call."""
        bound = changes.get("accelerator", self.accelerator)
        assert self._engine is None or bound is self.accelerator, "the lanes' thread is bound to one device"
        self.settings = replace(self.settings, **changes)

    @property
    def topology(self) -> Topology:
        return self.settings.topology

    @property
    def accelerator(self) -> "Accelerator | None":
        return self.settings.accelerator

    @property
    def tracer(self) -> Tracer:
        return self.settings.tracer

    @property
    def place(self) -> Place:
        return self.topology.places[self.rank]

    def is_near(self, one: int, other: int) -> bool:
        """Say whether a message between two ranks uses fast links only; all ranks say the same."""
        network = self.settings.network
        return network.is_near(one, other) if network else self.topology.are_together(one, other)

    def enter(self, phase: Phase) -> None:
        """Begin another phase of the run. All ranks should, at about the same time; nobody waits."""
        self.patience.phase = phase
        self.watchdog.recorder.note_phase(phase.name)

    def group(self, ranks: Sequence[int], name: str = "", overlapped: bool = False, on_host: bool = False) -> "Group":
        """Return a group of `ranks`, in this order. All of them must call, in the same order of calls.

        With `overlapped`, operations started on it continue while the ranks compute. A group for tensors of the host
        alone (`on_host`) connects no library of devices.
        """
        from hpctrain.comm.groups.group import Group  # imports torch: late, so that mistakes are reported first

        backend, instruments, lane = None, Instruments(), None
        if len(ranks) > 1:
            instruments = self._instruments(name, ranks)
            with instruments.recorded("connect"):
                backend = self._routes().backend(ranks, on_host, instruments.pace, name in PAIRED)
            lane = self._moving().add_lane() if overlapped else None
        return self._keep(Group(ranks, backend, self.patience, instruments, lane))

    def pair(self, ranks: tuple[int, int]) -> "Group":
        """Return a group of two ranks with the route of messages between stages. Both must call."""
        from hpctrain.comm.groups.group import Group

        instruments = self._instruments("pair", ranks)
        with instruments.recorded("connect"):
            backend = self._routes().message_backend(ranks, instruments.pace)
        return self._keep(Group(ranks, backend, self.patience, instruments))

    def channel(self, peer: int, num_bytes: int, depth: int, name: str = "") -> "Channel":
        """Return a two-way channel to `peer` for `depth` messages of up to `num_bytes`. Both ends must call.

        Of several to the same peer each has a `name` of its own.
        """
        from hpctrain.comm.groups.channel import make_channel

        instruments = self._instruments("pipeline", sorted((self.rank, peer)), name)
        with instruments.recorded("connect"):
            made = make_channel(self._routes(), self._moving(), peer, num_bytes, depth, self.patience, instruments)
        return self._keep(made)

    @contextmanager
    def freeing(self):
        """Free memory, connections and other objects made in this block when it ends. All ranks must call.

        Where an error ends it they are abandoned, without the other ranks.
        """
        count = self.num_made
        try:
            yield
        except BaseException:
            self.free(count, alone=True)
            raise
        self.free(count)

    @property
    def num_made(self) -> int:
        """The number of groups and channels that this world has made and not freed."""
        return len(self._made)

    def free(self, count: int, alone: bool = False) -> None:
        """Free all groups and channels of this world except the first `count`.

        All ranks must call, unless this rank is `alone`: then they are abandoned.
        """
        if self._engine is not None and not alone:  # first: a lane may move tensors in memory of another group
            self._engine.finish()
        for made in reversed(self._made[count:]):
            if alone:
                made.abandon()
            else:
                made.close()
        del self._made[count:]

    def keep_records(self, folder: Path) -> None:
        """Keep the flight records in a folder, where they survive the ranks. All ranks must call.

        Raises CommError on all of them if one cannot write.
        """
        with self.all_or_none():
            self.watchdog.recorder.move_to(folder)
        self.watchdog.announce_folder(folder)

    def _combine(self, operation: str, value: object, function: Callable[[list], T]) -> T:
        """Return the result of `function`, which must not raise, on rank 0 for the values of all ranks. It is
        recorded."""
        with self.recorded(operation):
            return self.everybody.combine(value, function, operation)

    def recorded(self, operation: str) -> AbstractContextManager:
        """Record a block in which all ranks do something together."""
        return self.watchdog.recorder.recorded(self._record, operation)

    def _instruments(self, name: str, ranks: Sequence[int], which: str = "") -> Instruments:
        rehearsal = self.settings.rehearsal
        pace = rehearsal.pace(name) if rehearsal else None
        return Instruments(self.watchdog.recorder, name or "group", ranks, self.tracer, pace, which)

    def _routes(self):
        from hpctrain.comm.groups.maker import RouteMaker

        return RouteMaker(self.space, self.settings)

    def _moving(self) -> "ProgressEngine":
        """Return the engine that moves this rank's lanes; it starts with the first lane."""
        from hpctrain.comm.progress.lanes import ProgressEngine

        if self._engine is None:
            device = self.accelerator
            self._engine = ProgressEngine(self.has_threads, device.use if device else None)
            self.patience.meanwhile = None if self.has_threads else self._engine.poll
        return self._engine

    def _keep(self, made):
        self._made.append(made)
        return made

    @property
    def has_threads(self) -> bool:
        """Say whether MPI may be called by several threads at once."""
        return self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE

    def agree(self, error: Exception | None) -> None:
        """Raise on every rank if any rank has an error. All ranks must call.

        For steps that can fail on some ranks only, such as writing files; the error of the lowest rank is raised.
        """
        own = None if error is None else (self.rank, type(error), str(error))
        failure = self._combine("agree", own, lambda of_ranks: next(filter(None, of_ranks), None))
        if failure is not None:
            rank, kind, message = failure
            if error is not None and rank == self.rank:
                raise error
            raise kind(message)

    @contextmanager
    def all_or_none(self):
        """Run a block that may fail with an HpctrainError on some ranks only; then it fails on all of them."""
        error = None
        try:
            yield
        except HpctrainError as caught:
            error = caught
        self.agree(error)

    def on_first_rank(self, make: Callable[[], T]) -> T:
        """Return the result of `make` on rank 0, a small plain object, on every rank. All ranks must call.

        An HpctrainError there is raised on all ranks.
        """
        result = None
        with self.all_or_none():
            if self.rank == 0:
                result = make()
        return self.broadcast_object(result)

    def broadcast_object(self, value):
        """Return rank 0's value on every rank. For small plain objects. All ranks must call."""
        return self._combine("broadcast_object", value if self.rank == 0 else None, lambda values: values[0])

    def gather_objects(self, value) -> list:
        """Return every rank's value, in their order, on rank 0 (an empty list on others). All ranks must call."""
        result: list = []
        self._combine("gather_objects", value, result.extend)
        return result

    def all_objects(self, value: T) -> list[T]:
        """Return every rank's value, in their order, on every rank. For small plain objects. All ranks must call."""
        return self._combine("all_objects", value, list)

    def gather_numbers(self, numbers: Sequence[float]) -> "Operation":
        """Start to bring every rank's numbers, equally many, to rank 0; nobody waits. All ranks must call.

        The wait for it returns [ranks, numbers] (float64) on rank 0, and no rows on others, as soon as it has ended
        there.
        """
        import numpy as np

        from hpctrain.comm.progress.operation import Operation

        if self._numbers is None:
            self._numbers = self._moving().add_lane()
        members, content = self.space.members(range(self.size), NUMBERS), array("d", numbers).tobytes()

        def steps() -> Steps:
            received = yield from members.gathering(content)
            return np.array([np.frombuffer(each) for each in received])

        # Not in the flight record: it is in flight until the slowest rank comes.
        operation = Operation(Instruments(), "gather_numbers", len(content), steps(), self.patience, is_overlapped=True)
        self._numbers.begin(operation)
        return operation

    def smallest(self, value: float) -> float:
        """Return the smallest of all ranks' values. All ranks must call."""
        return self._combine("smallest", value, min)

    def largest(self, value: float) -> float:
        """Return the largest of all ranks' values. All ranks must call."""
        return self._combine("largest", value, max)

    @property
    def library(self) -> str:
        """The version text of the MPI library."""
        return self._mpi.Get_library_version().splitlines()[0].replace("\t", " ").strip()

    @property
    def raw_mpi(self):
        """The mpi4py module, for comparisons with plain MPI."""
        return self._mpi

    def close(self) -> None:
        """Free everything made by this world, and end MPI if it was started here. All ranks must call."""
        self.agree(None)  # no rank ends while another one may still be killed, or hang
        self.free(0)
        self._end_threads()
        self.watchdog.close()
        self.communicators.close()
        if self._owns_mpi:
            self._mpi.Finalize()

    def abandon(self, reason: str) -> None:
        """Leave without the other ranks: abandon groups and channels, end threads, and record the reason.

        MPI's communicators stay, since all ranks must call to free them. Keep `communicators` until MPI ends: with them
        stay the tensors of operations in flight, into which MPI may still write.
        """
        self.free(0, alone=True)
        if self._numbers is not None:
            self._numbers.abandon()
        if self._engine is not None:
            self.communicators.kept += self._engine.kept
        self._end_threads()
        self.watchdog.close(reason)

    def _end_threads(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self.patience.meanwhile = self._engine = self._numbers = None
        if self.settings.rehearsal is not None:
            self.settings.rehearsal.close()

    def fail(self, error: BaseException) -> NoReturn:
        """End all ranks after an error on this one; the message is printed once. Any rank may call.

        Where every rank failed by the same error (a mistake in a file), they detect it within `AGREEMENT_SECONDS`. Rank
        0 prints it and all exit in order. Others that still run are told, and leave their waits; this rank prints it
        and aborts them. Where a rank was killed, its host's guardian prints that, and the ranks end without a word.
        """
        if not isinstance(error, HpctrainError) and not self.patience.interruption:
            time.sleep(2 * TICK_SECONDS)  # a library may notice a death before the guardian's message comes
        loss = self.patience.interruption
        if loss and loss.is_dead:
            error = loss  # what fails after a death fails because of it
        code = error.exit_code if isinstance(error, HpctrainError) else UNCAUGHT_EXIT_CODE
        record_exit(code)
        self.free(0, alone=True)  # no rank may wait in them any longer
        is_own = not isinstance(error, RankLossError)
        is_first = self.watchdog.note_failure(error) and is_own
        if loss and loss.is_dead:
            self._abort(code)
        have_failed = self._ranks_that_failed(error)
        if len(have_failed) == self.size:
            if self.rank == 0:
                print(self._banner(error, everywhere=True), file=sys.stderr, flush=True)
            if self._engine is not None:
                self._engine.close()  # its thread calls MPI
            self._mpi.Finalize()
            # MPICH signs off from its launcher at exit. A process that skips that looks killed, and all are killed.
            sys.exit(code)
        if have_failed:
            is_first = self.rank == have_failed[0]
            time.sleep(0 if is_first else SECOND_SECONDS)
        else:
            time.sleep(min(self.rank * STAGGER_SECONDS, LONGEST_STAGGER_SECONDS) if is_first else SECOND_SECONDS)
        if is_own:
            print(self._banner(error, everywhere=False), file=sys.stderr, flush=True)
        time.sleep(HEARD_SECONDS)
        self._abort(code)

    def _abort(self, code: int) -> NoReturn:
        record_exit(code)
        self._mpi.COMM_WORLD.Abort(code)
        os._exit(code)

    def _ranks_that_failed(self, error: BaseException) -> list[int]:
        """Return the ranks with an error of their own, where all come; the others come because they are told of it.

        Empty where one does not come in time.
        """
        patience, begun = Patience(Phase("failing", AGREEMENT_SECONDS, "")), time.monotonic()
        is_own = not isinstance(error, RankLossError)

        def announce() -> None:
            if is_own and time.monotonic() > begun + EQUALLY_SECONDS:
                patience.meanwhile = None
                text = f"rank {self.rank} (host {self.place.host}) failed: {type(error).__name__}: {error}"
                self.watchdog.announce_loss(text, False, range(self.size))

        patience.meanwhile = announce
        everybody = self.space.members(range(self.size), FAREWELL)
        try:
            return everybody.combine(is_own, lambda own: [r for r, has in enumerate(own) if has], "failing", patience)
        except (CommError, self._mpi.Exception):
            return []

    def _banner(self, error: BaseException, everywhere: bool) -> str:
        trace = ""
        if not isinstance(error, HpctrainError):
            trace = "".join(traceback.format_exception(error))
        message = f"hpctrain: {type(error).__name__}: {error}"
        if not everywhere:
            message += f"\n  on rank {self.rank} of {self.size}, host {self.place.host}; all ranks are stopped"
        return trace + message
