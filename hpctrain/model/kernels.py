"""What lies between the products of a model, as an object: torch's kernels for each operation, or fused ones."""

import torch

from hpctrain.architectures.description import Attention, Norm
from hpctrain.config.kernels import KernelChoice
from hpctrain.model import functions
from hpctrain.model.axes import Axis
from hpctrain.model.documents import Documents
from hpctrain.model.functions import OfInput
from hpctrain.model.units import Weight


class Kernels:
    """Norms, rotary positions, gated activations, attention and the loss. See `functions.py` for shapes."""

    def __init__(self, choice: KernelChoice | None = None):
        """`choice` says which of torch's kernels attention has to use, and how many logits may be there at once."""
        choice = choice or KernelChoice()
        self._attention, self.logits_bytes = choice.attention, choice.logits_bytes

    def norm(
        self,
        x: torch.Tensor,
        weights: list[Weight],
        x_axis: Axis,
        features: int,
        of: Norm,
        again: list[OfInput] | None = None,
    ) -> torch.Tensor:
        """Apply `functions.norm`. All ranks of `x_axis` must call."""
        return functions.norm(x, weights, x_axis, features, of, again)

    def head_norm(self, x: torch.Tensor, weight: Weight, of: Norm) -> torch.Tensor:
        """Apply `functions.head_norm`."""
        return functions.head_norm(x, weight, of)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Apply `functions.rotate`."""
        return functions.rotate(x, cos, sin)

    def gated(self, both: torch.Tensor, activation: str) -> torch.Tensor:
        """Apply `functions.gated`."""
        return functions.gated(both, activation)

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attention: Attention,
        first: int = 0,
        documents: Documents | None = None,
    ) -> torch.Tensor:
        """Apply `functions.attend`."""
        return functions.attend(
            queries, keys, values, attention, first=first, documents=documents, backend=self._attention
        )

    def token_losses(
        self,
        logits_NV: torch.Tensor,
        targets_N: torch.Tensor,
        first_id: int,
        num_ids: int,
        cap: float | None,
        y: Axis,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply `functions.token_losses`. All ranks of `y` must call."""
        return functions.token_losses(logits_NV, targets_N, first_id, num_ids, cap, y)

    def logits_gradient(
        self,
        logits_NV: torch.Tensor,
        targets_N: torch.Tensor,
        logs_N: torch.Tensor,
        d_loss: torch.Tensor,
        first_id: int,
        num_ids: int,
        cap: float | None,
    ) -> torch.Tensor:
        """Apply `functions.logits_gradient`."""
        return functions.logits_gradient(logits_NV, targets_N, logs_N, d_loss, first_id, num_ids, cap)
