"""Checkpoints on disk: read by anyone whole or in slices, refused where a byte is not as it was written."""

import errno
import itertools
import os
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from benchmarks.disks import every_call
from hpctrain.checkpoint import index as checkpoint_index
from hpctrain.checkpoint.folder import candidates, complete_checkpoints, kept_steps, latest_checkpoint, step_of, tidy
from hpctrain.checkpoint.index import Index
from hpctrain.checkpoint.resume import choose_checkpoint, verify_checkpoint
from hpctrain.config.errors import CheckpointError, DamagedCheckpointError
from hpctrain.config.job import Checkpoint
from tests.checkpoints import FORGED, forge, write_checkpoint
from tests.old_runs.make import HERE
from tests.ranks.small_runs import Alone


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.mark.parametrize("how", [{}, {"writers": 5, "parts": 1}, {"writers": 1, "parts": 1}])
def test_whole_tensors_and_slices_are_what_was_written(run, how):
    tensors = write_checkpoint(run, **how)
    path = latest_checkpoint(run)
    verify_checkpoint(path)
    rng = np.random.default_rng(1)
    with Index(path) as index, h5py.File(path / "index.h5") as shown:
        for name, tensor in tensors.items():
            kind, _, parameter = name.rpartition("/")
            assert np.array_equal(index.whole(kind, parameter), tensor)
            assert np.array_equal(shown[name][:], tensor)
            bounds = [sorted(rng.choice(size + 1, 2, replace=False).tolist()) for size in tensor.shape]
            rows, columns = (*bounds, [0, 1])[:2]
            expected = tensor[tuple(slice(*each) for each in bounds)].reshape(-1)
            assert np.array_equal(index.read(kind, parameter, rows, columns), expected), (name, bounds)


def test_compressed_blocks_of_an_older_version_are_read_and_checked(tmp_path):
    """Moments of the same run, which one rank wrote as they are."""
    runs = [shutil.copytree(HERE / "2026-11-26" / name, tmp_path / name) for name in ("tensor-gzip", "one")]
    packed, plain = map(latest_checkpoint, runs)
    verify_checkpoint(packed)
    with Index(packed) as index, Index(plain) as other, h5py.File(packed / "index.h5") as shown:
        assert index.manifest.compression == "gzip" and other.manifest.compression is None
        for tensor in index.manifest.tensors:
            kind, _, name = tensor.name.rpartition("/")
            values = index.whole(kind, name)
            near = np.isclose(values, other.whole(kind, name), rtol=1e-3, atol=1e-5)
            assert near.mean() > 0.99, f"{tensor.name}: other ranks round differently, and small gradients count"
            assert np.array_equal(shown[tensor.name][:], values)
    part = packed / "part-00001.h5"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    assert "part-00001.h5: is damaged: block" in damaged_by(packed)


def damaged_by(path) -> str:
    with pytest.raises(DamagedCheckpointError) as caught:
        verify_checkpoint(path)
    return str(caught.value)


@pytest.mark.parametrize(("behind", "stretches"), [(False, 12), (True, 1)])
def test_every_flipped_byte_is_detected_and_none_is_read(run, monkeypatch, behind, stretches):
    """A byte in every stretch of every file, and `latest`; also cut short, longer, missing.

    Checked at once, as small tensors are, or `behind`: by other threads while more is read, as large ones are.
    """
    if behind:
        monkeypatch.setattr(checkpoint_index, "AT_ONCE_BYTES", 8)
    tensors = write_checkpoint(run)
    path, rng = latest_checkpoint(run), np.random.default_rng(2)
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        edges = np.linspace(0, len(data), min(len(data), stretches) + 1).astype(int)
        for low, high in itertools.pairwise(edges):
            damaged = bytearray(data)
            damaged[rng.integers(low, high)] ^= 1 << rng.integers(8)
            file.write_bytes(damaged)
            assert file.name in damaged_by(path)
            assert_nothing_wrong_is_read(path, tensors)
        for other in (data[:-1], data + b"\0", b""):
            file.write_bytes(other)
            assert file.name in damaged_by(path)
        file.unlink()
        assert file.name in damaged_by(path)
        file.write_bytes(data)
    verify_checkpoint(path)
    pointer = run / "checkpoints/latest"
    data = pointer.read_bytes()
    for at in range(len(data)):
        pointer.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        with pytest.raises(DamagedCheckpointError, match="latest"):
            latest_checkpoint(run)
        pointer.write_bytes(data[:at])
        with pytest.raises(DamagedCheckpointError, match="latest"):
            latest_checkpoint(run)


