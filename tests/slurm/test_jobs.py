"""Batch jobs from their script to their end, as a real Slurm runs them."""

import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from hpctrain.config.clusters.cluster_file import ready_clusters
from tests.slurm.work import Work, family

MANY = 100
"""Steps of a run that something comes between."""


@pytest.mark.timeout(300)
def test_a_job_on_equal_nodes(work: Work):
    work.write_job(steps=10)
    script = work.slurm("--nodes", "2", "--ranks-per-node", "2", "--time", "5")
    job = work.submit(script, "--partition=fast", cold=True)
    work.site.await_state(job, "COMPLETED", "FAILED")
    out = work.output()
    assert "on 4 cpu ranks" in out, out
    assert work.compare(work.alone(), "run", "--tolerance", "1e-5")["same"]
    for name in ("job.toml", "rank-0.sh", "version.json"):
        assert (work.folder / "run" / "launch" / name).exists()


@pytest.mark.timeout(300)
def test_two_partitions_are_two_families_of_one_model(work: Work):
    work.write_job(steps=10)
    work.write_cluster(family("fast", speed=2e8), family("slow"))
    script = work.slurm("--cluster", "cluster.toml", "--time", "5")
    assert "#SBATCH hetjob" in script.read_text()
    job = work.submit(script)
    work.site.await_state(job, "COMPLETED", "FAILED")
    out = work.output()
    assert "on 2 fast (cpu) and 2 slow (cpu) ranks" in out, out
    assert work.compare(work.alone(), "run", "--tolerance", "1e-5")["same"]
    plan = (work.folder / "run" / "plan.toml").read_text()
    assert '"fast"' in plan and '"slow"' in plan


@pytest.mark.timeout(400)
def test_a_job_that_is_interrupted_goes_back_into_the_queue_and_gives_the_same_numbers(work: Work):
    work.write_job(steps=MANY)
    work.write_cluster(family("fast"), family("slow"))
    script = work.slurm("--cluster", "cluster.toml", "--time", "10")
    job = work.submit(script)
    work.await_steps(20)
    work.site.call("scancel", "--signal=TERM", job)
    work.site.await_state(job, "COMPLETED", "FAILED")
    out = work.output()
    assert "stopped by SIGTERM" in out and "goes back into the queue" in out, out
    assert "continuing after step" in out
    assert work.site.state(job)["Restarts"] == "1"
    whole = work.slurm("--cluster", "cluster.toml", "--time", "10", run="whole")
    work.site.await_state(work.submit(whole), "COMPLETED", "FAILED")
    assert work.compare("whole", "run", "--exact")["same"]


@pytest.mark.timeout(400)
def test_a_job_whose_node_goes_down_continues_on_what_is_left(work: Work):
    work.write_job(steps=MANY)
    work.write_cluster(family("fast", nodes=2, min_nodes=1))
    job = work.submit(work.slurm("--cluster", "cluster.toml", "--time", "10"))
    work.await_steps(20)
    try:
        work.site.call("scontrol", "update", "nodename=n2", "state=down", "reason=test")
        work.site.await_state(job, "COMPLETED", "FAILED")
    finally:
        work.site.call("scontrol", "update", "nodename=n2", "state=resume")
        work.site.await_idle()
    out = work.output()
    assert "a part of" in out and "2 fast on 1 node" in out, out
    assert "planned again" in out and "The global batch of 8 rows and the order of data stay" in out
    assert work.compare(work.alone(), "run", "--tolerance", "1e-4")["same"]


@pytest.mark.timeout(400)
def test_a_killed_rank_is_started_again_in_the_same_allocation_from_memory(work: Work):
    work.write_job(steps=MANY)
    options = ["--set", "checkpoint.every=1000", "--set", "recovery.copies=5", "--time", "10"]
    job = work.submit(work.slurm("--nodes", "2", "--ranks-per-node", "2", *options), "--partition=fast")
    work.await_steps(20)
    for pid in work.site.processes("n2"):
        with suppress(OSError):
            if b"\0train\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                break
    work.site.await_state(job, "COMPLETED", "FAILED")
    out = work.output()
    assert out.count("the ranks are started again") == 1 and ", from memory, " in out, out
    assert work.site.state(job)["Restarts"] == "0"
    assert len(work.metrics()) == MANY
    assert work.compare(work.alone(), "run", "--tolerance", "1e-5")["same"]


@pytest.mark.timeout(300)
def test_ranks_that_srun_starts_alone_say_so_once(work: Work):
    work.write_job(steps=10)
    script = work.slurm("--nodes", "2", "--ranks-per-node", "2", "--mpi", "none")
    job = work.submit(script, "--partition=fast")
    state = work.site.await_state(job, "COMPLETED", "FAILED")
    out = work.output()
    assert state["ExitCode"] == "82:0", state
    assert out.count("LaunchError") == 1, out
    assert "promises 4 ranks" in out and "srun --mpi=pmi2" in out


