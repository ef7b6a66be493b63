"""The reactions of a run to changes of its machine: the `[recovery]` section of a job file."""

from typing import Literal

from hpctrain.config.tables import Table


class Recovery(Table):
    """The reactions of a run to changes of its machine."""

    rebalance: Literal["auto", "off"] = "auto"
    """`auto`: where a device computes 1.15 times as long as predicted, or as short, and a plan by the speeds that are
    measured gains three times what the change costs, the run goes on by that plan. `off`: it keeps its plan."""
