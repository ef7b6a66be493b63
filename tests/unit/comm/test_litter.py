"""Segments of shared memory that killed MPI processes left."""

import mmap
import os
import signal
import subprocess
import sys
import time

from hpctrain.comm.start.launcher import EXIT_FILE_VARIABLE, record_exit
from hpctrain.comm.start.process import process_start, remove_dead_segments

HOLD = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
time.sleep(60)
"""


def make(folder, name: str, age: float = 1e6):
    path = folder / name
    path.write_bytes(bytes(4096))
    then = time.time() - age
    os.utime(path, (then, then))
    return path


def test_only_what_is_old_and_in_no_process_is_removed(tmp_path):
    dead, foreign, young = make(tmp_path, "mpich_shm_1_0"), make(tmp_path, "other"), make(tmp_path, "mpich_shm_2_0", -5)
    opened = make(tmp_path, "vader_segment.1")
    with opened.open("rb"), make(tmp_path, "sm_segment.1").open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
        file.close()
        assert remove_dead_segments(tmp_path) == [dead.name]
        memory.close()
    assert foreign.exists() and young.exists() and opened.exists()
    assert remove_dead_segments(tmp_path) == ["sm_segment.1", "vader_segment.1"]


def test_what_another_process_maps_is_kept_until_it_is_killed(tmp_path):
    path = make(tmp_path, "mpich_shm_3_0")
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"mapped\n"
        assert remove_dead_segments(tmp_path) == []
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert remove_dead_segments(tmp_path) == [path.name]


def test_a_process_knows_when_it_began():
    assert 0 <= time.time() - process_start() < 3600
    text = "from hpctrain.comm.start.process import process_start; import time; print(time.time() - process_start())"
    age = float(subprocess.run([sys.executable, "-c", text], capture_output=True, check=True).stdout)
    assert -0.1 < age < 30


def test_a_folder_that_is_not_there_has_no_litter(tmp_path):
    assert remove_dead_segments(tmp_path / "nothing") == []


def test_the_first_exit_code_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv(EXIT_FILE_VARIABLE, str(tmp_path / "code"))
    record_exit(12)
    record_exit(14)
    assert (tmp_path / "code").read_text() == "12\n"
    monkeypatch.setenv(EXIT_FILE_VARIABLE, str(tmp_path / "nowhere" / "code"))
    record_exit(12)
