"""`hpctrain doctor` as a person would start it, on machines that lack something."""

import json
import os
import subprocess

import pytest

from tests.started import BIN

OPEN_MPI = "#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n"


def other_mpirun(folder) -> str:
    """Make a folder with an mpirun of another MPI library, and return it."""
    folder.mkdir(exist_ok=True)
    path = folder / "mpirun"
    path.write_text(OPEN_MPI)
    path.chmod(0o755)
    return str(folder)


def examine(hpctrain, cwd, *arguments: str, code: int, cold: bool = False, **environment: str) -> dict[str, dict]:
    """Return the findings of `doctor --json` by name."""
    result = hpctrain("doctor", "--json", *arguments, cwd=cwd, cold=cold, environment=environment)
    assert result.code == code, result.out + result.err
    summary = json.loads(result.out)
    assert summary["exit_code"] == code
    return {finding["name"]: finding for finding in summary["findings"]}


def test_the_doctor_says_what_there_is(hpctrain, tmp_path):
    environment = {"PATH": f"{BIN}:/usr/bin:/bin"}
    result = hpctrain("doctor", "--json", ranks=2, cwd=tmp_path, environment=environment)
    assert result.code == 0, result.err
    summary = json.loads(result.out)
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    assert all(rank["memory_bytes"] > 1e9 and rank["flops_per_second"]["fp32"] > 1e8 for rank in summary["ranks"])
    assert summary["routes"] and all(route["reason"] for route in summary["routes"])
    assert [link["latency_seconds"] > 0 and link["bytes_per_second"] > 1e6 for link in summary["links"]] == [True]
    findings = {finding["name"]: finding for finding in summary["findings"]}
    assert "PMI_SIZE" in findings["ranks"]["text"] and "MPICH" in findings["MPI library"]["text"]
    assert {"Python", "packages", "launcher", "shared memory", "file system", "HDF5", "software", "MPI threads"} <= set(
        findings
    )
    assert summary["communicators"] == {"hpctrain family cpu": 2, "hpctrain bridge": 2, "hpctrain alarms": 2}
    assert {"communicators", "devices", "cores", "routes", "links", "shared folder"} <= set(findings)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_no_mpi(hpctrain, tmp_path):
    findings = examine(hpctrain, tmp_path, code=82, cold=True, MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert findings["MPI library"]["verdict"] == "error"
    assert "pip install 'hpctrain[mpi]'" in findings["MPI library"]["remedy"]
    assert "ranks" not in findings, "what needs MPI is not tried"


def test_the_first_of_two_mpis_counts(hpctrain, tmp_path):
    path = f"{BIN}:{other_mpirun(tmp_path / 'other')}:/usr/bin:/bin"
    finding = examine(hpctrain, tmp_path, code=0, PATH=path)["launcher"]
    assert finding["verdict"] == "ok" and str(BIN / "mpirun") in finding["text"]


def test_mpi4py_of_another_mpi(hpctrain, tmp_path):
    path = f"{other_mpirun(tmp_path / 'other')}:{BIN}:/usr/bin:/bin"
    finding = examine(hpctrain, tmp_path, code=82, PATH=path)["launcher"]
    assert finding["verdict"] == "error" and "is of openmpi, mpi4py uses MPICH" in finding["text"]
    assert finding["remedy"] == f"{BIN / 'mpirun'} -n 4 hpctrain doctor"


def test_one_rank_where_four_were_promised(hpctrain, tmp_path):
    finding = examine(hpctrain, tmp_path, code=82, OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="0")["ranks"]
    assert finding["verdict"] == "error" and "OMPI_COMM_WORLD_SIZE promises 4 ranks" in finding["text"]
    assert "srun --mpi=pmi2" in finding["text"] + finding["remedy"]


def test_a_folder_that_cannot_be_written(hpctrain, tmp_path):
    (tmp_path / "file").touch()
    findings = examine(hpctrain, tmp_path, "--folder", "file/runs", code=88)
    assert findings["file system"]["verdict"] == "error" and "--folder DIR" in findings["file system"]["remedy"]
    assert findings["HDF5"]["verdict"] == "error"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a read-only file system")
def test_a_read_only_file_system(hpctrain, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(scratch)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        finding = examine(hpctrain, tmp_path, "--folder", "scratch", code=88)["file system"]
    finally:
        subprocess.run(["umount", str(scratch)], check=True)
    assert "Read-only file system" in finding["text"] and "--run DIR" in finding["remedy"]


def test_one_core_for_two_ranks(tmp_path):
    core = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "-c", core, BIN / "mpirun", "-n", "2", BIN / "hpctrain", "doctor", "--json"]
    environment = os.environ | {"PATH": f"{BIN}:/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["cores"]["verdict"] == "warning" and "2 ranks on 1 core" in findings["cores"]["text"]
    assert "mpirun -n 1" in findings["cores"]["remedy"]
