"""Files that a start leaves in the run folder before any rank runs: job, plan, cluster, scripts, version of the code.

launch/job.toml        the job with the overrides of the command line
launch/cluster.toml    the cluster that it is for, where one was given
launch/plan.toml       the plan, where the job or the command line gave one
launch/rank-N.sh       what starts a rank of component N
launch/version.json    version, digest and commit of the code

`cluster.toml` and the scripts have the variables of families, `environment`, among which keys and passwords may be:
they are readable for their owner alone.
"""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path

import hpctrain
from hpctrain import __version__
from hpctrain.config import errors
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.cluster_file import dump_cluster
from hpctrain.config.errors import JobError, describe_os_error
from hpctrain.config.job import Job, dump_job
from hpctrain.launch.components import Component
from hpctrain.launch.mpi import LOCAL_RANK_VARIABLES
from hpctrain.plan.file import dump_plan
from hpctrain.plan.tiling import Plan

FOLDER = "launch"
PRIVATE = re.compile(r"cluster\.toml|rank-\d+\.sh")
PACKAGE = Path(hpctrain.__file__).parent
LOCAL_RANK = reduce(lambda rest, name: f"${{{name}:-{rest}}}", reversed(LOCAL_RANK_VARIABLES), "0")
"""The number of a rank on its host, as a shell finds it."""


def launch_files(
    job: Job, plan: Plan | None, cluster: Cluster | None, components: Sequence[Component]
) -> dict[str, str]:
    """Return the texts of the files, by their names in the run folder."""
    version: dict[str, str | bool] = {"version": __version__, "package": str(PACKAGE), "digest": code_digest()}
    with suppress(OSError, subprocess.SubprocessError):
        asked = {"cwd": PACKAGE, "capture_output": True, "text": True, "timeout": 10, "check": True}
        version["commit"] = subprocess.run(["git", "rev-parse", "HEAD"], **asked).stdout.strip()
        version["changed"] = bool(subprocess.run(["git", "status", "--porcelain", "."], **asked).stdout.strip())
    files = {
        f"{FOLDER}/job.toml": dump_job(job, {}, "plan.toml" if plan else None),
        f"{FOLDER}/version.json": json.dumps(version, indent=2) + "\n",
    }
    if cluster:
        files[f"{FOLDER}/cluster.toml"] = dump_cluster(cluster)
    if plan:
        files[f"{FOLDER}/plan.toml"] = dump_plan(plan)
    own_venv = sys.prefix if sys.prefix != sys.base_prefix else ""
    for number, component in enumerate(components):
        script = render("rank", component=component, own_venv=own_venv, local_rank=LOCAL_RANK)
        files[f"{FOLDER}/rank-{number}.sh"] = script
    return files


def write_files(run: Path, files: Mapping[str, str]) -> None:
    """Write files into the run folder; scripts can be run. Raises JobError where the disk refuses."""
    try:
        (run / FOLDER).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = run / name
            partial = path.with_name(path.name + ".partial")
            partial.unlink(missing_ok=True)
            readable, executable = (0o600, 0o700) if PRIVATE.fullmatch(path.name) else (0o666, 0o755)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, readable)
            with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
                file.write(text)
            if text.startswith("#!"):
                partial.chmod(executable)
            os.replace(partial, path)
    except OSError as error:
        where = error.filename or run
        raise JobError(f"{where}: cannot be written: {describe_os_error(error)}; choose another --run") from None


def render(template: str, **values: object) -> str:
    """Return a script, whose template is `template`.sh.jinja in this folder, with some values in it."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(loader=PackageLoader("hpctrain.launch", "."), undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = environment.keep_trailing_newline = True
    environment.filters["quoted"] = lambda value: shlex.quote(str(value))
    return environment.get_template(f"{template}.sh.jinja").render(values, errors=errors)


def code_digest(package: Path = PACKAGE) -> str:
    """Return a digest of all source files of the package."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
