"""What the doctor says of launchers, cores, devices and software, without ranks."""

import os
from types import SimpleNamespace

import pytest

from hpctrain.config.errors import LaunchError, TopologyError
from hpctrain.jobs.doctor.machine_checks import (
    Finding,
    check_launcher,
    check_shared_memory,
    error_finding,
    format_finding,
    launcher_kind,
)
from hpctrain.jobs.doctor.rank_checks import check_cores, check_promise, describe_devices
from hpctrain.jobs.doctor.software import Software, describe_environments, refuse_differences
from hpctrain.launch.mpi import MpiLibrary

MPICH = MpiLibrary("mpich", "MPICH Version: 5.0.2")
OPEN_MPI = MpiLibrary("openmpi", "Open MPI v5.0.11")
VERSIONS = {
    "mpich": "HYDRA build details:\n    Version: 5.0.2",
    "openmpi": "mpirun (Open MPI) 5.0.11",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.14",
}


@pytest.fixture
def path(tmp_path):
    """Make folders with an mpirun each, and return them as a search path."""

    def make(*kinds: str) -> str:
        for kind in kinds:
            (tmp_path / kind).mkdir()
            program = tmp_path / kind / "mpirun"
            program.write_text(f"#!/bin/sh\ncat <<'END'\n{VERSIONS[kind]}\nEND\n")
            program.chmod(0o755)
        return ":".join([*(str(tmp_path / kind) for kind in kinds), "/usr/bin", "/bin"])

    return make


@pytest.mark.parametrize("kind", list(VERSIONS))
def test_a_launcher_says_whose_it_is(path, kind):
    assert launcher_kind(f"{path(kind).partition(':')[0]}/mpirun") == kind


@pytest.mark.parametrize(
    ("library", "kinds", "verdict"),
    [
        (MPICH, ("mpich",), "ok"),
        (MPICH, ("intel",), "ok"),
        (MPICH, ("openmpi",), "error"),
        (MPICH, ("openmpi", "mpich"), "error"),
        (MPICH, ("mpich", "openmpi"), "ok"),
        (OPEN_MPI, ("openmpi",), "ok"),
        (OPEN_MPI, ("mpich",), "error"),
    ],
)
def test_the_first_launcher_is_to_be_of_the_library(path, library, kinds, verdict):
    finding = check_launcher(library, {"PATH": path(*kinds)})
    assert finding.verdict == verdict
    assert bool(finding.remedy) == (verdict != "ok")


def test_a_machine_without_a_launcher(tmp_path):
    finding = check_launcher(MPICH, {"PATH": str(tmp_path)})
    assert finding.verdict == "warning" and "mpirun" in finding.text and finding.remedy


def test_a_promise_that_was_not_kept(monkeypatch):
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    assert check_promise(1).verdict == "ok"
    monkeypatch.setenv("PMI_SIZE", "4")
    assert check_promise(4).verdict == "ok"
    assert check_promise(2).verdict == "error" and check_promise(2).exit_code == LaunchError.exit_code


def rank(host: str, cores: list[int], threads: int = 1, kind: str = "cpu") -> dict:
    speed = {"fp32": 1e9}
    one = {"host": host, "cores": cores, "threads": threads, "kind": kind, "family": "f", "model": "m", "device": "cpu"}
    return one | {"memory_bytes": 2**30, "flops_per_second": speed}


def test_cores_are_counted_by_host():
    ranks = [rank("a", [0, 1]), rank("a", [0, 1]), rank("b", [0]), rank("b", [0])]
    verdicts = [(each.verdict, each.text) for each in check_cores(ranks)]
    assert verdicts[0] == ("ok", "a: 2 ranks on 2 cores")
    assert verdicts[1] == ("warning", "b: 2 ranks on 1 core: they share cores")
    (threads,) = check_cores([rank("a", [0, 1], 2), rank("a", [0, 1], 2)])
    assert threads.verdict == "warning" and threads.remedy == "export OMP_NUM_THREADS=1"
    assert check_cores([rank("a", range(4), 8, "cuda")])[0].verdict == "ok"
    (narrow,) = check_cores([rank("a", [0], 8, "cuda"), rank("a", [1], 8, "cuda")])
    assert narrow.text.endswith("2 of 2 ranks have a device and 1 core, and threads that need 4")
    assert (narrow.verdict, narrow.remedy) == ("warning", "mpirun --bind-to none, or srun --cpus-per-task=8")


def test_equal_devices_of_a_host_are_one_line():
    (finding,) = describe_devices([rank("a", [0]), rank("a", [1]), rank("b", [0])])
    assert finding.text.count("of family f") == 2 and "a: 2 of family f" in finding.text


def test_errors_of_a_job_become_findings():
    finding = error_finding("devices", TopologyError("host a has 4 ranks for 2 devices; start 2 ranks"))
    assert finding == Finding(
        "devices", "error", "host a has 4 ranks for 2 devices", "start 2 ranks", TopologyError.exit_code
    )
    assert format_finding(finding).splitlines()[1].strip() == "-> start 2 ranks"
    assert error_finding("ranks", LaunchError("no remedy")).text == "no remedy"


def test_shared_memory_that_is_not_there(tmp_path):
    assert check_shared_memory(tmp_path / "none").verdict == "warning"


@pytest.mark.parametrize(("total_mb", "free_mb", "num_ranks"), [(40, 40, 8), (64, 4, 2), (1, 1, 1)])
def test_shared_memory_too_small_for_mpi_is_an_error_that_says_what_to_do(
    monkeypatch, tmp_path, total_mb, free_mb, num_ranks
):
    monkeypatch.setenv("MPI_LOCALNRANKS", str(num_ranks))
    facts = SimpleNamespace(f_frsize=1_000_000, f_blocks=total_mb, f_bavail=free_mb)
    monkeypatch.setattr(os, "statvfs", lambda path: facts)
    finding = check_shared_memory(tmp_path)
    assert finding.verdict == "error" and finding.exit_code == LaunchError.exit_code
    assert f"{free_mb}.0 MB are free" in finding.text and "--shm-size" in finding.remedy


def software(version="0.1.0", environment="/a", mpi="MPICH 5") -> Software:
    return Software(version, f"{environment}/hpctrain", environment, mpi)


def test_environments_may_differ_and_hpctrain_and_mpi_may_not():
    two = [software(), software(environment="/b")]
    refuse_differences(two, ["1", "1"])
    assert describe_environments(two, ["fast", "slow"]) == ("hpctrain 0.1.0 everywhere; fast in /a, slow in /b")
    assert describe_environments([software()] * 2, ["fast", "slow"]) == ""
    with pytest.raises(LaunchError, match=r"hpctrain is not the same.*code 1.*in /a on ranks 0.*code 2.*in /b"):
        refuse_differences(two, ["1", "2"])
    with pytest.raises(LaunchError, match=r"hpctrain 0\.1\.0 in /a.*hpctrain 0\.2\.0 in /a"):
        refuse_differences([software(), software("0.2.0")], ["", ""])
    with pytest.raises(LaunchError, match="MPI library is not the same"):
        refuse_differences([software(), software(mpi="MPICH 4")], ["", ""])
