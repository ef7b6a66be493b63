"""What is noted of a device that ran out of memory, and what later plans make of it."""

import pytest

from hpctrain.comm.probe import machine
from hpctrain.config.clusters.cluster import MemoryOverflow
from hpctrain.config.clusters.cluster_file import dump_cluster, parse_cluster
from hpctrain.engine.trainer import requested_bytes
from tests.pretended import CLUSTER


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_CACHE", str(tmp_path))
    return tmp_path


def overflow(num_bytes: int, predicted: int) -> MemoryOverflow:
    return MemoryOverflow(items=(0, 4), rows=8, bytes=num_bytes, predicted_bytes=predicted)


def test_a_plan_that_overflowed_does_not_fit_again():
    family = CLUSTER.families["fast"]
    whole = family.usable_bytes
    for num_bytes, predicted in ((whole + 1, whole), (2 * whole, whole // 2), (whole // 2, whole // 2 + 5), (9, whole)):
        noted = family.model_copy(update={"overflows": (overflow(num_bytes, predicted),)})
        assert noted.usable_bytes < predicted, "whether it needed more than predicted, or had less than described"
    assert family.model_copy(update={"overflows": (overflow(whole // 2, whole),)}).usable_bytes > 0.97 * whole / 2


def test_overflows_are_kept_for_these_devices_and_read_again(cache):
    assert machine.with_overflows(CLUSTER) == CLUSTER and not machine.describe_overflows(CLUSTER)
    first, second = overflow(60_000_000, 40_000_000), overflow(50_000_000, 45_000_000)
    assert "the same command plans with it" in machine.note_overflow(CLUSTER, "fast", first)
    machine.note_overflow(CLUSTER, "slow", second)
    noted = machine.with_overflows(CLUSTER)
    assert (noted.families["fast"].overflows, noted.families["slow"].overflows) == ((first,), (second,))
    assert machine.with_overflows(noted) == noted, "each once"
    assert parse_cluster(dump_cluster(noted), "a test") == noted, "and a cluster file has them"
    said = machine.describe_overflows(noted)
    assert "of fast: one with items [0, 4] and 8 rows ran out of memory at 57.2 MiB, where 38.1 were" in said
    faster = {"peak_flops_per_second": {"fp32": 5e9}}
    measured = {name: family.model_copy(update=faster) for name, family in CLUSTER.families.items()}
    assert machine.with_overflows(CLUSTER.model_copy(update={"families": measured})).families["fast"].overflows
    smaller = {name: family.model_copy(update={"memory_bytes": 10**7}) for name, family in CLUSTER.families.items()}
    other = CLUSTER.model_copy(update={"families": smaller})
    assert machine.with_overflows(other) == other, "other devices"
    machine.overflows_path(CLUSTER).write_text('{"fast": [{"rows": "many"}]}')
    assert machine.with_overflows(CLUSTER) == CLUSTER, "what is damaged is none"


def test_a_folder_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HPCTRAIN_CACHE", str(tmp_path / "file"))
    assert "this could not be noted" in machine.note_overflow(CLUSTER, "fast", overflow(2, 1))


@pytest.mark.parametrize(
    ("message", "num_bytes"),
    [
        ("CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0 has", 21_495_808),
        ("HIP out of memory. Tried to allocate 2.00 GiB.", 2**31),
        ("the pretended t4 is out of memory: 225280 bytes more than the 4593444 in use", 225280),
        ("out of memory", 0),
    ],
)
def test_what_was_asked_for_is_read_from_the_message(message, num_bytes):
    assert requested_bytes(message) == num_bytes
