"""`hpctrain report`: write what one or several runs did as one HTML file. Runs on a login node."""

import click

from hpctrain.jobs.arguments import PATH
from hpctrain.jobs.common import write_out


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=PATH)
@click.option("--out", type=PATH, metavar="FILE", help="Default: report.html in the first RUN.")
def command(runs, out):
    """Write a report of run folders as one HTML file, which needs no network to be read.

    \b
    hpctrain report runs/tiny-20261123-150052
    hpctrain report runs/a runs/b --out comparison.html

    It shows losses and speed, the plan, the timeline of a step as predicted and as measured, and where a step goes. It
    also has memory, communication, decisions with their reasons, and what happened. Several runs are shown
    side by side. A run that failed, or is still running, has one too.
    """
    from hpctrain.observe.report.page import render_report
    from hpctrain.observe.report.record import read_runs

    page = render_report(read_runs(list(runs)))
    path = out or runs[0] / "report.html"
    write_out(path, page)
    print(f"report {path} ({len(page.encode()) / 1e6:.2f} MB): open it in a browser")
