"""Training where shared memory is small, as in a container, or cannot be written: it trains, or says why not."""

import os
import subprocess

import pytest

from tests.started import BIN

SIZES = {"num_layers": 2, "hidden_size": 512, "num_heads": 8, "ffn_size": 1376, "vocab_size": 20000}
LARGE = [word for name, size in SIZES.items() for word in ("--set", f"model.{name}={size}")]
"""A model whose arrays each have room in 64 MB, and together have not."""
SHORT = ("--set", "train.steps=2", "--set", "train.validate_every=2", "--sample", "0")


def train(warm_start, folder, mount: str, *arguments: str) -> subprocess.CompletedProcess:
    """Train with another /dev/shm, in a namespace of mounts of its own."""
    script = f'mount -t tmpfs -o {mount} tmpfs /dev/shm && exec "$@"'
    start = [BIN / "mpirun", "-n", "2", *warm_start, "train", "job.toml", *SHORT, *arguments]
    command = ["unshare", "-m", "sh", "-c", script, "sh", *map(str, start)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
@pytest.mark.timeout(240)
def test_what_shared_memory_has_no_room_for_is_elsewhere(warm_start, folder):
    done = train(warm_start, folder, "size=64m", "--run", "small", "--set", "plan.data=2", *LARGE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "after 2 steps" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("mount", "remedy"), [("size=1m", "--shm-size"), ("size=16m", "--shm-size"), ("ro", "mount it read-write")]
)
def test_less_than_mpi_needs_is_refused_before_it_starts(warm_start, folder, mount, remedy):
    done = train(warm_start, folder, mount, "--run", "none")
    assert done.returncode == 82
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"hpctrain: HostError: {os.uname().nodename}:/dev/shm: ") and line.count(remedy) == 1
