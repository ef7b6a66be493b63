"""What a report needs of a run folder's JSON files. A file or line without it is left out, and named on the page."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, ValidationInfo

from hpctrain.comm.watchdog.flight import parse_ranks
from hpctrain.config.errors import describe_os_error
from hpctrain.config.paths import exists
from hpctrain.config.tables import Table

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Loss = Annotated[float, Field(allow_inf_nan=True)]


def _is_of_the_plan(rank: int, info: ValidationInfo) -> int:
    size: Any = info.context
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is none of the plan's {size}")
    return rank


def _are_of_the_plan(ranks: str, info: ValidationInfo) -> str:
    for rank in parse_ranks(ranks):
        _is_of_the_plan(rank, info)
    return ranks


def _has_all_ranks(column: list, info: ValidationInfo) -> list:
    if len(column) != info.context:
        raise ValueError(f"has {len(column)} ranks, and the plan {info.context}")
    return column


Rank = Annotated[int, AfterValidator(_is_of_the_plan)]
Ranks = Annotated[str, AfterValidator(_are_of_the_plan)]
Column = Annotated[list[NonNegative | None], AfterValidator(_has_all_ranks)]
"""A figure of every rank; None where a device does not know it."""


class SavedTable(Table):
    """A table that may have more keys than a report shows. A default only says that a key may be missing."""

    model_config = ConfigDict(extra="allow")


class SavedSpread(SavedTable):
    max: NonNegative
    max_rank: int


class SavedSlowest(SavedTable):
    rank: int
    computing_seconds: NonNegative
    waiting_seconds: NonNegative
    waits_for: str


class SavedMetrics(SavedTable):
    """A line of metrics.jsonl."""

    step: int
    loss: Loss
    validation_loss: Loss = 0.0
    step_seconds: Positive
    tokens_per_second: Positive
    mfu: Positive = 1.0
    fraction_of_sum: Positive = 1.0
    memory_share: SavedSpread | None = None
    slowest: SavedSlowest | None = None


class SavedYardstick(SavedTable):
    predicted_alone: dict[str, float | None] = Field(default_factory=dict)
    fraction_of_sum: float = 0.0
    speedup_over_best_family: float = 0.0
    speedup_over_even: float = 0.0


class SavedEvent(SavedTable):
    """A line of events.jsonl, with what starts and ends have."""

    time: float
    event: str
    step: int
    text: str
    ranks: int = 0
    planned_again: bool = False
    rehearsed: bool = False
    predicted_seconds: Positive = 1.0
    reasons: dict[str, str] = Field(default_factory=dict)
    stopped_by: str | None = None
    overrun: NonNegative = 0.0
    yardstick: SavedYardstick = Field(default_factory=SavedYardstick)


class SavedGrid(SavedTable):
    rank: Rank
    spans: list[tuple[str, int, int, float, float]]
    """Kind, virtual stage, micro-batch, begin and end of an instruction."""


class SavedTimeline(SavedTable):
    """timeline.json"""

    step: int
    grids: list[SavedGrid] = Field(min_length=1)


class SavedSend(SavedTable):
    """Of traffic.json: what one rank sent to another."""

    sender: Rank = Field(alias="from")
    to: Rank
    tensor_bytes: int


class SavedCollective(SavedTable):
    """Of traffic.json: what a group of ranks moved together."""

    operation: str
    ranks: Ranks
    tensor_bytes: int


class SavedAxis(SavedTable):
    communication_seconds: NonNegative
    hidden_seconds: NonNegative
    exposed_seconds: NonNegative


class SavedTraffic(SavedTable):
    """traffic.json"""

    step: int
    groups: list[SavedSend | SavedCollective]
    axes: dict[str, SavedAxis] = Field(default_factory=dict)


class SavedRanks(SavedTable):
    """ranks.json"""

    step: int
    memory_peak_bytes: Column
    compute_seconds: Column
    tensor_seconds: Column
    pipeline_seconds: Column
    data_seconds: Column
    optimizer_seconds: Column


def read_saved(path: Path, table: type[Table], num_ranks: int, left_out: list[str]) -> dict | None:
    """Return a file of a run folder; None where there is none, or it is damaged, which `left_out` then says."""
    if not exists(path):
        return None
    try:
        return table.model_validate_json(path.read_bytes(), context=num_ranks).model_dump(
            by_alias=True, exclude_unset=True
        )
    except OSError as error:
        left_out.append(f"{path.name} cannot be read: {describe_os_error(error)}")
    except ValidationError as error:
        left_out.append(f"{path.name} is damaged or of another version: {_first(error)}")
    return None


def check_lines(name: str, lines: Iterable[dict], table: type[Table], left_out: list[str]) -> list[dict]:
    """Return those lines of a file that are as they should be; `left_out` says which is the first of the others."""
    good, mistakes = [], []
    for number, line in enumerate(lines, 1):
        try:
            good.append(table.model_validate(line).model_dump(exclude_unset=True))
        except ValidationError as error:
            mistakes.append(f"line {number}: {_first(error)}")
    if mistakes:
        left_out.append(
            f"{name}: {len(mistakes):,} lines are damaged or of another version; the first is {mistakes[0]}"
        )
    return good


def _first(error: ValidationError) -> str:
    """Return the first mistake with where it is, such as `grids.0.rank: ...`."""
    mistake = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, mistake['loc']))}: {mistake['msg']}"
