"""The JSON files of a run folder: the name and the content of each, for writers and readers.

A key that is `NotRequired` is not written by every run, or was not by earlier versions. Readers leave out keys that are
new to them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, NotRequired, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo, with_config
from typing_extensions import TypedDict

from hpctrain.comm.watchdog.flight import parse_ranks
from hpctrain.config.bounds import WholeNumber
from hpctrain.config.errors import JobError
from hpctrain.config.paths import exists, is_file, read_bytes, refused_as
from hpctrain.planner.prediction.simulate import EXPOSED

T = TypeVar("T")
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Part = Annotated[str, Field(pattern="|".join(f"^{part}$" for part in EXPOSED))]


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
"""Ranks of a group, such as `0-3,8`."""
Column = Annotated[list[NonNegative | None], AfterValidator(_has_all_ranks)]
"""A figure of every rank; None where a device does not know it."""


@with_config(ConfigDict(strict=True))
class SavedTable(TypedDict):
    """A table of a file. A number is a number: text is not taken for one."""


class SavedSpread(SavedTable):
    """The extremes and the median of a figure by rank, and which ranks have them."""

    min: float
    min_rank: int
    median: float
    max: NonNegative
    max_rank: int


class SavedSlowest(SavedTable):
    """The rank that computed longest in a step."""

    rank: int
    computing_seconds: NonNegative
    waiting_seconds: NonNegative
    waits_for: str


class SavedFigures(SavedTable):
    """The figures of a logged step that differ by rank; those of time where the host knows when it computes."""

    memory_peak_bytes: NotRequired[SavedSpread]
    memory_share: NotRequired[SavedSpread]
    compute_seconds: NotRequired[SavedSpread]
    waiting_seconds: NotRequired[SavedSpread]
    slowest: NotRequired[SavedSlowest]


class SavedLosses(SavedTable):
    """The keys of a line of metrics.jsonl that other commands compute with."""

    step: WholeNumber
    loss: NotRequired[float]
    """Left out of a step whose tokens are all of prompts: no token is learnt then."""
    validation_loss: NotRequired[float]
    grad_norm: NotRequired[float]


class SavedMetrics(SavedFigures, SavedLosses):
    """A line of metrics.jsonl."""

    learning_rate: NotRequired[float]
    expert_load: NotRequired[Positive]
    """The largest load of an expert over the mean of its layer, in the layer where that is largest."""
    expert_load_layer: NotRequired[int]
    expert_spread: NotRequired[float]
    """Standard deviation of the tokens of a layer's experts over their mean; of all layers the root mean square."""
    balance_loss: NotRequired[float]
    """What the auxiliary loss against uneven experts adds to `loss`, which is without it."""
    loss_scale: NotRequired[float]
    skipped: NotRequired[float]
    step_seconds: Positive
    tokens_per_second: Positive
    mfu: NotRequired[Positive]
    fraction_of_sum: NotRequired[Positive]
    overrun: NotRequired[float]
    """The overrun of a rehearsal: shown, and not written."""


class SavedYardstick(SavedTable):
    """The speeds of families alone, as predicted, and the ratios of a mixed run to them."""

    predicted_alone: NotRequired[dict[str, float | None]]
    """Tokens/s by family; None where it cannot hold the model."""
    worth: NotRequired[dict[str, str]]
    """The possible error of each, by family."""
    fraction_of_sum: NotRequired[float]
    speedup_over_best_family: NotRequired[float]
    speedup_over_even: NotRequired[float]


class SavedNote(SavedTable):
    """The keys that every line of events.jsonl has."""

    time: float
    """Seconds since 1970."""
    event: str
    step: int
    text: str


class SavedEvent(SavedNote):
    """A line of events.jsonl."""

    ranks: NotRequired[int]
    rank: NotRequired[int]
    planned_again: NotRequired[bool]
    number: NotRequired[int]
    """The number of a leg."""
    reason: NotRequired[str]
    seconds: NotRequired[float | dict[str, float]]
    """Seconds of a save, or of the parts of a start or of a change of plans."""
    predicted_stall_seconds: NotRequired[NonNegative]
    """Of a change of plans: what its parts `moved` and `made` were predicted to take."""
    rehearsed: NotRequired[bool]
    predicted_seconds: NotRequired[Positive]
    reasons: NotRequired[dict[str, str]]
    stopped_by: NotRequired[str | None]
    overrun: NotRequired[NonNegative]
    yardstick: NotRequired[SavedYardstick]


class SavedGrid(SavedTable):
    """The instructions that the first rank of a tensor grid executed."""

    rank: Rank
    spans: list[tuple[str, int, int, float, float]]
    """Kind, virtual stage, micro-batch, begin and end of an instruction."""


class SavedTimeline(SavedTable):
    """The times at which the instructions of one step ran."""

    step: int
    grids: Annotated[list[SavedGrid], Field(min_length=1)]


SavedSend = TypedDict(
    "SavedSend",
    {"group": str, "operation": str, "from": Rank, "to": Rank, "tensor_bytes": int, "calls": int},
)
"""What one rank sent to another."""


class SavedCollective(SavedTable):
    """A collective: the bytes that a group of ranks moved together."""

    group: str
    operation: str
    ranks: Ranks
    tensor_bytes: int
    calls: int


