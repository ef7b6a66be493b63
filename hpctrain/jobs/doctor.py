"""`hpctrain doctor`: show what this machine has, as the ranks that were started see it."""

import json
import os
import platform
from importlib.metadata import distributions

import click

from hpctrain.jobs.common import started_world

PACKAGES = ("torch", "mpi4py", "numpy", "h5py")
OPTIONAL_PREFIXES = ("cupy", "nvidia-nccl", "mpich", "openmpi")  # their names end in what they are built for


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def command(as_json):
    """Tell versions, ranks, devices and their speed, and by which routes they communicate and why.

    \b
    hpctrain doctor                     this process alone
    mpirun -n 4 hpctrain doctor         the ranks of a job, as `train` would find them

    The exit code is 0, or that of the error that a job would end with.
    """
    with started_world() as world:
        summary = examine(world)
        if world.rank == 0:
            print(json.dumps(summary) if as_json else report(summary), flush=True)


def examine(world) -> dict:
    """Return what there is, as plain data; rank 0's is complete. All ranks must call."""
    from hpctrain.comm.accelerators.bind import DTYPES, bind_accelerator
    from hpctrain.comm.launcher import promised_size
    from hpctrain.comm.routes.abilities import describe_routes
    from hpctrain.comm.topology import Route
    from hpctrain.comm.window import SHARED_MEMORY, free_bytes

    accelerator = bind_accelerator(world)
    memory = accelerator.memory()
    device = {
        "rank": world.rank,
        "host": world.place.host,
        "family": world.place.family,
        "device": str(accelerator.device),
        "model": accelerator.model,
        "memory_bytes": memory.total,
        "flops_per_second": {name: accelerator.products_per_second(dtype) for name, dtype in DTYPES.items()},
        "shared_memory_free_bytes": free_bytes(),
    }
    gathered = world.gather_objects(device) or []
    _, variable = promised_size()
    families = world.settings.devices.families if world.topology.has_devices else {}
    everybody = world.topology.route(range(world.size), world.preferences.route)
    if families:
        everybody = Route("devices", "by the routes between families")
    return {
        "versions": {"python": platform.python_version()} | _versions(),
        "mpi": {
            "library": " ".join(world.library.split()),
            "threads": _thread_level(world.raw_mpi),
            "launcher": variable or "none",
        },
        "shared_memory": {
            "path": SHARED_MEMORY,
            "total_bytes": os.statvfs(SHARED_MEMORY).f_blocks * os.statvfs(SHARED_MEMORY).f_frsize,
            "free_bytes": min((d["shared_memory_free_bytes"] for d in gathered), default=free_bytes()),
        },
        "ranks": gathered,
        "routes": [route._asdict() for route in describe_routes(world.topology, families)],
        "everybody": {"route": everybody.kind, "reason": everybody.reason},
    }


def _versions() -> dict[str, str]:
    installed = {result.name: result.version for result in distributions()}
    optional = sorted(name for name in installed if name.startswith(OPTIONAL_PREFIXES))
    return {name: installed.get(name, "not installed") for name in (*PACKAGES, *optional)}


def _thread_level(mpi) -> str:
    names = {
        mpi.THREAD_SINGLE: "single",
        mpi.THREAD_FUNNELED: "funneled",
        mpi.THREAD_SERIALIZED: "serialized",
        mpi.THREAD_MULTIPLE: "multiple",
    }
    return names[mpi.Query_thread()]


def report(summary: dict) -> str:
    """Return what `examine` found as text for people. Pure."""
    mpi, shared = summary["mpi"], summary["shared_memory"]
    threads = "" if mpi["threads"] == "multiple" else "; lanes move only while the main thread waits"
    lines = [
        "versions      " + ", ".join(f"{name} {number}" for name, number in summary["versions"].items()),
        f"MPI           {mpi['library']}; threads: {mpi['threads']}{threads}",
        f"launcher      {mpi['launcher']}" + (" (this process alone)" if mpi["launcher"] == "none" else ""),
        f"{shared['path']:13} {_gib(shared['total_bytes'])}, {_gib(shared['free_bytes'])} free on the fullest host",
        f"ranks         {len(summary['ranks'])}: {summary['everybody']['route']}, {summary['everybody']['reason']}",
    ]
    groups: dict[tuple[str, str, str], list[dict]] = {}
    for rank in summary["ranks"]:
        groups.setdefault((rank["host"], rank["family"], rank["model"]), []).append(rank)
    for (host, family, model), ranks in groups.items():
        lines.append(f"  {host}: {len(ranks)} of family {family}, {model}, {_gib(ranks[0]['memory_bytes'])} memory")
        for dtype in ranks[0]["flops_per_second"]:
            speeds = [rank["flops_per_second"][dtype] / 1e9 for rank in ranks]
            lines.append(f"    {dtype}: {min(speeds):,.1f} to {max(speeds):,.1f} GFLOP/s a rank, all at once")
    lines.append("routes")
    for route in summary["routes"]:
        pair = route["family"] if route["family"] == route["other"] else f"{route['family']} - {route['other']}"
        lines.append(f"  {pair}: {route['route']}: {route['reason']}")
    return "\n".join(lines)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
