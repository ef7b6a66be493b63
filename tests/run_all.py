"""Run the suite to its end and list what failed: `python tests/run_all.py [--thorough] [STAGE ...]`, by default all
stages. Without `--thorough` cases are left out whose parts others have; tests/selection.py lists them.

A test on several ranks that fails may leave them out of step. Its ranks end there, and new ones do the tests after it.
Ranks that crash or hang count as a failure of the test that they were in.

Ranks wait for each other, and leave the cores idle meanwhile. Tests that only compute, of one process, take these
seconds: they run in the background at the lowest priority. What four ranks measure has the machine for itself: that
stage comes last, when the background has ended.
"""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of many processes compiles all that it imports

from tests.busy import own_seconds, seconds_of  # noqa: E402
from tests.results import append_result, read_results  # noqa: E402
from tests.warm_start import MODULE, SERVER_VARIABLE, client_command, serving  # noqa: E402

BIN = Path(sys.executable).parent
SILENCE_SECONDS = 900.0
"""Without a test that starts or ends, after which a stage is stopped: longer than any test may take."""
THOROUGH = "--thorough"
NO_TESTS, STOP_SECONDS, POLL_SECONDS = 5, 10.0, 0.2
SHOWN_FILES = 30


@dataclass(frozen=True)
class Stage:
    name: str
    commands: tuple[tuple[str, ...], ...]
    """Programs of the virtual environment, one after the other."""
    keeps_results: bool = True
    in_background: bool = False
    """Whether it runs at the lowest priority while the stages after it run."""
    is_alone: bool = False
    """Whether it begins when the stage in the background has ended."""

    @property
    def is_on_ranks(self) -> bool:
        return self.commands[0][0] == "mpirun"

    @property
    def is_forked(self) -> bool:
        """Whether processes of it are forked from a server."""
        return any(WARM in word for command in self.commands for word in command)


WARM = "warm"
"""Stands for what forks a process of a server that has imported everything: see tests/warm_start.py."""
COMPILER = "torch._inductor.compile_fx"
"""Takes a rank that compiles three seconds to import."""
LIBRARY = "transformers.models.llama.modeling_llama"
"""Takes each process that runs tests of one host two seconds."""
OPTIONS = ("-p", "tests.results", "--durations", "10", "--durations-min", "5")
PYTEST = ("python", "-m", "pytest", *OPTIONS)
# A rank that hangs inside MPI sees no signal: a thread ends it, and so its mpirun, after the test's timeout.
ON_RANKS = (WARM, "pytest", *OPTIONS, "--with-mpi", "--maxfail=1", "--timeout-method=thread", "tests/ranks")
BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder")
COMPUTING = ("tests/unit/planner", "tests/unit/project/test_lint.py")
"""The tests that take the most seconds of those that only compute, and whose verdicts no busy core changes."""
ONE_HOST = ("tests/slurm", "tests/commands", "tests/unit", *(f"--ignore={path}" for path in COMPUTING))
# What waits for cores that others need may take many times as long.
PATIENT = ("--patience", "20", "--timeout", "3600")
SOURCES = ("hpctrain", "tests", "benchmarks")
LINTERS = (("ruff", "check", *SOURCES), ("ruff", "format", "--check", *SOURCES), ("pyright",))
STAGES = {
    stage.name: stage
    for stage in (
        # Commands and Slurm's jobs wait now and then: of four processes two compute. Slurm's tests come first: one
        # process does them all, and waits the most.
        Stage("one-host", ((*PYTEST, "--tx", f"4*popen//python={WARM}", *BY_FILE, *ONE_HOST),)),
        # Two processes, so that a core is not idle where others wait for this stage.
        Stage("computing", ((*PYTEST, "-n", "2", *BY_FILE, *PATIENT, *COMPUTING),), in_background=True),
        *(Stage(f"ranks-{size}", (("mpirun", "-n", str(size), *ON_RANKS),)) for size in (2, 8)),
        Stage("hosts", ((WARM, *PYTEST[2:], "tests/hosts"),)),
        Stage("ranks-4", (("mpirun", "-n", "4", *ON_RANKS, "-m", "not measured"),)),
        Stage("measured", (("mpirun", "-n", "4", *ON_RANKS, "-m", "measured"),), is_alone=True),
    )
}
PARTS = {
    stage.name: stage
    for stage in (
        Stage("lint", LINTERS, keeps_results=False),
        Stage("unit", ((*PYTEST, "-n", "2", "tests/unit"),)),
        Stage("commands", ((*PYTEST, "-n", "3", *BY_FILE, "tests/commands"),)),
        Stage("slurm", ((*PYTEST, "tests/slurm"),)),
    )
}
"""Of a stage, to be run alone."""


