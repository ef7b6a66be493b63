"""The errors that people see.

A mistake in a file or on a command line, and a failure of the machine, is raised as one of these. It has the numbers
that explain it and what to set. These errors are printed without a traceback. Anything else that escapes is a defect
of hpctrain and keeps its traceback.
"""

import difflib
from collections.abc import Iterable, Sequence


class HpctrainError(Exception):
    """Base of all errors for people.

    `exit_code` is the exit status of the process, distinct for each kind: batch scripts see whether a job
    will never run (do not requeue) from one that a machine interrupted. The codes are between those that others have:
    MPICH's mpirun reports signals by their numbers (1 to 64), shells, Slurm and Open MPI as 128 and the number, and
    sysexits.h ends at 78.
    """

    exit_code = 80


class InterruptionError(HpctrainError):
    """A signal asked the run to end before its first step. EX_TEMPFAIL: the same command is to be started again."""

    exit_code = 75


class JobError(HpctrainError):
    """The job file or the command line asks for something that cannot be."""

    exit_code = 81


class LaunchError(HpctrainError):
    """The processes were not started as the launcher or the plan promised."""

    exit_code = 82


class HostError(LaunchError):
    """A host lacks what its ranks need. The first rank of each such host says so."""


class TopologyError(HpctrainError):
    """Nodes, devices or links are not what the cluster file or the binding says."""

    exit_code = 83


class CommError(HpctrainError):
    """A transfer or a collective failed or did not finish in time."""

    exit_code = 84


class RankLossError(CommError):
    """Another rank was killed or has failed, and this one ends for it. It says nothing: the other one is reported."""

    def __init__(self, text: str, is_dead: bool = False):
        """`is_dead`: the rank was killed or crashed, and will not answer."""
        super().__init__(text)
        self.is_dead = is_dead


class PlanError(HpctrainError):
    """A plan has gaps or overlaps, or does not fit the model, the ranks or the memory."""

    exit_code = 85


class CheckpointError(HpctrainError):
    """A checkpoint cannot be written or read, or belongs to another model."""

    exit_code = 86


class DamagedCheckpointError(CheckpointError):
    """A checkpoint has bytes that nobody wrote, or lacks some that were written; an older one may be intact."""


class DataError(HpctrainError):
    """A token file is missing, damaged, or too small for what is asked of it."""

    exit_code = 87


class TrainingError(HpctrainError):
    """Training itself went wrong, such as a loss that is not a number."""

    exit_code = 88


class CorruptionError(TrainingError):
    """Numbers of a run are not finite, or differ between ranks that hold the same."""


class MemoryOverflowError(TrainingError):
    """A device ran out of memory with a plan that was predicted to fit. The same command is to be started again: it
    plans with what the device needed."""

    exit_code = 76


def did_you_mean(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return `; did you mean 'x'?` for the closest known words, or the list of known ones if none is close.

    `likeness` is the least share of equal letters, as difflib counts them.
    """
    known = sorted(known)
    longer = [name for name in known if word and name.lower().startswith(f"{word}-".lower())]
    close = longer or difflib.get_close_matches(word, known, n=1, cutoff=likeness)
    if len(close) > 1:
        return f"; did you mean {' or '.join(map(repr, close))}?"
    return f"; did you mean '{close[0]}'?" if close else f"; known are: {', '.join(known)}"


def shorten_list(words: Sequence[str], separator: str = ", ", most: int = 4) -> str:
    """Join words, of many the first ones and how many more there are."""
    more = [f"and {len(words) - most} more"] if len(words) > most else []
    return separator.join([*words[:most], *more])


def describe_os_error(error: OSError) -> str:
    """Say in a few words why the operating system refused, such as `No space left on device`."""
    return error.strerror or str(error)
