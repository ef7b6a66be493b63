"""Why a search chose what it chose, in sentences with the numbers. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from hpctrain.plan.tiling import Tile, counted
from hpctrain.planner.prediction.offload import unknown_hosts
from hpctrain.planner.search.changes import SimulatedPlan
from hpctrain.planner.search.search import SearchResult
from hpctrain.planner.search.space import Shape, names_of
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import is_attention

MIB = 2**20
EQUAL_SHARE = 1e-3
"""Two plans take equally long where they differ by less than this share."""


def reasons(result: SearchResult) -> list[str]:
    """Return what limits the best plan, and what its main choices are better than."""
    best = result.best
    limits = _bottleneck(result), _arrangement(result), _microbatches(result), _schedule(best)
    return [reason for reason in (*limits, *_memory(result), *_unused(result)) if reason]


def runner_up(result: SearchResult) -> str:
    """Say what the second best plan is, and by how much it is slower."""
    if len(result.plans) < 2:
        return ""
    second, names = result.plans[1], [pool.name for pool in result.pools]
    return f"{second.describe(names)}: {_compare(second.seconds, result.best.seconds, 'slower', 'equally fast')}"


def _compare(seconds: float, best: float, more: str = "longer", equal: str = "as long") -> str:
    """Return by how much a step takes longer than the best one, or that it does not."""
    share = seconds / best - 1
    return f"{share:.1%} {more}" if share >= EQUAL_SHARE else f"{equal} (within {EQUAL_SHARE:.1%})"


def _stages(result: SearchResult) -> dict[tuple[str, Interval], tuple[Tile, ...]]:
    """Return the tiles of a rank of each stage of the best plan, by its pools and the first tile's items."""
    plan = result.best.plan
    pool_of = {rank: pool.name for pool in result.pools for ranks in pool.nodes for rank in ranks}
    names = {tile: "+".join(dict.fromkeys(map(pool_of.__getitem__, tile.ranks))) for tile in plan.first_tiles}
    return {(name, tile.items): plan.virtual_stages(tile) for tile, name in names.items()}


def _bottleneck(result: SearchResult) -> str:
    best, stages = result.best, _stages(result)
    plan, costs = best.plan, best.predictor.costs.tiles
    inner = Interval(1, plan.tiles[-1].items.stop - 1)
    busy = [plan.microbatches * sum(costs[tile].seconds for tile in tiles) for tiles in stages.values()]
    names = [
        f"stage {number} ({counted(sum(tile.items.intersect(inner).size for tile in tiles) / 2, 'block')} on {pool})"
        for number, ((pool, _), tiles) in enumerate(stages.items())
    ]
    slowest, fastest = (busy.index(end(busy)) for end in (max, min))
    if len(stages) == 1:
        return f"{names[0]} computes {busy[0]:.4g} s of the step's {best.seconds:.4g} s; no other stage delays it"
    return (
        f"{names[slowest]} is the bottleneck: it computes {busy[slowest]:.4g} s of the step's {best.seconds:.4g} s, the"
        f" most of all; {names[fastest]} computes the least, {busy[fastest]:.4g} s"
    )


def _arrangement(result: SearchResult) -> str:
    if result.best.is_mixed:
        return ""
    names = [pool.name for pool in result.pools]
    resolved = result.best.layout.shape.pipelines
    other, text = _alternative(result, lambda shape: shape.pipelines, result.least_by_arrangement)
    return f"{names_of(resolved, names)}: with {names_of(other, names)} {text}" if text else ""


def _microbatches(result: SearchResult) -> str:
    plan = result.best.plan
    text = f"{counted(plan.microbatches, 'microbatch')} of {counted(plan.rows, 'row')}"
    if result.best.is_mixed:
        return text
    other, longer = _alternative(result, lambda shape: shape.microbatches, result.least_by_microbatches)
    return f"{text}: with {other} {longer}" if longer else text


