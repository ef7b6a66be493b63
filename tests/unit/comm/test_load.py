"""Timings of a busy machine are told from those of a quiet one; they are marked, not kept, and measured again."""

from types import SimpleNamespace

import pytest

from hpctrain.comm.probe import load, machine
from hpctrain.comm.probe.device_timing import DeviceFigures
from hpctrain.comm.probe.load import HostUse, busy_seconds, describe_disturbance
from hpctrain.comm.probe.survey import Survey, unequal_ranks
from hpctrain.comm.topology import Place
from hpctrain.config.clusters.cluster_file import load_cluster
from tests.pretended import CLUSTER

STAT = """cpu  100 0 50 900 5 1 2 3 7 0
cpu0 60 10 30 400 5 1 2 4 7 0
cpu1 40 0 20 500 0 0 0 0 0 0
cpu12 1 1 1 1 1 1 1 1 1 1
intr 5
"""


def test_busy_processors_are_read_from_the_system(tmp_path, monkeypatch):
    monkeypatch.setattr(load.os, "sysconf", lambda name: 100)
    path = tmp_path / "stat"
    path.write_text(STAT)
    assert busy_seconds({0, 12}, str(path)) == pytest.approx({0: 1.07, 12: 0.06}), (
        "what is idle or waits does not count"
    )
    assert busy_seconds({0}, str(tmp_path / "none")) == {}
    path.write_text("cpu0 1\n")
    assert busy_seconds({0}, str(path)) == {}


def uses(others: float, ranks: int, cores: int, host: str = "a") -> list[HostUse]:
    """Return what ranks see of a host whose processors do all that they can, `others` of them for other programs."""
    own = min(ranks, cores - others)
    busy = dict.fromkeys(range(cores), 10.0 * (own + others) / cores)
    return [HostUse(host, 1, 10.0, 10.0 * own / ranks, busy) for _ in range(ranks)]


def test_a_host_is_busy_where_others_keep_its_ranks_from_their_processors():
    assert describe_disturbance(uses(0.1, ranks=4, cores=2)) == ""
    assert describe_disturbance(uses(0.9, ranks=4, cores=2)) == "other programs took 0.9 of the 2 processors of host a"
    assert describe_disturbance(uses(20.0, ranks=8, cores=64)) == "", "there are more than the ranks need"
    both = [*uses(0.5, 4, 2, "a"), *uses(1.6, 4, 2, "b"), *uses(0.0, 4, 2, "c")]
    assert describe_disturbance(both) == "other programs took 1.6 of the 2 processors of host b", "the worst"
    pinned = [use._replace(busy_seconds={i: 10.0}) for i, use in enumerate(uses(1.0, ranks=2, cores=2))]
    assert describe_disturbance(pinned) == "other programs took 1.0 of the 2 processors of host a"
    assert describe_disturbance([HostUse("a", 1, 10.0, 5.0, {})]) == "", "nobody knows"


def figures(*speeds: float) -> list[DeviceFigures]:
    shapes = {("fp32", (size,) * 3): 1.0 for size in (64, 256, 512)}
    return [DeviceFigures("cpu", "cpu", None, 1, 1e9, None, dict.fromkeys(shapes, speed)) for speed in speeds]


def test_equal_ranks_that_differ_were_disturbed():
    assert unequal_ranks(figures(1e9, 1.5e9)) == ""
    assert unequal_ranks(figures(1e9, 3e9)) == "ranks of family cpu differ by 3.0 times"
    one_off = figures(1e9, 1e9)
    one_off[0].flops_per_second["fp32", (64, 64, 64)] = 9e9
    assert unequal_ranks(one_off) == "", "most figures agree"


def test_what_a_busy_machine_gives_is_marked_not_kept_and_measured_again(monkeypatch, tmp_path):
    monkeypatch.setenv("HPCTRAIN_CACHE", str(tmp_path))
    world = SimpleNamespace(
        rank=0,
        size=1,
        library="MPI",
        settings=SimpleNamespace(devices=None),
        place=Place("a", "cpu"),
        topology=SimpleNamespace(places=(Place("a", "cpu"),), has_devices=False),
        broadcast_object=lambda value: value,
        gather_objects=lambda value: [value],
        all_objects=lambda value: [value],
    )
    device = SimpleNamespace(model="m", kind="cpu", memory=lambda: SimpleNamespace(total=1))
    measured = iter([Survey(CLUSTER, {}, "others were there"), Survey(CLUSTER, {}, ""), None])
    monkeypatch.setattr(machine, "probe_cluster", lambda *what, **how: next(measured))
    busy = machine.describe_machine(world, device)
    assert busy.disturbance and busy.source.endswith("not kept: others were there; the next start measures again")
    assert "# Not those of a quiet machine: others were there.\n" in busy.text and not busy.path.exists()
    quiet = machine.describe_machine(world, device)
    assert quiet.is_new and not quiet.disturbance and load_cluster(quiet.path) == CLUSTER
    again = machine.describe_machine(world, device)
    assert again.cluster == CLUSTER and not again.is_new, "known from now on"
    machine.add_profiles(busy.path, CLUSTER, [], [], keeps=False)
    assert busy.path.read_text() == quiet.text
