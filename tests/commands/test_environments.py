"""One MPI job over families whose software is in environments of their own."""

import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from hpctrain.launch.files import PACKAGE
from tests import clusters
from tests.started import BIN


def make_environment(folder: Path, harmless: str, package: Path | None = None) -> Path:
    """Make a virtual environment that has what this one has, and a package `harmless` of a version of its own.

    `package` is another hpctrain.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    )
    lines = [str(package)] if package else []
    lines.append(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})")
    (site / "base.pth").write_text("\n".join(lines) + "\n")
    about = site / f"harmless-{harmless}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: harmless\nVersion: {harmless}\n")
    program = folder / "bin" / "hpctrain"
    program.write_text(f"#!{python}\nfrom hpctrain.cli import main\nmain()\n")
    program.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def fast(tmp_path_factory) -> Path:
    return make_environment(tmp_path_factory.mktemp("environments") / "fast", "1.0")


def write_start(hpctrain, folder: Path, run: str, fast: Path, slow: Path) -> Path:
    """Write the start of a job on two families, and return its script."""
    environment = {"MPI4PY_LIBMPI": str(BIN.parent / "lib" / "libmpi.so.12")}
    tables = [clusters.fabric()]
    for name, path in {"fast": fast, "slow": slow}.items():
        launch = {"venv": str(path), "environment": environment}
        tables += clusters.family(name, launch=launch), clusters.nodes({name: 1})
    (folder / f"{run}.toml").write_text("".join(tables))
    done = hpctrain("mpirun", "job.toml", "--cluster", f"{run}.toml", "--run", run, cwd=folder)
    assert done.code == 0, done.err
    return folder / run / "start.sh"


def start(script: Path, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run([script, "--sample", "0"], cwd=cwd, capture_output=True, text=True, timeout=200)


@pytest.mark.timeout(240)
def test_two_environments_train_one_model(hpctrain, folder, fast, tmp_path):
    slow = make_environment(tmp_path / "slow", "2.0")
    done = start(write_start(hpctrain, folder, "two", fast, slow), folder)
    assert done.returncode == 0, done.stderr
    text = done.stdout + done.stderr
    assert "on 1 fast (cpu) and 1 slow (cpu) ranks" in text
    assert f"fast in {fast}, slow in {slow}" in text
    assert hpctrain("train", "job.toml", "--run", "alone", "--sample", "0", cwd=folder).code == 0
    compared = hpctrain("compare", "two", "alone", "--tolerance", "1e-5", cwd=folder)
    assert compared.code == 0, compared.out


@pytest.mark.timeout(240)
def test_another_hpctrain_is_refused(hpctrain, folder, fast, tmp_path):
    package = tmp_path / "other"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, package / "hpctrain", ignore=ignored)
    changed = package / "hpctrain" / "config" / "errors.py"
    changed.write_text(changed.read_text() + "# another one\n")
    done = start(
        write_start(hpctrain, folder, "other", fast, make_environment(tmp_path / "slow", "1.0", package)), folder
    )
    assert done.returncode == 82, done.stderr
    assert done.stderr.count("LaunchError") == 1
    words = " ".join(done.stderr.split())
    assert "hpctrain is not the same on all ranks" in words and "install the same hpctrain" in words
