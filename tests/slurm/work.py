"""What the tests with Slurm train, and on what."""

import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from hpctrain.observe.folder.run_folder import read_metrics
from tests import clusters
from tests.slurm.site import SlurmSite
from tests.started import BIN, SMALL_MODEL, Finished

JOB = """
{model}
[data]
tokens = "{tokens}"
sequence_length = 32
[train]
steps = {steps}
global_batch = 8
learning_rate = 1e-3
dtype = "fp32"
[checkpoint]
every = 5
"""


class Work:
    """A folder in which a person works with hpctrain and Slurm."""

    def __init__(self, site: SlurmSite, shared: Path, folder: Path, program: Sequence[str]):
        self.site, self.folder = site, folder
        self._program = program
        self._shared = shared
        site.environment |= {"XDG_CACHE_HOME": str(shared)}

    @staticmethod
    def prepare(folder: Path) -> Path:
        text = folder / "text"
        text.mkdir()
        for i in range(40):
            lines = [f"def function_{i}_{j}(value):\n    return value + {j}\n" for j in range(40)]
            (text / f"module_{i}.py").write_text("\n".join(lines))
        subprocess.run([BIN / "hpctrain", "prepare", "text", "--out", "tokens.h5"], cwd=folder, check=True)
        return folder

    def write_job(self, steps: int) -> None:
        text = JOB.format(model=SMALL_MODEL, tokens=self._shared / "tokens.h5", steps=steps)
        (self.folder / "job.toml").write_text(text)

    def write_cluster(self, *families: str) -> None:
        (self.folder / "cluster.toml").write_text(clusters.fabric() + "".join(families))

    def hpctrain(self, *arguments: str | Path) -> Finished:
        command = [*self._program, *map(str, arguments)]
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment(), capture_output=True, text=True, timeout=120
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    def slurm(self, *arguments: str, run: str = "run") -> Path:
        """Write the script of a run, and return it."""
        done = self.hpctrain("slurm", "job.toml", "--run", run, *arguments)
        assert done.code == 0, done.err
        return self.folder / run / "job.sbatch"

    def submit(self, script: Path, *options: str, cold: bool = False) -> str:
        return self.site.submit(script, *options, cold=cold)

    def await_steps(self, count: int, run: str = "run", seconds: float = 120.0) -> None:
        """Wait until so many steps are done."""
        deadline = time.monotonic() + seconds
        while len(self.metrics(run)) < count:
            assert time.monotonic() < deadline, self.output(run)
            self.site.nudge()

    def metrics(self, run: str = "run") -> list[dict]:
        return read_metrics(self.folder / run)

    def output(self, run: str = "run") -> str:
        return "\n".join(path.read_text() for path in sorted((self.folder / run).glob("slurm-*.out")))

    def compare(self, one: str, other: str, *options: str) -> dict:
        done = self.hpctrain("compare", one, other, "--json", *options)
        assert done.out, done.err
        return json.loads(done.out.splitlines()[-1])

    def alone(self) -> str:
        """Train the job on one rank; return its run folder."""
        done = self.hpctrain("train", "job.toml", "--run", "alone", "--sample", "0")
        assert done.code == 0, done.err
        return "alone"

    def _environment(self) -> dict[str, str]:
        return (
            os.environ
            | {"XDG_CACHE_HOME": str(self._shared), "PATH": self.site.environment["PATH"]}
            | {"SLURM_CONF": self.site.environment["SLURM_CONF"]}
        )


def family(name: str, nodes: int = 1, speed: float = 1e8, **launch: object) -> str:
    """Return the tables of a family with a partition of its own, two devices a node."""
    table = clusters.family(name, speed, launch={"partition": name, "cores_per_rank": 1} | launch)
    return table + clusters.nodes({name: 2}, count=nodes)
