"""Over a slow link, what counts is how many bytes cross it: measured, counted by the interfaces, and as computed."""

import json
import statistics
from pathlib import Path

import pytest

from tests.busy import OtherPrograms, unless_busy
from tests.warm_start import SCRIPT

REDUCE = Path(__file__).with_name("reduce.py")
NUM_BYTES, REPEATS = 4_000_000, 4
# Headers and acknowledgements of the other direction; starting and ending the job.
OVERHEAD, START_BYTES = 1.08, 400_000
# Of a tensor, over 4 ranks in 2 domains of 2: what leaves a domain.
CROSSING = {"hierarchical": 1.0, "messages": 2.0}


def all_reduce(network, warm_start, route: str) -> tuple[float, object]:
    """Return the median seconds of an all-reduce, and the run; check the bytes."""
    command = [*warm_start, SCRIPT, REDUCE, route, NUM_BYTES, REPEATS]
    done = network.run(command, cwd=Path(__file__).parents[2], timeout_seconds=60)
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    half = len(network.site.hosts) // 2
    alpha, beta = range(half), range(half, 2 * half)
    for name, here, there in (("alpha", alpha, beta), ("beta", beta, alpha)):
        said = sum(summary["sent"][source][target] for source in here for target in there)
        counted = done.traffic.clusters[name].sent
        print(f"{route}: {name} says it sent {said:,} bytes, its link counted {counted:,}")
        assert said == pytest.approx(CROSSING[route] * NUM_BYTES * REPEATS, rel=1e-3)
        assert said <= counted <= said * OVERHEAD + START_BYTES
    return statistics.median(summary["seconds"]), done


@pytest.mark.timeout(150)
def test_by_domains_beats_a_flat_exchange_by_the_bytes_over_the_slow_link(network, warm_start):
    others = OtherPrograms()
    flat, _ = all_reduce(network, warm_start, "messages")
    hierarchical, _ = all_reduce(network, warm_start, "hierarchical")
    predicted = CROSSING["messages"] / CROSSING["hierarchical"]
    print(f"flat {flat:.3f} s, by domains {hierarchical:.3f} s: {flat / hierarchical:.2f}, by bytes {predicted}")
    with unless_busy(others):
        assert flat / hierarchical == pytest.approx(predicted, rel=0.2)
