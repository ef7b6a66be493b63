"""Chooses the checkpoint that a run continues from: the latest one, or the newest that is intact."""

from collections.abc import Sequence
from pathlib import Path

from hpctrain.checkpoint.folder import CHECKPOINTS, candidates
from hpctrain.checkpoint.index import Index
from hpctrain.checkpoint.state import check_contents
from hpctrain.comm.world import World
from hpctrain.config.errors import CheckpointError, DamagedCheckpointError


def choose_checkpoint(world: World, run: Path, resume: str) -> tuple[Path | None, Sequence[str]]:
    """Return the checkpoint of a run folder to continue from, every byte of which was checked; None where there is none
    yet. Also return messages about those that were passed over. All ranks must call.

    `resume` is `auto`, `latest` or the name of one. With `auto` damaged ones are passed over for the newest intact one.
    The ranks share the work. Raises CheckpointError on all ranks: where none is intact, with what is wrong with each.
    """
    choices, damage_of_latest = world.on_first_rank(lambda: candidates(run, resume))
    damages = [damage_of_latest] if damage_of_latest else []
    for path in choices:
        try:
            with world.all_or_none():
                verify_checkpoint(path, (world.rank, world.size))
        except DamagedCheckpointError as error:
            if resume != "auto":
                raise
            damages.append(str(error))
        else:
            passed = [f"damaged: {line}" for line in damages]
            return path, [*passed, f"continuing from {path.name}, the newest intact one"] if passed else []
    if damages:
        raise CheckpointError(
            "\n".join([*damages, f"{run / CHECKPOINTS}: no checkpoint is intact; start a new run with another --run"])
        )
    return None, []


def verify_checkpoint(path: Path, share: tuple[int, int] = (0, 1)) -> None:
    """Check a whole checkpoint, or a share of it: (index, number of shares). Raises CheckpointError."""
    with Index(path) as index:
        if share[0] == 0:
            check_contents(index)
        index.verify(share)