@dataclass
class Report:
    """What became of a stage."""

    stage: Stage
    verdicts: dict[str, dict]
    """By test; see tests/results.py."""
    seconds: float
    processor_seconds: float
    """Of all its processes; the daemons of Slurm, and what they start cold, are not its own."""

    def count(self, outcome: str) -> int:
        return sum(verdict["outcome"] == outcome for verdict in self.verdicts.values())

    def format(self) -> str:
        counts = ", ".join(f"{self.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped"))
        return f"{self.stage.name}: {counts} in {self.seconds:.0f} s ({self.processor_seconds:.0f} s of processors)"


def run_program(command: tuple[str, ...], results: Path) -> tuple[int, str]:
    """Return the exit code of a program and, where it was stopped, why. All that it started ends with it."""
    print(f"+ {' '.join(command)}", flush=True)
    return await_program(start_program(command, results), results)


def start_program(command: tuple[str, ...], results: Path, **options) -> subprocess.Popen:
    """Start a program in a session of its own; `options` are those of `subprocess.Popen`."""
    names = {name: [str(BIN / name)] for name in ("python", "mpirun", "ruff", "pyright")}
    client = client_command(server_of(results.parent))
    names[WARM] = [*client, MODULE]
    program = [part for word in command for part in names.get(word, [word])]
    program = [word.replace(f"python={WARM}", f"python={shlex.join(client)}") for word in program]
    return subprocess.Popen(program, cwd=ROOT, start_new_session=True, **options)


def await_program(process: subprocess.Popen, results: Path) -> tuple[int, str]:
    """Wait for a program's end; return what `run_program` does."""
    begun = time.time()
    try:
        while process.poll() is None:
            last = results.stat().st_mtime if results.exists() else begun
            if time.time() - max(begun, last) > SILENCE_SECONDS:
                return 1, f"no test started or ended for {SILENCE_SECONDS:.0f} s"
            time.sleep(POLL_SECONDS)
    finally:
        _stop(process)
    return process.returncode, ""


def server_of(folder: Path) -> Path:
    return folder / "server"


