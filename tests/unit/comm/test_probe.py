"""The probe, as far as one rank goes: which pairs represent all, what is measured how, and what is computed from it."""

import itertools
import pwd
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.comm.accelerators.kinds import Ability
from hpctrain.comm.groups.group import Group
from hpctrain.comm.probe.device_timing import (
    SHAPES,
    DeviceFigures,
    TimeBudget,
    host_copy_seconds,
    measure_device,
    measure_products,
    seconds_of,
)
from hpctrain.comm.probe.link_timing import ACROSS, SIZES, MeasuredLinks, PairClass, one_direction, pair_classes
from hpctrain.comm.probe.machine import cache_folder, fingerprint
from hpctrain.comm.probe.survey import check_names, describe
from hpctrain.comm.start.launcher import free_host_bytes
from hpctrain.comm.topology import Place
from hpctrain.comm.transports.abilities import FamilyAbilities
from hpctrain.config.clusters.cluster_file import dump_cluster, parse_cluster
from hpctrain.config.clusters.links import link_between
from hpctrain.config.errors import TopologyError

ALPHA = [Place(f"alpha-{i}", "fast") for i in (0, 0, 0, 0, 1, 1, 1, 1)]
BETA = [Place("beta", "slow")] * 3
PLACES = ALPHA + BETA
FABRICS = ["ib"] * 8 + ["roce"] * 3


def test_a_user_without_home_and_name_has_a_cache_folder(monkeypatch):
    def refuse(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", refuse)
    assert cache_folder({}) == Path("/.cache/hpctrain")


def test_pairs_represent_all_that_are_equal():
    assert pair_classes(PLACES, FABRICS) == [
        PairClass(("fast", "fast"), None, ((0, 1), (2, 3))),
        PairClass(("slow", "slow"), None, ((8, 9),)),
        PairClass(("fast", "slow"), ACROSS, ((0, 8), (1, 9), (2, 10))),
        PairClass(("fast", "fast"), "ib", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ]


def test_families_of_one_host_are_paired_with_each_other():
    places = [Place("host", family) for family in ("b", "a", "b", "a", "b")]
    assert {c.families: c.pairs for c in pair_classes(places, ["x"] * 5)} == {
        ("a", "a"): ((1, 3),),
        ("a", "b"): ((1, 0), (3, 2)),
        ("b", "b"): ((0, 2),),
    }


def test_a_lone_rank_has_no_pairs_and_many_hosts_are_not_enumerated():
    assert pair_classes([Place("host", "a")], ["x"]) == []
    start = time.process_time()
    places = [Place(f"host-{rank // 8}", "a" if rank < 2048 else "b") for rank in range(4096)]
    assert len(pair_classes(places, ["x"] * 4096)) == 5
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("number", "flows"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (8, [1, 2, 4, 8])]
)
def test_flows_double(number, flows):
    assert PairClass(("a", "a"), None, tuple((2 * i, 2 * i + 1) for i in range(number))).flows == flows


def test_one_direction_is_what_the_answer_leaves_and_at_least_half():
    pairs = PairClass(("a", "a"), None, ((0, 1),))
    trips = {(1, 1): 20e-6} | {(1, size): 20e-6 + size / 1e9 for size in SIZES}
    measured = one_direction(pairs, trips)
    assert measured.latency_seconds == pytest.approx(10e-6)
    assert measured.seconds[1, 1 << 20] == pytest.approx(10e-6 + (1 << 20) / 1e9)
    assert measured.bytes_per_second(1) == pytest.approx(1e9)
    assert (1, 1) not in measured.seconds
    without_large = one_direction(pairs, {key: seconds for key, seconds in trips.items() if key[1] < 1 << 20})
    assert without_large.bytes_per_second(1) == pytest.approx(1e9)
    disturbed = one_direction(pairs, trips | {(1, 1): 1.0})
    assert disturbed.latency_seconds == pytest.approx(10.5e-6, rel=0.05)
    lucky = one_direction(pairs, trips | {(2, SIZES[0]): 1e-6})
    assert lucky.seconds[2, SIZES[0]] == 0.5e-6, "faster than the latency: at least half of the round trip"


def test_time_that_is_not_used_is_left_to_the_next():
    budget = TimeBudget(10.0, 10)
    assert budget.next_share() == pytest.approx(1.0, rel=0.1)
    for _ in range(8):
        budget.next_share()
    assert budget.next_share() == pytest.approx(10.0, rel=0.1)
    assert TimeBudget(-1.0, 3).next_share() == 0


def _busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_call_is_timed_for_about_so_long():
    calls = []
    start = time.perf_counter()
    taken = seconds_of(lambda: calls.append(_busy(0.005)), CpuAccelerator(), 0.1)
    assert taken >= 0.005
    assert 5 <= len(calls) <= 22
    assert time.perf_counter() - start >= 0.02


def test_a_device_is_measured():
    accelerator = CpuAccelerator()
    dtypes = ["fp32", "fp16", "bf16"]  # fp16 is what others measure
    figures = measure_device(Group([0]), accelerator, "cpu", ranks_on_host=2, seconds=1.0, dtypes=dtypes)
    assert figures.memory_bytes == accelerator.memory().total // 2
    assert figures.memory_bytes_per_second > 0
    assert figures.host_copy_bytes_per_second is None
    assert {dtype for dtype, _ in figures.flops_per_second} == {"fp32", "bf16"}
    assert {shape for _, shape in figures.flops_per_second} <= set(SHAPES)
    assert ("fp32", (8192, 4096, 8192)) not in figures.flops_per_second, "0.5 TFLOP do not fit into a second's share"


def test_large_products_are_measured_on_a_device_whose_launches_cost_more_than_small_ones(monkeypatch):
    """A probe of half a second measured [64, 64] alone on an H200, and took it for the speed of the device."""
    clock, flops_per_second, launch_seconds = [0.0], 7e14, 6e-5

    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        clock[0] += max(launch_seconds, 2 * a.shape[0] * a.shape[1] * b.shape[1] / flops_per_second)

    def stopwatch():
        since = clock[0]
        return lambda: clock[0] - since

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda tensor, *_: tensor)
    device = SimpleNamespace(
        kind="cuda",
        device=torch.device("cpu"),
        compute_stopwatch=stopwatch,
        products_per_second=lambda dtype: flops_per_second,
    )
    budget = TimeBudget(0.6, 3 * len(SHAPES) + 2)
    measured = dict(measure_products(Group([0]), device, torch.bfloat16, 1 << 32, budget))
    assert set(measured) == set(SHAPES) and max(measured.values()) == pytest.approx(flops_per_second)


