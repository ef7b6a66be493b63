"""The batch script: asks Slurm for the components of a cluster, and starts their ranks as one MPI job.

Slurm splits lines `#SBATCH` by rules of its own. They have only words that `Launch` has checked. Everything else is
quoted for the shell.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.config.errors import CommError, InterruptionError, JobError, MemoryOverflowError
from hpctrain.config.launch import BATCH_WORD
from hpctrain.launch.components import Component

SIGNAL_SECONDS = 120
"""Before the time limit Slurm sends SIGTERM; hpctrain itself ends earlier where its steps are long."""
LONGEST_NAME = 60
KILLED = 128
"""Slurm's exit codes above it are of processes that a signal ended."""


@dataclass(frozen=True)
class BatchJob:
    """What a script asks for in addition to nodes."""

    name: str
    run: Path
    """The run folder, absolute: it has the job, the scripts of ranks, and the output."""
    folder: Path
    """Where hpctrain runs, absolute: relative paths of the job start there."""
    mpi: str = "pmi2"
    """The interface between srun and the MPI library."""
    time: str | None = None
    retries: int = 3
    """How many times a run is started again after a rank failed."""
    shared_nodes: bool = False
    requeues: bool = True
    """Whether the script puts its own job back into the queue; else it is one of a chain."""
    arguments: Sequence[str] = ()
    """More of `hpctrain train`, as words of a shell."""


def batch_script(components: Sequence[Component], batch: BatchJob) -> str:
    """Return the script for a job of these components: a heterogeneous one where there are several."""
    lines = ["#!/bin/bash", *_requests(components, batch), ""]
    lines += [
        *title(components),
        "set -uo pipefail",
        f"run={shlex.quote(str(batch.run))}",
        f"cd -- {shlex.quote(str(batch.folder))} || exit {JobError.exit_code}",
    ]
    if not batch.requeues:
        lines += [
            "# Where a job of the chain ended for good, the ones after it have nothing to do.",
            'if [ -e "$run/launch/ended" ]; then exit 0; fi',
        ]
    lines += ["", *_cores(components)]
    # Ranks that srun ends after the first one failed were ended by a signal; the first one writes its own code.
    lines += ['export HPCTRAIN_EXIT_FILE="$run/launch/exit-code"', 'rm -f -- "$HPCTRAIN_EXIT_FILE"']
    # srun takes no --cpus-per-task from #SBATCH since Slurm 22.05.
    lines += [f"srun --mpi={shlex.quote(batch.mpi)} --kill-on-bad-exit=1 \\"]
    steps = [_step(number, component, len(components) > 1, batch) for number, component in enumerate(components)]
    lines.append(" : \\\n".join(steps))
    lines += ["code=$?", 'if [ -s "$HPCTRAIN_EXIT_FILE" ]; then code=$(cat -- "$HPCTRAIN_EXIT_FILE"); fi', ""]
    lines += _ending(batch)
    return "\n".join(lines) + "\n"


def chain_script(batch_path: Path, run: Path, length: int) -> str:
    """Return a script that submits the batch script `length` times, each job after the one before was interrupted."""
    return f"""#!/bin/bash
# Submits {length} jobs, for centres that allow no requeue: each starts where the one before it was interrupted.
set -euo pipefail
rm -f {shlex.quote(str(run / "launch" / "ended"))}
job=$(sbatch --parsable {shlex.quote(str(batch_path))})
echo "$job"
for ((i = 1; i < {length}; i++)); do
  job=$(sbatch --parsable --dependency="afternotok:${{job%%;*}}" --kill-on-invalid-dep=yes \\
    {shlex.quote(str(batch_path))})
  echo "$job"
done
"""


def title(components: Sequence[Component]) -> list[str]:
    """Return comments that say what a script starts; names of families have no line breaks."""
    parts = [f"#   {component.describe()}" for component in components]
    return ["# Trains with one MPI job on", *parts, "# Started again it continues."]


