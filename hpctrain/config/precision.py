"""Number formats of a job, where families or operators differ, and how losses are scaled for fp16."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from hpctrain.config.tables import AUTO, Table

if TYPE_CHECKING:  # files are checked for these words; the code computes with plain strings
    Trained = Operator = Computed = str
else:
    Trained = Literal["fp32", "bf16", "fp16"]
    Computed = Literal["fp32", "bf16", "fp16", "fp8"]
    Operator = Literal["linear", "attention", "rotary", "activation", "head"]


class Precision(Table):
    """Number formats where they differ from `train.dtype`, and the scale of losses."""

    by_family: dict[str, Trained] = Field(default_factory=dict)
    """The dtype of some families, such as `{v100 = "fp16"}`; all others have `train.dtype`."""
    wire: Annotated[Trained | None, AUTO] = None
    """Of activations and their gradients between tiles of different dtypes; auto: fp32, which loses nothing."""
    overrides: dict[Operator, Computed] = Field(default_factory=dict)
    """Operators that compute in another dtype on all families, such as `{attention = "fp32"}`; `{linear = "fp8"}`:
    products of blocks round their operands to 8 bits, with a scale for each tensor."""
    loss_scale: Annotated[float, Field(gt=0)] = 65536.0
    """Where a family trains in fp16: by what the loss is multiplied in the first step. It is halved when a gradient
    overflows, and that step changes no weights."""
    loss_scale_window: Annotated[int, Field(ge=1)] = 1000
    """After so many steps without overflow the scale is doubled."""

    @field_validator("overrides")
    @classmethod
    def _only_products_in_8_bits(cls, overrides: dict[str, str]) -> dict[str, str]:
        for operator, dtype in overrides.items():
            if dtype == "fp8" and operator != "linear":
                raise ValueError(f"{operator} cannot compute in fp8, only linear can; set another dtype for {operator}")
        return overrides
