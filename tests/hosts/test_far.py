"""Two sites that are 50 ms from each other: a relay between them holds every packet for so long."""

import json

import pytest

from tests.hosts.network import Cluster, Site, missing, open_network
from tests.warm_start import MODULE

LATENCY, BYTES_PER_SECOND, NUM_BYTES = 0.05, 0.25e9, 192 << 20
SITE = Site((Cluster("one", 1, 20e9), Cluster("two", 1, 20e9)), BYTES_PER_SECOND * 8, LATENCY)


@pytest.mark.timeout(120)
def test_staged_messages_fill_a_link_whose_bytes_are_long_under_way(warm_start):
    """Two chunks of 4 MiB alone fill a third of it."""
    if reason := missing():
        pytest.skip(reason)
    with open_network(SITE) as network:
        command = [*warm_start, MODULE, "tests.hosts.far", LATENCY, BYTES_PER_SECOND, NUM_BYTES]
        done = network.run(command, hosts=SITE.hosts, timeout_seconds=90)
    assert done.code == 0, done.err
    following, two_chunks = json.loads(done.out)
    print(f"{NUM_BYTES / BYTES_PER_SECOND:.2f} s of bytes: {following:.2f} s, with two chunks {two_chunks:.2f} s")
    assert following > 0.8 * NUM_BYTES / BYTES_PER_SECOND
    assert two_chunks > 2 * following