FULL_HEAP = """
import os, random
from mpi4py import rc
rc.initialize = False
from mpi4py import MPI
from hpctrain.comm.start import pmi
used = [os.urandom(random.randrange(16, 9000)) for _ in range(20_000)]
random.shuffle(used)
used = used[::2]
pmi.init_thread(MPI)
print(MPI.COMM_WORLD.allreduce(1))
MPI.Finalize()
"""


@pytest.mark.timeout(60)
def test_ranks_connect_however_long_their_addresses_are(work: Work):
    """MPICH hands over more of its heap than the address: without zeros in it the lines are longer than Slurm reads."""
    command = ("srun", "--mpi=pmi2", "--partition=every", "--nodes=4", "--ntasks=8", "--time=1", sys.executable)
    assert work.site.call(*command, "-c", FULL_HEAP).split() == ["8"] * 8


@pytest.mark.timeout(300)
def test_a_job_ends_before_its_time_limit(work: Work):
    """The limit of a minute is nearer than the margin that a run keeps: it saves after its first step."""
    work.write_job(steps=100_000)
    script = work.slurm("--nodes", "1", "--ranks-per-node", "2", "--time", "1")
    text = script.read_text().replace("scontrol requeue", "echo would requeue")
    script.write_text(re.sub("#SBATCH --signal=.*\n", "", text))
    job = work.submit(script, "--partition=fast")
    state = work.site.await_state(job, "COMPLETED", "FAILED", "TIMEOUT")
    assert state["ExitCode"] == "75:0", work.output()
    assert "stopped by the end of the batch job" in work.output()
    assert list((work.folder / "run" / "checkpoints").glob("step-*"))


@pytest.mark.timeout(300)
def test_a_node_that_dies_takes_nothing_with_it_that_runs_on(work: Work):
    work.write_job(steps=100_000)
    work.write_cluster(family("fast", nodes=2, min_nodes=1))
    job = work.submit(work.slurm("--cluster", "cluster.toml", "--time", "10"))
    work.await_steps(20)
    try:
        work.site.kill_node("n2")
        work.site.call("scontrol", "update", "nodename=n2", "state=down", "reason=test")
        work.site.await_state(job, "PENDING", "RUNNING", seconds=30)
        work.await_steps(40)
        work.site.call("scancel", job)
        work.site.await_state(job, "CANCELLED", seconds=30)
    finally:
        work.site.start_node("n2")
        work.site.call("scontrol", "update", "nodename=n2", "state=resume", check=False)
    work.site.await_idle()
    assert not [pid for node in ("n1", "n2") for pid in work.site.processes(node)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ready_clusters())
def test_slurm_takes_the_script_of_every_ready_cluster(work: Work, name: str):
    work.write_job(steps=10)
    script = work.slurm("--cluster", name, "--time", "1-00:00:00")
    result = work.site.call("sbatch", "--test-only", str(script), check=False)
    assert "to start at" in result and "error" not in result.lower(), result


SCRIPTS = Path(__file__).parents[2] / "slurm"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["homogeneous", "heterogeneous", "cpu"])
def test_slurm_takes_the_templates(work: Work, name: str):
    text = re.sub(r"--partition=\w+", "--partition=large", (SCRIPTS / f"{name}.sbatch").read_text())
    (work.folder / "job.sbatch").write_text(text)
    result = work.site.call("sbatch", "--test-only", "job.sbatch", "my.toml", check=False, cwd=work.folder)
    assert "to start at" in result and "error" not in result.lower(), result


@pytest.mark.timeout(300)
def test_a_chain_of_templates_trains(work: Work):
    """The first job is interrupted, the second one ends the training, the third one never starts."""
    work.write_job(steps=MANY)
    text = (SCRIPTS / "cpu.sbatch").read_text().replace("--partition=cpu", "--partition=fast")
    for ours, theirs in (("--cpus-per-task=32", "--cpus-per-task=1"), (" --cpu-bind=cores", "")):
        text = text.replace(ours, theirs)
    text = text.replace(" OMP_PROC_BIND=close OMP_PLACES=cores", "")  # all ranks would be on the first core
    (work.folder / "cpu.sbatch").write_text(text)
    chain = work.site.call(str(SCRIPTS / "chain.sh"), "3", "run", "cpu.sbatch", "job.toml", cwd=work.folder)
    first, second, third = chain.split()
    work.await_steps(20)
    work.site.call("scancel", "--signal=TERM", first)
    work.site.await_state(first, "FAILED")
    work.site.await_state(second, "COMPLETED", "FAILED")
    out = "\n".join(path.read_text() for path in sorted(work.folder.glob("slurm-*.out")))
    assert "stopped by SIGTERM" in out and "continuing after step" in out, out
    assert work.site.state(first)["ExitCode"] == "75:0" and work.site.state(second)["JobState"] == "COMPLETED", out
    assert work.site.state(third)["JobState"] in ("CANCELLED", "PENDING"), work.site.state(third)
    assert work.compare(work.alone(), "run", "--tolerance", "1e-5")["same"]
