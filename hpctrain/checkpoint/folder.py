"""The checkpoints of a run folder: which there are, which is the latest, which are kept."""

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpctrain.checkpoint.format import (
    INDEX,
    MANIFEST,
    PARTIAL,
    STEP_FOLDER,
    read_manifest,
    read_small,
    step_folder,
    write_synced,
)
from hpctrain.config.errors import CheckpointError, DamagedCheckpointError
from hpctrain.config.job import Checkpoint
from hpctrain.config.paths import exists, is_file, is_folder, refused_as, sync

CHECKPOINTS, LATEST, OLD = "checkpoints", "latest", ".old"
POINTER = re.compile(rb"(step-\d{8,}) ([0-9a-f]{64})\n")
POINTER_BYTES = 1 << 20
"""Upper bound of the size of `latest`, in bytes."""
LITTER = re.compile(r"step-\d{8,}(\.old)?\.partial")


def complete_checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run folder, the oldest first. Incomplete ones are left out."""
    folder = run / CHECKPOINTS
    with refused_as(CheckpointError, f"{folder}: cannot be read", "check its permissions"):
        if not folder.is_dir():
            return []
        named = [path for path in folder.iterdir() if STEP_FOLDER.fullmatch(path.name)]
    ours = [p for p in named if not p.is_symlink() and (_may_have(p / MANIFEST) or _may_have(p / INDEX))]
    return sorted(ours, key=step_of)


def _may_have(path: Path) -> bool:
    """Say whether a file exists or may exist; opening it then gives the reason why it cannot be read."""
    try:
        return path.is_file()
    except OSError:
        return True


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))


def latest_checkpoint(run: Path) -> Path | None:
    """Return the checkpoint that `latest` of a run folder names, or None without one.

    Raises DamagedCheckpointError where `latest` is damaged, or its checkpoint is missing or has another manifest.
    """
    pointer = run / CHECKPOINTS / LATEST
    if not exists(pointer):
        if complete := complete_checkpoints(run):
            raise DamagedCheckpointError(
                f"{pointer}: is missing, and there are checkpoints, such as {complete[-1].name}"
            )
        return None
    result = _read_pointer(pointer)
    if result is None:
        raise DamagedCheckpointError(f"{pointer}: is damaged: it is not the name of a checkpoint and a SHA-256")
    path, digest = pointer.parent / result[0], result[1]
    if path.is_symlink() or not is_folder(path):
        raise DamagedCheckpointError(f"{pointer}: names {path.name}, which is not there")
    if read_manifest(path)[1] != digest:
        raise DamagedCheckpointError(
            f"{pointer}: names {path.name} with another manifest than that has: the folder was damaged, or came from"
            " elsewhere"
        )
    return path


def _read_pointer(pointer: Path) -> tuple[str, str] | None:
    """Return the name and the digest in `latest`; None where it has none. Raises DamagedCheckpointError."""
    result = POINTER.fullmatch(read_small(pointer, POINTER_BYTES))
    return (result[1].decode(), result[2].decode()) if result else None


def locate_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a path names: itself, or the latest one of a run folder. Raises CheckpointError."""
    if is_file(path / MANIFEST) or STEP_FOLDER.fullmatch(path.name):
        return path
    if not is_folder(path):
        raise CheckpointError(f"{path}: no such run folder or checkpoint")
    try:
        result = latest_checkpoint(path)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{error}; name a checkpoint of {path / CHECKPOINTS} itself") from None
    if result is None:
        raise CheckpointError(f"{path}: has no checkpoint yet; a run writes one at its end or every checkpoint.every")
    return result


def candidates(run: Path, resume: str) -> tuple[list[Path], str]:
    """Return the checkpoints to continue from, the first choice first, and what is wrong with `latest`, if anything.

    `resume` is the job's key. Raises DamagedCheckpointError where only the latest may be taken and `latest` is damaged;
    CheckpointError where a step is asked for that is not there.
    """
    complete = complete_checkpoints(run)[::-1]
    if resume not in ("auto", "latest"):
        path = run / CHECKPOINTS / resume
        if path not in complete:
            names = ", ".join(each.name for each in complete) or "none"
            raise CheckpointError(f"{path}: checkpoint.resume names it, and it is not there; there are: {names}")
        return [path], ""
    latest, damage = None, ""
    try:
        latest = latest_checkpoint(run)
    except DamagedCheckpointError as error:
        if resume == "latest":
            raise
        damage = str(error)
    if resume == "latest":
        return [latest] if latest else [], ""
    named = None
    with suppress(DamagedCheckpointError):
        named = _read_pointer(run / CHECKPOINTS / LATEST)
    if named is None:
        return complete, damage
    # Those before the one that `latest` names are the run's own; others may have come from elsewhere.
    own = [path for path in complete if path == latest or step_of(path) < step_of(Path(named[0]))]
    return own + [path for path in complete if path not in own], damage


