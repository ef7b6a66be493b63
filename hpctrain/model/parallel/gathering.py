"""Hidden states that are cut by positions over y: gathered and scattered, whole or part by part.

A product next to a gather or a scatter may be cut into parts of its rows. All parts begin to be gathered at once, and
each is multiplied when it is there. One is scattered while the next one is multiplied.

Hidden states of all positions are [rows, positions, features], a rank's own [rows, positions / y, features].
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from hpctrain.model.parallel.axes import Axis, PendingWork
from hpctrain.sharding.intervals import cut_evenly


class RowPart(NamedTuple):
    """Some rows, or some of each rank's own positions of a single row."""

    rows: slice
    positions: slice

    def of(self, whole: torch.Tensor, y_size: int) -> torch.Tensor:
        """Return the view [rows, y, positions / y, features] of a part of hidden states of all positions."""
        rows, positions, features = whole.shape
        return whole.view(rows, y_size, positions // y_size, features)[self.rows, :, self.positions]


def cut_parts(rows: int, positions: int, count: int) -> list[RowPart]:
    """Cut rows, or a rank's own positions of a single row, into so many parts, or into as many as there are."""
    every = slice(None)
    if rows == 1:
        return [RowPart(every, slice(*cut)) for cut in cut_evenly(positions, min(count, positions))]
    return [RowPart(slice(*cut), every) for cut in cut_evenly(rows, min(count, rows))]


def gathered(own: torch.Tensor, y: Axis) -> torch.Tensor:
    """Return the hidden states of all positions. All ranks of `y` must call."""
    gathering = Gathering(own, y)
    return gathering.tokens().view(gathering.shape)


def start_scatter(whole: torch.Tensor, y: Axis, own: torch.Tensor | None = None) -> tuple[torch.Tensor, PendingWork]:
    """Start to sum [rows, positions, features] over y; return this rank's positions of the sum, and the work.

    `own` is a contiguous buffer for these. All ranks of `y` must call.
    """
    rows, positions, features = whole.shape
    by_rank = whole.view(rows, y.size, positions // y.size, features).transpose(0, 1).contiguous()
    own = torch.empty_like(by_rank[0]) if own is None else own
    # `.data` has no version counter: the sum is still written into it when autograd has saved `own`, an error else.
    return own, y.start_reduce_scatter(by_rank, own.data)


class Gathering:
    """Hidden states of all positions, which are gathered over y part by part."""

    def __init__(self, own: torch.Tensor, y: Axis, num_parts: int = 1, keeps_whole: bool = False):
        """Start to gather them from `own`. All ranks of `y` must call."""
        rows, positions, features = own.shape
        self._y_size = y.size
        self.shape = torch.Size((rows, y.size * positions, features))
        self.parts = cut_parts(rows, positions, num_parts)
        self.whole = own.new_empty(self.shape) if keeps_whole else None
        """All positions of the parts taken so far, where they are kept; else None."""
        self._started: deque[tuple[torch.Tensor, PendingWork, bool]] = deque()
        for part in self.parts:
            buffer = None if self.whole is None else part.of(self.whole, y.size).transpose(0, 1)
            is_placed = buffer is not None and buffer.is_contiguous()
            some = own[part.rows, part.positions]
            if buffer is None or not is_placed:
                buffer = own.new_empty(y.size, *some.shape)  # [y, rows, positions / y, features]
            buffer[y.rank] = some
            self._started.append((buffer, y.start_all_gather(buffer), is_placed))

    def tokens(self) -> torch.Tensor:
        """Return all tokens of what is gathered in one part, [N, features]."""
        ((_, tokens),) = self.take()
        return tokens

    def take(self) -> Iterator[tuple[RowPart, torch.Tensor]]:
        """Yield each part when it is there, with its tokens, [N, features]."""
        for part in self.parts:
            buffer, work, is_placed = self._started.popleft()
            work.wait()
            _, rows, _, features = buffer.shape
            if self.whole is not None and not is_placed:
                part.of(self.whole, self._y_size).copy_(buffer.transpose(0, 1))
            if self.whole is None or rows == 1:  # a single row is not copied
                tokens = buffer.transpose(0, 1).reshape(-1, features)
            else:
                tokens = self.whole[part.rows].view(-1, features)
            yield part, tokens

    def map(
        self, compute: Callable[..., torch.Tensor], out: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, Callable[[], object]]]:
        """Compute [N, features of `out`] of each part's tokens; yield it, and what puts it into `out` if it is not.

        `compute` gets tokens, and as `out` a buffer for the result where that is contiguous in the whole, else None.
        """
        for part, tokens in self.take():
            target = part.of(out, self._y_size)
            is_placed = target.is_contiguous()
            result = compute(tokens, out=target.view(-1, target.shape[-1]) if is_placed else None)
            yield result, (lambda: None) if is_placed else partial(target.copy_, result.view(target.shape))
