"""Tests on N ranks: `mpirun -n N python -m pytest --with-mpi tests/ranks`.

A test runs on all ranks at once. Its verdict is collective: where it fails on one rank it fails on all, and each says
which ranks failed and why. A rank that waits for one that has failed gives up after TIMEOUT_SECONDS.
"""

import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from hpctrain.comm.world import World
from tests.ranks.small_runs import write_tokens

TIMEOUT_SECONDS = 60.0


def pytest_addoption(parser):
    parser.addoption("--all-layouts", action="store_true", help="every factorisation of the ranks, not a selection")


@pytest.fixture(scope="session")
def world():
    world = World.start(TIMEOUT_SECONDS, watched=False)
    yield world
    world.close()


@pytest.fixture(scope="session")
def shared_tmp_path(world):
    """A folder that all ranks see. Not one of pytest: every rank is a pytest, and tidies up those of others."""
    path = world.broadcast_object(Path(tempfile.mkdtemp(prefix="hpctrain-")) if world.rank == 0 else None)
    yield path
    world.agree(None)
    if world.rank == 0:
        shutil.rmtree(path)


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


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    from mpi4py import MPI

    config.addinivalue_line("markers", "ranks(*sizes): run on these numbers of ranks")
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if MPI.COMM_WORLD.rank and reporter:  # verdicts are collective: one report is enough
        reporter._tw._file = open(os.devnull, "w")


def pytest_collection_modifyitems(config, items):
    """Leave out what is for another number of ranks; the suite runs these files on 2, 4 and 8 in turn.

    What names no numbers is the same on all, and not run on 2 and 8: minutes count.
    """
    from mpi4py import MPI

    def fits(item) -> bool:
        marker = item.get_closest_marker("ranks")
        size = MPI.COMM_WORLD.size
        return size in marker.args if marker else size not in (2, 8)

    config.hook.pytest_deselected(items=[item for item in items if not fits(item)])
    items[:] = [item for item in items if fits(item)]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    from mpi4py import MPI

    failure = None
    try:
        result = yield
    except Exception as error:
        failure = error
        result = True
    failures = MPI.COMM_WORLD.allgather(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    if any(failures):
        told = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text)
        pytest.fail(f"failed on other ranks:\n{told}", pytrace=False)
    return result
