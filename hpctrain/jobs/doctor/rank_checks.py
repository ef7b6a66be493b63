"""Checks that all ranks of a start make together: software, drivers, devices, routes, links, shared folder."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.comm.start.launcher import MORE_CORES, asked_threads, few_cores, promised_size
from hpctrain.config.errors import HpctrainError, LaunchError
from hpctrain.jobs.doctor.machine_checks import Finding, error_finding
from hpctrain.jobs.doctor.software import compare_software, describe_environments, grouped
from hpctrain.plan.tiling import counted

if TYPE_CHECKING:
    from hpctrain.comm.topology import Place
    from hpctrain.comm.world import World

LINK_SECONDS = 0.6


def check_ranks(world: "World", folder: Path) -> Iterator[tuple[list[Finding], dict[str, Any]]]:
    """Yield findings and facts as they come; rank 0's are complete. All ranks must call, and exhaust it.

    The first error ends the checks: later ones depend on it.
    """
    try:
        software = compare_software(world)
    except HpctrainError as error:
        yield [error_finding("software", error)], {}
        return
    environments = describe_environments(software, [place.family for place in world.topology.places])
    text = environments or f"one environment, {software[0].environment}"
    drivers = check_drivers(world.topology.places, world.gather_objects(describe_drivers(world.place.kind)))
    everybody = world.gather_objects(world.communicators.describe())
    communicators = {name: size for of_kind in zip(*everybody, strict=True) for name, size in of_kind}
    sizes = (f"{name} ({counted(size, 'rank')})" for name, size in communicators.items())
    made = Finding("communicators", "ok", ", ".join(sizes))
    yield (
        [check_promise(world.size), Finding("software", "ok", text), _check_threads(world), made, *drivers],
        {"communicators": communicators},
    )

    from hpctrain.comm.bind import DTYPES, bind_accelerator

    try:
        accelerator = bind_accelerator(world)
    except HpctrainError as error:
        yield [error_finding("devices", error)], {}
        return
    facts = {
        "rank": world.rank,
        "host": world.place.host,
        "family": world.place.family,
        "environment": software[world.rank].environment,
        "device": str(accelerator.device),
        "kind": accelerator.kind,
        "model": accelerator.model,
        "memory_bytes": accelerator.memory().total,
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": asked_threads() or 0,
        "flops_per_second": {name: accelerator.products_per_second(dtype) for name, dtype in DTYPES.items()},
    }
    ranks: list[dict[str, Any]] = world.gather_objects(facts)
    yield [*describe_devices(ranks), *check_cores(ranks)], {"ranks": ranks}
    routes = _routes(world)
    try:
        _connect_families(world)
    except HpctrainError as error:
        yield [error_finding("routes", error)], {"routes": routes}
        return
    yield [_check_routes(routes)], {"routes": routes}
    links = _measure_links(world, accelerator)
    yield ([_check_links(links)] if links else []), {"links": links}
    yield _check_shared(world, folder), {}


def check_promise(size: int) -> Finding:
    """Say how many ranks there are and what promised them."""
    promised, variable = promised_size()
    if variable and promised != size:
        text = f"{size}, but {variable} promises {promised}"
        remedy = "use the mpirun or srun --mpi of this MPI library"
        return Finding("ranks", "error", text, remedy, LaunchError.exit_code)
    return Finding("ranks", "ok", f"{size}, as {variable} promises" if variable else f"{size}: this process alone")


def describe_drivers(kind: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return which makers' drivers this rank's host has, and whether the rank uses such a device, in words.

    `kind` is the kind of device that the rank computes on.
    """
    from hpctrain.comm.accelerators.kinds import DEVICE_VARIABLE, KINDS, driver_files, torch_module

    drivers = ", ".join(f"{path} of {maker.maker}" for maker, path in driver_files()) or "no driver of devices"
    if kind == "cpu":
        asked = environment.get(DEVICE_VARIABLE) == "cpu"
        why = f", {DEVICE_VARIABLE}=cpu" if asked else UNSEEN if driver_files() else ""
        return f"{drivers}: ranks compute on processors{why}"
    module = torch_module(KINDS[kind]) if kind in KINDS else None
    return f"{drivers}: torch sees {module.device_count() if module else 'no'} {kind} devices"


UNSEEN = ", since torch sees no device"


def check_drivers(places: "Sequence[Place]", texts: Sequence[str]) -> list[Finding]:
    """Compare what drivers there are with what ranks compute on; `texts` are by rank. Pure."""
    hosts = grouped((text, place.host_name) for place, text in zip(places, texts, strict=False))
    lines = []
    for text, of_ranks in hosts.items():
        names = list(dict.fromkeys(of_ranks))
        lines.append(f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}: {text}")
    is_unseen = any(text.endswith(UNSEEN) for text in hosts)
    return [Finding("drivers", "warning" if is_unseen else "ok", "\n".join(lines))] if lines else []


def _check_threads(world: "World") -> Finding:
    if world.has_threads:
        return Finding("MPI threads", "ok", "multiple: lanes move while the main thread computes")
    text = "MPI may not be called by several threads: lanes move only while the main thread waits"
    return Finding("MPI threads", "warning", text, "use an MPI library built with MPI_THREAD_MULTIPLE")