def tidy(run: Path) -> None:
    """Remove the incomplete checkpoints that a killed run left. Only the rank that has locked the folder may call.

    A complete checkpoint that was about to be replaced or deleted gets its name back.
    """
    folder = run / CHECKPOINTS
    for path in sorted(folder.iterdir()) if is_folder(folder) and os.access(folder, os.R_OK) else ():
        with suppress(OSError):  # on a disk that is read-only now it stays, and the next save says what is wrong
            if path.name == LATEST + PARTIAL:
                path.unlink()
            elif LITTER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                final = path.with_name(path.name.removesuffix(PARTIAL).removesuffix(OLD))
                if path.name.endswith(OLD + PARTIAL) and (path / MANIFEST).is_file():
                    if final.exists() and _is_named(path, final):
                        shutil.rmtree(final)
                    if final.exists():
                        shutil.rmtree(path)
                    else:
                        path.rename(final)
                else:
                    shutil.rmtree(path)


def _is_named(path: Path, final: Path) -> bool:
    """Say whether `latest` names the final name of a checkpoint that was set aside."""
    try:
        return _read_pointer(final.parent / LATEST) == (final.name, read_manifest(path)[1])
    except CheckpointError:
        return False


def commit(partial: Path, keeping: Checkpoint, kept_step: int | None = None) -> Path:
    """Give a complete checkpoint its final name, move `latest` to it, and remove old ones; return its path.

    The checkpoint of `kept_step` is kept in any case.

    Raises OSError, with `latest` and its checkpoint unchanged. Raises CheckpointError where only the removal failed.
    """
    final = partial.with_name(partial.name.removesuffix(PARTIAL))
    folder, digest = final.parent, read_manifest(partial)[1]
    sync(partial)
    pointer, replaced = folder / (LATEST + PARTIAL), None
    try:
        write_synced(pointer, f"{final.name} {digest}\n".encode())  # all that takes disk space, before any renaming
        if final.exists():
            replaced = _set_aside(final)
        partial.rename(final)
        sync(folder)
        pointer.replace(folder / LATEST)
    except OSError:
        pointer.unlink(missing_ok=True)
        if replaced and not final.exists():
            replaced.rename(final)
        raise
    sync(folder)
    text = f"{final}: is complete, but older checkpoints cannot be deleted"
    with refused_as(CheckpointError, text, "delete them, or keep more (checkpoint.keep)"):
        if replaced:
            _delete(replaced)
        _delete_others(final, keeping, kept_step)
    return final


def _delete_others(newest: Path, keeping: Checkpoint, kept_step: int | None) -> None:
    """Delete the checkpoints that are not kept. Raises OSError."""
    there = complete_checkpoints(newest.parents[1])
    kept = kept_steps({step_of(path): _validation_loss(path) for path in there}, step_of(newest), keeping, kept_step)
    for path in there:
        if step_of(path) not in kept:
            _delete(_set_aside(path))


def _validation_loss(checkpoint: Path) -> float | None:
    with suppress(CheckpointError):
        return read_manifest(checkpoint)[0].validation_loss
    return None


def kept_steps(
    losses: Mapping[int, float | None], newest: int, keeping: Checkpoint, kept_step: int | None = None
) -> set[int]:
    """Return the steps of the checkpoints to keep: the last ones, every n-th, the best and `kept_step`.

    Steps after the newest are not kept: the run did not continue from them. `losses` are the validation losses of the
    existing checkpoints, by step.
    """
    past = sorted(step for step in losses if step <= newest)
    kept = {*past[-keeping.keep :], *(step for step in past if step == kept_step)}
    if keeping.keep_every:
        kept |= {step for step in past if step % keeping.keep_every == 0}
    validated = [(loss, step) for step in past if (loss := losses[step]) is not None]
    if keeping.keep_best and validated:
        kept.add(min(validated)[1])
    return kept


def _set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint before it is deleted, so that its final name always means a whole one. Return its new
    path."""
    doomed = checkpoint.with_name(checkpoint.name + OLD + PARTIAL)
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    return doomed


def _delete(doomed: Path) -> None:
    """Delete a checkpoint that was set aside. The manifest goes first: without it `tidy` does not restore the rest."""
    (doomed / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(doomed)


def partial_folder(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / (step_folder(step) + PARTIAL)
