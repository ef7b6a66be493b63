"""One run at a time in a run folder.

The file `lock` names the process that trains there. That process also holds a POSIX lock on the file, which the system
releases when the process ends, however it ends. Some file systems keep such locks within one host. So a heartbeat
updates the time of the file, and a lock of another host is taken over when its heartbeat stops.
"""

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path

from hpctrain.comm.start.process import process_status, this_machine
from hpctrain.comm.watchdog.flight import FOLDER as FLIGHT
from hpctrain.config.errors import JobError, TrainingError
from hpctrain.config.paths import refused_as

LOCK = "lock"
BEAT_SECONDS, STILL_SECONDS, POLL_SECONDS = 2.0, 9.0, 0.2


class RunLock:
    """Holds a run folder until `release`, or until the process ends. For one rank to make."""

    def __init__(self, run: Path):
        """Raises JobError that names the other run where there is one, or where the folder cannot be written."""
        self.path = run / LOCK
        self._is_new = not run.exists()
        self._refuse_if_in_flight()
        with refused_as(JobError, f"{run}: the run folder cannot be written", "choose another with --run"):
            run.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._take()
        except JobError:
            os.close(self._handle)
            raise
        self._ended_by = self._news = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._thread.start()

    def check(self) -> str | None:
        """Return what happened to the lock since the last call, for people; None: nothing.

        Raises TrainingError where the folder is gone, or another run took it: two runs would write over each other.
        """
        if self._ended_by:
            raise TrainingError(self._ended_by)
        news, self._news = self._news, ""
        return news or None

    def _refuse_if_in_flight(self) -> None:
        """Refuse a folder whose lock was removed while its run trains. Raises JobError."""
        from hpctrain.comm.watchdog.diagnosis import post_mortem

        if self._is_new or self.path.exists():
            return
        result = post_mortem(self.path.parent / FLIGHT, time.time())
        if result and result[0].startswith("in flight"):
            raise JobError(
                f"{self.path.parent}: another run is in this folder ({result[0]}), though its file {LOCK} was removed;"
                " wait for its end, or choose another --run"
            )

    def _take(self) -> None:
        if not self._lock():
            raise self._refusal()
        if self._is_alive(self._read()):
            raise self._refusal()
        own = {"host": socket.gethostname(), "pid": os.getpid(), "machine": this_machine()}
        own |= {"process_start": process_status(os.getpid()).start_ticks, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with refused_as(JobError, f"{self.path}: cannot be written", "free space, or choose another --run"):
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, json.dumps(own).encode() + b"\n", 0)

    def _lock(self) -> bool:
        """Take the system's lock; return False where another process has it."""
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            return True  # a file system without locks: what the file says has to do
        return True

    def _read(self) -> dict:
        try:
            holder = json.loads(os.pread(self._handle, 4096, 0))
            return holder if isinstance(holder, dict) else {}
        except (ValueError, OSError, RecursionError):
            return {}

    def _is_alive(self, holder: dict) -> bool:
        """Say whether the process that the file names still works, although the system's lock was free."""
        if not holder:
            return False
        pid = holder.get("pid")
        if holder.get("machine") == this_machine() and isinstance(pid, int):
            is_own = pid == os.getpid()
            return not is_own and process_status(pid).start_ticks == holder.get("process_start")
        since, before = time.monotonic(), os.fstat(self._handle).st_mtime_ns
        while time.monotonic() - since < STILL_SECONDS:
            time.sleep(POLL_SECONDS)
            if os.stat(self.path).st_mtime_ns != before:
                return True
        return False

    def _refusal(self) -> JobError:
        holder = self._read()
        who = (
            f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"
            if holder
            else "a process"
        )
        return JobError(
            f"{self.path.parent}: another run is in this folder ({who}); wait for its end, or choose another --run"
        )

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            self._look()

    def _look(self) -> None:
        """Update the time of the lock; where it is no longer this run's own, take it again, or note why not."""
        run, flags = self.path.parent, os.O_RDWR
        with contextlib.suppress(OSError):  # a folder that became read-only, or is changing: the next beat looks again
            try:
                if os.stat(self.path).st_ino == os.fstat(self._handle).st_ino:
                    os.utime(self.path)
                    return
            except FileNotFoundError:
                if not run.is_dir():
                    self._ended_by = (
                        f"{run}: the run folder is gone: it was deleted or moved while the run trained; if it was"
                        " moved, start the same command with its new path as --run, which continues from the latest"
                        " checkpoint there"
                    )
                    return
                flags |= os.O_CREAT | os.O_EXCL
            self._take_again(flags)
            if flags & os.O_CREAT:
                self._news = f"{self.path}: was removed while the run trains, and is made again"

    def _take_again(self, flags: int) -> None:
        """Take the file that is there in place of the one that was held. Raises OSError."""
        before, self._handle = self._handle, os.open(self.path, flags, 0o666)
        try:
            self._take()
            os.close(before)
            self._lock()  # where both are one file, closing one of them let go of it
        except JobError as error:
            os.close(self._handle)
            self._handle = before
            self._ended_by = f"{error}; its lock was removed while this run trained, so this one ends"

    def release(self, is_done: bool = True) -> None:
        """Let others in. Unless the run is done, a folder that was made for it and is empty is removed."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # on a disk that became read-only the system releases its lock all the same
            os.ftruncate(self._handle, 0)
            if self._is_new and not is_done and os.listdir(self.path.parent) == [LOCK]:
                self.path.unlink()
                self.path.parent.rmdir()
        os.close(self._handle)
