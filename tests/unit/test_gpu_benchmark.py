"""The benchmark of a machine with a GPU: ends in its time, continues where it was, says what it could not do."""

import argparse
import json
import time
from pathlib import Path

from benchmarks.gpu import PARTS, RESULTS, SECTIONS, is_done, run_section

MOST_SECONDS = 25 * 60


def options(folder: Path, **more) -> argparse.Namespace:
    return argparse.Namespace(**{"folder": folder, "short": True, "limit": None} | more)


def test_all_sections_end_in_25_minutes():
    assert sum(section.limit_seconds for section in SECTIONS.values()) <= MOST_SECONDS
    assert {section.part for section in SECTIONS.values()} == set(PARTS) == {1, 2, 3}


def test_a_section_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path):
    start = time.monotonic()
    line = run_section("parity", options(tmp_path, limit=0.5), False)
    assert time.monotonic() - start < 20
    assert line["status"] == "timeout" and line["could_not"][-1] == "was not done after 0.5 s"
    assert not is_done(tmp_path, "parity")


def test_a_section_that_fails_says_why_and_is_repeated(tmp_path, monkeypatch):
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    line = run_section("checkpoints", options(tmp_path), False)
    assert line["status"] == "failed" and "cannot load MPI library" in line["could_not"][-1]
    (tmp_path / RESULTS).write_text(json.dumps(line) + "\n")
    assert not is_done(tmp_path, "checkpoints")


def test_every_section_says_what_a_machine_without_a_gpu_leaves_out():
    assert all(section.without_gpu for section in SECTIONS.values())
