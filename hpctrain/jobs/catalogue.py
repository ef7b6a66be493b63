"""`hpctrain catalogue`: what may be named: ready clusters, accelerators, networks."""

import json
from dataclasses import asdict

import click

from hpctrain.config.clusters.cluster_file import load_cluster, ready_clusters
from hpctrain.config.clusters.device_catalogue import ACCELERATORS, NETWORKS
from hpctrain.config.errors import TopologyError
from hpctrain.config.tables import read_text
from hpctrain.jobs.arguments import json_option
from hpctrain.observe.text_tables import console, table
from hpctrain.planner.prices.devices import DeviceModel

DTYPES = ("fp32", "tf32", "fp16", "bf16")


@click.command("catalogue")
@json_option
def command(as_json):
    """List the ready clusters, and the accelerators and networks that a cluster file may name.

    \b
    hpctrain catalogue
    hpctrain catalogue --json
    mpirun -n 8 hpctrain train mixed --rehearse v100-t4

    Ready clusters have figures of real size. A rehearsal scales them down together with its job.
    Bandwidths are of one direction, peaks of dense products.
    """
    clusters = {
        name: (load_cluster(path), read_text(path, TopologyError).partition("\n")[0].removeprefix("# "))
        for name, path in ready_clusters().items()
    }
    worth = {name: DeviceModel(name, each.family(name)).worth for name, each in ACCELERATORS.items()}
    if as_json:
        networks = {name: network._asdict() for name, network in NETWORKS.items()}
        ready = {name: {"ranks": each.num_devices, "about": about} for name, (each, about) in clusters.items()}
        devices = {name: asdict(each) | {"worth": worth[name]} for name, each in ACCELERATORS.items()}
        print(json.dumps({"clusters": ready, "accelerators": devices, "networks": networks}))
        return
    out = console()
    ready = table("cluster", "ranks", "what it is", numbers={"ranks"})
    for name, (each, about) in clusters.items():
        ready.add_row(name, f"{each.num_devices}", about)
    numbers = {"GB", "GB/s", "us", "link", "W", *DTYPES}
    columns = ("model", "GB", "GB/s", *DTYPES, "link", "W", "source", "what an assumed speed is worth")
    devices = table(*columns, numbers=numbers)
    for name, each in ACCELERATORS.items():
        peaks = [each.peak_flops_per_second.get(dtype) for dtype in DTYPES]
        speeds = (each.memory_bytes_per_second, each.link_bytes_per_second)
        memory, link = (f"{speed / 1e9:,.4g}" for speed in speeds)
        each_peak = [f"{peak / 1e12:,.4g}" if peak else "-" for peak in peaks]
        described = f"{each.watts:g}", each.source, worth[name]
        devices.add_row(name, f"{each.memory_bytes / 1e9:.1f}", memory, *each_peak, link, *described)
    networks = table("network", "GB/s", "us", "source", numbers=numbers)
    for name, each in NETWORKS.items():
        seconds = f"{each.latency_seconds * 1e6:.0f}"
        networks.add_row(name, f"{each.bytes_per_second / 1e9:.4g}", seconds, each.source)
    out.print("clusters: CLUSTER of train --rehearse CLUSTER, plan search --cluster CLUSTER", ready, sep="\n")
    title = "accelerators: families.NAME.model; peak TFLOP/s by dtype, link GB/s of a node, W at work"
    out.print(f"\n{title}", devices, sep="\n")
    out.print("\nnetworks: fabrics.NAME.network; GB/s of a NIC, latency in us (assumed)", networks, sep="\n")
