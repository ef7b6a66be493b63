"""Tests with a real Slurm, whose nodes are daemons of this machine; see site.py."""

from pathlib import Path

import pytest

from tests.slurm.site import SlurmSite, missing, open_site
from tests.slurm.work import Work


@pytest.fixture(scope="session")
def site(tmp_path_factory, warm_start) -> SlurmSite:
    if reason := missing():
        pytest.skip(reason)
    with open_site(tmp_path_factory.mktemp("slurm")) as site:
        site.start_warm(warm_start)
        yield site


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder with a token file, and with what the machine's description is kept in."""
    return Work.prepare(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def work(site, shared, tmp_path, warm_start) -> Work:
    """A folder with a job and a cluster, for one test."""
    return Work(site, shared, tmp_path, warm_start)