def job_name(text: str) -> str:
    """Return a name that Slurm and its tools show without quotes: other characters become `-`."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-")[:LONGEST_NAME] or "hpctrain"


def _requests(components: Sequence[Component], batch: BatchJob) -> Iterator[str]:
    output = batch.run / "slurm-%j.out"
    yield f"#SBATCH --job-name={job_name(batch.name)}"
    if BATCH_WORD.fullmatch(str(batch.run)) and "%" not in str(batch.run):
        yield f"#SBATCH --output={output}"
    else:  # Slurm has no quotes for it
        yield "#SBATCH --output=slurm-%j.out"
    yield "#SBATCH --open-mode=append"
    yield f"#SBATCH --{'requeue' if batch.requeues else 'no-requeue'}"
    yield f"#SBATCH --signal=TERM@{SIGNAL_SECONDS}"
    for number, component in enumerate(components):
        if number:
            yield "#SBATCH hetjob"
        if batch.time:
            yield f"#SBATCH --time={batch.time}"
        for key in ("partition", "account", "qos", "constraint", "reservation"):
            if value := getattr(component.request, key):
                yield f"#SBATCH --{key}={value}"
        least, most = component.min_nodes, component.num_nodes
        yield f"#SBATCH --nodes={most if least == most else f'{least}-{most}'}"
        if least == most or batch.shared_nodes:
            # Of a range Slurm keeps the number of tasks that it started first, and waits for as many when it requeues.
            yield f"#SBATCH --ntasks-per-node={component.ranks_per_node}"
        if batch.shared_nodes:
            cores = component.cores_per_node or component.ranks_per_node
            yield f"#SBATCH --cpus-per-task={-(-cores // component.ranks_per_node)}"
        else:
            yield "#SBATCH --exclusive"
        if component.gres:
            yield f"#SBATCH --gres={','.join(f'{name}:{count}' for name, count in component.gres.items())}"


def _cores(components: Sequence[Component]) -> Iterator[str]:
    """Yield what sets the cores of a rank: as the cluster file says, else a share of what the node has."""
    for number, component in enumerate(components):
        group = f"_HET_GROUP_{number}" if len(components) > 1 else ""
        cores = component.cores_per_node
        if cores is not None:
            yield f"cores_{number}={max(1, cores // component.ranks_per_node)}"
        else:
            yield f"cores_{number}=${{SLURM_JOB_CPUS_PER_NODE{group}%%[(,]*}}"
            yield f"cores_{number}=$((cores_{number} / {component.ranks_per_node}))"
            yield f"if [ $cores_{number} -lt 1 ]; then cores_{number}=1; fi"


def _step(number: int, component: Component, is_mixed: bool, batch: BatchJob) -> str:
    group, nodes = "", "$SLURM_JOB_NUM_NODES"
    if is_mixed:
        group, nodes = f"--het-group={number} ", f"$SLURM_JOB_NUM_NODES_HET_GROUP_{number}"
    script = f'"$run/launch/rank-{number}.sh"'
    arguments = ['"$run/launch/job.toml"', "--run", '"$run"', *batch.arguments]
    return (
        f'  {group}--nodes="{nodes}" --ntasks-per-node={component.ranks_per_node} --cpus-per-task=$cores_{number} \\\n'
        f"  {script} train {' '.join(arguments)}"
    )


def _ending(batch: BatchJob) -> Iterator[str]:
    yield 'case "$code" in'
    yield '0) reason="" ;;'
    yield f'{InterruptionError.exit_code}) reason="it was interrupted in order" ;;'
    yield f'{MemoryOverflowError.exit_code}) reason="a device ran out of memory, which the next start plans with" ;;'
    yield f'{CommError.exit_code}) reason="a rank failed or a message did not arrive" ;;'
    yield '*) reason=""'
    yield f'  if [ "$code" -gt {KILLED} ]; then reason="a signal ended a rank"; fi ;;'
    yield "esac"
    if not batch.requeues:
        yield 'if [ -z "$reason" ]; then echo "$code" > "$run/launch/ended"; fi'
        yield 'exit "$code"'
        return
    too_often = (
        f'[ "$code" -ne {InterruptionError.exit_code} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -ge {batch.retries} ]'
    )
    yield f'if {too_often}; then reason=""; fi'
    yield 'if [ -n "$reason" ]; then'
    yield '  echo "hpctrain ended with code $code: $reason; job $SLURM_JOB_ID goes back into the queue"'
    yield '  scontrol requeue "$SLURM_JOB_ID"'
    yield "fi"
    yield 'exit "$code"'
