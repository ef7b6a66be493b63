"""Checks that a process makes alone: Python, packages, MPI library, launchers, shared memory, file system, HDF5."""

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal, NamedTuple

from hpctrain.comm.start.launcher import ranks_on_host
from hpctrain.comm.start.process import SHARED_MEMORY, require_shared_memory
from hpctrain.config.errors import HpctrainError, LaunchError, TrainingError, describe_os_error
from hpctrain.launch.mpi import MpiLibrary, kind_of, mpi_library, output_of, srun_interfaces

REQUIRED = ("torch", "mpi4py", "numpy", "h5py")
OPTIONAL_PREFIXES = ("cupy", "nvidia-nccl", "mpich", "openmpi")  # their names end in what they are built for
LAUNCHERS = ("mpirun", "mpiexec")
HYDRA = ("mpich", "intel", "cray")
"""MPI libraries whose launchers can start each other's processes."""
LEAST_SHARED_BYTES = 256 << 20
WRITTEN_BYTES = 64 << 20
SLOW_BYTES_PER_SECOND = 50e6
"""Bandwidth of a file system in bytes/s, below which a checkpoint of a model of 1 B parameters takes minutes."""


class Finding(NamedTuple):
    """A result of one check."""

    name: str
    verdict: Literal["ok", "warning", "error"]
    text: str
    remedy: str = ""
    """The line to type, or what to change."""
    exit_code: int = 0
    """Exit code of a job that ends for this reason; 0: none does."""


def error_finding(name: str, error: HpctrainError) -> Finding:
    """Return the finding of an error that a job would raise; the text after its last semicolon is the remedy."""
    text, _, remedy = str(error).rpartition("; ")
    return Finding(name, "error", text or remedy, remedy if text else "", error.exit_code)


def format_finding(finding: Finding) -> str:
    """Return a finding as text; further lines of its text and the remedy are indented."""
    first, *more = finding.text.split("\n")
    lines = [f"{finding.verdict:8} {finding.name:14} {first}", *(f"{'':24}{line}" for line in more)]
    if finding.remedy:
        lines.append(f"{'':24}-> {finding.remedy}")
    return "\n".join(lines)


def check_machine(folder: Path, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield what this process alone can say of its host; `folder` is where runs are to be written."""
    yield Finding("Python", "ok", f"{platform.python_version()} in {sys.prefix}")
    versions = package_versions()
    text = ", ".join(f"{name} {number}" for name, number in versions.items())
    if missing := [name for name in REQUIRED if versions[name] == "not installed"]:
        yield Finding("packages", "error", text, f"pip install {' '.join(missing)}", LaunchError.exit_code)
    else:
        yield Finding("packages", "ok", text)
    try:
        library = mpi_library()
    except LaunchError as error:
        yield error_finding("MPI library", error)
    else:
        yield Finding("MPI library", "ok", f"{library.text}, used by mpi4py {versions['mpi4py']}")
        yield check_launcher(library, environment)
    yield check_shared_memory()
    yield check_folder(folder)
    yield check_hdf5(folder)


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that matter, `not installed` for required ones that are missing."""
    installed = {each.name: each.version for each in distributions()}
    optional = sorted(name for name in installed if name.startswith(OPTIONAL_PREFIXES))
    return {name: installed.get(name, "not installed") for name in (*REQUIRED, *optional)}


def launcher_kind(path: str) -> str:
    """Return the MPI of a launcher, by its version text; see `MPI_OF_SRUN`. Empty where it does not tell."""
    text = output_of(path, "--version").lower()
    is_known = any(word in text for word in ("open mpi", "openrte", "prte", "hydra", "intel", "mpich"))
    return kind_of(text) if is_known else ""


def check_launcher(library: MpiLibrary, environment: Mapping[str, str]) -> Finding:
    """Compare mpirun, and srun in a batch job, with the library that mpi4py uses."""
    programs = (shutil.which(name, path=environment.get("PATH", "")) for name in LAUNCHERS)
    program = next(filter(None, programs), "")
    kind = launcher_kind(program) if program else ""
    interface = next(iter(library.usable_interfaces(srun_interfaces())), "")
    by_mpirun = [f"{program} of {kind or 'an unknown MPI'}"] if program else []
    by_srun = [f"srun --mpi={interface}"] if interface else []
    own = os.path.join(sys.prefix, "bin", "mpirun")
    has_own = os.access(own, os.X_OK)
    fits = kind == library.kind or (kind in HYDRA and library.kind in HYDRA)
    if program and not fits and not (by_srun and "SLURM_JOB_ID" in environment):
        remedy = f"{own} -n 4 hpctrain doctor" if has_own else f"load the module of {library.text.split(' ')[0]}"
        text = f"{by_mpirun[0].replace(' of ', ' is of ')}, mpi4py uses {library.text}: each process"
        return Finding("launcher", "error", f"{text} would be a job of one rank", remedy, LaunchError.exit_code)
    if not program and not by_srun:
        path = f"export PATH={os.path.dirname(own)}:$PATH"
        remedy = path if has_own else "load your site's MPI module, or pip install 'hpctrain[mpi]'"
        return Finding("launcher", "warning", "no mpirun on the search path", remedy)
    return Finding("launcher", "ok", ", ".join(by_mpirun + by_srun))


def check_shared_memory(path: Path = SHARED_MEMORY) -> Finding:
    try:
        require_shared_memory(ranks_on_host(), path)
        facts = os.statvfs(path)
    except LaunchError as error:
        return error_finding("shared memory", error)
    except OSError as error:
        text = f"{path}: {describe_os_error(error)}: several ranks of this host could not start"
        return Finding("shared memory", "warning", text, f"mount a tmpfs at {path}")
    total, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    text = f"{path}: {total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"
    if free < LEAST_SHARED_BYTES:
        remedy = "remove what is left there, or start the container with a larger one (--shm-size=8g)"
        return Finding("shared memory", "warning", text, remedy)
    return Finding("shared memory", "ok", text)


def check_folder(folder: Path) -> Finding:
    """Write a file into the folder of runs, sync and remove it."""
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
        text = f"{folder.absolute()} cannot be written: {describe_os_error(error)}"
        remedy = "choose a folder that can: hpctrain doctor --folder DIR, hpctrain train JOB --run DIR"
        return Finding("file system", "error", text, remedy, TrainingError.exit_code)
    text = f"{folder.absolute()}: {written / 1e6:,.0f} MB/s written and synced, {free / 1e9:,.0f} GB free"
    if written < SLOW_BYTES_PER_SECOND:
        remedy = "write runs to a parallel file system: hpctrain train JOB --run DIR"
        return Finding("file system", "warning", text, remedy)
    return Finding("file system", "ok", text)


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
