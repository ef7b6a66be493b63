"""The figures of a cluster file: where each is from, and the range in which one can be that nobody measured."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from hpctrain.config.bounds import MOST_MEMORY_BYTES, Latency, Rate
from hpctrain.config.errors import did_you_mean
from hpctrain.config.tables import Table, toml_value

if TYPE_CHECKING:  # files are checked for these words; the code computes with plain strings
    Origin = str
else:
    Origin = Literal["measured", "datasheet", "assumed"]


def whole_number(value):
    """Take 80e9, as bytes are written, for a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plausible(least: float, most: float, unit: str, usual: str) -> AfterValidator:
    """Refuse a figure outside of a wide range, unless it was measured: its unit was forgotten, or applied twice."""

    def check(value: float, info: ValidationInfo) -> float:
        origin = info.data.get("origins", {}).get(info.field_name, info.data.get("origin"))
        if origin != "measured" and not least <= value <= most:
            raise ValueError(f"{toml_value(value)} {unit}? usual are {usual}; set it in {unit}")
        return value

    return AfterValidator(check)


Bytes = Annotated[int, BeforeValidator(whole_number), Field(ge=1, le=MOST_MEMORY_BYTES)]
# Of a table `Figures`, of whose origins they depend.
MemoryBytes = Annotated[Bytes, _plausible(1e5, 1e14, "bytes", "4e9 to 1e12")]
Bandwidth = Annotated[Rate, _plausible(1e4, 1e15, "bytes/s", "1e9 to 1e13")]
Speed = Annotated[Rate, _plausible(1e6, 1e18, "FLOP/s", "1e12 to 1e16")]
LinkLatency = Annotated[Latency, _plausible(0.0, 1.0, "seconds", "1e-7 to 1e-3")]


class Figures(Table):
    """A table of figures, each of which says where it is from."""

    UNITS: ClassVar = ("_seconds", "_bytes", "_per_second", "products", "times", "_slowdown", "half_speed_rows")

    origin: Origin | None = None
    """The origin of all figures of the table that are not in `origins`; left out: typed, as from a data sheet."""
    origins: dict[str, Origin] = Field(default_factory=dict)

    @classmethod
    def figures(cls) -> list[str]:
        return [name for name in cls.model_fields if name.endswith(cls.UNITS)]

    def origin_of(self, figure: str) -> Origin:
        return self.origins.get(figure, self.origin or "datasheet")

    @property
    def given(self) -> list[str]:
        return [figure for figure in self.figures() if getattr(self, figure) not in (None, {}, ())]

    @field_validator("origins")
    @classmethod
    def _of_figures(cls, origins: dict[str, Origin]) -> dict[str, Origin]:
        if unknown := sorted(set(origins) - set(cls.figures())):
            raise ValueError(f"'{unknown[0]}' is no figure of this table{did_you_mean(unknown[0], cls.figures())}")
        return origins
