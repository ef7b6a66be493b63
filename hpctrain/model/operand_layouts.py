"""How products are computed: as their operands lie in memory, or with a copy that lies the other way round.

Libraries are not equally fast for all orders of their operands, sometimes by more than a copy costs, and which one
suffers depends on shape and device (Singh et al. 2024, arXiv 2502.08145). The results are the same but for the order
of sums, so for the last bit.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from hpctrain.model.products import parse_product


class OperandLayout(NamedTuple):
    """What of [m, k] @ [k, n] is copied into the other order: operands before, or the result after."""

    first: bool = False
    second: bool = False
    result: bool = False

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return a @ b, contiguous."""
        return self._multiply(a, b).contiguous()

    def add(self, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, fresh: bool = False) -> None:
        """Add a @ b to `out`, which may be of a wider dtype; to a `fresh` one as if it were zeros."""
        if not (self.result or out.dtype != a.dtype):
            out.addmm_(*self._operands(a, b), beta=0 if fresh else 1)
        elif fresh:
            out.copy_(self._multiply(a, b))
        else:
            out += self._multiply(a, b)

    def _multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = self._operands(a, b)
        return (b.t() @ a.t()).t() if self.result else a @ b

    def _operands(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _turned_over(a) if self.first else a, _turned_over(b) if self.second else b


def _turned_over(matrix: torch.Tensor) -> torch.Tensor:
    """Return a copy that lies by columns where the matrix lies by rows, and the other way round."""
    return matrix.t().contiguous().t() if matrix.stride(1) == 1 else matrix.contiguous()


PLAIN = OperandLayout()
LAYOUTS_BY_NAME = {
    "plain": PLAIN,
    "first": OperandLayout(first=True),
    "second": OperandLayout(second=True),
    "both": OperandLayout(first=True, second=True),
    "result": OperandLayout(result=True),
}


class OperandLayouts:
    """By which way each product is computed: that of its name, or as it lies. Immutable."""

    def __init__(self, by_product: Mapping[str, str] = {}, dtype: str = "fp32"):
        """`by_product`: names of products, of which those of `dtype` count, and of WAYS."""
        named = ((parse_product(name), LAYOUTS_BY_NAME[layout]) for name, layout in by_product.items())
        self._layouts = {(p.use, p.m, p.k, p.n): layout for p, layout in named if p.dtype == dtype and layout != PLAIN}

    def multiply(self, use: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return a @ b, contiguous; `use` as in `Product`."""
        return self._layout(use, a, b).multiply(a, b)

    def add(self, use: str, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, fresh: bool = False) -> None:
        """Add a @ b to `out`; to a `fresh` one as if it were zeros."""
        self._layout(use, a, b).add(out, a, b, fresh)

    def add_weight(self, grad_OI: torch.Tensor, dy_NO: torch.Tensor, x_NI: torch.Tensor, fresh: bool) -> None:
        """Add dy^T x to the gradient of a weight."""
        self.add("weight", grad_OI, dy_NO.t(), x_NI, fresh)

    def _layout(self, use: str, a: torch.Tensor, b: torch.Tensor) -> OperandLayout:
        (m, k), n = a.shape, b.shape[1]
        return self._layouts.get((use, m, k, n), PLAIN) if self._layouts else PLAIN


AS_THEY_LIE = OperandLayouts()