def assert_nothing_wrong_is_read(path, tensors):
    try:
        with Index(path) as index:
            for name, tensor in tensors.items():
                kind, _, parameter = name.rpartition("/")
                assert np.array_equal(index.whole(kind, parameter), tensor)
    except DamagedCheckpointError:
        pass


def test_damage_names_the_part_and_the_tensor(run):
    write_checkpoint(run)
    path = latest_checkpoint(run)
    with Index(path) as index:
        offset = index.manifest.streams[2].offset
    part = path / "part-00001.h5"
    data = bytearray(part.read_bytes())
    data[offset] ^= 1
    part.write_bytes(data)
    assert "part-00001.h5: is damaged: block 0 of rank-00002 has another CRC-32, in model/embedding" in damaged_by(path)


def test_parts_of_other_checkpoints_are_detected(run):
    write_checkpoint(run, 1, seed=1)
    write_checkpoint(run, 2, seed=2)
    one, two = complete_checkpoints(run)
    shutil.copy(one / "part-00000.h5", two / "part-00000.h5")
    assert "part-00000.h5: is damaged" in damaged_by(two)
    a, b = one / "part-00000.h5", one / "part-00001.h5"
    a.rename(one / "x"), b.rename(a), (one / "x").rename(b)
    assert "part-0000" in damaged_by(one)


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_manifest_is_refused(run, name):
    write_checkpoint(run)
    path = latest_checkpoint(run)
    forge(path, FORGED[name])
    with pytest.raises(CheckpointError):
        verify_checkpoint(path)


def test_a_slice_reads_its_blocks_alone(run):
    tensors = write_checkpoint(run)
    with Index(latest_checkpoint(run)) as index:
        index.read("model", "embedding.weight", (0, 1), (0, 48))
        assert 0 < index.bytes_read <= 2 * index.manifest.block_bytes
        assert index.bytes_read < sum(tensor.nbytes for tensor in tensors.values()) / 2


def steps(run) -> list[int]:
    return [int(path.name[5:]) for path in complete_checkpoints(run)]


def test_retention():
    there = {10: 3.0, 20: 1.0, 25: None, 30: 2.0, 40: 2.5, 50: 9.0}
    for keep, last in ((1, {40}), (2, {40, 30}), (4, {40, 30, 25, 20}), (9, {10, 20, 25, 30, 40})):
        assert kept_steps(there, 40, Checkpoint(keep=keep)) == last, "nothing after the newest"
    assert kept_steps(there, 50, Checkpoint(keep=1, keep_every=20)) == {50, 40, 20}
    assert kept_steps(there, 50, Checkpoint(keep=1, keep_best=True)) == {50, 20}
    assert kept_steps({40: 2.5, 50: 9.0}, 50, Checkpoint(keep=1, keep_best=True)) == {50, 40}


def test_only_what_is_ours_is_removed(run):
    folder = run / "checkpoints"
    keep = Checkpoint(keep=1)
    write_checkpoint(run, 1, keep=keep)
    for name in ("step-notes", "step-00000001.bak", "step-00000009.partial.txt"):
        (folder / name).mkdir()
    (folder / "step-00000000").write_text("a file of somebody")
    (folder / "step-00000007.partial").mkdir()
    write_checkpoint(run, 2, keep=keep)
    tidy(run)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "latest",
        "step-00000000",
        "step-00000001.bak",
        "step-00000002",
        "step-00000009.partial.txt",
        "step-notes",
    ]


def test_what_a_run_continues_from(run):
    keep = Checkpoint(keep=5)
    for step in (1, 2, 3):
        write_checkpoint(run, step, keep=keep)
    names = lambda resume: [path.name for path in candidates(run, resume)[0]]  # noqa: E731
    assert names("auto") == ["step-00000003", "step-00000002", "step-00000001"]
    assert names("latest") == ["step-00000003"]
    assert names("step-00000001") == ["step-00000001"]
    with pytest.raises(CheckpointError, match="step-00000009: checkpoint.resume names it, and it is not there"):
        names("step-00000009")
    pointer = run / "checkpoints/latest"
    for text in ("", "../../etc", "step-00000002\n", "x" * 10_000):
        pointer.write_text(text)
        assert names("auto") == ["step-00000003", "step-00000002", "step-00000001"]
        with pytest.raises(DamagedCheckpointError, match="latest: is damaged"):
            names("latest")
    pointer.unlink()
    assert names("auto")[0] == "step-00000003"
    with pytest.raises(DamagedCheckpointError, match="latest: is missing"):
        names("latest")


