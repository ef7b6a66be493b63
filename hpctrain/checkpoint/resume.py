"""Chooses the checkpoint that a run continues from: the latest one, or the newest that is intact."""

from pathlib import Path
from typing import NamedTuple

from hpctrain.checkpoint.folder import CHECKPOINTS, candidates
from hpctrain.checkpoint.index import Index
from hpctrain.checkpoint.state import check_contents
from hpctrain.comm.world import World
from hpctrain.config.errors import CheckpointError, DamagedCheckpointError


class Choice(NamedTuple):
    """The checkpoint to continue from."""

    checkpoint: Path | None
    """The checkpoint's path; None: there is no checkpoint yet."""
    lines: tuple[str, ...]
    """Messages about the checkpoints that were passed over."""


def choose_checkpoint(world: World, run: Path, resume: str) -> Choice:
    """Return the checkpoint of a run folder to continue from, every byte of which was checked. All ranks must call.

    `resume` is `auto`, `latest` or the name of one. With `auto` damaged ones are passed over for the newest intact one.
    The ranks share the work. Raises CheckpointError on all ranks: where none is intact, with what is wrong with each.
    """
    choices, damage_of_latest = world.on_first_rank(lambda: candidates(run, resume))
    damages = [damage_of_latest] if damage_of_latest else []
    for path in choices:
        damage = _verify_together(world, path)
        if damage is None:
            passed = tuple(f"damaged: {line}" for line in damages)
            return Choice(path, (*passed, f"continuing from {path.name}, the newest intact one") if passed else ())
        if resume != "auto":
            raise damage
        damages.append(str(damage))
    if damages:
        raise CheckpointError(
            "\n".join([*damages, f"{run / CHECKPOINTS}: no checkpoint is intact; start a new run with another --run"])
        )
    return Choice(None, ())


def _verify_together(world: World, path: Path) -> DamagedCheckpointError | None:
    """Check a share of a checkpoint on each rank; return what is damaged. All ranks must call."""
    try:
        with world.all_or_none():
            verify_checkpoint(path, (world.rank, world.size))
    except DamagedCheckpointError as error:
        return error
    return None


def verify_checkpoint(path: Path, share: tuple[int, int] = (0, 1)) -> None:
    """Check a whole checkpoint, or a share of it: (index, number of shares). Raises CheckpointError."""
    with Index(path) as index:
        if share[0] == 0:
            check_contents(index)
        index.verify(share)
