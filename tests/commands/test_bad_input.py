"""Whatever is wrong is said once, in one message with what to set, soon, and with an exit code that is not 0."""

import os
import subprocess

import numpy as np
import pytest

from tests.started import BIN
from tests.warm_start import SCRIPT

RANKS = 2


def check(done, code: int, *parts: str):
    said = done.out + done.err
    assert done.code == code, said
    for part in parts:
        assert part in said, said
    assert said.count("hpctrain: ") == 1, f"said once:\n{said}"
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("args", "code", "parts"),
    [
        (["--set", "train.step=3"], 81, ["--set: train.step: unknown key; did you mean 'steps'?"]),
        (["--set", "data.tokens=."], 87, [".: is a folder; make a token file of the texts in it"]),
        (["--set", "plan.data=3"], 82, ["is for 3 ranks, but MPI started 2; start it with mpirun -n 3"]),
        (
            ["--set", "plan.tensor.y=2", "--set", "model.num_heads=1"],
            85,
            ["num_heads 1 is not divisible by tensor y = 2"],
        ),
    ],
)
@pytest.mark.timeout(60)
def test_mistakes_in_a_job(hpctrain, folder, args, code, parts):
    """One of each exit code: other mistakes of the same kind are in tests/unit."""
    check(hpctrain("train", "job.toml", "--run", "never", *args, ranks=RANKS, cwd=folder), code, *parts)
    assert not (folder / "never").exists()


@pytest.mark.timeout(120)
def test_the_largest_token_of_a_bin_decides_whether_it_fits(hpctrain, folder):
    """GPT-2 has 50,257 token ids, and nanoGPT's models 50,304."""
    np.array([*range(999), 50256], "<u2").tofile(folder / "gpt2.bin")
    sizes = ("--set", "data.tokens=gpt2.bin", "--set", "train.steps=1", "--sample", "0")
    result = hpctrain("train", "job.toml", "--run", "fits", *sizes, "--set", "model.vocab_size=50257", cwd=folder)
    assert result.code == 0, result.err
    result = hpctrain("train", "job.toml", "--run", "never", *sizes, "--set", "model.vocab_size=50256", cwd=folder)
    check(result, 81, "model.vocab_size 50256 is less than the 50257 token ids", "set it to 50257 or more")
    more = ("--run", "more", "--set", "train.start_from='fits'")
    result = hpctrain("train", "job.toml", *more, *sizes, cwd=folder)
    assert result.code == 0, f"auto is the vocabulary of what it starts from: {result.err}"


@pytest.mark.timeout(60)
def test_the_file_and_key_of_a_mistake_are_named(hpctrain, folder):
    (folder / "base.toml").write_text((folder / "job.toml").read_text().replace("steps = 6", "stepz = 6"))
    (folder / "over.toml").write_text('extends = "base.toml"\n[train]\nseed = 2\n')
    check(hpctrain("train", "over.toml", ranks=RANKS, cwd=folder), 81, "base.toml: train.stepz: unknown key")
    check(hpctrain("train", "jub.toml", ranks=RANKS, cwd=folder), 81, "jub.toml: no such job file")


@pytest.mark.timeout(60)
def test_a_sequence_longer_than_the_corpus(hpctrain, folder):
    np.arange(500, dtype="<u2").tofile(folder / "short.bin")
    args = ["--set", "data.tokens=short.bin", "--set", "data.sequence_length=1000"]
    done = hpctrain("train", "job.toml", *args, ranks=RANKS, cwd=folder)
    check(done, 87, "data.sequence_length = 1000 needs 1001 tokens", "set data.sequence_length to at most 474")


@pytest.mark.timeout(60)
def test_a_damaged_token_file(hpctrain, folder):
    data = bytearray((folder / "tokens.h5").read_bytes())
    (folder / "short.h5").write_bytes(data[: len(data) // 2])
    check(hpctrain("train", "job.toml", "--set", "data.tokens=short.h5", ranks=RANKS, cwd=folder), 87, "is cut short")
    at = bytes(data).index(b"return value")
    data[at] ^= 1
    (folder / "flipped.h5").write_bytes(data)
    done = hpctrain("train", "job.toml", "--set", "data.tokens=flipped.h5", ranks=RANKS, cwd=folder)
    check(done, 87, "flipped.h5: block 0", "is damaged", "prepare it again")


@pytest.mark.timeout(90)
def test_a_checkpoint_of_another_model(hpctrain, folder):
    args = ["train", "job.toml", "--run", "runs/other", "--sample", "0", "--set", "train.steps=1"]
    assert hpctrain(*args, ranks=RANKS, cwd=folder).code == 0
    done = hpctrain(*args, "--set", "model.num_layers=3", ranks=RANKS, cwd=folder)
    check(done, 86, "is of another model: model.num_layers is 2 there and 3 in the job")
    done = hpctrain(*args, "--set", "data.validation_fraction=0.5", cwd=folder)
    check(done, 86, "was trained on other data")
    done = hpctrain(*args, "--set", "train.seed=9", cwd=folder)
    check(done, 86, "cannot be continued by this job: train.seed is 1 there and 9 in the job")


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 2 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.timeout(90)
def test_a_full_disk_keeps_the_earlier_checkpoint(hpctrain, folder, small_disk):
    run = small_disk / "run"
    # Nothing but checkpoints is written when it is full: whatever is refused first is what the message is about.
    settings = ("checkpoint.every=1", "checkpoint.keep=9", "train.steps=9", "observe.log_every=100")
    args = [
        "train",
        "job.toml",
        "--run",
        run,
        "--sample",
        "0",
        *(word for each in settings for word in ("--set", each)),
    ]
    done = hpctrain(*args, ranks=RANKS, cwd=folder)
    check(done, 86, ".partial: cannot be written: No space left on device (", "bytes are to be written", "are free")
    summary = hpctrain("inspect", run, "--verify", cwd=folder)
    assert summary.code == 0, summary.err
    assert "all files match their checksums" in summary.out
    assert not list(run.glob("checkpoints/*.partial"))


@pytest.mark.timeout(60)
def test_a_read_only_mount(hpctrain, folder, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    done = hpctrain("train", "job.toml", "--run", small_disk / "run", ranks=RANKS, cwd=folder)
    check(done, 81, "the run folder cannot be written: Read-only file system; choose another with --run")


@pytest.mark.timeout(60)
def test_one_failing_rank_stops_all_and_is_named(warm_start, tmp_path):
    """A defect on one rank: a banner with its traceback, and nobody waits for ever."""
    script = tmp_path / "script.py"
    script.write_text(
        "from hpctrain.jobs.common import started_world\n"
        "with started_world() as world:\n"
        "    comm = world.group(range(world.size))\n"
        "    if world.rank == 1:\n"
        "        raise ValueError('a defect')\n"
        "    comm.barrier()\n"
    )
    command = [BIN / "mpirun", "-n", "3", *warm_start, SCRIPT, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=45)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert said.count("ValueError: a defect\n") == 2, said  # the traceback's last line, and ours
    assert "on rank 1 of 3, host " in said


def test_usage_errors_are_said_once(hpctrain, folder):
    done = hpctrain("train", "job.toml", "--bogus", ranks=RANKS, cwd=folder)
    assert done.code == 2
    assert done.err.count("No such option '--bogus'") == 1