def test_a_checkpoint_that_was_being_replaced_gets_its_name_back(run):
    """Killed between the two renames; one whose deletion had begun is gone for good."""
    tensors = write_checkpoint(run, 1, seed=1)
    folder = run / "checkpoints"
    (folder / "step-00000001").rename(folder / "step-00000001.old.partial")
    shutil.copytree(folder / "step-00000001.old.partial", folder / "step-00000002.old.partial")
    (folder / "step-00000002.old.partial/manifest.json").unlink()
    (folder / "latest.partial").touch()
    tidy(run)
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000001"]
    verify_checkpoint(latest_checkpoint(run))
    write_checkpoint(run, 1, seed=2)
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000001"]
    with Index(latest_checkpoint(run)) as index:
        name = "embedding.weight"
        assert not np.array_equal(index.whole("model", name), tensors[f"model/{name}"]), "the new one replaced it"


def test_own_checkpoints_come_before_those_that_latest_disowns(run, tmp_path):
    """Another run's folder under the name that `latest` has, and one of a later step."""
    keep = Checkpoint(keep=5)
    for step in (1, 2, 3):
        write_checkpoint(run, step, keep=keep, seed=step)
    for step in (3, 4):
        write_checkpoint(tmp_path / "other", step, keep=keep, seed=7)
        shutil.rmtree(run / f"checkpoints/step-{step:08d}", ignore_errors=True)
        shutil.copytree(tmp_path / f"other/checkpoints/step-{step:08d}", run / f"checkpoints/step-{step:08d}")
    assert [step_of(path) for path in candidates(run, "auto")[0]] == [2, 1, 4, 3]
    checkpoint, lines = choose_checkpoint(Alone(), run, "auto")
    assert checkpoint == run / "checkpoints/step-00000002"
    assert "names step-00000003 with another manifest than that has" in lines[0]
    with pytest.raises(DamagedCheckpointError, match="came from elsewhere"):
        choose_checkpoint(Alone(), run, "latest")


def test_a_kill_between_a_renaming_and_latest_leaves_the_old_one(run):
    write_checkpoint(run, 1, seed=1)
    path = latest_checkpoint(run)
    shutil.copytree(path, path.with_name("step-00000001.old.partial"))
    shutil.rmtree(path)
    write_checkpoint(run / "new", 1, seed=2)
    shutil.move(run / "new/checkpoints/step-00000001", path)
    with pytest.raises(DamagedCheckpointError, match="another manifest"):
        latest_checkpoint(run)
    tidy(run)
    assert sorted(each.name for each in path.parent.iterdir()) == ["latest", "step-00000001"]
    verify_checkpoint(latest_checkpoint(run))


def test_a_folder_without_permissions_is_passed_over_with_a_word(run, monkeypatch):
    """As for other users than root, who may read all."""
    for step in (1, 2):
        write_checkpoint(run, step, keep=Checkpoint(keep=5))
    locked = run / "checkpoints/step-00000002"

    status_of = os.stat

    def refused(path, *arguments, **options):
        if locked in Path(path).parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return status_of(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refused)
    checkpoint, lines = choose_checkpoint(Alone(), run, "auto")
    assert checkpoint == run / "checkpoints/step-00000001"
    assert "step-00000002/manifest.json: cannot be read: Permission denied" in "\n".join(lines)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        choose_checkpoint(Alone(), run, "step-00000002")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_whatever_call_of_a_save_is_refused_the_latest_is_intact(tmp_path, number):
    result = every_call(tmp_path, number)
    calls = result["calls"]
    assert calls > 20
    assert result == {
        "calls": calls,
        "refused": calls,
        "names_path": calls,
        "an_intact_latest": calls,
        "litter_after_start": 0,
    }


def test_large_reads_are_checked_by_the_end_of_a_with(run, monkeypatch):
    """Whole blocks are read into place and checked by other threads meanwhile."""
    monkeypatch.setattr(checkpoint_index, "AT_ONCE_BYTES", 8)
    write_checkpoint(run, writers=1, parts=1)
    path = latest_checkpoint(run)
    part = path / "part-00000.h5"
    data = bytearray(part.read_bytes())
    with Index(path) as index:
        about = index.manifest.streams[0]
        out = np.empty(about.elements, "<f4")
        index.read_elements(0, 0, out)
        assert len(index.unchecked) > 2, "they are not waited for"
    assert out.tobytes() == data[about.offset : about.offset + out.nbytes]
    data[about.offset + 2 * index.manifest.block_bytes] ^= 1
    part.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match="block 2 of rank-00000"), Index(path) as index:
        index.read_elements(0, 0, out)
