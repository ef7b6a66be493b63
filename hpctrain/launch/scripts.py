"""Scripts that start the ranks of all components as one MPI job: a batch script for Slurm, and a start with mpirun.

Slurm splits lines `#SBATCH` by rules of its own. They have only words that `Launch` has checked. Everything else is
quoted for the shell.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.config.errors import CommError, InterruptionError, JobError, LaunchError, MemoryOverflowError
from hpctrain.config.launch import BATCH_WORD
from hpctrain.launch.components import Component

SIGNAL_SECONDS = 120
"""Before the time limit Slurm sends SIGTERM; hpctrain itself ends earlier where its steps are long."""
LONGEST_NAME = 60
KILLED = 128
"""Slurm's exit codes above it are of processes that a signal ended."""
MPIRUNS = ("mpich", "openmpi", "intel")
SLOTS = {"mpich": "{host}:{count}", "openmpi": "{host} slots={count}", "intel": "{host}:{count}"}
OPTIONS = {"mpich": "-f", "openmpi": "--hostfile", "intel": "-machinefile"}


@dataclass(frozen=True)
class Start:
    """A job that is to be started, by whatever launcher."""

    name: str
    run: Path
    """The run folder, absolute: it has the job, the scripts of ranks, and the output."""
    folder: Path
    """Where hpctrain runs, absolute: relative paths of the job start there."""
    components: Sequence[Component]
    arguments: Sequence[str] = ()
    """More of `hpctrain train`, as words of a shell."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of files of the run folder, by name."""
    notes: Sequence[str] = ()
    """Messages for the person who starts it."""

    def describe(self) -> str:
        return " + ".join(component.describe() for component in self.components)

    def opening(self, shell_options: str, without_folder: str = "") -> list[str]:
        """Return the lines that say what a script starts, and go to where it runs."""
        return [
            "# Trains with one MPI job on",
            *(f"#   {component.describe()}" for component in self.components),
            "# Started again it continues.",
            f"set -{shell_options} pipefail",
            f"run={shlex.quote(str(self.run))}",
            f"cd -- {shlex.quote(str(self.folder))}{without_folder}",
        ]

    def rank_command(self, number: int) -> str:
        """Return what starts a rank of a component."""
        words = [f'"$run/launch/rank-{number}.sh"', "train", '"$run/launch/job.toml"', "--run", '"$run"']
        return " ".join([*words, *self.arguments])


@dataclass(frozen=True)
class SlurmOptions:
    """Requests of a batch script in addition to its nodes."""

    mpi: str = "pmi2"
    """The interface between srun and the MPI library."""
    time: str | None = None
    retries: int = 3
    """How many times a run is started again after a rank failed."""
    shared_nodes: bool = False
    requeues: bool = True
    """Whether the script puts its own job back into the queue; else it is one of a chain."""


def mpirun_script(start: Start, implementation: str, has_hosts: bool) -> str:
    """Return a script that starts all components with mpirun; without hosts on this one."""
    hosts = f' {OPTIONS[implementation]} "$run/launch/hosts"' if has_hosts else ""
    own = Path(sys.executable).with_name("mpirun")  # a wheel's, which needs no module
    program = shlex.quote(str(own)) if own.exists() else "mpirun"
    parts = [
        f'  -n {component.num_ranks} {start.rank_command(number)} "$@"'
        for number, component in enumerate(start.components)
    ]
    lines = ["#!/bin/bash", *start.opening("euo"), f"exec {program}{hosts} \\", " : \\\n".join(parts)]
    return "\n".join(lines) + "\n"


def host_lines(start: Start, hosts: Sequence[str], implementation: str) -> str:
    """Return a file of hosts: the hosts in the order of the cluster's nodes, each with its number of ranks.

    Raises LaunchError where there are more or fewer hosts than nodes, or a name that such a file cannot hold.
    """
    sizes = [component.ranks_per_node for component in start.components for _ in range(component.num_nodes)]
    if len(hosts) != len(sizes):
        raise LaunchError(
            f"{len(hosts)} hosts for {len(sizes)} nodes ({start.describe()}); list a host for each node, in the order"
            " of the cluster file, one a line"
        )
    for host in hosts:
        if not host or set(host) & set(" \t:=#") or not host.isprintable():
            raise LaunchError(f"{host!r} is no name of a host; list a name or an address a line, and nothing else")
    pairs = zip(hosts, sizes, strict=True)
    return "".join(SLOTS[implementation].format(host=host, count=count) + "\n" for host, count in pairs)


