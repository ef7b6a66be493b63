"""What can be checked of a start: Python, packages, MPI, launchers, the file system; then by all ranks what they share.

Each check returns findings.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hpctrain.comm.doctor.software import compare_software, describe_environments
from hpctrain.comm.launcher import asked_threads, promised_size
from hpctrain.config.errors import HpctrainError, LaunchError, TrainingError, describe_os_error
from hpctrain.launch.mpi import MPI_OF_SRUN, MpiLibrary, kind_of, mpi_library, srun_interfaces

if TYPE_CHECKING:
    from hpctrain.comm.topology import Place
    from hpctrain.comm.world import World


NEWEST_TOO_OLD = (3, 10)
REQUIRED = ("torch", "mpi4py", "numpy", "h5py")
OPTIONAL_PREFIXES = ("cupy", "nvidia-nccl", "mpich", "openmpi")  # their names end in what they are built for
LAUNCHERS = ("mpirun", "mpiexec")
HYDRA = ("mpich", "intel", "cray")
"""Libraries whose processes each other's launchers can start."""
SHARED_MEMORY = "/dev/shm"
LEAST_SHARED_BYTES = 256 << 20
WRITTEN_BYTES = 64 << 20
SLOW_BYTES_PER_SECOND = 50e6
"""Of a file system, below which a checkpoint of a model of 1 B parameters takes minutes."""
SECONDS = 30


class Finding(NamedTuple):
    """One rung of the ladder."""

    name: str
    verdict: Literal["ok", "warning", "error"]
    text: str
    remedy: str = ""
    """The line to type, or what to change."""
    exit_code: int = 0
    """With which a job would end for this reason."""


def error_finding(name: str, error: HpctrainError) -> Finding:
    """Return what an error of a job is as a finding; what follows its last semicolon is the remedy."""
    text, _, remedy = str(error).rpartition("; ")
    return Finding(name, "error", text or remedy, remedy if text else "", error.exit_code)


def check_machine(folder: Path, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield what this process alone can say of its host; `folder` is where runs are to be written."""
    yield check_python()
    yield check_packages()
    library = None
    try:
        library = mpi_library()
        yield Finding("MPI library", "ok", f"{library.text}, used by mpi4py {package_versions()['mpi4py']}")
    except LaunchError as error:
        yield error_finding("MPI library", error)
    if library:
        yield check_launchers(library, environment)
    yield check_shared_memory()
    yield from check_folder(folder)
    yield check_hdf5(folder)


def check_python() -> Finding:
    text = f"{platform.python_version()} in {sys.prefix}"
    if sys.version_info[:2] <= NEWEST_TOO_OLD:
        return Finding("Python", "error", text, "use Python 3.11 or later", LaunchError.exit_code)
    return Finding("Python", "ok", text)


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that matter, `not installed` for required ones that are missing."""
    installed = {each.name: each.version for each in distributions()}
    optional = sorted(name for name in installed if name.startswith(OPTIONAL_PREFIXES))
    return {name: installed.get(name, "not installed") for name in (*REQUIRED, *optional)}


def check_packages() -> Finding:
    versions = package_versions()
    text = ", ".join(f"{name} {number}" for name, number in versions.items())
    if missing := [name for name in REQUIRED if versions[name] == "not installed"]:
        return Finding("packages", "error", text, f"pip install {' '.join(missing)}", LaunchError.exit_code)
    return Finding("packages", "ok", text)


class Launcher(NamedTuple):
    """A program that starts ranks."""

    path: str
    kind: str
    """As of a library, see `MPI_OF_SRUN`; empty where the program does not say it."""

    def fits(self, library: MpiLibrary) -> bool:
        return self.kind == library.kind or (self.kind in HYDRA and library.kind in HYDRA)


def launchers(search_path: str) -> list[Launcher]:
    """Return the launchers on a search path, the first one first, each program once."""
    result: dict[str, Launcher] = {}
    for folder in search_path.split(os.pathsep):
        for name in LAUNCHERS:
            path = os.path.join(folder, name)
            real = os.path.realpath(path)
            if os.access(path, os.X_OK) and os.path.isfile(path) and real not in result:
                result[real] = Launcher(path, launcher_kind(path))
    return list(result.values())


def launcher_kind(path: str) -> str:
    """Ask a launcher whose it is."""
    with suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=SECONDS)
        text = (asked.stdout + asked.stderr).lower()
        if any(word in text for word in ("open mpi", "openrte", "prte", "hydra", "intel", "mpich")):
            return kind_of(text)
    return ""


