"""The hosts' networks do what they promise, and training over them gives the numbers of one host."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.busy import OtherPrograms, unless_busy
from tests.hosts.network import Moved, open_network, remove_leftovers
from tests.ranks.small_runs import write_tokens
from tests.started import SMALL_MODEL

SEND = Path(__file__).with_name("send.py")
NUM_BYTES = 4_000_000
# Headers and acknowledgements are 5 % at most, less where 64 KiB count as one packet; MPI's start is some kB.
OVERHEAD, START_BYTES = 1.08, 50_000
JOB = f"""
{SMALL_MODEL}
[data]
tokens = "tokens.bin"
sequence_length = 16
[train]
steps = 4
global_batch = 16
learning_rate = 1e-2
dtype = "fp32"
"""


def send(network, hosts, ranks_per_host=1) -> tuple[float, Moved]:
    """Send NUM_BYTES twice between the halves of the ranks; return the seconds of the faster time, and the run."""
    done = network.run([sys.executable, SEND, NUM_BYTES], ranks_per_host, hosts=hosts, timeout_seconds=60)
    assert done.code == 0, done.err
    return min(json.loads(done.out)), done


def namespaces() -> list[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in done.stdout.splitlines()]


def processes_in(namespace: str) -> list[str]:
    return subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split()


def is_running(pid: str) -> bool:
    try:
        return bool(Path("/proc", pid, "cmdline").read_bytes())  # empty: ended, but nobody asked for its exit code yet
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.timeout(20)
def test_ranks_know_their_host_and_family_and_the_exit_code_comes_back(network):
    done = network.run(
        ["sh", "-c", "echo $PMI_RANK $HPCTRAIN_HOST $HPCTRAIN_FAMILY $GIVEN; exit 7"], 2, environment={"GIVEN": "x"}
    )
    assert done.code == 7
    expected = [f"{i} {host} {host[:-2]} x" for i, host in enumerate(h for h in network.site.hosts for _ in range(2))]
    assert sorted(done.out.splitlines()) == expected


@pytest.mark.timeout(40)
def test_between_clusters_bytes_take_the_time_of_the_slow_link_and_are_counted(network):
    others = OtherPrograms()
    seconds, done = send(network, ("alpha-0", "beta-0"))
    expected = NUM_BYTES * 8 / network.site.bits_per_second
    print(f"{NUM_BYTES / 1e6:g} MB between clusters: {seconds:.3f} s of {expected:.3f}; {done.traffic}")
    assert seconds > 0.8 * expected
    with unless_busy(others):
        assert seconds < 1.2 * expected
    hosts, clusters = done.traffic.hosts, done.traffic.clusters
    for count in (hosts["alpha-0"].sent, clusters["alpha"].sent, clusters["beta"].received, hosts["beta-0"].received):
        assert 2 * NUM_BYTES <= count <= 2 * NUM_BYTES * OVERHEAD + START_BYTES
    for count in (hosts["alpha-0"].received, clusters["alpha"].received, clusters["beta"].sent, hosts["beta-0"].sent):
        assert 0 < count < 2 * NUM_BYTES * (OVERHEAD - 1) + START_BYTES
    assert hosts["alpha-1"].sent + hosts["beta-1"].sent == 0


@pytest.mark.timeout(40)
def test_inside_a_cluster_bytes_are_faster_and_stay_there(network):
    others = OtherPrograms()
    seconds, done = send(network, ("beta-0", "beta-1"))
    expected = NUM_BYTES * 8 / network.site.clusters[1].bits_per_second
    print(f"{NUM_BYTES / 1e6:g} MB inside a cluster: {seconds:.3f} s of {expected:.3f}; {done.traffic}")
    assert seconds > 0.8 * expected
    with unless_busy(others):
        assert seconds < 3 * expected
    assert 2 * NUM_BYTES <= done.traffic.hosts["beta-1"].received <= 2 * NUM_BYTES * OVERHEAD + START_BYTES
    assert all(crossed.sent + crossed.received < START_BYTES for crossed in done.traffic.clusters.values())


@pytest.mark.timeout(40)
def test_flows_share_the_slow_link(network):
    others = OtherPrograms()
    seconds, _ = send(network, network.site.hosts)
    expected = 2 * NUM_BYTES * 8 / network.site.bits_per_second
    print(f"2 x {NUM_BYTES / 1e6:g} MB between clusters: {seconds:.3f} s of {expected:.3f}")
    assert seconds > 0.75 * expected
    with unless_busy(others):
        assert seconds < 1.25 * expected


@pytest.mark.timeout(40)
def test_ranks_of_one_host_leave_the_network_alone(network):
    _, done = send(network, ("alpha-0",), ranks_per_host=2)
    assert sum(moved.sent for moved in done.traffic.hosts.values()) < START_BYTES


@pytest.mark.timeout(20)
def test_a_timeout_ends_all_ranks(network):
    with pytest.raises(subprocess.TimeoutExpired):
        network.run(["sleep", "100"], timeout_seconds=0.5)
    assert not any(processes_in(namespace) for namespace in network.namespaces)


@pytest.mark.timeout(20)
def test_an_exception_removes_the_network(network):
    before = namespaces()
    with pytest.raises(ZeroDivisionError), open_network(network.site) as another:
        assert set(namespaces()) == {*before, *another.namespaces}
        raise ZeroDivisionError
    assert namespaces() == before


@pytest.mark.timeout(20)
def test_the_network_of_a_killed_process_is_removed_by_the_next(network, tmp_path):
    before = namespaces()
    command = f"touch {tmp_path}/$HPCTRAIN_HOST; exec sleep 100"
    program = (
        "from tests.hosts.conftest import SITE\nfrom tests.hosts.network import open_network\n"
        f"with open_network(SITE) as network: network.run(['sh', '-c', {command!r}])"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2]) as maker:
        while len(list(tmp_path.iterdir())) < 4:
            assert maker.poll() is None
            time.sleep(0.01)
        maker.kill()
    left = [name for name in namespaces() if name not in before]
    assert len(left) == 5
    running = [pid for name in left for pid in processes_in(name)]
    assert running
    remove_leftovers()
    assert namespaces() == before
    assert not any(is_running(pid) for pid in running)


@pytest.fixture(scope="module")
def folder(network, warm_start, tmp_path_factory) -> Path:
    """A folder with tokens, a job, and in runs/one what one rank makes of it."""
    path = tmp_path_factory.mktemp("hosts")
    write_tokens(path / "tokens.bin")
    (path / "job.toml").write_text(JOB)
    train(network, warm_start, path, "runs/one", hosts=("alpha-0",))
    return path


def train(network, warm_start, folder: Path, run: str, *layout: str, **how) -> Moved:
    command = [*warm_start, "train", "job.toml", "--run", run, "--sample", "0"]
    done = network.run([*command, *(part for setting in layout for part in ("--set", setting))], cwd=folder, **how)
    assert done.code == 0, done.out + done.err
    return done


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("ranks_per_host", "layout"),
    [(1, ("plan.tensor.y=2", "plan.pipeline=2")), (2, ("plan.tensor.y=2", "plan.data=2", "plan.pipeline=2"))],
    ids=["tensor in a cluster", "tensor in a host, data in a cluster"],
)
def test_training_on_four_hosts_gives_the_losses_of_one(network, warm_start, folder, ranks_per_host, layout):
    run = f"runs/{ranks_per_host}"
    done = train(network, warm_start, folder, run, *layout, ranks_per_host=ranks_per_host)
    compare = [*warm_start, "compare", "runs/one", run, "--tolerance", "1e-5"]
    said = subprocess.run(compare, cwd=folder, capture_output=True, text=True, timeout=30)
    print(f"{said.stdout}{done.traffic}")
    assert said.returncode == 0, said.stdout + said.stderr
    assert int(re.search(r"(\d+) steps", said.stdout)[1]) == 4
    crossed = sum(link.sent for link in done.traffic.clusters.values())
    stayed = sum(link.sent for link in done.traffic.hosts.values()) - crossed
    assert 0 < crossed < stayed, "only the pipeline is cut by the slow link"
