"""Which code runs: its version, its digest, and its commit where it is a repository's."""

import hashlib
import subprocess
from contextlib import suppress
from pathlib import Path

import hpctrain
from hpctrain import __version__

PACKAGE = Path(hpctrain.__file__).parent


def code_digest(package: Path = PACKAGE) -> str:
    """Return a digest of all source files of the package."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def code_version() -> dict[str, str | bool]:
    """Return what distinguishes this code from other versions."""
    version: dict[str, str | bool] = {"version": __version__, "package": str(PACKAGE), "digest": code_digest()}
    with suppress(OSError, subprocess.SubprocessError):
        asked = {"cwd": PACKAGE, "capture_output": True, "text": True, "timeout": 10, "check": True}
        version["commit"] = subprocess.run(["git", "rev-parse", "HEAD"], **asked).stdout.strip()
        version["changed"] = bool(subprocess.run(["git", "status", "--porcelain", "."], **asked).stdout.strip())
    return version