def _alternative(result: SearchResult, choice: Callable[[Shape], Any], estimates: Mapping) -> tuple[Any, str]:
    """Return the best other value of a choice, and how much longer a step takes with it; no text where none fits.

    Simulated plans are compared where there is one with another value, since they decide; else estimates.
    """
    own = choice(result.best.layout.shape)
    for plan in result.plans:
        if (other := choice(plan.layout.shape)) != own:
            return other, f"a step takes {_compare(plan.seconds, result.best.seconds)}"
    others = {value: seconds for value, seconds in estimates.items() if value != own}
    if not others:
        return None, ""
    other = min(others, key=others.__getitem__)
    return other, f"a step takes about {_than(others[other], estimates[own])}"


def _schedule(best: SimulatedPlan) -> str:
    if best.plain_seconds is None:
        is_cut_inside = any(tile.items.start and not is_attention(tile.items.start) for tile in best.plan.tiles)
        return "cuts are inside of blocks, so that stages take equally long" if is_cut_inside else ""
    longer = f"a step would take {_compare(best.plain_seconds, best.seconds)}"
    if best.is_mixed:
        one, several = "node", "nodes, which have equal parts of its positions"
        if "+" in best.plan.tiles[0].family:
            one, several = "family", "families, which have positions of it by the speed of their devices"
        made_from = f"by the plan of one {one} a tile that it was made from {longer}"
        return f"a row is computed by ranks of several {several}: {made_from}"
    if best.virtual_stages > 1:
        return f"ranks have {best.virtual_stages} virtual stages, so that bubbles are shorter: with one {longer}"
    if best.plan.schedule != "1f1b":
        return f"the schedule is {best.plan.schedule}; by 1F1B bubbles are longer, and {longer}"
    first = max(best.plan.tiles, key=lambda tile: tile.extra_warmup)
    return (
        f"up to {counted(first.extra_warmup, 'microbatch')} more than by 1F1B are in flight (items {list(first.items)},"
        f" {first.family}), since messages would delay them: {longer}"
    )


def _than(other: float, own: float) -> str:
    return _compare(other, own) if other > own else "as long, by an estimate that the simulation corrects"


def _memory(result: SearchResult) -> list[str]:
    best, summary = result.best, []
    stages = [first for first, *_ in _stages(result).values()]

    def which(option: str) -> tuple[str, list[Tile]]:
        """Return the stages with an option of memory, in words and as their first tiles."""
        numbers = [i for i, tile in enumerate(stages) if getattr(tile, option) != "none"]
        words = f"{counted(len(numbers), 'stage')} of {len(stages)}, stage {numbers[0]} the first," if numbers else ""
        return words, [stages[number] for number in numbers]

    words, again = which("recompute")
    if again:
        summary.append(f"{words} would not fit with all activations kept, and computes them again")
    words, offloading = which("offload")
    if offloading:
        memory = next(each.memory for each in best.prediction.memory if each.memory.on_host)
        summary.append(
            f"{words} would not fit, or be slower, without host memory: offload {offloading[0].offload} keeps"
            f" {memory.on_host / MIB:,.1f} MiB of a rank there"
        )
    elif best.layout.is_short_of_memory and not best.is_mixed and (unknown := unknown_hosts(best.predictor.cluster)):
        summary.append(f"memory is short, and {unknown}")
    if row_chunks := {tile.row_chunks for tile in best.plan.tiles if tile.row_chunks > 1}:
        summary.append(
            f"at the loss rows go in {' or '.join(map(str, sorted(row_chunks)))} chunks, one of which is kept at a time"
        )
    fullest = max(best.prediction.memory, key=lambda stage: stage.memory.total / stage.available_bytes)
    used, available = fullest.memory.total, fullest.available_bytes
    summary.append(
        f"ZeRO {fullest.tile.zero}: the fullest rank (items {list(fullest.tile.items)}, {fullest.tile.family})"
        f" needs {used / MIB:,.1f} of {available / MIB:,.1f} MiB"
    )
    return summary


def _unused(result: SearchResult) -> list[str]:
    unused = set(result.best.plan.unused)
    idle = ((pool, sum(rank in unused for ranks in pool.nodes for rank in ranks)) for pool in result.pools)
    return [
        f"{count} of {pool.num_devices} {pool.name} are unused: no plan that uses them was simulated to be faster"
        for pool, count in idle
        if count
    ]