def _wall_stopwatch():
    start = time.perf_counter()
    return lambda: time.perf_counter() - start


def test_host_copies_are_awaited_and_the_slower_direction_counts():
    """An accelerator that is slow to report that a copy from the device has ended."""

    class Event:
        def __init__(self, until: float):
            self._until = until

        def query(self) -> bool:
            return time.perf_counter() >= self._until

    def copy(target: torch.Tensor, source: torch.Tensor) -> Event:
        return Event(time.perf_counter() + (0.004 if target is host else 0.0))

    host = torch.empty(1000, dtype=torch.uint8)
    pretended = SimpleNamespace(
        device=torch.device("cpu"), host_buffer=lambda _: host, copy=copy, compute_stopwatch=_wall_stopwatch
    )
    assert host_copy_seconds(pretended, 1000, 0.02) >= 0.004


def figures_of(place: Place, slower: float = 1.0) -> DeviceFigures:
    speeds = {("fp32", (64, 64, 64)): 1e9 / slower, ("fp32", (512, 512, 512)): 5e9 / slower}
    if place.family == "fast":
        speeds["bf16", (64, 64, 64)] = 2e9
    kind = "cuda" if place.family == "fast" else "cpu"
    copied, slowed = (1e9, 1.2) if kind == "cuda" else (None, None)
    return DeviceFigures(place.family, kind, "A 100", 1 << 30, 2e9, copied, speeds, slowed, slowed and 4e-5)


