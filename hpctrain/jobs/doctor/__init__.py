"""`hpctrain doctor`: check this machine from the bottom up, as the ranks that were started see it."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from hpctrain.comm.start.launcher import promised_rank
from hpctrain.config.errors import HpctrainError
from hpctrain.jobs.arguments import PATH, json_option
from hpctrain.jobs.doctor.machine_checks import Finding, check_machine, error_finding, format_finding, package_versions
from hpctrain.jobs.doctor.rank_checks import check_ranks

NEEDED_BY_MPI = ("packages", "MPI library", "shared memory")
"""Findings that must be without error before MPI is started."""


@click.command("doctor")
@click.option(
    "--folder",
    type=PATH,
    default="runs",
    show_default=True,
    help="Where runs are to be written; its speed is measured.",
)
@json_option
def command(folder, as_json):
    """Check Python, MPI, launcher, devices, routes, links and file system: ok, warning or error each.

    \b
    hpctrain doctor                     this process alone
    mpirun -n 4 hpctrain doctor         the ranks of a job, as `train` would see them
    srun --mpi=pmi2 hpctrain doctor     the same under Slurm

    Warnings and errors come with the line to type. The exit code is 0 where there is no error, else that of the first
    error, with which a job would end too.
    """
    findings: list[Finding] = []
    facts: dict = {"versions": package_versions()}
    speaks = promised_rank() == 0

    def report(more: Sequence[Finding]) -> None:
        findings.extend(more)
        if speaks and not as_json:
            for finding in more:
                click.echo(format_finding(finding))

    is_there = folder.exists()
    if speaks:
        for finding in check_machine(folder):
            report([finding])
    if not any(finding.verdict == "error" and finding.name in NEEDED_BY_MPI for finding in findings):
        _check_together(folder, report, facts)
    if speaks and not is_there and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    code = next((finding.exit_code for finding in findings if finding.verdict == "error"), 0)
    if speaks and as_json:
        print(json.dumps(facts | {"exit_code": code, "findings": [each._asdict() for each in findings]}), flush=True)
    elif speaks:
        click.echo(_verdict(findings))
    sys.exit(code)


def _check_together(folder: Path, report, facts: dict) -> None:
    """Start MPI and let all ranks check what they share."""
    from hpctrain.comm.world import World

    try:
        world = World.start()
    except HpctrainError as error:
        report([error_finding("ranks", error)])
        return
    try:
        facts["mpi"] = {"library": " ".join(world.library.split())}
        for new, more in check_ranks(world, folder):
            report(new)
            facts |= more
        world.close()
    except (Exception, KeyboardInterrupt) as error:
        world.fail(error)


def _verdict(findings: Sequence[Finding]) -> str:
    count = {verdict: sum(each.verdict == verdict for each in findings) for verdict in ("error", "warning")}
    said = [f"{number} {verdict}{'s' * (number > 1)}" for verdict, number in count.items() if number]
    return ", ".join(said) or "all is well"
