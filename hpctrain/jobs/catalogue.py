"""`hpctrain catalogue`: the accelerators and networks whose figures a cluster file may leave out."""

import json
import textwrap
from dataclasses import asdict

import click

from hpctrain.config.device_catalogue import ACCELERATORS, NETWORKS

DTYPES = ("fp32", "tf32", "fp16", "bf16")


@click.command("catalogue")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def command(as_json):
    """List accelerators and networks by the names that a cluster file may use.

    \b
    hpctrain catalogue
    hpctrain catalogue --json

    Bandwidths are of one direction, peaks of dense products. See docs/cluster-file.md.
    """
    if as_json:
        networks = {name: network._asdict() for name, network in NETWORKS.items()}
        print(json.dumps({"accelerators": {n: asdict(a) for n, a in ACCELERATORS.items()}, "networks": networks}))
        return
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
    print("\nnetworks: fabrics.NAME.network; GB/s of a NIC, latency in microseconds (a guess)")
    for name, each in NETWORKS.items():
        print(f"{name:12} {each.bytes_per_second / 1e9:6.4g} {each.latency_seconds * 1e6:6.0f}  {each.source}")