@pytest.mark.parametrize(
    ("files", "environment", "left"),
    [
        ({}, {}, 6 << 30),
        ({}, {"SLURM_MEM_PER_NODE": "2048"}, 2 << 30),
        ({}, {"SLURM_MEM_PER_CPU": "1024", "SLURM_CPUS_ON_NODE": "4"}, 4 << 30),
        ({"proc/self/cgroup": "0::/jobs/7\n"}, {}, 1 << 30),
        ({"proc/self/cgroup": "0::/other/8\n"}, {}, 6 << 30),
        ({"proc/self/cgroup": "3:memory:/jobs/9\n2:cpu:/jobs/7\n"}, {}, 5 << 20),
    ],
)
def test_the_host_memory_that_a_job_may_fill_is_what_its_limits_leave(tmp_path, files, environment, left):
    files |= {
        "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {6 << 20} kB\n",
        "sys/fs/cgroup/jobs/7/memory.max": "max\n",
        "sys/fs/cgroup/jobs/7/memory.current": "1000\n",
        "sys/fs/cgroup/jobs/memory.max": f"{3 << 30}\n",
        "sys/fs/cgroup/jobs/memory.current": f"{2 << 30}\n",
        "sys/fs/cgroup/memory/jobs/9/memory.limit_in_bytes": f"{7 << 20}\n",
        "sys/fs/cgroup/memory/jobs/9/memory.usage_in_bytes": f"{2 << 20}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_host_bytes(tmp_path, environment) == left


def measured_of(pair_class: PairClass) -> MeasuredLinks:
    speed = {None: 5e9, "ib": 2e9, "roce": 2e9}.get(pair_class.fabric, 1e8)
    trips = {(f, s): 2e-6 + s * f**0.5 / speed for f in pair_class.flows for s in (1, *SIZES)}
    return one_direction(pair_class, trips)


def test_what_was_measured_becomes_a_cluster_whose_links_are_those():
    figures = [figures_of(place, slower=2.0 if rank == 10 else 1.0) for rank, place in enumerate(PLACES)]
    left = [(1 + rank) << 30 if each.kind == "cuda" else None for rank, each in enumerate(figures)]
    figures = [each._replace(free_host_bytes=num_bytes) for each, num_bytes in zip(figures, left, strict=True)]
    measured = [measured_of(c) for c in pair_classes(PLACES, FABRICS)]
    cluster, comments = describe(PLACES, FABRICS, figures, measured)
    text = dump_cluster(cluster, comments)
    assert parse_cluster(text, "cluster.toml") == cluster
    assert cluster.describe() == "8 fast and 3 slow on 3 nodes, by backbone, ib"
    fast, slow = cluster.families["fast"], cluster.families["slow"]
    assert (fast.kind, fast.measured_at_once, fast.host_copy_bytes_per_second) == ("cuda", 4, 1e9)
    assert (fast.overlap_slowdown, slow.overlap_slowdown) == (1.2, None)
    assert (fast.operation_seconds, slow.operation_seconds) == (4e-5, None)
    assert slow.sustained_flops_per_second == {"fp32": 5e9}
    assert "3 ranks; figures are the median rank's. They differ by up to 2.00x. 3 ranks of a host measured" in text
    assert [nodes.count for nodes in cluster.nodes] == [2, 1]
    assert [nodes.host_memory_bytes for nodes in cluster.nodes] == [1 << 30, None], "the least; devices alone"
    assert link_between(cluster, 0, 3).bytes_per_second == pytest.approx(5e9, rel=1e-3)
    ib, across = link_between(cluster, 0, 4), link_between(cluster, 0, 8)
    assert (ib.between, ib.fabric, across.between, across.fabric) == ("fabric", "ib", "across", ACROSS)
    assert ib.bytes_per_second == pytest.approx(2e9, rel=1e-3)
    assert ib.shared_bytes_per_second == pytest.approx(4e9, rel=1e-3), "four flows got twice as much as one"
    assert {time.flows for time in across.times} == {1, 2, 3}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["fast", "slow", "other"])), min_size=1, max_size=9),
    st.data(),
)
def test_every_rank_is_located_where_it_is_whatever_the_order(ranks, data):
    """Its node, its family, and of every pair what was measured for its class."""
    places = [Place(f"host-{host}", family) for host, family in ranks]
    own = [data.draw(st.sampled_from(["ib", "roce"])) for _ in range(4)]
    fabrics = [own[host] for host, _ in ranks]
    measured = [measured_of(c) for c in pair_classes(places, fabrics)]
    cluster, comments = describe(places, fabrics, [figures_of(place) for place in places], measured)
    assert parse_cluster(dump_cluster(cluster, comments), "cluster.toml") == cluster
    assert [device.family for device in cluster.devices] == [place.family for place in places]
    for a, b in itertools.combinations(range(len(places)), 2):
        link = link_between(cluster, a, b)
        assert (link.between == "node") == (places[a].host == places[b].host)
        if link.between != "node":
            assert link.fabric == (fabrics[a] if fabrics[a] == fabrics[b] else ACROSS)
        assert link.times, "each class of pairs was measured"