class SavedAxis(SavedTable):
    """The seconds of a rank in a step in which an axis communicated, those that computing hid, and the others."""

    communication_seconds: NonNegative
    hidden_seconds: NonNegative
    exposed_seconds: NonNegative
    tensor_bytes: NotRequired[float]


class SavedTraffic(SavedTable):
    """The traffic of one step by group of ranks: its tensors, not what an algorithm made of them."""

    step: int
    groups: list[SavedSend | SavedCollective]
    axes: NotRequired[dict[str, SavedAxis]]


class SavedTraceSummary(SavedTable):
    """The communication of each axis in the steps of a trace: means over ranks, and by rank."""

    steps: int
    axes: dict[str, SavedAxis]
    ranks: dict[str, dict[int, SavedAxis]]


class SavedRanks(SavedTable):
    """The figures of every rank in a recent logged step."""

    step: int
    memory_peak_bytes: Column
    memory_share: NotRequired[Column]
    compute_seconds: Column
    tensor_seconds: Column
    pipeline_seconds: Column
    data_seconds: Column
    optimizer_seconds: Column


class SavedLayerLoad(SavedTable):
    """The tokens of each expert of a layer in a step."""

    layer: WholeNumber
    tokens: Annotated[list[WholeNumber], Field(min_length=1)]


class SavedExperts(SavedTable):
    """The load of all experts in a recent logged step."""

    step: int
    layers: Annotated[list[SavedLayerLoad], Field(min_length=1)]


class SavedSeconds(SavedTable):
    """The seconds of a part of a step."""

    predicted_seconds: NonNegative
    measured_seconds: NonNegative


class SavedMemory(SavedTable):
    """The memory of the fullest rank of a stage."""

    items: list[int]
    family: str
    rows: NotRequired[int]
    """Rows of a micro-batch."""
    predicted_bytes: Positive
    measured_bytes: NonNegative


class SavedComparison(SavedTable):
    """Steps compared with their prediction: means over ranks, and over all steps of a start but the first."""

    cluster: str
    """The source of the prediction."""
    steps: int
    predicted_seconds: Positive
    interval_seconds: list[NonNegative]
    measured_seconds: NonNegative
    drift: float
    is_large: bool
    parts: NotRequired[dict[Part, SavedSeconds]]
    """Left out where devices compute by themselves."""
    drifted: NotRequired[Part]
    memory: NotRequired[list[SavedMemory]]
    waterfall: NotRequired[dict[str, float]]
    """Predicted seconds of each cause (`planner/prediction/forecast.py`); they add up to the predicted step."""
    cause: NotRequired[str]
    """Why steps differ from their prediction, where that is known; then the user is not asked to measure again."""


@dataclass(frozen=True)
class SavedFile(Generic[T]):
    """A file of a run folder: its name, and the type of what is in it, or of each of its lines."""

    name: str
    table: type[T]


METRICS = SavedFile("metrics.jsonl", SavedMetrics)
EVENTS = SavedFile("events.jsonl", SavedEvent)
RANKS = SavedFile("ranks.json", SavedRanks)
TIMELINE = SavedFile("timeline.json", SavedTimeline)
TRAFFIC = SavedFile("traffic.json", SavedTraffic)
EXPERTS = SavedFile("experts.json", SavedExperts)
DRIFT = SavedFile("drift.json", SavedComparison)
TRACE_SUMMARY = SavedFile("trace-summary.json", SavedTraceSummary)
OF_ONE_PLAN = (DRIFT, RANKS, TIMELINE, TRAFFIC)
"""Measured with the plan of the folder; a start with another one removes them."""


def read_saved(folder: Path, file: SavedFile[T], num_ranks: int = 0) -> T | None:
    """Return a file of a run folder; None where it has none. Raises JobError where it is damaged.

    `num_ranks` is that of the plan, where the file has figures of ranks.
    """
    path = folder / file.name
    if not exists(path):
        return None
    with refused_as(JobError, f"{path}: cannot be read"):
        data = read_bytes(path)
    try:
        return TypeAdapter(file.table).validate_json(data, context=num_ranks)
    except ValidationError as error:
        text = f"{path}: is damaged: {_first(error)}; remove it, the next run writes it again"
        raise JobError(text) from None


def read_lines(path: Path, table: type) -> tuple[list[Any], list[str]]:
    """Return the lines of a file that are as `table` says, with all of their keys, and a message for each other one.

    A last line that a crash cut short is left out. Raises OSError.
    """
    lines, mistakes = [], []
    if not is_file(path):
        return lines, mistakes
    adapter, texts = TypeAdapter(table), read_bytes(path).split(b"\n")
    for number, text in enumerate(texts, 1):
        try:
            adapter.validate_python(line := json.loads(text))
            lines.append(line)
        except (ValueError, RecursionError) as error:
            if number < len(texts):
                mistakes.append(f"{path}, line {number}: is damaged, or of another version: {_first(error)}")
    return lines, mistakes


def _first(error: Exception) -> str:
    """Return the first mistake with where it is, such as `grids.0.rank: ...`."""
    if not isinstance(error, ValidationError):
        return str(error)
    mistake = error.errors(include_url=False)[0]
    return ": ".join(filter(None, (".".join(map(str, mistake["loc"])), mistake["msg"])))
