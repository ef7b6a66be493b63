"""Refuses plans that cannot run: the message has the numbers."""

from collections.abc import Sequence

from hpctrain.config.bounds import MOST_MICROBATCHES, MOST_PASSES
from hpctrain.config.errors import LaunchError, PlanError
from hpctrain.config.job import Job
from hpctrain.plan.holdings import check_zero
from hpctrain.plan.tiling import Plan, counted
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval, tiles_exactly
from hpctrain.sharding.parameters import check_grid

SHOWN = 16


def check_plan(job: Job, plan: Plan, where: str) -> None:
    """Refuse a plan that cannot run this job; `where` is what the message calls it. Raises PlanError."""
    check_tiling(plan, job.model.num_items)
    for number, tile in enumerate(plan.tiles):
        check_grid(job.model, tile.tensor)
        check_positions(job.data.sequence_length, tile.tensor, f"{where}: tile {number}")
    check_zero(plan, where)
    if plan.microbatches * plan.rows != job.train.global_batch:
        raise PlanError(
            f"{where}: microbatches {plan.microbatches} x rows {plan.rows} = {plan.microbatches * plan.rows}, but"
            f" train.global_batch is {job.train.global_batch}; make them equal"
        )


def check_positions(sequence_length: int, grid: TensorGrid, where: str) -> None:
    """Refuse a tensor grid that cannot cut the positions of a row. Raises PlanError with the numbers."""
    if grid.sequence_parallel and grid.y == 1:
        raise PlanError(f"{where}: sequence_parallel cuts positions over y, and tensor y = 1; remove it, or raise y")
    c, y, shares = grid.context_parts, grid.sequence_parts, grid.position_shares
    if grid.exchanges_heads and c == 1:
        raise PlanError(
            f"{where}: exchange_heads is of ranks that cut positions, and tensor c = 1; remove it, or raise c"
        )
    if shares and (len(shares) != c or len(set(shares)) == 1):
        raise PlanError(
            f"{where}: position_shares = {_first(shares)} has {counted(len(shares), 'share')} for tensor c = {c};"
            " give one for each rank of c, or remove them where they are equal"
        )
    if c > 1 and sequence_length % (parts := 2 * sum(grid.context_shares)):
        into = f"{parts} intervals, two for each of its ranks"
        into = f"{parts} parts, twice the sum of position_shares {_first(shares)}" if shares else into
        raise PlanError(
            f"{where}: tensor c = {c} cuts the {sequence_length} positions of data.sequence_length into {into}, which"
            f" does not divide them; set data.sequence_length to a multiple of {parts}, or"
            f" {'other position_shares' if shares else 'lower c'}"
        )
    if sequence_length % (parts := sum(grid.context_shares) * y):
        raise PlanError(
            f"{where}: sequence_parallel cuts the {sequence_length} positions of data.sequence_length into {parts}"
            f" parts (tensor y{' x c' if c > 1 else ''}), which does not divide them; set data.sequence_length to a"
            f" multiple of {parts}, or sequence_parallel to false"
        )


def check_tiling(plan: Plan, num_items: int) -> None:
    """Refuse gaps, overlaps, and grids that do not match their ranks; the message has the numbers.

    Raises PlanError.
    """
    if not plan.tiles:
        raise PlanError("the plan has no tiles")
    check_passes(plan)
    seen: dict[int, int] = {}
    for number, tile in enumerate(plan.tiles):
        where = f"tile {number} (items {list(tile.items)}, rows {list(tile.rows)})"
        if tile.tensor.size != len(tile.ranks):
            raise PlanError(f"{where}: a grid of {tile.tensor} needs {tile.tensor.size} ranks, {len(tile.ranks)} given")
        if len(set(tile.ranks)) < len(tile.ranks):
            raise PlanError(f"{where}: ranks {_first(tile.ranks)} has a rank twice; list each once")
        least, z = tile.rows.size, tile.tensor.row_parts
        if least < z:
            raise PlanError(f"{where}: z = {z} splits {least} rows; give it rows or lower z")
        if least < z * tile.row_chunks:
            raise PlanError(f"{where}: z = {z} and row_chunks = {tile.row_chunks} split {least} rows; lower row_chunks")
        for rank in tile.ranks:
            if plan.tiles[seen.setdefault(rank, number)].ranks != tile.ranks:
                raise PlanError(
                    f"{where}: rank {rank} is already in tile {seen[rank]}, which has other ranks; tiles that share"
                    " ranks must have all of them in the same order"
                )
        if tile.items.size == 0 or tile.items.start < 0 or tile.items.stop > num_items:
            raise PlanError(
                f"{where}: items must lie in [0, {num_items}): the embedding, attention and feed-forward part of each"
                " block, the head"
            )
        if tile.rows.start < 0 or tile.rows.stop > plan.rows:
            raise PlanError(f"{where}: rows must lie in [0, {plan.rows})")
        if tile.items.stop < num_items and not plan.downstream(tile):
            raise PlanError(f"{where}: no tile starts at item {tile.items.stop} for its rows")
        if tile.items.start > 0 and not plan.upstream(tile):
            raise PlanError(f"{where}: no tile ends at item {tile.items.start} for its rows")
    _check_virtual_stages(plan)
    _check_extra_warmup(plan)
    cuts = {0, *(cut for tile in plan.tiles for cut in tile.items)}  # what holds at one holds up to the next
    for item in sorted(cut for cut in cuts if cut < num_items):
        rows = [tile.rows for tile in plan.tiles if tile.contains(item)]
        if not tiles_exactly(rows, Interval(0, plan.rows)):
            raise PlanError(
                f"item {item} is computed for rows {sorted(map(list, rows))}, which is not [0, {plan.rows}) once each"
            )
    if both := sorted(set(plan.unused) & set(seen)):
        raise PlanError(f"rank {both[0]} is in tile {seen[both[0]]} and in unused; take it out of one")
    if len(set(plan.unused)) < len(plan.unused) or min(plan.unused, default=0) < 0:
        raise PlanError(f"unused = {_first(plan.unused)} has a rank twice, or one below 0; list each once")
    first = next((rank for rank, there in enumerate(plan.ranks) if rank != there), None)
    if first is not None:
        there = set(plan.ranks)
        missing = [rank for rank in range(first, min(plan.ranks[-1], first + 10 * SHOWN)) if rank not in there]
        raise PlanError(f"rank {first} is in no tile; list it under unused = {_first(missing)}")


