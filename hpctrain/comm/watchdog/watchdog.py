"""The watchdog: when ranks wait for too long, one of them determines why, reports it once, and ends all.

Every rank has a thread that looks a few times a second: is an operation of its own in flight for longer than the
patience, and does another rank ask? A rank that is overdue appeals to rank 0, which asks all ranks what
they do, waits for their answers, prints one report and aborts. Where rank 0 does not react, ranks 1, 2, 4, ... are
tried, and at last the rank speaks for itself: all that are overdue try the same ranks in the same order, so that one
speaks. A rank that was asked by another one does not speak.

The same thread interrupts the rank's waits where another rank is lost. It hears that from the guardian of its host, and
tells the ranks of other hosts. A rank that fails by an error tells all others itself.

A rank whose launcher's daemon was killed is ended too: nobody else would do it, and mpirun waits for it for ever.
"""

import itertools
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hpctrain.comm.mpi_communicators import FamilyCommunicators
from hpctrain.comm.start.launcher import record_exit
from hpctrain.comm.topology import Place
from hpctrain.comm.waiting import Patience, Phase
from hpctrain.comm.watchdog import flight
from hpctrain.comm.watchdog.diagnosis import Diagnosis, Evidence, diagnose
from hpctrain.comm.watchdog.flight import Flight
from hpctrain.comm.watchdog.guardian import LOST, START_SECONDS, Guarded
from hpctrain.comm.watchdog.recorder import Recorder
from hpctrain.config.errors import CommError, RankLossError

TICK_SECONDS = 0.25
REACTION_SECONDS = 3.0
ANSWER_SECONDS = 5.0
# A rank that was asked lets the asking rank report first, for this long.
DEFERENCE_SECONDS = 2 * ANSWER_SECONDS
# A launcher that has to abort may drop what it has not read yet.
HEARD_SECONDS = 0.5
SENT_OPERATIONS = 16
SHOWN_STACKS, SHOWN_SENTENCES = 4, 8
# After its timeout a waiting operation lets the watchdog report first, which knows more, for this long.
GRACE_SECONDS = 30.0
# A rank that is told of a loss, and still computes or waits in a library after this long, is ended.
INTERRUPTED_SECONDS = 5.0
APPEAL, QUESTION, ANSWER, LOSS = range(4)
TELLING_RANKS = 2
"""Ranks of a host that tell other hosts of a loss; one of them may be the lost one."""


@dataclass(frozen=True)
class Answer:
    """A rank's answer to a question about its state."""

    flight: Flight
    stacks: str
    overdue_in: Phase | None
    """The phase in which the rank has waited for too long, if it has."""


