"""What all tests share: a folder of the session for descriptions of machines, and patience with a busy machine."""

import atexit
import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings

CACHE = tempfile.mkdtemp(prefix="hpctrain-cache-")
os.environ["HPCTRAIN_CACHE"] = CACHE
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)

# How long an example takes says something of the machine, not of the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

PATIENCE = 2.5
"""How many times longer than on an idle machine a test may take before it is taken for one that hangs."""


def pytest_collection_modifyitems(items):
    for item in items:
        if marker := item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(PATIENCE * marker.args[0]), append=False)
