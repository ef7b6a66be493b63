"""The plan file: TOML that a person can write and edit. See docs/job.md."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from hpctrain.config.bounds import (
    MOST_LAYERS,
    MOST_MICROBATCHES,
    MOST_RANKS,
    MOST_SEQUENCES,
    MicrobatchCount,
    Rank,
    RankCount,
    SequenceCount,
    ZeroStage,
)
from hpctrain.config.errors import PlanError
from hpctrain.config.parallelism import TensorSizes
from hpctrain.config.saved import GONE_TILE_VALUES, KEY, RESOLVED, SCHEMA, ignore, replaced, say_on_stderr, schema_of
from hpctrain.config.tables import Several, Table, explain, parse_toml, read_text, shorten, toml_value
from hpctrain.plan.draw import ranges
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.sharding.grid import CUTTING_CONTEXT, TensorGrid
from hpctrain.sharding.intervals import Interval

Item = Annotated[int, Field(ge=0, le=2 * MOST_LAYERS + 2)]
Row = Annotated[int, Field(ge=0, le=MOST_SEQUENCES)]


def _numbers(value: object) -> object:
    """Return the numbers of ranges such as "0-7,16"; what is no text as it is. Raises ValueError with the numbers."""
    if not isinstance(value, str):
        return value
    result: list[int] = []
    for part in value.split(","):
        first, dash, last = (end.strip() for end in part.partition("-"))
        if not first.isdecimal() or not (last if dash else first).isdecimal():
            raise ValueError(f'"{shorten(value)}" is no list of ranks; write "0-7", "0-3,8-11", or [0, 1, 2, 3]')
        low, high = (int(end.lstrip("0")[:10] or 0) for end in (first, last or first))
        if not low <= high < MOST_RANKS:
            raise ValueError(f'"{shorten(part.strip())}" must go up, and no rank is above {MOST_RANKS - 1:,}')
        result += range(low, high + 1)
        if len(result) > MOST_RANKS:
            raise ValueError(f'"{shorten(value)}" has more than {MOST_RANKS:,} ranks; list each once')
    return result


Ranks = Annotated[Several[Rank], BeforeValidator(_numbers)]


_OF_GRID = {
    "sequence_parallel": "sequence_parallel",
    "exchange_heads": "exchanges_heads",
    "position_shares": "position_shares",
}
"""Keys of a tile that are about its tensor grid, with the fields of that. They are written where they have a value."""


class _TileTable(Table):
    items: Annotated[tuple[Item, Item], Field(strict=False)]
    rows: Annotated[tuple[Row, Row], Field(strict=False)]
    ranks: Ranks
    tensor: TensorSizes = TensorSizes()
    sequence_parallel: bool = False
    exchange_heads: bool = False
    position_shares: Several[RankCount] = ()
    family: str = "cpu"
    recompute: Literal["none", "selective", "full"] = "none"
    zero: ZeroStage = 1
    state_share: RankCount = 1
    row_chunks: SequenceCount = 1
    extra_warmup: Annotated[int, Field(ge=0, le=MOST_MICROBATCHES)] = 0
    offload: Literal["none", "optimizer"] = "none"


class _PlanTable(Table):
    schedule: Literal["1f1b", "zb-h1"] = "1f1b"
    microbatches: MicrobatchCount
    rows: SequenceCount
    unused: Ranks = ()
    tile: Annotated[list[_TileTable], Field(min_length=1)]


def load_plan(path: Path, say: Callable[[str], None] = say_on_stderr) -> Plan:
    """Read a plan file. Raises PlanError that names file and key; the tiling itself is checked by `check_tiling`."""
    text, is_of_run = read_text(path, PlanError), path.with_name(RESOLVED).is_file()
    return parse_plan(text, str(path), say, is_typed=not is_of_run)


def parse_plan(text: str, path: str, say: Callable[[str], None] = ignore, is_typed: bool = False) -> Plan:
    """Read a plan from TOML; `path` is what errors call it. Raises PlanError.

    What is gone since an older version wrote it is read as something else, and `say` hears of it. A plan without the
    number of a schema is of the oldest, unless a person has typed it.
    """
    tree = parse_toml(text, path, PlanError)
    is_older = schema_of(tree, path, PlanError) < SCHEMA and not (is_typed and KEY not in tree)
    tree.pop(KEY, None)
    if is_older and isinstance(tiles := tree.get("tile"), list):
        tree["tile"] = [
            replaced(tile, GONE_TILE_VALUES, f"{path}: tile.{number}", say) if isinstance(tile, dict) else tile
            for number, tile in enumerate(tiles)
        ]
    try:
        table = _PlanTable.model_validate(tree)
    except ValidationError as error:
        raise PlanError(f"{path}: {explain(error, _PlanTable)[0][1]}") from None
    tiles = tuple(
        Tile(
            Interval(*t.items),
            Interval(*t.rows),
            t.ranks,
            TensorGrid(**t.tensor.sizes, **{field: getattr(t, key) for key, field in _OF_GRID.items()}),
            **t.model_dump(exclude={"items", "rows", "ranks", "tensor", *_OF_GRID}),
        )
        for t in table.tile
    )
    plan = Plan(tiles, table.microbatches, table.rows, table.schedule, table.unused)
    return _reduced_zero(plan, path, say) if is_older else plan


def _reduced_zero(plan: Plan, path: str, say: Callable[[str], None]) -> Plan:
    """Return a plan of an older version with ZeRO 1 where tiles with ZeRO 2 or 3 share items over different grids."""
    grids: dict[Interval, set[TensorGrid]] = {}
    for tile in plan.tiles:
        grids.setdefault(tile.items, set()).add(tile.tensor)
    reduced = [tile for tile in plan.tiles if tile.zero >= 2 and len(grids[tile.items]) > 1]
    for items, zero in dict.fromkeys((tile.items, tile.zero) for tile in reduced):
        say(
            f"{path}: is of an older version; zero = {zero} of tiles {list(items)}, whose tensor grids differ, is gone"
            " and is read as 1"
        )
    return replace(plan, tiles=tuple(replace(tile, zero=1) if tile in reduced else tile for tile in plan.tiles))


def dump_plan(plan: Plan) -> str:
    """Write a plan as TOML that `load_plan` reads back to an equal plan."""
    head: dict[str, Any] = {
        KEY: SCHEMA,
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "rows": plan.rows,
    }
    lines = _pairs(head | ({"unused": _brief(plan.unused)} if plan.unused else {}))
    for tile in plan.tiles:
        grid = tile.tensor
        values = {
            "items": tile.items,
            "rows": tile.rows,
            "family": tile.family,
            "ranks": _brief(tile.ranks),
            "tensor": {axis: size for axis, size in grid.sizes.items() if size > 1 or axis not in CUTTING_CONTEXT},
            "recompute": tile.recompute,
            "zero": tile.zero,
        }
        values |= {key: value for key in ("state_share", "row_chunks") if (value := getattr(tile, key)) != 1}
        values |= {key: value for key, field in _OF_GRID.items() if (value := getattr(grid, field))}
        values |= {"extra_warmup": tile.extra_warmup} if tile.extra_warmup else {}
        values |= {"offload": tile.offload} if tile.offload != "none" else {}
        lines += ["", "[[tile]]", *_pairs(values)]
    return "\n".join(lines) + "\n"


def _brief(ranks: tuple[int, ...]) -> tuple[int, ...] | str:
    """Return ranks as a text of ranges where that is shorter than their list."""
    text = ranges(ranks)
    return text if len(text) + 2 < len(str(list(ranks))) else ranks


def _pairs(values: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {toml_value(value)}" for key, value in values.items()]
