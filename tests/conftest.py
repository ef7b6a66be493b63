"""What all tests share: a folder of the session for descriptions of machines, and patience with a busy machine."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.results import STARTER
from tests.selection import is_left_out
from tests.warm_start import client_command, pid_of, serving

CACHE = tempfile.mkdtemp(prefix="hpctrain-cache-")
os.environ["HPCTRAIN_CACHE"] = CACHE
os.environ["HPCTRAIN_IGNORE_LOAD"] = "1"  # tests run side by side, and descriptions are kept all the same
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)

# How long an example takes says something of the machine, not of the code. A suite that tries the same examples each
# time says something of a change; `make test-random` looks for new ones.
EXAMPLES = 40
"""Of a rule that does not say how many it needs; new ones are 100."""
IN_TIME = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, max_examples=EXAMPLES, **IN_TIME)
settings.register_profile("random", **IN_TIME)
settings.load_profile(os.environ.get("HPCTRAIN_TEST_EXAMPLES", "same"))

PATIENCE = 2.5
"""How many times longer than on an idle machine a test may take before it is taken for one that hangs; see
`--patience`."""


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory, request) -> Iterator[list[str]]:
    """The words that take the place of `hpctrain` in a command, and start it without importing anything anew."""
    server = tmp_path_factory.mktemp("server") / "socket"
    with serving(server):
        request.config.stash[STARTER] = pid_of(server)
        yield client_command(server)


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="all cases and layouts, not a selection")
    parser.addoption("--patience", type=float, default=PATIENCE, help="factor of the time that a test may take")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--thorough"):
        config.hook.pytest_deselected(items=[item for item in items if is_left_out(item.nodeid)])
        items[:] = [item for item in items if not is_left_out(item.nodeid)]
    for item in items:
        if marker := item.get_closest_marker("timeout"):
            patience = config.getoption("--patience")
            item.add_marker(pytest.mark.timeout(patience * marker.args[0]), append=False)
