"""Copies in the memory of hosts: who keeps what, whose they are, what is litter, and how far they are apart."""

import fcntl
import math
import os
import random
import shutil
import time

import numpy as np
import pytest

from hpctrain.checkpoint.contents import Contents
from hpctrain.checkpoint.copies import (
    LITTER_SECONDS,
    LOCK,
    complete_copies,
    copies_name,
    readers_of,
    remove_litter,
)
from hpctrain.checkpoint.format import MANIFEST, RECTANGLE
from hpctrain.engine.copies import DEVICE_SECONDS, interval_seconds
from hpctrain.plan.keepers import host_bytes, keepers


def test_equal_hosts_are_pairs_and_a_host_alone_keeps_its_own():
    assert keepers(["a", "a", "b", "b"], [5, 5, 5, 5]) == [2, 3, 0, 1]
    assert keepers(["a", "a"], [5, 5]) == [None, None]
    assert keepers(["a", "b", "b"], [4, 0, 2]) == [1, None, 0], "a rank without a state can keep one"
    assert host_bytes(["a", "b", "b"], [4, 0, 2]) == {"a": 48, "b": 48}


def test_a_keeper_has_kept_least_so_far_and_so_has_a_reader():
    chance = random.Random(3)
    for _ in range(200):
        hosts = chance.choices("abcd", k=chance.randint(1, 12))
        loads, counts = [0] * len(hosts), chance.choices((0, 1, 5), k=len(hosts))
        for rank, keeper in enumerate(keepers(hosts, counts)):
            others = [other for other, host in enumerate(hosts) if host != hosts[rank] and counts[rank]]
            assert keeper == min(others, key=lambda other: (loads[other], other), default=None)
            if keeper is not None:
                loads[keeper] += counts[rank]
        loads, names = [0] * len(hosts), list("pqrstuv")
        holders = {(host, name) for host in hosts for name in names if chance.random() < 0.4}
        for name, reader in zip(names, readers_of(names, hosts, holders), strict=True):
            able = [rank for rank, host in enumerate(hosts) if (host, name) in holders]
            assert reader == min(able, key=lambda rank: (loads[rank], rank), default=None)
            if reader is not None:
                loads[reader] += 1


def test_a_name_is_of_one_user_and_one_folder(tmp_path, monkeypatch):
    run, copied = tmp_path / "run", tmp_path / "copied"
    run.mkdir()
    assert copies_name(run) is None
    name = copies_name(run, make=True)
    assert name and copies_name(run) == copies_name(run, make=True) == name
    shutil.copytree(run, copied)
    assert copies_name(copied) is None, "else two runs would write over each other"
    assert copies_name(copied, make=True) != name
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert copies_name(run) is None


def test_a_copy_in_a_folder_of_another_user_is_none(tmp_path, monkeypatch):
    (tmp_path / "step-00000005").mkdir()
    (tmp_path / "step-00000005" / MANIFEST).write_text("{}")
    assert [path.name for path in complete_copies(tmp_path)] == ["step-00000005"]
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert complete_copies(tmp_path) == []


def test_litter_is_old_and_of_no_process(tmp_path):
    def make(name: str, is_old: bool = True):
        host = tmp_path / f"hpctrain-copies-{os.geteuid()}-{name}" / "host"
        (host / "step-00000005").mkdir(parents=True)
        (host / LOCK).touch()
        for path in (host / "step-00000005", host / LOCK, host, host.parent):
            os.utime(path, (0, time.time() - is_old * (LITTER_SECONDS + 60)))
        return host

    own, young, old = make("own"), make("young", is_old=False), make("old")
    empty = tmp_path / f"hpctrain-copies-{os.geteuid()}-empty"
    other = tmp_path / f"hpctrain-copies-{os.geteuid() + 1}-other"
    for folder in (empty, other):
        folder.mkdir()
        os.utime(folder, (0, 0))
    with (make("held") / LOCK).open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        os.utime(held.name, (0, 0))
        assert sorted(remove_litter(tmp_path, own.parent.name)) == [empty.name, old.parent.name]
    assert {path.name.rpartition("-")[2] for path in tmp_path.iterdir()} == {"own", "young", "held", "other"}
    assert young.exists() and remove_litter(tmp_path / "nowhere") == []


def test_checkpoints_by_node_and_copies_by_rank_have_their_own_index():
    rectangles = [np.array([(rank, 0, (0, 4), (0, 1), 0)], RECTANGLE) for rank in range(2)]
    contents = Contents({"model/a": (4,), "model/b": (4,)}, rectangles, [4, 4], {})
    by_rank, by_node = contents.index([0, 1]), contents.index([0, 0])
    assert b"part-00001.h5" in by_rank and b"part-00001.h5" not in by_node
    assert contents.index([0, 1]) is by_rank, "made once"


@pytest.mark.parametrize(("seconds", "num_ranks"), [(0.01, 8), (2.0, 64), (30.0, 16384)])
def test_copies_are_apart_by_their_cost_and_the_risk_and_take_a_hundredth_at_most(seconds, num_ranks):
    interval = interval_seconds(seconds, num_ranks)
    assert interval >= 100 * seconds
    if interval > 100 * seconds:  # then longer and shorter ones cost more
        cost = lambda apart: seconds / apart + apart / 2 * num_ranks / DEVICE_SECONDS  # noqa: E731
        assert all(cost(interval) < cost(interval * factor) for factor in (0.9, 1.1))
    assert math.isclose(interval_seconds(1e-9, 1), math.sqrt(2e-9 * DEVICE_SECONDS))
