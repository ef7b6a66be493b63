"""`hpctrain rehearse`: the clusters that are ready to be rehearsed."""

import click

from hpctrain.config.cluster_file import load_cluster, ready_clusters
from hpctrain.config.errors import TopologyError
from hpctrain.config.tables import read_text


@click.command("rehearse")
@click.option("--list", "listed", is_flag=True, help="List the ready cluster files.")
def command(listed):
    """Tell which clusters can be rehearsed by name.

    \b
    hpctrain rehearse --list
    mpirun -n 8 hpctrain train mixed --rehearse v100-t4
    mpirun -n 8 hpctrain bench mixed v100-t4

    A rehearsal's ranks impersonate the devices of a cluster file, one of these or one of your own. Cluster and job are
    scaled down together; see docs/rehearsal.md.
    """
    if not listed:
        raise click.UsageError("give --list; a rehearsal itself is `mpirun -n N hpctrain train JOB --rehearse CLUSTER`")
    for name, path in ready_clusters().items():
        cluster = load_cluster(path)
        about = read_text(path, TopologyError).partition("\n")[0].removeprefix("# ")
        print(f"{name:15} {cluster.num_devices} ranks. {about}")
