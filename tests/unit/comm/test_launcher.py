"""What launchers and shells leave in variables: empty is unset, and what is no number is refused by its name."""

import os
import subprocess
import sys

import click
import pytest
import torch

from hpctrain.cli import main
from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.comm.accelerators.kinds import LOCAL_RANK_VARIABLES, local_rank
from hpctrain.comm.start import launcher, pmi
from hpctrain.comm.start.launcher import RANK_VARIABLES, SIZE_VARIABLES, asked_threads, promised_rank, promised_size
from hpctrain.comm.start.process import require_shared_memory
from hpctrain.config.errors import LaunchError

NO_NUMBERS = ["x", "-1", "1.5", "0x1", "²", "9" * 5000, "1 2", "nan"]


@pytest.fixture(autouse=True)
def without_launcher(monkeypatch):
    for name in (*RANK_VARIABLES, *SIZE_VARIABLES, launcher.THREADS_VARIABLE, pmi.STREAM_VARIABLE, pmi.SLURM_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", [*RANK_VARIABLES, *SIZE_VARIABLES])
@pytest.mark.parametrize("text", NO_NUMBERS)
def test_what_is_no_number_is_refused(monkeypatch, name, text):
    ask = promised_rank if name in RANK_VARIABLES else promised_size
    monkeypatch.setenv(name, text)
    with pytest.raises(LaunchError, match=f"^{name} = .*: is no whole number.*unset {name}$"):
        ask()


def test_what_is_empty_is_unset(monkeypatch):
    for name in (*RANK_VARIABLES, *SIZE_VARIABLES):
        monkeypatch.setenv(name, " ")
    assert (promised_rank(), promised_size()) == (0, (1, ""))
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", " 4 ")
    assert (promised_rank(), promised_size()) == (3, (4, "SLURM_NTASKS"))


@pytest.mark.parametrize("name", pmi.CONNECTING_VARIABLES)
def test_mpi_starts_where_a_variable_of_its_launcher_is_empty(name):
    """MPICH takes it for a launcher's, and fails."""
    program = "from hpctrain.comm.world import World; print(World.start().size)"
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | {name: " "}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_local_ranks(monkeypatch):
    assert local_rank({}) is None
    assert local_rank({"SLURM_LOCALID": "2", "MPI_LOCALRANKID": ""}) == 2
    with pytest.raises(LaunchError, match=LOCAL_RANK_VARIABLES[0]):
        local_rank({LOCAL_RANK_VARIABLES[0]: "²"})


@pytest.mark.parametrize(("text", "number"), [("", None), (" ", None), ("4", 4), ("4,2", 4), (" 3 , 1", 3), ("2,", 2)])
def test_threads_are_those_of_the_first_level(monkeypatch, text, number):
    monkeypatch.setenv(launcher.THREADS_VARIABLE, text)
    assert asked_threads() == number
    before = torch.get_num_threads()
    CpuAccelerator().bind()
    assert torch.get_num_threads() == (number or 1)
    torch.set_num_threads(before)


@pytest.mark.parametrize("text", [*NO_NUMBERS, "0", ",2", "4097"])
def test_what_is_no_number_of_threads_is_refused(monkeypatch, text):
    monkeypatch.setenv(launcher.THREADS_VARIABLE, text)
    with pytest.raises(LaunchError, match="^OMP_NUM_THREADS = .*: is no number of threads from 1 to 4,096; set it"):
        asked_threads()


@pytest.mark.parametrize("text", ["x", "987654"])
def test_a_connection_to_a_launcher_that_is_not_there_is_refused(monkeypatch, text):
    monkeypatch.setenv(pmi.STREAM_VARIABLE, text)
    monkeypatch.setenv(pmi.SLURM_VARIABLE, "0")
    with pytest.raises(LaunchError, match="^PMI_FD = .*unset PMI_FD$"):
        pmi.init_thread(None)


def test_an_end_that_is_no_time_is_none(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for text in ("", "nan", "inf", "soon"):
        monkeypatch.setenv("HPCTRAIN_END_TIME", text)
        assert launcher.end_of_batch_job() is None


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["SLURM_PROCID", "PMI_RANK"])
def test_every_command_says_so_once(name):
    command = [sys.executable, "-m", "hpctrain", "catalogue"]
    done = subprocess.run(command, env=os.environ | {name: "x"}, capture_output=True, text=True, timeout=100)
    assert done.returncode == LaunchError.exit_code
    assert done.stderr.startswith(f"hpctrain: LaunchError: {name} = 'x': is no whole number")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("rank", "on_host", "speaks"), [(0, 0, True), (4, 0, True), (5, 1, False), (1, 1, False)])
def test_what_one_host_lacks_is_said_by_its_first_rank(monkeypatch, capsys, rank, on_host, speaks):
    """Rank 0 is on another host, and knows nothing of it."""
    monkeypatch.setenv("PMI_RANK", f"{rank}")
    monkeypatch.setenv("MPI_LOCALRANKID", f"{on_host}")
    monkeypatch.setattr(sys, "argv", ["hpctrain"])

    @click.command()
    def starting():
        require_shared_memory(10**9)

    with pytest.raises(SystemExit) as ended:
        main(starting)
    said = f"hpctrain: HostError: {os.uname().nodename}:/dev/shm: has "
    assert ended.value.code == 82 and capsys.readouterr().err.startswith(said) == speaks