def check_passes(plan: Plan) -> None:
    """Refuse what would take minutes to check, as nobody trains by it. Raises PlanError."""
    if plan.microbatches > MOST_MICROBATCHES:
        raise PlanError(
            f"microbatches = {plan.microbatches:,} are more than {MOST_MICROBATCHES:,}; make them of more rows"
            " (plan.microbatch)"
        )
    if (passes := num_passes(plan)) > MOST_PASSES:
        raise PlanError(
            f"the plan has {passes:,} passes a step (microbatches = {plan.microbatches:,}), and the most is"
            f" {MOST_PASSES:,}; make microbatches of more rows, or lower row_chunks"
        )


def num_passes(plan: Plan) -> int:
    """Return how many passes a step has, with those of equal pipelines counted once. Where all are few, all are
    counted."""
    passes = plan.microbatches * sum(tile.row_chunks for tile in plan.tiles)
    if passes <= MOST_PASSES:
        return passes
    pipelines = {tuple((tile.items, tile.zero, tile.row_chunks) for tile in tiles) for tiles in plan.pipelines}
    return plan.microbatches * sum(row_chunks for tiles in pipelines for *_, row_chunks in tiles)


def _first(numbers: Sequence[int]) -> str:
    """Return a list of numbers as text, only the first ones of many."""
    return str(list(numbers)) if len(numbers) <= SHOWN else f"{str(list(numbers[:SHOWN]))[:-1]}, …]"


def _check_extra_warmup(plan: Plan) -> None:
    """Refuse an extra warm-up that is of no use, or with which tiles would deadlock."""
    for number, tile in enumerate(plan.tiles):
        if not tile.extra_warmup:
            continue
        where = f"tile {number}: extra_warmup = {tile.extra_warmup}"
        if plan.schedule != "1f1b" or len(plan.virtual_stages(tile)) > 1:
            raise PlanError(f'{where} is of schedule = "1f1b" with one tile a rank; set it to 0')
        if not plan.downstream(tile):
            raise PlanError(f"{where}, and nothing comes after it that it could warm up for; set it to 0")
        for other in plan.upstream(tile):
            if plan.warm_up(other) < plan.warm_up(tile):
                raise PlanError(
                    f"{where}, so that it wants {plan.warm_up(tile) + 1} microbatches before it sends one back, and"
                    f" tile {plan.tiles.index(other)} before it sends {plan.warm_up(other) + 1}; set extra_warmup of"
                    f" that one to {plan.warm_up(tile) - plan.depth_to_loss(other)} or more"
                )


def _check_virtual_stages(plan: Plan) -> None:
    """Refuse ranks with several tiles that are not virtual stages of an interleaved pipeline: equal but for `items`
    and `recompute`, and as many tiles apart as there are stages."""
    number = {tile: i for i, tile in enumerate(plan.tiles)}
    for first in plan.first_tiles:
        tiles = plan.virtual_stages(first)
        if len(tiles) == 1:
            continue
        numbers = [number[tile] for tile in tiles]
        where = f"tiles {', '.join(map(str, numbers))} have the same ranks {list(first.ranks)[:8]}"
        for key in ("tensor", "rows", "family", "zero", "state_share", "row_chunks", "offload"):
            values = [str(getattr(tile, key)) for tile in tiles]
            if len(set(values)) > 1:
                raise PlanError(f"{where}, but different {key}: {', '.join(values)}; make them equal")
        if plan.schedule != "1f1b":
            raise PlanError(f'{where}, and schedule = "{plan.schedule}" is of one tile a rank; set it to "1f1b"')
        length = plan.path_length(first)
        stages = length // len(tiles)
        before = [plan.depth_from_start(tile) for tile in tiles]
        near = {each for tile in tiles for each in (*plan.upstream(tile), *plan.downstream(tile))}
        mixed = [
            tile for tile in near if len(plan.virtual_stages(tile)) != len(tiles) or plan.path_length(tile) != length
        ]
        if (
            mixed
            or length % len(tiles)
            or before != [before[0] % stages + stages * virtual_stage for virtual_stage in range(len(tiles))]
        ):
            raise PlanError(
                f"{where}, with {', '.join(map(str, before))} tiles before them of the {length} from the embedding"
                " to the loss: ranks with several tiles are an interleaved pipeline, in which all have as"
                " many, and of s stages each has every s-th tile; give each rank one tile, or every s-th"
            )


def check_ranks(plan: Plan, num_ranks: int) -> None:
    """Refuse a number of ranks other than the plan's. Raises LaunchError that says which number fits."""
    wanted = len(plan.ranks)
    if num_ranks != wanted:
        raise LaunchError(
            f"the plan is for {counted(wanted, 'rank')} ({plan.describe()}), but MPI started {num_ranks};"
            f' start it with mpirun -n {wanted}, or set plan = "auto"'
        )
