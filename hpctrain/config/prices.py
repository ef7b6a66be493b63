"""The price file of `hpctrain what-if`: prices of devices and of energy. Frozen data."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from hpctrain.config.clusters.cluster import Name
from hpctrain.config.errors import JobError
from hpctrain.config.tables import Table, explain, parse_toml, read_text, refused_for, with_lines

HOURS_OF_A_YEAR = 8766
MOST_MONEY = 1e12

Money = Annotated[float, Field(ge=0, le=MOST_MONEY)]
Watts = Annotated[float, Field(ge=0, le=1e6)]


class FamilyPrice(Table):
    """The price and the power of one device of a family."""

    device_hour: Money | None = None
    """The price of an hour, where the device is rented, with all that is not in `kwh`."""
    purchase: Money | None = None
    """The price to buy it, with its share of the node. It is spread over `years`."""
    watts: Watts | None = None
    """Its power at work; left out: the catalogue's."""
    idle_watts: Watts | None = None
    """Its power while it waits; left out: a share of its power at work."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        mistakes = []
        if self.device_hour is not None and self.purchase is not None:
            mistakes.append("device_hour and purchase: a device is rented or bought; keep one")
        if self.watts is not None and self.idle_watts is not None and self.idle_watts > self.watts:
            mistakes.append(f"idle_watts = {self.idle_watts:g} is more than watts = {self.watts:g}")
        return refused_for(self, mistakes)


class PriceFile(Table):
    """A price file."""

    currency: Name = "EUR"
    kwh: Money = 0.0
    """The price of a kWh at the device; multiply it by what cooling takes."""
    years: Annotated[float, Field(gt=0, le=100)] = 4.0
    """The years over which the price of a purchase is spread."""
    families: dict[Name, FamilyPrice] = Field(default_factory=dict)

    def hourly(self, family: str) -> float | None:
        """Return what an hour of one device costs without its energy; None where the file has no price."""
        price = self.families.get(family, FamilyPrice())
        if price.purchase is not None:
            return price.purchase / (self.years * HOURS_OF_A_YEAR)
        return price.device_hour


def load_prices(path: Path) -> PriceFile:
    """Read a price file. Raises JobError that names file and key."""
    text = read_text(path, JobError)
    try:
        return PriceFile.model_validate(parse_toml(text, str(path), JobError))
    except ValidationError as error:
        lines = with_lines(text, dict.fromkeys(line for _, line in explain(error, PriceFile)))
        raise JobError("\n".join(f"{path}: {line}" for line in lines)) from None