def batch_script(start: Start, options: SlurmOptions) -> str:
    """Return a batch script; that of a heterogeneous job where there are several components."""
    lines = ["#!/bin/bash", *_requests(start, options), "", *start.opening("uo", f" || exit {JobError.exit_code}")]
    if not options.requeues:
        lines += [
            "# Where a job of the chain ended for good, the ones after it have nothing to do.",
            'if [ -e "$run/launch/ended" ]; then exit 0; fi',
        ]
    lines += ["", *_cores(start.components)]
    # Ranks that srun ends after the first one failed were ended by a signal; the first one writes its own code.
    lines += ['export HPCTRAIN_EXIT_FILE="$run/launch/exit-code"', 'rm -f -- "$HPCTRAIN_EXIT_FILE"']
    # srun takes no --cpus-per-task from #SBATCH since Slurm 22.05.
    lines += [f"srun --mpi={shlex.quote(options.mpi)} --kill-on-bad-exit=1 \\"]
    lines.append(" : \\\n".join(_step(start, number) for number in range(len(start.components))))
    lines += ["code=$?", 'if [ -s "$HPCTRAIN_EXIT_FILE" ]; then code=$(cat -- "$HPCTRAIN_EXIT_FILE"); fi', ""]
    return "\n".join([*lines, *_ending(options)]) + "\n"


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


def job_name(text: str) -> str:
    """Return a name that Slurm and its tools show without quotes: other characters become `-`."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-")[:LONGEST_NAME] or "hpctrain"


def _requests(start: Start, options: SlurmOptions) -> Iterator[str]:
    yield f"#SBATCH --job-name={job_name(start.name)}"
    if BATCH_WORD.fullmatch(str(start.run)) and "%" not in str(start.run):
        yield f"#SBATCH --output={start.run / 'slurm-%j.out'}"
    else:  # Slurm has no quotes for it
        yield "#SBATCH --output=slurm-%j.out"
    yield "#SBATCH --open-mode=append"
    yield f"#SBATCH --{'requeue' if options.requeues else 'no-requeue'}"
    yield f"#SBATCH --signal=TERM@{SIGNAL_SECONDS}"
    for number, component in enumerate(start.components):
        if number:
            yield "#SBATCH hetjob"
        if options.time:
            yield f"#SBATCH --time={options.time}"
        for key in ("partition", "account", "qos", "constraint", "reservation"):
            if value := getattr(component.request, key):
                yield f"#SBATCH --{key}={value}"
        least, most = component.min_nodes, component.num_nodes
        yield f"#SBATCH --nodes={most if least == most else f'{least}-{most}'}"
        if least == most or options.shared_nodes:
            # Of a range Slurm keeps the number of tasks that it started first, and waits for as many when it requeues.
            yield f"#SBATCH --ntasks-per-node={component.ranks_per_node}"
        if options.shared_nodes:
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


def _step(start: Start, number: int) -> str:
    group, nodes = "", "$SLURM_JOB_NUM_NODES"
    if len(start.components) > 1:
        group, nodes = f"--het-group={number} ", f"$SLURM_JOB_NUM_NODES_HET_GROUP_{number}"
    ranks = start.components[number].ranks_per_node
    return (
        f'  {group}--nodes="{nodes}" --ntasks-per-node={ranks} --cpus-per-task=$cores_{number} \\\n'
        f"  {start.rank_command(number)}"
    )


def _ending(options: SlurmOptions) -> Iterator[str]:
    yield 'case "$code" in'
    yield '0) reason="" ;;'
    yield f'{InterruptionError.exit_code}) reason="it was interrupted in order" ;;'
    yield f'{MemoryOverflowError.exit_code}) reason="a device ran out of memory, which the next start plans with" ;;'
    yield f'{CommError.exit_code}) reason="a rank failed or a message did not arrive" ;;'
    yield '*) reason=""'
    yield f'  if [ "$code" -gt {KILLED} ]; then reason="a signal ended a rank"; fi ;;'
    yield "esac"
    if not options.requeues:
        yield 'if [ -z "$reason" ]; then echo "$code" > "$run/launch/ended"; fi'
        yield 'exit "$code"'
        return
    too_often = (
        f'[ "$code" -ne {InterruptionError.exit_code} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -ge {options.retries} ]'
    )
    yield f'if {too_often}; then reason=""; fi'
    yield 'if [ -n "$reason" ]; then'
    yield '  echo "hpctrain ended with code $code: $reason; job $SLURM_JOB_ID goes back into the queue"'
    yield '  scontrol requeue "$SLURM_JOB_ID"'
    yield "fi"
    yield 'exit "$code"'
