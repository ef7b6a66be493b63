"""Products of half precision whose result is fp32: gradients of weights are rounded once, when they are used.

A product that is rounded to bf16 before it is added loses what is below 1/256 of its own size, in every microbatch.
The operation has a name of its own in torch, so that whoever watches operations sees one product of half precision.
"""

from functools import lru_cache

import torch

_LIBRARY = torch.library.Library("hpctrain", "DEF")
_LIBRARY.define("add_wide_product(Tensor(a!) grad, Tensor dy, Tensor x, bool fresh) -> ()")


def add_wide_product(grad_OI: torch.Tensor, dy_NO: torch.Tensor, x_NI: torch.Tensor, fresh: bool) -> None:
    """Add dy^T x to an fp32 gradient, summed in fp32 and not rounded in between.

    grad: [O, I] fp32; dy: [N, O], x: [N, I] of half precision. Where it is `fresh` the gradient is overwritten.
    """
    torch.ops.hpctrain.add_wide_product(grad_OI, dy_NO, x_NI, fresh)


def _add_wide_product(grad_OI: torch.Tensor, dy_NO: torch.Tensor, x_NI: torch.Tensor, fresh: bool) -> None:
    beta = 0 if fresh else 1
    if has_wide_products(grad_OI.device, x_NI.dtype):
        wide = torch.ops.aten.addmm.dtype_out
        wide(grad_OI, dy_NO.t(), x_NI, torch.float32, beta=beta, alpha=1, out=grad_OI)
    else:
        grad_OI.addmm_(dy_NO.t().float(), x_NI.float(), beta=beta)


_LIBRARY.impl("add_wide_product", _add_wide_product, "CompositeExplicitAutograd")


@lru_cache
def has_wide_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether a device multiplies in half precision with a result in fp32, added to what is there: by trying it.

    CPUs do not, nor do old versions of libraries: there both operands are converted first, which costs their speed.
    """
    if device.type == "cpu":
        return False
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    tiny = torch.full((16, 16), 2.0**-12, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(tiny, ones, ones, torch.float32, beta=1, alpha=1, out=tiny)
    except (NotImplementedError, RuntimeError):
        return False
    return bool((tiny == 16 + 2.0**-12).all())
