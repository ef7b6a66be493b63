"""The scale of losses for fp16, whose small gradients would otherwise be zeros (Micikevicius et al. 2018).

All ranks multiply the loss by the same power of two. They decide by the global norm, which all of them have, so that no
message is needed to agree: a gradient that overflowed anywhere is not finite in the norm, and all skip the step.
"""

import json
import math
from dataclasses import dataclass

import torch

from hpctrain.config.errors import TrainingError

KEY = "loss_scale"
"""Key of the scale among the checkpoint's texts."""
SMALLEST, LARGEST = 2.0**-14, 2.0**24
"""Limits of the scale. If a gradient overflows at the smallest, scaling cannot help; a scale above the largest never
helps."""


def gradient_of_loss(scale: "LossScale | None", loss_tokens: int, device: torch.device) -> torch.Tensor:
    """Return the gradient with which a backward pass begins, for a mean over so many tokens."""
    # A fill is a kernel. A copy of a number would make the host wait for the end of the last step.
    return torch.full((), (scale.value if scale else 1.0) / loss_tokens, dtype=torch.float64, device=device)


@dataclass
class LossScale:
    """The number by which the loss is multiplied now, the same on all ranks."""

    value: float
    window: int
    """Steps without overflow after which the scale is doubled."""
    good_steps: int = 0
    """Steps without overflow since the scale last changed."""
    skipped: int = 0
    """Steps since the start of training that changed no weights."""

    def judge(self, norm: float, step: int) -> bool:
        """Record a step's scaled global norm; return whether the step may change weights.

        `step` is for the message. Raises TrainingError where a smaller scale cannot help.
        """
        if math.isfinite(norm):
            self.good_steps += 1
            return True
        self.skipped += 1
        self.good_steps, self.value = 0, self.value / 2
        if self.value < SMALLEST:
            raise TrainingError(
                f"step {step + 1}: the gradient is {norm} in fp16 whatever the loss is multiplied by, down to"
                f" {SMALLEST:g}; lower train.learning_rate, set train.dtype to bf16 or fp32, or let `hpctrain align`"
                " say which operator overflows"
            )
        return False

    def grow(self) -> None:
        """Double it after a window without overflow. Call it after the update, which still needs the old value."""
        if self.good_steps >= self.window:
            self.good_steps, self.value = 0, min(2 * self.value, LARGEST)

    def dump(self) -> str:
        """Return it as a text that `restore` reads."""
        return json.dumps({"value": self.value, "good_steps": self.good_steps, "skipped": self.skipped})

    def restore(self, text: str | None) -> None:
        """Continue with a checkpoint's text; without one (a run without a scale) nothing changes."""
        for name, value in json.loads(text or "{}").items():
            setattr(self, name, value)