def check_launchers(library: MpiLibrary, environment: Mapping[str, str]) -> Finding:
    """Compare mpirun, and srun in a batch job, with the library that mpi4py uses."""
    there = launchers(environment.get("PATH", ""))
    interfaces = srun_interfaces() if shutil.which("srun", path=environment.get("PATH")) else []
    fitting = [each for each in there if each.fits(library)]
    by_srun = next((kind for kind in MPI_OF_SRUN[library.kind] if kind in interfaces), None)
    own = os.path.join(sys.prefix, "bin", "mpirun")
    said = [f"{each.path} of {each.kind or 'an unknown MPI'}" for each in there]
    said += [f"srun --mpi={by_srun}"] if by_srun else []
    text = ", ".join(said)
    if "SLURM_JOB_ID" in environment and by_srun:
        return Finding("launcher", "ok", text)
    if there and not there[0].fits(library):
        better = fitting[0].path if fitting else own if os.access(own, os.X_OK) else None
        remedy = f"{better} -n 4 hpctrain doctor" if better else f"load the module of {library.text.split(' ')[0]}"
        text = f"{there[0].path} is of {there[0].kind or 'an unknown MPI'}, mpi4py uses {library.text}: each process"
        return Finding("launcher", "error", f"{text} would be a job of one rank", remedy, LaunchError.exit_code)
    if not there and not by_srun:
        if os.access(own, os.X_OK):
            remedy = f"export PATH={os.path.dirname(own)}:$PATH"
        else:
            remedy = "load your site's MPI module, or pip install 'hpctrain[mpi]'"
        return Finding("launcher", "warning", "no mpirun on the search path", remedy)
    if len({each.kind for each in there}) > 1:
        remedy = f"start ranks with {there[0].path}"
        return Finding("launcher", "warning", f"several MPIs: {text}; the first one fits mpi4py", remedy)
    return Finding("launcher", "ok", text)


def check_promise(size: int) -> Finding:
    """Say how many ranks there are and what promised them."""
    promised, variable = promised_size()
    if variable and promised != size:
        text = f"{size}, but {variable} promises {promised}"
        remedy = "use the mpirun or srun --mpi of this MPI library"
        return Finding("ranks", "error", text, remedy, LaunchError.exit_code)
    return Finding("ranks", "ok", f"{size}, as {variable} promises" if variable else f"{size}: this process alone")


def check_shared_memory(path: str = SHARED_MEMORY) -> Finding:
    try:
        facts = os.statvfs(path)
    except OSError as error:
        text = f"{path}: {describe_os_error(error)}: ranks of a host send messages instead"
        return Finding("shared memory", "warning", text, f"mount a tmpfs at {path}")
    total, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    text = f"{path}: {total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"
    if free < LEAST_SHARED_BYTES:
        remedy = "remove what is left there, or start the container with a larger one (--shm-size=8g)"
        return Finding("shared memory", "warning", text, remedy)
    return Finding("shared memory", "ok", text)


def check_folder(folder: Path) -> Iterator[Finding]:
    """Write a file into the folder of runs, sync and remove it."""
    name = f"{folder.absolute()}"
    block = os.urandom(1 << 20)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hpctrain-doctor-") as file:
            begun = time.perf_counter()
            for _ in range(WRITTEN_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written = WRITTEN_BYTES / (time.perf_counter() - begun)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        text = f"{name} cannot be written: {describe_os_error(error)}"
        remedy = "choose a folder that can: hpctrain doctor --folder DIR, hpctrain train JOB --run DIR"
        yield Finding("file system", "error", text, remedy, TrainingError.exit_code)
        return
    text = f"{name}: {written / 1e6:,.0f} MB/s written and synced, {free / 1e9:,.0f} GB free"
    slow = written < SLOW_BYTES_PER_SECOND
    remedy = "write runs to a parallel file system: hpctrain train JOB --run DIR" if slow else ""
    yield Finding("file system", "warning" if slow else "ok", text, remedy)


def check_hdf5(folder: Path) -> Finding:
    """Write and read an HDF5 file; say whether this h5py is a parallel one."""
    try:
        import h5py
    except ImportError as error:
        return Finding("HDF5", "error", f"h5py cannot be imported: {error}", "pip install h5py", LaunchError.exit_code)
    text = f"h5py {h5py.version.version} with HDF5 {h5py.version.hdf5_version}"
    text += ", parallel" if h5py.get_config().mpi else ""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".hpctrain-doctor-") as inside:
            path = Path(inside) / "file.h5"
            with h5py.File(path, "w") as file:
                file["numbers"] = [1, 2, 3]
            with h5py.File(path, "r") as file:
                assert list(file["numbers"]) == [1, 2, 3]  # pyright: ignore[reportArgumentType]
    except OSError as error:
        locks = "lock" in str(error).lower()
        remedy = "export HDF5_USE_FILE_LOCKING=FALSE" if locks else "choose another folder with --folder"
        text += f" cannot write to {folder.absolute()}: {str(error).splitlines()[0]}"
        return Finding("HDF5", "error", text, remedy, TrainingError.exit_code)
    return Finding("HDF5", "ok", text)


def format_finding(finding: Finding) -> str:
    """Return one rung as text; further lines of its text and the remedy are indented."""
    first, *more = finding.text.split("\n")
    lines = [f"{finding.verdict:8} {finding.name:14} {first}", *(f"{'':24}{line}" for line in more)]
    if finding.remedy:
        lines.append(f"{'':24}-> {finding.remedy}")
    return "\n".join(lines)


LINK_SECONDS = 0.6
SKEW_SECONDS = 1.0
"""Between the clocks of hosts, above which times in their files mislead; a run's own times do not depend on it."""