class Watchdog:
    """Records this rank's communication, and makes sure that a missing rank is reported, once."""

    def __init__(
        self,
        communicators: FamilyCommunicators,
        places: Sequence[Place],
        patience: Patience,
        abort: Callable[[int], object],
    ):
        """It records in memory; monitoring begins with `start`. `abort(code)` ends all ranks."""
        self._mpi, self._alarms = communicators.mpi, communicators.alarms
        self._patience, self._end_all = patience, abort
        self._rank, self._size = communicators.rank, len(places)
        self._hosts = tuple(place.host for place in places)
        own = places[self._rank]
        self.recorder = Recorder(None, self._rank, self._size, own.host, own.family, communicators.made_at)
        self.recorder.note_phase(patience.phase.name)
        self._sent: list = []
        self._deferring_until = 0.0
        self._candidates: Iterator[int] = iter(())
        self._overdue: int | None = None
        self._next_appeal = 0.0
        self._launcher = os.getppid()
        self._ends = 0.0
        """Time of `time.monotonic` at which an interrupted rank is ended; 0: none is."""
        self._stop = -1
        self._awaited = select.poll()
        """Ends a sleep of the thread, when it is told to stop or the guardian says something."""
        self._heard = threading.Event()
        """Set when the guardian has answered."""
        self._guarded: Guarded | None = None
        self._thread: threading.Thread | None = None

    def start(self, everybody) -> None:
        """Begin to monitor in a thread, and start the guardian of the host. All ranks must call.

        `everybody` are the members of a group of all ranks.
        """
        if self._size == 1:
            return
        self._guarded = Guarded(everybody, self._hosts[self._rank])
        self._alarms.Set_errhandler(self._mpi.ERRORS_RETURN)  # a message to a dead rank must not kill the messenger
        if self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE:
            self._patience.grace_seconds = GRACE_SECONDS
            self._stop = os.eventfd(0)
            self._awaited.register(self._stop, select.POLLIN)
            if self._guarded.descriptor is not None:
                self._awaited.register(self._guarded.descriptor, select.POLLIN)
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def announce_folder(self, folder: Path) -> None:
        """Tell where the records are kept, after all ranks have moved theirs there. All ranks must call."""
        if self._guarded and self._guarded.descriptor is not None:
            self._guarded.announce_folder(folder)
            if self._thread is not None:
                self._heard.wait(START_SECONDS)
            else:
                self._guarded.hear(START_SECONDS)

    def note_failure(self, error: BaseException) -> bool:
        """Stop watching: this rank ends with an error. Return False where another one reports it.

        The record of a rank that ends for another one stays as it is.
        """
        self._end_thread()
        is_loss = isinstance(error, RankLossError)
        if not is_loss:
            self.recorder.close(f"{type(error).__name__}: {error}")
        hears_report = is_loss and error.is_dead
        return self._guarded.say_goodbye(not hears_report, hears_report) if self._guarded else True

    def announce_loss(self, text: str, is_dead: bool, to: Iterable[int]) -> None:
        """Interrupt the waits of other ranks, which are watched: a rank is lost."""
        for rank in to:
            if rank != self._rank:
                self._send(rank, LOSS, (text, is_dead))

    def close(self, error: str = "") -> None:
        """Stop watching, before MPI is ended: in order or, with the text of an error, without the other ranks."""
        self._end_thread()
        self.recorder.close(error)
        if self._guarded:
            self._guarded.say_goodbye()

    def _end_thread(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            os.eventfd_write(self._stop, 1)
            self._thread.join()
            self._thread = None
            os.close(self._stop)

    def _abort(self) -> None:
        if self._guarded:
            self._guarded.say_goodbye(reports_error=True)
        self._end_all(CommError.exit_code)

    def _run(self) -> None:
        while not self._sleep(TICK_SECONDS):
            try:
                self._tick()
            except self._mpi.Exception:  # other ranks are ending; report what is known
                continue

    def _sleep(self, seconds: float) -> bool:
        """Wait for that time, unless the guardian says something; return whether the thread is to end."""
        for number, _ in self._awaited.poll(seconds * 1000):
            if number == self._stop:
                return True
            assert self._guarded is not None, "it is heard"
            word, _, text = self._guarded.hear().partition(" ")
            self._heard.set()
            if word == LOST:
                self._interrupt(text, is_dead=True)
                near = [rank for rank, host in enumerate(self._hosts) if host == self._hosts[self._rank]]
                if near.index(self._rank) < TELLING_RANKS:
                    self.announce_loss(text, True, set(range(self._size)).difference(near))
            elif not word:  # it has ended
                self._awaited.unregister(number)
        return False

    def _interrupt(self, text: str, is_dead: bool) -> None:
        if self._patience.interruption is None:
            self._ends = time.monotonic() + INTERRUPTED_SECONDS
            self._patience.interruption = RankLossError(text, is_dead)

    def _tick(self) -> None:
        self.recorder.beat()
        if self._ends and time.monotonic() > self._ends:
            self._abort()
        if os.getppid() != self._launcher:
            self._end_without_launcher()
        appeals = self._read_appeals()
        now = time.monotonic()
        if now < self._deferring_until:
            return
        if appeals:
            self._speak()
        elif self._is_overdue() and now >= self._next_appeal:
            candidate = next(self._candidates)
            if candidate == self._rank:
                self._speak()
            else:
                self._send(candidate, APPEAL)
                self._next_appeal = now + REACTION_SECONDS

    def _end_without_launcher(self) -> NoReturn:
        """End this rank; the first one of the host prints why. MPI's own abort needs the daemon, which is gone."""
        host = self._hosts[self._rank]
        text = (
            f"CommError: on host {host} process {self._launcher} is gone, which the launcher had started the ranks"
            " with; its ranks are stopped, start the same command again"
        )
        try:
            record_exit(CommError.exit_code)
            if self._hosts.index(host) == self._rank:
                self.recorder.close(error=text)
                print(f"hpctrain: {text}", file=sys.stderr, flush=True)
        finally:  # standard error may be a pipe that ended with the daemon
            os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it was killed")

    def _is_overdue(self) -> bool:
        """Say whether an operation takes too long. For a new operation the appeals start again."""
        result = self.recorder.max_in_flight()
        since = time.monotonic() - self._patience.since
        if result is None or min(result[1], since) < self._patience.phase.seconds:
            self._overdue = None
            return False
        if result[0] != self._overdue:
            self._overdue = result[0]
            self._candidates = _spokesmen(self._rank)
            self._next_appeal = 0.0
        return True

    def _read_appeals(self) -> list[int]:
        """Return the ranks that appeal to this one; answer those that ask."""
        appeals = []
        for source, kind, content in self._messages():
            if kind == APPEAL:
                appeals.append(source)
            elif kind == LOSS:
                self._interrupt(*content)
            elif kind == QUESTION:
                self._answer(source)
        return appeals

    def _messages(self) -> Iterator[tuple[int, int, Any]]:
        self._sent = [request for request in self._sent if not request.Test()]
        status = self._mpi.Status()
        while self._alarms.iprobe(status=status):
            content = self._alarms.recv(source=status.Get_source(), tag=status.Get_tag())
            yield status.Get_source(), status.Get_tag(), content

    def _send(self, rank: int, kind: int, content: object = None) -> None:
        try:
            self._sent.append(self._alarms.isend(content, dest=rank, tag=kind))
        except self._mpi.Exception:
            return  # it is gone; the report will say so

    def _answer(self, rank: int) -> None:
        self._deferring_until = time.monotonic() + DEFERENCE_SECONDS
        self._send(rank, ANSWER, self._describe_self())

    def _describe_self(self) -> Answer:
        stacks = python_stacks(skip=threading.get_ident())
        if (folder := self.recorder.folder) is not None:
            with suppress(OSError):  # the report has those that matter
                (folder / f"stacks-{self._rank:05}.txt").write_text(stacks)
        overdue_in = self._patience.phase if self._is_overdue() else None
        return Answer(self.recorder.snapshot().shortened(SENT_OPERATIONS), stacks, overdue_in)

    def _speak(self) -> None:
        """Ask all, wait for their answers, print the report and end all ranks."""
        started = time.monotonic()
        others = [rank for rank in range(self._size) if rank != self._rank]
        for rank in others:
            self._send(rank, QUESTION)
        answers = {self._rank: self._describe_self()}
        while len(answers) < self._size and time.monotonic() - started < ANSWER_SECONDS:
            for source, kind, content in self._messages():
                if kind == ANSWER:
                    answers[source] = content
                elif kind == QUESTION and source < self._rank:  # two ranks were asked to report
                    return self._answer(source)
                elif kind == LOSS:
                    return self._interrupt(*content)
            if self._sleep(TICK_SECONDS / 5) or self._patience.interruption:
                return None
        phases = [phase for rank in sorted(answers) if (phase := answers[rank].overdue_in)]
        if not phases:
            return None  # the slow operation has ended
        report, summary = self._report(answers, phases[0])
        self.recorder.close(error=f"CommError: {summary}; {phases[0]}")
        with suppress(OSError):  # its reader may have ended
            print(report, file=sys.stderr, flush=True)
        time.sleep(HEARD_SECONDS)
        return self._abort()

    def _report(self, answers: dict[int, Answer], phase: Phase) -> tuple[str, str]:
        flights = {rank: answer.flight for rank, answer in answers.items()}
        silent = frozenset(range(self._size)) - frozenset(answers)
        gone: set[int] = set()
        if silent and self.recorder.folder is not None:  # their records may have what they cannot answer
            left = flight.read_flights(self.recorder.folder)
            flights |= {rank: left[rank] for rank in silent if rank in left}
            gone = {rank for rank in silent if rank in left and left[rank].process_is_gone()}
        evidence = Evidence(flights, self._size, time.time(), frozenset(gone), silent, hosts=self._hosts)
        result = diagnose(evidence)
        lines = [
            f"hpctrain: CommError: {result.sentences[0]}",
            *(f"  {text}" for text in result.sentences[1:SHOWN_SENTENCES]),
        ]
        lines.append(f"  detected by rank {self._rank}: {phase}; all ranks are stopped")
        lines += [f"    {line}" for line in result.table]
        return "\n".join(lines + self._stacks(result, answers)), result.sentences[0]

    def _stacks(self, result: Diagnosis, answers: dict[int, Answer]) -> list[str]:
        if self.recorder.folder is not None:
            return [f"  Python stacks of the ranks that answered: {self.recorder.folder / 'stacks-*.txt'}"]
        shown = [rank for rank in result.culprits or answers if rank in answers][:SHOWN_STACKS]
        return [f"  Python stacks of rank {rank}:\n{answers[rank].stacks}" for rank in shown]


def _spokesmen(rank: int) -> Iterator[int]:
    """Yield the ranks to which this one appeals, one after the other; its own ends the search."""
    powers = itertools.takewhile(lambda candidate: candidate < rank, (2**i for i in itertools.count()))
    return itertools.chain([0], powers, itertools.repeat(rank)) if rank else itertools.repeat(0)


def python_stacks(skip: int = 0) -> str:
    """Return the stacks of all threads of this process, except the thread with the identifier `skip`."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    summary = []
    for identifier, frame in sys._current_frames().items():
        if identifier != skip:
            summary.append(f"thread {names.get(identifier, identifier)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(summary)
