"""The benchmark of a machine with a GPU: ends in its time, continues where it was, says what it could not do."""

import argparse
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import gpu, gpu_inside
from benchmarks.gpu import PARTIAL, PARTS, RESULTS, SECTIONS, SectionError, Setting, is_done, run, run_section

MOST_SECONDS, FIRST_SECONDS = 30 * 60, 540
"""Of all sections, and of the first part."""


def options(folder: Path, **more) -> argparse.Namespace:
    return argparse.Namespace(**{"folder": folder, "short": True, "limit": None} | more)


def test_the_first_part_ends_in_nine_minutes_and_all_in_thirty():
    first = [section.limit_seconds for section in SECTIONS.values() if section.part == 1]
    assert sum(first) <= FIRST_SECONDS
    assert sum(section.limit_seconds for section in SECTIONS.values()) <= MOST_SECONDS
    assert {section.part for section in SECTIONS.values()} == set(PARTS) == {1, 2, 3}


def test_a_section_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    python = tmp_path / "python"
    kept = f"echo '{{\"seconds\": 1}}' > {tmp_path / PARTIAL}"
    python.write_text(f"#!/bin/sh\n{kept}\nsleep 600 &\necho $! > {tmp_path}/started\nwait\n")
    python.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(python))
    line = run_section("parity", options(tmp_path, limit=3), False)
    assert line["status"] == "timeout" and line["could_not"][-1] == "was not done after 3 s"
    assert line["result_so_far"] == {"seconds": 1}
    assert not is_done(tmp_path, "parity")
    status = Path("/proc", (tmp_path / "started").read_text().strip(), "status")
    deadline = time.monotonic() + 10  # a process that was killed takes a moment to end

    def has_ended() -> bool:
        try:
            return "Z (zombie)" in status.read_text()
        except OSError:  # it is gone
            return True

    while not has_ended() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert has_ended()


def test_a_process_that_a_section_starts_keeps_its_own_figures(tmp_path, monkeypatch):
    code = "from benchmarks.gpu_inside import keep; keep({'step_seconds': 2}); print('{}')"
    monkeypatch.setattr(gpu, "INSIDE", [sys.executable, "-c", code])
    assert Setting(tmp_path, False, True).run_inside("kernels") == {}
    assert json.loads((tmp_path / PARTIAL).read_text()) == {"step_seconds": 2}, "what a section leaves that is killed"


def test_modules_are_found_where_python_was_told_to_look(tmp_path, monkeypatch):
    (tmp_path / "elsewhere.py").write_text("print('found')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run([sys.executable, "-m", "elsewhere"], Path("/")) == "found\n"
    assert run([sys.executable, "-c", "import benchmarks.gpu; print(1)"], Path("/")) == "1\n"
    with pytest.raises(SectionError, match="exit code 1: .*No module named nowhere"):
        run([sys.executable, "-m", "nowhere"], Path("/"), range(256))


def test_a_section_that_fails_says_why_and_is_repeated(tmp_path, monkeypatch):
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    line = run_section("checkpoints", options(tmp_path), False)
    assert line["status"] == "failed" and "cannot load MPI library" in line["could_not"][-1]
    (tmp_path / RESULTS).write_text(json.dumps(line) + "\n")
    assert not is_done(tmp_path, "checkpoints")


def test_every_section_says_what_a_machine_without_a_gpu_leaves_out():
    assert all(section.without_gpu for section in SECTIONS.values())


def test_calls_of_a_driver_are_no_kernels(monkeypatch):
    monkeypatch.setattr(gpu_inside, "DEVICE", torch.device("cuda"))
    events = [
        SimpleNamespace(key="cudaLaunchKernel", device_type=DeviceType.CPU),
        SimpleNamespace(key="nvjet_hsh_128x256", device_type=DeviceType.CUDA),
    ]
    (kernel,) = gpu_inside.of_device(SimpleNamespace(key_averages=lambda: events))
    assert kernel.key == "nvjet_hsh_128x256"
