"""What a start leaves in the run folder before any rank runs: job, plan, cluster, scripts, and which code wrote them.

launch/job.toml        the job with the overrides of the command line
launch/cluster.toml    the cluster that it is for, where one was given
launch/plan.toml       the plan, where the job or the command line gave one
launch/rank-N.sh       what starts a rank of component N
launch/version.json    version, digest and commit of the code
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.config.cluster import Cluster
from hpctrain.config.cluster_file import dump_cluster
from hpctrain.config.errors import JobError, describe_os_error
from hpctrain.config.job import Job
from hpctrain.config.job_dump import dump_job
from hpctrain.launch.code import code_version
from hpctrain.launch.components import Component
from hpctrain.launch.rank_script import rank_script
from hpctrain.plan.file import dump_plan
from hpctrain.plan.tiling import Plan

FOLDER = "launch"


def launch_files(
    job: Job, plan: Plan | None, cluster: Cluster | None, components: Sequence[Component]
) -> dict[str, str]:
    """Return the texts of the files, by their names in the run folder."""
    files = {
        f"{FOLDER}/job.toml": dump_job(job, {}, "plan.toml" if plan else None),
        f"{FOLDER}/version.json": json.dumps(code_version(), indent=2) + "\n",
    }
    if cluster:
        files[f"{FOLDER}/cluster.toml"] = dump_cluster(cluster)
    if plan:
        files[f"{FOLDER}/plan.toml"] = dump_plan(plan)
    for number, component in enumerate(components):
        files[f"{FOLDER}/rank-{number}.sh"] = rank_script(component)
    return files


def write_files(run: Path, files: Mapping[str, str]) -> None:
    """Write files into the run folder; scripts can be run. Raises JobError where the disk refuses."""
    try:
        (run / FOLDER).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = run / name
            partial = path.with_name(path.name + ".partial")
            partial.write_text(text, encoding="utf-8", errors="surrogateescape")
            if text.startswith("#!"):
                partial.chmod(0o755)
            os.replace(partial, path)
    except OSError as error:
        where = error.filename or run
        raise JobError(f"{where}: cannot be written: {describe_os_error(error)}; choose another --run") from None