def check_ranks(world: "World", folder: Path) -> Iterator[tuple[list[Finding], dict[str, Any]]]:
    """Yield findings and facts as they come; rank 0's are complete. All ranks must call, and go through to the end.

    What has an error ends the ladder: what comes after it needs it.
    """
    try:
        software = compare_software(world)
    except HpctrainError as error:
        yield [error_finding("software", error)], {}
        return
    environments = describe_environments(software, [place.family for place in world.topology.places])
    text = environments.removeprefix("software: ") or f"one environment, {software[0].environment}"
    own = describe_drivers(world.place.kind)
    drivers = check_drivers(world.topology.places, world.gather_objects(own))
    yield [check_promise(world.size), Finding("software", "ok", text), _check_threads(world), *drivers], {}

    from hpctrain.comm.accelerators.bind import DTYPES, bind_accelerator

    try:
        accelerator = bind_accelerator(world)
    except HpctrainError as error:
        yield [error_finding("devices", error)], {}
        return
    own = {
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
    ranks: list[dict[str, Any]] = world.gather_objects(own)
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
    yield [_check_clocks(world), *_check_shared(world, folder)], {}


def describe_drivers(kind: str, environment: Mapping[str, str] = os.environ) -> str:
    """Say which makers' drivers this rank's host has, and whether the rank uses a device of theirs; `kind` is what it
    computes on."""
    from hpctrain.comm.accelerators.detect import DEVICE_VARIABLE
    from hpctrain.comm.accelerators.kinds import KINDS, driver_files, torch_module

    there = ", ".join(f"{path} of {maker.maker}" for maker, path in driver_files()) or "no driver of devices"
    if kind == "cpu":
        asked = environment.get(DEVICE_VARIABLE) == "cpu"
        why = f", {DEVICE_VARIABLE}=cpu" if asked else UNSEEN if driver_files() else ""
        return f"{there}: ranks compute on processors{why}"
    module = torch_module(KINDS[kind]) if kind in KINDS else None
    return f"{there}: torch sees {module.device_count() if module else 'no'} {kind} devices"


UNSEEN = ", since torch sees no device"


def check_drivers(places: "Sequence[Place]", texts: Sequence[str]) -> list[Finding]:
    """Compare what drivers there are with what ranks compute on; `texts` are by rank. Pure."""
    hosts: dict[str, list[str]] = {}
    for place, text in zip(places, texts, strict=False):
        if place.host_name not in hosts.setdefault(text, []):
            hosts[text].append(place.host_name)
    lines = [f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}: {text}" for text, names in hosts.items()]
    is_unseen = any(text.endswith(UNSEEN) for text in hosts)
    return [Finding("drivers", "warning" if is_unseen else "ok", "\n".join(lines))] if lines else []


def _check_threads(world: "World") -> Finding:
    if world.has_threads:
        return Finding("MPI threads", "ok", "multiple: lanes move while the main thread computes")
    text = "MPI may not be called by several threads: lanes move only while the main thread waits"
    return Finding("MPI threads", "warning", text, "use an MPI library built with MPI_THREAD_MULTIPLE")


def describe_devices(ranks: Sequence[dict[str, Any]]) -> list[Finding]:
    """Say which devices the ranks of each host and family have, and how fast they multiply matrices. Pure."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for rank in ranks:
        groups.setdefault((rank["host"], rank["family"], rank["model"]), []).append(rank)
    lines = []
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
    for host, count in Counter(rank["host"] for rank in ranks).items():
        members = [rank for rank in ranks if rank["host"] == host]
        cores = sorted({core for rank in members for core in rank["cores"]})
        threads = sum(max(1, rank["threads"]) for rank in members if rank["kind"] == "cpu")
        text = f"{host}: {count} rank{'s' * (count > 1)} on {len(cores)} core{'s' * (len(cores) > 1)}"
        if count > len(cores):
            remedy = f"mpirun -n {len(cores)}, mpirun --bind-to none, or srun --cpus-per-task=1 on a larger node"
            findings.append(Finding("cores", "warning", f"{text}: they share cores", remedy))
        elif threads > len(cores):
            text += f" with {threads} threads"
            findings.append(Finding("cores", "warning", text, f"export OMP_NUM_THREADS={len(cores) // count}"))
        else:
            findings.append(Finding("cores", "ok", text))
    return findings


def _routes(world: "World") -> list[dict[str, str]]:
    from hpctrain.comm.routes.abilities import describe_routes

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

    fabrics = world.broadcast_object(world.gather_objects(os.environ.get(FABRIC_VARIABLE, FABRIC)))
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


def _check_clocks(world: "World") -> Finding:
    """Compare the wall clocks of all hosts."""
    offset = world.clock_offset()
    now = world.gather_objects((time.time() - time.monotonic() - offset, world.place.host)) or [(0.0, "")]
    skew, host = max((abs(shift - now[0][0]), host) for shift, host in now)
    text = f"clocks of all hosts are within {skew:.3g} s"
    if skew > SKEW_SECONDS:
        return Finding("clocks", "warning", f"the clock of {host} is {skew:.1f} s from rank 0's", "start NTP or chrony")
    return Finding("clocks", "ok", text)


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
