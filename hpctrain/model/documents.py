"""Which positions a token may attend to: those before it, in its window, and in its own document."""

from collections.abc import Sequence

import torch


class Documents:
    """Where the documents of a microbatch start, and the masks that keep attention inside of them.

    A mask is made once for each window that layers have: it is of all layers and heads.
    """

    def __init__(self, starts: torch.Tensor):
        """`starts`, int64 [rows, positions], is where in its row each token's document starts."""
        self.starts = starts
        self._masks: dict[tuple, torch.Tensor] = {}
        self._parts: dict[tuple[int, ...], list[Documents]] = {}

    def split(self, sizes: Sequence[int]) -> "list[Documents]":
        """Return the documents of some rows after others."""
        sizes = tuple(sizes)
        if sizes not in self._parts:
            self._parts[sizes] = [Documents(part) for part in self.starts.split(sizes)] if len(sizes) > 1 else [self]
        return self._parts[sizes]

    def mask(self, queries: torch.Tensor, first: int, total: int, window: int | None) -> torch.Tensor:
        """Return which positions each query may attend to, bool [rows, 1, queries, all positions]."""
        key = queries.shape[2], first, total, window
        if key not in self._masks:
            begins = torch.arange(total, device=queries.device) >= self.starts[:, None, :, None]
            self._masks[key] = visible(queries, first, total, window) & begins
        return self._masks[key]

    def forget_masks(self) -> None:
        """Let go of masks, which graphs keep as long as they need them."""
        self._masks.clear()
        self._parts.clear()


def visible(queries: torch.Tensor, first: int, total: int, window: int | None) -> torch.Tensor:
    """Return which positions each query may attend to, bool [queries, all positions]."""
    places = torch.arange(total, device=queries.device)
    behind = places[first : first + queries.shape[2], None] - places
    return (behind >= 0) & (behind < (window or total))
