"""The reactions of a run to changes of its machine: the `[recovery]` section of a job file."""

from typing import Annotated, Literal

from hpctrain.config.bounds import WholeNumber
from hpctrain.config.tables import AUTO, FilePath, Table


class Recovery(Table):
    """The reactions of a run to changes of its machine."""

    rebalance: Literal["auto", "off"] = "auto"
    """`auto`: where a device computes 1.15 times as long as predicted, or as short, and a plan by the speeds that are
    measured gains three times what the change costs, the run goes on by that plan. `off`: it keeps its plan."""
    copies: Annotated[WholeNumber | None, AUTO] = None
    """Steps between copies of the state in the memory of hosts, from which the same command continues after a failure.
    auto: by the time that a copy takes and the risk of a failure, where a script of `hpctrain mpirun` or `hpctrain
    slurm` starts the ranks again. 0: none."""
    copies_folder: FilePath | None = None
    """A folder of each host for copies that do not fit into /dev/shm; None: such a run goes on without copies."""
