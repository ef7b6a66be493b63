"""`hpctrain catalogue`: what may be named: ready clusters, accelerators, networks."""

import json
import textwrap
from dataclasses import asdict

import click

from hpctrain.config.clusters.cluster_file import load_cluster, ready_clusters
from hpctrain.config.clusters.device_catalogue import ACCELERATORS, NETWORKS
from hpctrain.config.errors import TopologyError
from hpctrain.config.tables import read_text
from hpctrain.jobs.arguments import json_option

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
    if as_json:
        networks = {name: network._asdict() for name, network in NETWORKS.items()}
        ready = {name: {"ranks": each.num_devices, "about": about} for name, (each, about) in clusters.items()}
        devices = {name: asdict(each) for name, each in ACCELERATORS.items()}
        print(json.dumps({"clusters": ready, "accelerators": devices, "networks": networks}))
        return
    print("clusters: CLUSTER of train --rehearse CLUSTER, plan search --cluster CLUSTER")
    for name, (each, about) in clusters.items():
        print(f"{name:15} {each.num_devices} ranks. {about}")
    print()
    print("accelerators: families.NAME.model; memory GB, its GB/s, peak TFLOP/s by dtype, link GB/s of a node")
    print(
        f"{'model':12} {'GB':>6} {'GB/s':>6} " + " ".join(f"{dtype:>6}" for dtype in DTYPES) + f" {'link':>6}  source"
    )
    for name, each in ACCELERATORS.items():
        peaks = [each.peak_flops_per_second.get(dtype) for dtype in DTYPES]
        summary = " ".join(f"{peak / 1e12:6.4g}" if peak else f"{'-':>6}" for peak in peaks)
        memory, speed = each.memory_bytes / 1e9, each.memory_bytes_per_second / 1e9
        source, *more = textwrap.wrap(each.source, 36)
        print(f"{name:12} {memory:6.1f} {speed:6.0f} {summary} {each.link_bytes_per_second / 1e9:6.4g}  {source}")
        for line in more:
            print(f"{'':63}{line}")
    print("\nnetworks: fabrics.NAME.network; GB/s of a NIC, latency in microseconds (assumed)")
    for name, each in NETWORKS.items():
        print(f"{name:12} {each.bytes_per_second / 1e9:6.4g} {each.latency_seconds * 1e6:6.0f}  {each.source}")
