"""Tests on N ranks: `mpirun -n N python -m pytest --with-mpi tests/ranks`.

A test runs on all ranks at once. Its verdict is collective: where it fails on one rank it fails on all, and each says
which ranks failed and why. A rank that waits for one that has failed gives up after TIMEOUT_SECONDS. After a failure
ranks may be out of step: use `--maxfail=1`; tests/run_all.py starts new ranks for the tests after it.
"""

import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hpctrain.comm.start.pmi import init_thread
from hpctrain.comm.world import World
from tests.compilers import need_compiler
from tests.ranks.small_runs import write_tokens
from tests.selection import ON_FOUR_RANKS_AT_MOST, ON_TWO_RANKS_ALONE, is_left_out

TIMEOUT_SECONDS = 60.0
VERDICT_SECONDS = 2 * TIMEOUT_SECONDS
"""How long a rank that is done with a test waits for the others, before it ends them all."""
FAREWELL_SECONDS = 20.0
FAILED, VERDICTS = pytest.StashKey(), pytest.StashKey()
"""Whether a test has failed, and a communicator for verdicts alone."""


@pytest.fixture(scope="session")
def world(request):
    world = World.start(TIMEOUT_SECONDS, watched=False)
    yield world
    if not request.config.stash[FAILED]:  # then ranks are out of step, and end without each other
        world.close()


@pytest.fixture(scope="session")
def shared_tmp_path(world, request):
    """A folder that all ranks see. Not one of pytest: every rank is a pytest, and tidies up those of others."""
    path = world.broadcast_object(Path(tempfile.mkdtemp(prefix="hpctrain-")) if world.rank == 0 else None)
    yield path
    if not request.config.stash[FAILED]:
        world.agree(None)
    if world.rank == 0:
        shutil.rmtree(path, ignore_errors=request.config.stash[FAILED])


@pytest.fixture
def folder(shared_tmp_path, request):
    """A folder of one test's own that all ranks see."""
    path = shared_tmp_path / re.sub(r"\W+", "-", request.node.nodeid)
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture(scope="session")
def tokens(world, shared_tmp_path):
    """A file of learnable tokens that all ranks see."""
    path = shared_tmp_path / "tokens.bin"
    if world.rank == 0:
        write_tokens(path)
    world.agree(None)
    return path


@pytest.fixture(scope="session")
def compiler(world):
    """For what ranks compile. One of them tries whether they can."""
    refusal = ""
    if world.rank == 0:
        try:
            need_compiler()
        except pytest.skip.Exception as skipped:
            refusal = str(skipped)
    if refusal := world.broadcast_object(refusal):
        pytest.skip(refusal)


@pytest.fixture(scope="session")
def steps(request) -> int:
    """Steps of a curve: what the suite has time for, and more where every layout is tried."""
    return 20 if request.config.getoption("--thorough") else 4


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    from mpi4py import MPI

    if not MPI.Is_initialized():  # the process was forked from one that has imported MPI
        init_thread(MPI)
        config.add_cleanup(lambda: config.stash[FAILED] or MPI.Finalize())
    config.stash[FAILED] = False
    config.stash[VERDICTS] = MPI.COMM_WORLD.Dup()
    config.addinivalue_line("markers", "ranks(*sizes): run on these numbers of ranks")
    config.addinivalue_line("markers", "measured: on four ranks with the machine for itself")
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if MPI.COMM_WORLD.rank and reporter:  # verdicts are collective: one report is enough
        reporter._tw._file = open(os.devnull, "w")


def pytest_collection_modifyitems(config, items):
    """Leave out what is for another number of ranks; the suite runs these files on 2, then 4, then 8.

    What names no numbers is the same on all, and not run on 2 and 8: minutes count.
    """
    from mpi4py import MPI

    def fits(item) -> bool:
        marker = item.get_closest_marker("ranks")
        size = MPI.COMM_WORLD.size
        is_all = config.getoption("--thorough")
        for most, table in ((2, ON_TWO_RANKS_ALONE), (4, ON_FOUR_RANKS_AT_MOST)):
            if size > most and not is_all and is_left_out(item.nodeid, table):
                return False
        return size in marker.args if marker else size not in (2, 8)

    config.hook.pytest_deselected(items=[item for item in items if not fits(item)])
    items[:] = [item for item in items if fits(item)]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    failure = None
    try:
        result = yield
    except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
        failure = error
        result = True
    skipped = isinstance(failure, pytest.skip.Exception)
    summary = (
        None if failure is None else (skipped, str(failure) if skipped else f"{type(failure).__name__}: {failure}")
    )
    every = verdicts(pyfuncitem, summary)
    failures = [f"rank {rank}: {verdict[1]}" for rank, verdict in enumerate(every) if verdict and not verdict[0]]
    if failures and (skipped or failure is None):
        pytest.fail("failed on other ranks:\n" + "\n".join(failures), pytrace=False)
    if failure is not None:
        raise failure
    if reasons := [verdict[1] for verdict in every if verdict]:
        pytest.skip(reasons[0])
    return result


def verdicts(item, own):
    """Return what all ranks say of a test. Ends them all where one does not come: it is in another test, or nowhere."""
    comm = item.config.stash[VERDICTS]
    request, deadline = comm.Ibarrier(), time.monotonic() + VERDICT_SECONDS
    while not request.Test():
        if time.monotonic() > deadline:
            text = f"rank {comm.rank} waited {VERDICT_SECONDS:g} s for the verdict of other ranks on {item.nodeid}"
            print(f"{text}; its own: {own[1] if own else 'passed'}", file=sys.__stderr__, flush=True)
            comm.Abort(1)
        time.sleep(0.001)
    return comm.allgather(own)


def pytest_runtest_logreport(report):
    from mpi4py import MPI

    if report.failed and report.when != "call" and MPI.COMM_WORLD.rank:  # of this rank alone, whose report is not shown
        print(f"rank {MPI.COMM_WORLD.rank}: {report.nodeid}: {report.longreprtext}", file=sys.__stderr__, flush=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
        item.config.stash[FAILED] = True


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """End ranks that are out of step: rank 0 when it has reported, the others with it."""
    if not config.stash.get(FAILED, False):
        return
    if config.stash[VERDICTS].rank:
        time.sleep(FAREWELL_SECONDS)
    sys.stdout.flush()
    config.stash[VERDICTS].Abort(1)
