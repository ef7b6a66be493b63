"""Tests on hosts with networks of their own, which are namespaces of this machine; see network.py."""

import pytest

from tests.hosts.network import Cluster, Site, missing, open_network

SITE = Site((Cluster("alpha", 2, 1e9), Cluster("beta", 2, 1e9)), 1e8)


@pytest.fixture(scope="session")
def network():
    """Two clusters of two hosts: alpha-0, alpha-1 and beta-0, beta-1."""
    if reason := missing():
        pytest.skip(reason)
    with open_network(SITE) as network:
        yield network