def test_ranks_that_were_not_started_host_by_host_keep_their_numbers():
    places = [Place(f"host-{rank % 2}", "cpu") for rank in range(4)]
    fabrics = ["x"] * 4
    measured = [measured_of(c) for c in pair_classes(places, fabrics)]
    cluster, _ = describe(places, fabrics, [figures_of(place) for place in places], measured)
    assert cluster.nodes[0].ranks == (0, 2, 1, 3)
    assert [device.node for device in cluster.devices] == [0, 1, 0, 1]


def test_a_lone_rank_is_a_cluster_too():
    places = [Place("host", "cpu")]
    cluster, comments = describe(places, ["x"], [figures_of(places[0])], [])
    assert parse_cluster(dump_cluster(cluster, comments), "cluster.toml") == cluster
    assert (cluster.num_devices, cluster.links, cluster.fabrics) == (1, (), {})


def test_hosts_are_on_one_fabric_whose_name_is_free():
    one, other = Place("a", "cpu"), Place("b", "cpu")
    check_names([one, one, other], ["ib", "ib", "roce"])
    with pytest.raises(TopologyError, match="HPCTRAIN_FABRIC=roce on rank 1, but other ranks of host a say 'ib'; give"):
        check_names([one, one], ["ib", "roce"])
    with pytest.raises(TopologyError, match="HPCTRAIN_FABRIC=backbone on rank 0: that is what .* choose another name"):
        check_names([one], [ACROSS])
    with pytest.raises(TopologyError, match="HPCTRAIN_FABRIC on rank 1: ' ib' is no name: it is empty, or has control"):
        check_names([one, other], ["ib", " ib"])
    with pytest.raises(TopologyError, match="HPCTRAIN_FAMILY on rank 0: '' is no name"):
        check_names([Place("a", "")], ["ib"])


def test_links_by_mpi_are_not_those_of_a_makers_library(monkeypatch):
    """A description that was kept is for the routes that it was measured by."""

    def fingerprint_with(works: bool, kind: str = "cuda") -> str:
        family = FamilyAbilities("a", kind, Ability(works, "-"), Ability(False, "-"))
        settings = SimpleNamespace(devices=SimpleNamespace(families={"a": family}))
        place = Place("n1", "a", kind)
        world = SimpleNamespace(place=place, library="an MPI", settings=settings, all_objects=lambda own: [own])
        return fingerprint(world, CpuAccelerator("a"))  # pyright: ignore[reportArgumentType]

    assert fingerprint_with(True) != fingerprint_with(False)
    assert fingerprint_with(True) == fingerprint_with(True)
    assert fingerprint_with(True, "cpu") == fingerprint_with(False, "cpu"), "a host has no such routes"
    before = fingerprint_with(False)
    monkeypatch.setenv("HPCTRAIN_PEER", "0")
    assert fingerprint_with(False) != before
