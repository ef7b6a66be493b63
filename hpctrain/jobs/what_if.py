"""`hpctrain what-if`: compares the machine that there is with others. Needs neither ranks nor torch."""

from collections.abc import Callable
from dataclasses import replace

import click

from hpctrain.config.clusters.changed_cluster import ClusterChanges
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.cluster_file import locate_cluster
from hpctrain.config.job import Job
from hpctrain.config.prices import load_prices
from hpctrain.engine.start.facts import MachineDescription
from hpctrain.engine.start.resolve_overlap import setups_by_plan, topology_of
from hpctrain.jobs.arguments import (
    LARGE_COUNT,
    PATH,
    FiniteRange,
    cluster_option,
    complete_job,
    json_option,
    print_result,
)
from hpctrain.jobs.common import load_job_for, write_out
from hpctrain.jobs.predict import predictor_of_run, with_overlap
from hpctrain.observe.machines import format_machines
from hpctrain.plan.tiling import Plan
from hpctrain.planner.choose import search_best, with_dtypes
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.search.search import Limits
from hpctrain.planner.what_if import PossibleMachine, what_if

SCORED = 100
"""Number of plans of each machine that are scored, unless a user says more."""
HOURS = 1e9


@click.command("what-if")
@click.argument("job", shell_complete=complete_job)
@cluster_option("The machine that there is: a cluster file, or the name of a ready one.")
@click.option(
    "--add",
    multiple=True,
    metavar="FAMILY=N",
    help="Add N devices of a family of the cluster, or of a model of the catalogue.",
)
@click.option("--without", multiple=True, metavar="FAMILY", help="Leave out a family of the cluster.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the cluster file, such as nics.ib.count=4.",
)
@click.option(
    "--price", type=PATH, metavar="FILE", help="Prices of devices, by hour or purchase, and of a kWh (docs/planner.md)."
)
@click.option(
    "--mtbf",
    type=FiniteRange(0, HOURS, min_open=True),
    metavar="HOURS",
    help="Mean time between failures of one device.",
)
@click.option(
    "--budget", type=LARGE_COUNT, default=SCORED, show_default=True, metavar="N", help="Score N plans for each machine."
)
@click.option("--html", type=PATH, metavar="FILE", help="Draw the answer into a page for a browser.")
@json_option
def command(job, cluster, add, without, overrides, price, mtbf, budget, html, as_json):
    """Say what other devices, networks or memory would bring to JOB.

    \b
    hpctrain what-if mixed --cluster three-vendors
    hpctrain what-if mixed --cluster three-vendors --add h100=8 --mtbf 50000
    hpctrain what-if mixed --cluster three-vendors --without ascend-910 --set nics.roce.count=4
    hpctrain what-if my.toml --cluster now.toml --price prices.toml --html what-if.html

    Without a change it says what each family, NIC, GB and GB/s of the machine is worth. With several changes there is a
    row for each alone, and one for all. A difference below 2 %, which a search may miss, is printed as none.
    """
    loaded, described = load_job_for(job, (), cluster)
    changes = ClusterChanges(locate_cluster(cluster))
    machines = [PossibleMachine("now", described.cluster)]
    for name, file in changes.machines(add, without, overrides).items():
        new = [family for family in file.cluster.families if family not in described.cluster.families]
        assumed = [f"new nodes of {family}: up to 8 devices each, with the NICs of the first ones" for family in new]
        if set(file.cluster.links) - set(described.cluster.links):
            assumed.append("links of the cluster file were measured before what is set; they are scaled with it")
        machines.append(PossibleMachine(name, file.cluster, tuple(assumed)))

    search, predict = searches_for(loaded, described, Limits(scored=budget))
    prices = load_prices(price) if price else None
    known = {family for machine in machines for family in machine.cluster.families}
    unread = sorted(prices.families.keys() - known) if prices else []
    machines[0] = replace(machines[0], assumed=tuple(f"prices: no machine has families.{name}" for name in unread))
    rows = what_if(machines, search, predict, prices, mtbf and mtbf * 3600, loaded.checkpoint.every)
    currency = prices.currency if prices else ""
    if html is not None:
        from hpctrain.observe.report.page import render_machines

        write_out(html, render_machines(rows, f"{loaded.name} on {described.name}", currency))
    print_result([row.data() for row in rows], format_machines(rows, currency, mtbf is not None), as_json)


def searches_for(
    job: Job, described: MachineDescription, limits: Limits
) -> tuple[Callable[[Cluster, float], Predictor], Callable[[Cluster, Plan], Predictor]]:
    """Return `search` and `predict` of `hpctrain.planner.what_if` for a job on machines such as the one described."""

    def search(machine: Cluster, known_seconds: float) -> Predictor:
        asked, _ = with_dtypes(job, machine, sorted(machine.families), described.name)
        run, _ = with_overlap(asked, replace(described, cluster=machine))
        setup_of = setups_by_plan(asked, run, topology_of(machine, described.is_rehearsed))
        seeded = replace(limits, known_seconds=known_seconds)
        return search_best(run, machine, seeded, described.name, setup_of=setup_of).best.predictor

    def predict(machine: Cluster, plan: Plan) -> Predictor:
        used = sorted({machine.devices[rank].family for tile in plan.tiles for rank in tile.ranks})
        asked, _ = with_dtypes(job, machine, used, described.name)
        return predictor_of_run(asked, replace(described, cluster=machine), plan)[0]

    return search, predict