def _stop(process: subprocess.Popen) -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signum)
            process.wait(STOP_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


class Background:
    """A stage that runs while others do. What it prints is kept until its report."""

    def __init__(self, stage: Stage, folder: Path, options: Sequence[str] = ()):
        self._stage, self._results, self._output = stage, folder / f"{stage.name}.jsonl", folder / f"{stage.name}.out"
        self._begun = time.monotonic()
        command = (*stage.commands[0], *options, "--results", str(self._results))
        print(f"\n==== {stage.name}, in the background ====\n+ {' '.join(command)}", flush=True)
        with self._output.open("wb") as output:
            how = {"stdout": output, "stderr": subprocess.STDOUT, "preexec_fn": _give_way}
            self._process = start_program(command, self._results, **how)

    def processor_seconds(self) -> float:
        """Return those that it has used so far."""
        return seconds_of(self._process.pid)

    def report(self) -> Report:
        """Wait for its end, for which nothing else waits any more."""
        _give_way(0, self._process.pid)
        code, why = await_program(self._process, self._results)
        print(f"\n==== {self._stage.name} ====\n{self._output.read_text(errors='replace')}", flush=True)
        outcomes = read_results(self._results)
        why = why or f"pytest ended with code {code}, see its output"
        for test in outcomes.unfinished:
            outcomes.verdicts[test] = {"outcome": "failed", "reason": why}
        if outcomes.last_code not in (0, 1):
            outcomes.verdicts[f"{self._stage.name}: pytest"] = {"outcome": "failed", "reason": why}
        used = sum(verdict.get("processor", 0.0) for verdict in outcomes.verdicts.values())
        return Report(self._stage, outcomes.verdicts, time.monotonic() - self._begun, used)

    def close(self) -> None:
        """End it, if it runs."""
        if self._process.poll() is None:
            _stop(self._process)


def _give_way(nice: int = 19, group: int = 0) -> None:
    """Set the priority of a process group, by default that of this process: the lowest one, or that of others."""
    with suppress(OSError):  # only root may have a higher one again
        os.setpriority(os.PRIO_PGRP, group, nice)
    with suppress(OSError):  # Linux may share the cores among sessions first
        Path(f"/proc/{group or 'self'}/autogroup").write_text(str(nice))


def run_stage(stage: Stage, folder: Path, options: Sequence[str] = (), background: Background | None = None) -> Report:
    def used_seconds() -> float:
        return own_seconds() - (background.processor_seconds() if background else 0.0)

    begun, used, results = time.monotonic(), used_seconds(), folder / f"{stage.name}.jsonl"
    print(f"\n==== {stage.name} ====", flush=True)
    if not stage.keeps_results:
        verdicts = {}
        for command in stage.commands:
            code, why = run_program(command, results)
            outcome = "failed" if code else "passed"
            verdicts[" ".join(command)] = {"outcome": outcome, "reason": why or f"exit code {code}"}
        return Report(stage, verdicts, time.monotonic() - begun, used_seconds() - used)
    while True:
        before = read_results(results)
        append_result(results, code=-1)  # until pytest comes to its end
        code, why = run_program((*stage.commands[0], *options, "--results", str(results)), results)
        after = read_results(results)
        if after.last_code == -1 or why:
            why = why or f"a crash or a timeout: pytest ended with code {code} and without a report, see its output"
            for test in after.unfinished or [f"{stage.name}: the start"]:
                append_result(results, test=test, outcome="failed", reason=why)
            after = read_results(results)
        elif not stage.is_on_ranks or after.last_code in (0, NO_TESTS):
            if after.last_code not in (0, 1, NO_TESTS) or (after.last_code == NO_TESTS and not after.verdicts):
                after.verdicts[f"{stage.name}: pytest"] = {"outcome": "failed", "reason": f"exit code {code}"}
            break
        if len(after.verdicts) == len(before.verdicts):
            after.verdicts[f"{stage.name}: pytest"] = {"outcome": "failed", "reason": f"exit code {code}"}
            break
        if not after.unfinished and f"{stage.name}: the start" in after.verdicts:
            break
        print(f"{stage.name}: a test failed; new processes continue with the tests after it", flush=True)
    return Report(stage, after.verdicts, time.monotonic() - begun, used_seconds() - used)


def slowest_files(reports: list[Report]) -> list[str]:
    """Return the files whose tests take the most seconds: what to look at before the suite grows.

    On ranks the processor seconds are those of the first rank.
    """
    seconds: dict[str, float] = defaultdict(float)
    processor: dict[str, float] = defaultdict(float)
    for report in reports:
        for test, verdict in report.verdicts.items():
            file = f"{report.stage.name}: {test.partition('::')[0]}"
            seconds[file] += verdict.get("seconds", 0.0)
            processor[file] += verdict.get("processor", 0.0)
    files = sorted(seconds, key=seconds.__getitem__, reverse=True)[:SHOWN_FILES]
    return [
        f"{seconds[file]:.0f} s, {processor[file]:.0f} s of processors: {file}" for file in files if seconds[file] >= 1
    ]


def print_summary(reports: list[Report], seconds: float) -> None:
    print("\n==== summary ====")
    for report in reports:
        print(report.format())
    print("slowest files:", *slowest_files(reports), sep="\n  ")
    for outcome in ("skipped", "failed"):
        for report in reports:
            for test, verdict in report.verdicts.items():
                if verdict["outcome"] == outcome:
                    print(f"{outcome.upper()} [{report.stage.name}] {test}: {verdict['reason']}")
    total = {name: sum(report.count(name) for report in reports) for name in ("passed", "failed", "skipped")}
    shown = [f"{count} {name}" for name, count in total.items() if count or name == "passed"]
    used = sum(report.processor_seconds for report in reports)
    print(f"{', '.join(shown)} in {seconds:.0f} s ({used:.0f} s of processors)", flush=True)


def main(names: list[str]) -> int:
    stages, options = STAGES | PARTS, [name for name in names if name == THOROUGH]
    names = [name for name in names if name != THOROUGH]
    if unknown := set(names) - set(stages):
        print(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(stages)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and so end what was started
    reports, begun = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hpctrain-results-") as folder, ExitStack() as stack:
        background = None
        for name in names or STAGES:
            stage = stages[name]
            if stage.in_background:
                background = Background(stage, Path(folder), options)
                stack.callback(background.close)
                continue
            if stage.is_forked and not server_of(Path(folder)).exists():
                stack.enter_context(serving(server_of(Path(folder)), COMPILER, LIBRARY))
                os.environ[SERVER_VARIABLE] = str(server_of(Path(folder)))
            if background and stage.is_alone:
                reports.append(background.report())
                background = None
            reports.append(run_stage(stage, Path(folder), options, background))
        if background:
            reports.append(background.report())
    print_summary(reports, time.monotonic() - begun)
    return int(any(report.count("failed") for report in reports))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