def describe_devices(ranks: Sequence[dict[str, Any]]) -> list[Finding]:
    """Say which devices the ranks of each host and family have, and how fast they multiply matrices. Pure."""
    lines = []
    groups = grouped(((rank["host"], rank["family"], rank["model"]), rank) for rank in ranks)
    for (host, family, model), members in groups.items():
        speeds = []
        for dtype in members[0]["flops_per_second"]:
            values = sorted(rank["flops_per_second"][dtype] / 1e9 for rank in members)
            speeds.append(f"{dtype} {values[0]:,.1f} to {values[-1]:,.1f} GFLOP/s")
        devices = ", ".join(dict.fromkeys(rank["device"] for rank in members))
        memory = f"{members[0]['memory_bytes'] / 2**30:.1f} GiB memory"
        lines.append(f"{host}: {len(members)} of family {family}, {model} ({devices}), {memory}")
        lines.append(f"  {', '.join(speeds)}, all ranks at once")
    return [Finding("devices", "ok", "\n".join(lines))] if ranks else []


def check_cores(ranks: Sequence[dict[str, Any]]) -> list[Finding]:
    """Compare the cores that the ranks of each host may use with their number and threads. Pure."""
    findings = []
    for host, members in grouped((rank["host"], rank) for rank in ranks).items():
        count = len(members)
        cores = sorted({core for rank in members for core in rank["cores"]})
        threads = sum(max(1, rank["threads"]) for rank in members if rank["kind"] == "cpu")
        text = f"{host}: {count} rank{'s' * (count > 1)} on {len(cores)} core{'s' * (len(cores) > 1)}"
        if count > len(cores):
            remedy = f"mpirun -n {len(cores)}, mpirun --bind-to none, or srun --cpus-per-task=1 on a larger node"
            findings.append(Finding("cores", "warning", f"{text}: they share cores", remedy))
        elif threads > len(cores):
            text += f" with {threads} threads"
            findings.append(Finding("cores", "warning", text, f"export OMP_NUM_THREADS={len(cores) // count}"))
        elif narrow := few_cores([(rank["kind"], len(rank["cores"])) for rank in members]):
            findings.append(Finding("cores", "warning", f"{text}; {narrow}", MORE_CORES))
        else:
            findings.append(Finding("cores", "ok", text))
    return findings


def _routes(world: "World") -> list[dict[str, str]]:
    from hpctrain.comm.transports.abilities import describe_routes

    devices = world.settings.devices
    described = describe_routes(world.topology, devices.families, devices.bridge) if devices else None
    return [route._asdict() for route in described or describe_routes(world.topology, {})]


def _connect_families(world: "World") -> None:
    """Connect the ranks of each family by its maker's library, as a run would. All ranks must call.

    Raises CommError on all of them where a library refuses its ranks.
    """
    families = world.settings.devices.families if world.settings.devices else {}
    for name, family in families.items():
        ranks = world.topology.ranks_of(name)
        with world.freeing(), world.all_or_none():
            if family.native.works and world.rank in ranks:
                world.group(ranks, "doctor")


def _check_routes(routes: Sequence[dict[str, str]]) -> Finding:
    lines = []
    for route in routes:
        pair = route["family"] if route["family"] == route["other"] else f"{route['family']} - {route['other']}"
        lines.append(f"{pair}: {route['route']}: {route['reason']}")
    return Finding("routes", "ok", "\n".join(lines))


def _measure_links(world: "World", accelerator) -> list[dict[str, Any]]:
    """Return latency and bandwidth of each class of pairs, on rank 0. All ranks must call."""
    from hpctrain.comm.probe.link_timing import measure_messages, pair_classes
    from hpctrain.comm.probe.survey import FABRIC, FABRIC_VARIABLE

    fabrics = world.all_objects(os.environ.get(FABRIC_VARIABLE, FABRIC))
    classes = pair_classes(world.topology.places, fabrics)
    if not classes:
        return []
    comm = world.group(range(world.size), "doctor", overlapped=world.has_threads)
    measured = measure_messages(world, comm, accelerator, classes, LINK_SECONDS)
    if world.rank != 0:
        return []
    return [
        {
            "families": list(each.pairs.families),
            "fabric": each.pairs.fabric,
            "latency_seconds": each.latency_seconds,
            "bytes_per_second": each.bytes_per_second(1),
            "route": each.route,
        }
        for each in measured
    ]


def _check_links(links: Sequence[dict[str, Any]]) -> Finding:
    lines = []
    for link in links:
        pair = " - ".join(dict.fromkeys(link["families"]))
        where = f"over {link['fabric']}" if link["fabric"] else "inside a host"
        speed = f"{link['latency_seconds'] * 1e6:,.1f} us, {link['bytes_per_second'] / 1e9:,.2f} GB/s"
        lines.append(f"{pair} {where}: {speed}{', ' + link['route'] if link['route'] else ''}")
    return Finding("links", "ok", "\n".join(lines))


def _check_shared(world: "World", folder: Path) -> list[Finding]:
    """Check whether all hosts see the folder in which rank 0 writes."""
    name, wrote = folder / f".hpctrain-doctor-{world.broadcast_object(os.getpid())}", True
    if world.rank == 0:
        try:
            name.write_text("")
        except OSError:
            wrote = False  # said already by the check of the file system
    wrote = world.broadcast_object(wrote)
    deadline = time.monotonic() + 2.0  # a network file system may be late
    while wrote and not name.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    seen = world.gather_objects((name.exists(), world.place.host))
    world.agree(None)
    if world.rank != 0 or not wrote:
        return []
    name.unlink(missing_ok=True)
    blind = sorted({host for sees, host in seen if not sees})
    if blind:
        text = f"{folder.absolute()} of rank 0 is not seen by {', '.join(blind)}"
        remedy = "choose a run folder on a file system that all nodes share"
        return [Finding("shared folder", "error", text, remedy, LaunchError.exit_code)]
    return [Finding("shared folder", "ok", f"all ranks see {folder.absolute()}")]
