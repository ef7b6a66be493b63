"""The start of a family's ranks: where the batch system has their nodes, and the software that they need."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from hpctrain.config.bounds import RankCount
from hpctrain.config.tables import Several, Table

BATCH_WORD = re.compile(r"[A-Za-z0-9_.,:=@%+/&|*()\[\]-]+")
"""What a line `#SBATCH` can hold without quotes: Slurm splits such lines by rules of its own."""


def _written_as(pattern: str | re.Pattern[str], refusal: str) -> AfterValidator:
    """Return the check that a text is as a pattern says; `refusal` follows it in the message."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} {refusal}")
        return text

    return AfterValidator(check)


BatchWord = Annotated[
    str,
    _written_as(BATCH_WORD, "cannot be in a batch script: use letters, digits and _.,:=@%+/&|*()[]- alone"),
]
Option = Annotated[BatchWord, _written_as("-.*", "is no option of Slurm; begin with -- and write its value behind =")]
Variable = Annotated[
    str, _written_as(r"[A-Za-z_][A-Za-z0-9_]*", "is no name of an environment variable: use letters, digits and _")
]
Value = Annotated[str, _written_as(r"[^\0]*", "has a zero byte, which no program can be given; remove it")]
Text = Annotated[Value, Field(min_length=1)]


class Launch(Table):
    """Read by `hpctrain slurm` and `hpctrain mpirun`."""

    partition: BatchWord | None = None
    account: BatchWord | None = None
    qos: BatchWord | None = None
    constraint: BatchWord | None = None
    reservation: BatchWord | None = None
    gres: BatchWord | None = None
    """Slurm's name for one device, such as `gpu:a100`; left out: `gpu` for accelerators, nothing for CPUs."""
    cores_per_rank: RankCount | None = None
    """The cores of one rank; left out: a share of the node's."""
    min_nodes: RankCount | None = None
    """The nodes of these with which the job may start where not all are free; left out: all of them."""
    sbatch: Several[Option] = ()
    """More options of a batch script, such as `--mail-type=END` and `--switches=1`, a line each."""
    srun: Several[Option] = ()
    """More options of srun, such as `--cpu-bind=cores` and `--gpu-bind=closest`."""
    modules: Several[Text] = ()
    """Loaded before the program starts."""
    before: Text | None = None
    """Lines of a shell that each rank runs after its modules are loaded, such as `source /opt/site/setup.sh`."""
    container: Text | None = None
    """The image that ranks run in: a file `.sif` by Apptainer, anything else by Slurm's pyxis."""
    mounts: Several[Text] = ()
    """Folders that the container sees, as `/scratch` or `/scratch:/data`; the run folder is always there."""
    venv: Text | None = None
    """The folder of a virtual environment with hpctrain; left out: the one that writes the script."""
    environment: dict[Variable, Value] = Field(default_factory=dict)
    """More variables."""

    @property
    def by_apptainer(self) -> bool:
        return bool(self.container) and self.container.endswith(".sif")

    @property
    def by_pyxis(self) -> bool:
        return bool(self.container) and not self.by_apptainer
