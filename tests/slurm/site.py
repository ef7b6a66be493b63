"""A Slurm of its own on this machine: one slurmctld, and four slurmd that are four nodes to it.

    n1 n2 in partition `fast`, n3 n4 in partition `slow`, all in `every`; 4 cores each, as far as Slurm knows
    and big nodes with accelerators that are not there, by which `sbatch --test-only` judges large scripts

Daemons are children of this process, in a folder of their own with a munged of their own: nothing of a Slurm that the
machine may have is touched. Needs Linux, root, and Debian's slurm-wlm and munge.
"""

import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.started import BIN

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
NODES = ("n1", "n2", "n3", "n4")
CORES, BIG_NODES = 4, 300
SITES, JOBS = 50_000, 1_000
"""Slurm's job numbers go up to 67 million."""
START_SECONDS, STOP_SECONDS, POLL_SECONDS = 30.0, 10.0, 0.1
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=1
MpiDefault=none
GresTypes=gpu
KillWait=5
MinJobAge=600
FirstJobId={first_job}
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=-1
NodeName=n[1-4] NodeHostname={host} Port=[{ports[1]}-{ports[4]}] CPUs={cores} State=UNKNOWN
NodeName=big[1-{big}] CPUs=128 Gres=gpu:8 State=CLOUD
PartitionName=fast Nodes=n[1-2]
PartitionName=slow Nodes=n[3-4]
PartitionName=every Nodes=n[1-4]
PartitionName=large Nodes=big[1-{big}] Default=YES
"""


def missing() -> str:
    """Return why there can be no Slurm here; empty where there can."""
    if os.geteuid() != 0:
        return "a Slurm of its own needs root"
    absent = [name for name in PROGRAMS if _program(name) is None]
    return f"there is no {', '.join(absent)}: apt-get install slurm-wlm munge" if absent else ""


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class SlurmSite:
    """Slurm as a user of it sees it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen] = {}
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_WAIT_POLICY": "passive",  # the nodes pretend more cores than there are, on which threads would spin
            "PATH": f"{BIN}:{os.environ['PATH']}",
            # All nodes are this host.
            "UCX_NET_DEVICES": "lo",
        }

    def start_warm(self, program: Sequence[str]) -> None:
        """Have jobs find a `hpctrain` that is started by these words, without importing anything anew."""
        folder = self.folder / "warm"
        folder.mkdir()
        command = folder / "hpctrain"
        command.write_text(f'#!/bin/sh\nexec {shlex.join(program)} "$@"\n')
        command.chmod(0o755)
        self.environment["PATH"] = f"{folder}:{self.environment['PATH']}"

    def start(self) -> None:
        """Start all daemons, and wait until the nodes are idle. Raises RuntimeError with their last words."""
        host, ports = socket.gethostname(), _free_ports(5)
        # MPICH names what ranks of a host share by the job's number: two sites on one host must not have the same ones.
        first_job = 1 + JOBS * secrets.randbelow(SITES)
        facts = {"host": host, "ports": ports, "folder": self.folder, "first_job": first_job}
        text = CONFIGURATION.format(**facts, cores=CORES, big=BIG_NODES)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text(f"NodeName=big[1-{BIG_NODES}] Name=gpu Count=8\n")
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        own = {name: self.folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        files = [f"--{option}={own[name]}" for option, name in MUNGE_FILES.items()]
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", *files)
        self._wait(own["socket"].exists, "munged")
        self._daemon("slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        self.await_idle()

    def start_node(self, name: str) -> None:
        """Start the daemon of a node, too, after it was killed."""
        (self.folder / f"spool-{name}").mkdir(exist_ok=True)
        self._daemon("slurmd", "-D", "-N", name, key=name)

    def kill_node(self, name: str) -> None:
        """Kill the daemon of a node, and the processes of its jobs, as if its power had failed."""
        self._daemons[name].kill()
        self._daemons.pop(name).wait()
        for pid in self.processes(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, node: str) -> list[int]:
        """Return the processes of jobs on a node."""
        result = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (path / "environ").read_bytes().split(b"\0")
                if f"SLURMD_NODENAME={node}".encode() in variables and self._conf in variables:
                    result.append(int(path.name))
        return result

    @property
    def _conf(self) -> bytes:
        return f"SLURM_CONF={self.folder / 'slurm.conf'}".encode()

    def nodes(self) -> list[str]:
        """Return the states of the four nodes."""
        return self.call("sinfo", "--noheader", "--Node", "--partition=every", "--format=%t", check=False).split()

    def call(self, *command: str, check: bool = True, cwd: Path | None = None, **variables: str) -> str:
        """Run one of Slurm's commands; return what it said. Raises RuntimeError where it fails."""
        done = subprocess.run(command, env=self.environment | variables, capture_output=True, text=True, cwd=cwd)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout + (done.stderr if not check else "")

    def submit(self, script: Path, *options: str, cold: bool = False) -> str:
        """Return the number of a job. A `cold` one starts hpctrain as a person's does, and imports everything anew."""
        variables = {"PATH": f"{BIN}:{os.environ['PATH']}"} if cold else {}
        command = ("sbatch", "--parsable", *options, str(script))
        return self.call(*command, cwd=script.parent, **variables).strip().split(";")[0]

    def state(self, job: str) -> dict[str, str]:
        """Return what scontrol says of a job, by its keys; of a heterogeneous one of its first component."""
        words = self.call("scontrol", "show", "job", job, check=False).split()
        pairs = [word.partition("=") for word in words if "=" in word]
        result: dict[str, str] = {}
        for key, _, value in pairs:
            result.setdefault(key, value)
        return result

    def await_state(self, job: str, *states: str, seconds: float = 150.0) -> dict[str, str]:
        """Wait for a job to come into one of these states. Raises TimeoutError with what it said."""
        deadline = time.monotonic() + seconds
        while True:
            state = self.state(job)
            if state.get("JobState") in states:
                return state
            self.nudge()
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is not {' or '.join(states)}: {state}")

    def nudge(self) -> None:
        """Change a partition to what it is. Only a change has Slurm look at heterogeneous jobs again, and the time at
        which a requeued job may start is none; on a site with other jobs there is always one.
        """
        self.call("scontrol", "update", "partitionname=every", "state=up", check=False)
        time.sleep(POLL_SECONDS)

    def await_idle(self) -> None:
        """Wait until no job is on a node. Raises RuntimeError."""
        self._wait(lambda: self.nodes().count("idle") == len(NODES), "idle nodes")

    def stop(self) -> None:
        """End all jobs and daemons; a job's processes too."""
        with suppress(RuntimeError, OSError):
            self.call("scancel", "--user=root", "--signal=KILL", "--full", check=False)
            self.call("scancel", "--user=root", check=False)
            time.sleep(0.5)
        for node in NODES:
            for pid in self.processes(node):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _daemon(self, name: str, *arguments: str, key: str = "") -> None:
        log = (self.folder / f"{key or name}.out").open("ab")
        program = _program(name)
        assert program is not None
        self._daemons[key or name] = subprocess.Popen(
            [program, *arguments], env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )

    def _wait(self, is_there, what: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not is_there():
            for name, daemon in self._daemons.items():
                if daemon.poll() is not None:
                    raise RuntimeError(f"{name} ended: {self._last_words()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {what} after {START_SECONDS:.0f} s: {self._last_words()}")
            time.sleep(POLL_SECONDS)

    def _last_words(self) -> str:
        logs = [*self.folder.glob("*.out"), *self.folder.glob("*.log")]
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-600:]}" for path in sorted(logs))


MUNGE_FILES = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


def _free_ports(count: int) -> list[int]:
    """Return consecutive ports that nobody listens at."""
    for first in range(46_000 + os.getpid() % 2_000, 60_000, count):
        with suppress(OSError):
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("", port))
            return list(range(first, first + count))
    raise RuntimeError("no free ports")


@contextmanager
def open_site(folder: Path) -> Iterator[SlurmSite]:
    """Start a Slurm in a folder, and end it."""
    site = SlurmSite(folder)
    try:
        site.start()
        yield site
    finally:
        site.stop()
