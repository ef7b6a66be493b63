"""The number formats of a job, also those that it leaves open, and the scale of losses in fp16."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from hpctrain.config.tables import AUTO, Table

if TYPE_CHECKING:  # files are checked for these words; the code computes with plain strings
    Trained = Operator = str
else:
    Trained = Literal["fp32", "bf16", "fp16"]
    Operator = Literal["linear", "attention", "rotary", "activation", "head"]


class Precision(Table):
    """Number formats where they differ from `train.dtype`, and the scale of losses."""

    by_family: dict[str, Trained] = Field(default_factory=dict)
    """The dtype of some families, such as `{v100 = "fp16"}`; all others have `train.dtype`."""
    wire: Annotated[Trained | None, AUTO] = None
    """Of activations and their gradients between tiles of different dtypes; auto: fp32, which loses nothing."""
    overrides: dict[Operator, Trained] = Field(default_factory=dict)
    """Operators that compute in another dtype on all families, such as `{attention = "fp32"}`."""
    loss_scale: Annotated[float, Field(gt=0)] = 65536.0
    """Where a family trains in fp16: by what the loss is multiplied in the first step. It is halved when a gradient
    overflows, and that step changes no weights."""
    loss_scale_window: Annotated[int, Field(ge=1)] = 1000
    """After so many steps without overflow the scale is doubled."""


TRAINED_DTYPES = ("bf16", "fp16", "fp32")
LEAST_HALF_SPEEDUP = 1.5
"""By how much large products must be faster in half precision than in fp32 for it to be taken.

GPUs reach 2 to 16 times, or less than 1 where bf16 is emulated. The limit is far from both: noise does not decide.
Processors reach 0.005 to 8 times, by model and by the moment of measuring, and steps gain less: they are not asked.
"""


def choose_dtypes(
    speeds: Mapping[str, Mapping[str, float]], kinds: Mapping[str, str]
) -> tuple[dict[str, str], str] | None:
    """Return the dtype of each family, and the reason; None where a family has no speed in any that can be trained in.

    `speeds` are FLOP/s of large products by family and dtype (those that it has), `kinds` the families' kinds ("cpu",
    "cuda", ...). Processors take fp32. Each other family takes bf16, or else fp16, where that is worthwhile on it; a
    family that gains nothing does not keep the others from it.
    """
    result, reasons = {}, []
    for family, by_dtype in speeds.items():
        known = [dtype for dtype in TRAINED_DTYPES if by_dtype.get(dtype)]
        if not known:
            return None
        ratios = {dtype: by_dtype[dtype] / by_dtype["fp32"] for dtype in known[:-1]} if by_dtype.get("fp32") else {}
        fast = [dtype for dtype, ratio in ratios.items() if ratio >= LEAST_HALF_SPEEDUP and kinds[family] != "cpu"]
        result[family] = fast[0] if fast else known[-1]
        if len(known) == 1:
            reasons.append(f"{family}: {known[0]}, the only one that it has")
        elif kinds[family] == "cpu":
            reasons.append(f"{family}: {result[family]}, as on all processors where train.dtype is not set")
        else:
            tried = fast[:1] or list(ratios)[:1]
            figures = "".join(f", {dtype} is {ratios[dtype]:.2g} times as fast as fp32" for dtype in tried)
            reasons.append(f"{family}: {result[family]}{figures} and pays from {LEAST_HALF_SPEEDUP:g} times")
    return result, "; ".join(reasons)
