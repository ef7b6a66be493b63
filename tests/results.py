"""A pytest plugin that keeps what became of each test in a file, line by line, so that it survives a crash.

`-p tests.results --results FILE` appends to FILE as tests start and end. It leaves out the tests that have a verdict
there already: the same command, started again, continues after the test that ended it.
"""

import json
import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.busy import own_seconds, seconds_of

SEVERITY = ("passed", "skipped", "failed")
MAX_REASON = 200
"""Characters of the message of a failure that are kept."""
PROCESSOR, BEGUN = "processor seconds", pytest.StashKey[float]()
STARTER = pytest.StashKey[int]()
"""The process that starts commands for tests, once there is one: what these use counts."""


@dataclass
class Outcomes:
    """What a file of results says."""

    verdicts: dict[str, dict] = field(default_factory=dict)
    """By test: its `outcome`, the `reason` of a failure or a skip, its `seconds`, and its `processor` seconds.

    The latter are of the process that reports and of the children that it waited for. Of ranks that is the first one.
    """
    unfinished: list[str] = field(default_factory=list)
    """Tests that started, and have no verdict."""
    last_code: int | None = None
    """Exit code of the last pytest that came to its end."""


def read_results(path: Path) -> Outcomes:
    result, started = Outcomes(), {}
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        if "code" in entry:
            result.last_code = entry["code"]
        elif "outcome" in entry:
            result.verdicts[entry["test"]] = entry
        else:
            started[entry["test"]] = None
    result.unfinished = [test for test in started if test not in result.verdicts]
    return result


def append_result(path: Path, **entry) -> None:
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def pytest_addoption(parser):
    parser.addoption("--results", type=Path, help="file in which the outcomes of tests are kept")


def pytest_configure(config):
    path = config.getoption("--results")
    is_first = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", 0))) == 0
    if path is not None and is_first and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if path := config.getoption("--results"):
        verdicts = read_results(path).verdicts
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in verdicts])
        items[:] = [item for item in items if item.nodeid not in verdicts]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.stash[BEGUN] = _processor_seconds(item)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    if call.when == "call" and BEGUN in item.stash:
        item.user_properties.append((PROCESSOR, round(_processor_seconds(item) - item.stash[BEGUN], 3)))


def _processor_seconds(item) -> float:
    starter = item.config.stash.get(STARTER, 0) if "warm_start" in getattr(item, "fixturenames", ()) else 0
    return own_seconds(and_running=False) + (seconds_of(starter) if starter else 0.0)


class Recorder:
    def __init__(self, path: Path):
        self._path, self._verdicts, self._seconds, self._processor = path, {}, defaultdict(float), {}

    def pytest_runtest_logstart(self, nodeid):
        append_result(self._path, test=nodeid)

    def pytest_runtest_logreport(self, report):
        before = self._verdicts.get(report.nodeid, ("passed", ""))
        verdict = (report.outcome, _reason(report))
        self._seconds[report.nodeid] += report.duration
        self._processor[report.nodeid] = dict(report.user_properties).get(PROCESSOR, 0.0)
        self._verdicts[report.nodeid] = max(before, verdict, key=lambda pair: SEVERITY.index(pair[0]))

    def pytest_runtest_logfinish(self, nodeid):
        outcome, reason = self._verdicts.pop(nodeid, ("failed", "it ended without a report"))
        seconds = round(self._seconds.pop(nodeid, 0.0), 3)
        processor = self._processor.pop(nodeid, 0.0)
        append_result(self._path, test=nodeid, outcome=outcome, reason=reason, seconds=seconds, processor=processor)

    def pytest_collectreport(self, report):
        if report.failed:
            append_result(self._path, test=report.nodeid, outcome="failed", reason=_reason(report))

    def pytest_sessionfinish(self, exitstatus):
        append_result(self._path, code=int(exitstatus))


def _reason(report) -> str:
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return " ".join(text.split())[:MAX_REASON]
