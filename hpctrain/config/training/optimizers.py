"""The rules of optimizers: what each keeps and moves, as data.

Whoever needs to know reads the rule: the engine and checkpoints which moments a parameter has, the planner how many
bytes they are and how many an update moves, profiles which update they measured. None of them needs torch. The update
itself is in `hpctrain.engine.step.updates`.

A rule answers by the shape of a parameter, since an optimizer may treat matrices and vectors differently.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from hpctrain.config.tables import named_in

Shape = tuple[int, ...]
MOMENT_BYTES = 4
"""Moments are fp32, whatever the weights in use are."""


@dataclass(frozen=True)
class OptimizerRule:
    """The rule of one optimizer."""

    moments: Callable[[Shape], tuple[str, ...]]
    """The names of what it keeps of a parameter, each as large as the parameter. They are those in checkpoints."""
    update_bytes: Callable[[Shape], float]
    """Read and written for each weight by the update alone: master, gradient and moments, as often as its kernels do.
    The gradient's norm, its clipping and its zeroing are not in it."""
    meaning: str
    """Its description in `docs/job.md`."""
    keys: tuple[str, ...]
    """The keys of `[train]` that are of optimizers and that this one reads."""
    positive: tuple[str, ...] = ()
    """Those of them that must be more than 0."""

    def moment_bytes(self, shape: Shape) -> int:
        """Return the bytes of the moments of one weight."""
        return MOMENT_BYTES * len(self.moments(shape))


RULES = {
    "adamw": OptimizerRule(
        moments=lambda shape: ("exp_avg", "exp_avg_sq"),
        update_bytes=lambda shape: 32,  # one kernel: reads gradient, master and moments; writes all but the gradient
        meaning="keeps two moments of each weight (Loshchilov and Hutter 2019).",
        keys=("beta1", "beta2", "epsilon"),
    ),
    "lion": OptimizerRule(
        moments=lambda shape: ("exp_avg",),
        update_bytes=lambda shape: 52,  # five kernels, of two operands 12 and of one 8
        meaning="keeps one (Chen et al. 2023); with 0.1 to 0.3 of AdamW's rate, more decay, and beta2 = 0.99.",
        keys=("beta1", "beta2"),
        positive=("beta2",),  # else nothing of the moment is left to compute the update from
    ),
}
"""By the name that `train.optimizer` and profiles have."""


OptimizerName = Annotated[str, named_in(RULES, "optimizer")]
