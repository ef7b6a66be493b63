"""Which products are faster with a copy of an operand, or of the result, in another order: measured at the start.

One rank of each family measures for all of them, since what replicas compute must be the same to the last bit; the
others sleep meanwhile.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch

from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.accelerators.bind import DTYPES, bind_accelerator
from hpctrain.config.job import Job, Products
from hpctrain.model.operand_layouts import LAYOUTS_BY_NAME
from hpctrain.model.products import Product, products_of
from hpctrain.plan.tiling import Plan

if TYPE_CHECKING:
    from hpctrain.comm.world import World

SECONDS = 1.0  # for a family's products; who is not through by then has large ones, of which the rest stay as they are
ROUNDS, LEAST_ROUNDS = 9, 3  # of the ways in turn: what else goes on in the machine meets all of them
SHORTEST_SECONDS = 0.3e-3  # of a timing: shorter products are computed several times in it
CLEARLY = 1.1  # times as fast as the plain way, both in the best and in the median round; less may be chance


class Tuned(NamedTuple):
    layout: str
    """Of `hpctrain.model.operand_layouts.LAYOUTS_BY_NAME`."""
    times: float
    """As fast as the plain way; 0 for a product that was too large to be measured."""


def tune_products(world: "World", job: Job, plan: Plan) -> tuple[Products, dict[str, str]]:
    """Return what the job's products become, and the reason by key; what the job names already is not measured again.

    `job` is resolved but for this. All ranks must call.
    """
    if job.products.tune is False:
        return job.products, {}
    if not world.topology.shares_memory:
        reason = "off: what a pretended device takes does not depend on the order of operands"
        return job.products.model_copy(update={"tune": False}), {"products.tune": reason}
    wanted = _wanted(job, plan)
    new = {
        family: [p for p in of if str(p) not in job.products.layouts.get(family, {})] for family, of in wanted.items()
    }
    start, result = time.monotonic(), {}
    if any(new.values()):
        measuring = {family: next(t.ranks[0] for t in plan.tiles if t.family == family) for family in new}
        accelerator = bind_accelerator(world)
        with world.freeing():
            all_ranks = world.group(range(world.size), "products")
            own = [family for family, rank in measuring.items() if rank == world.rank]
            mine = {family: measure(accelerator, new[family]) for family in own}
            all_ranks.barrier()  # whose waiting leaves the cores to who measures, which MPI's own would not
        for part in world.broadcast_object(world.gather_objects(mine)):
            result |= part
    layouts = {
        f: job.products.layouts.get(f, {}) | {name: t.layout for name, t in result.get(f, {}).items()} for f in wanted
    }
    summary = [_format_reason(wanted[family], new[family], result.get(family, {})) for family in wanted]
    if len(wanted) > 1:
        summary = [f"{family}: {of}" for family, of in zip(wanted, summary, strict=True)]
    reason = f"{'; '.join(summary)} ({world.largest(time.monotonic() - start):.2f} s)"
    return Products(tune=True, layouts={**job.products.layouts, **layouts}), {"products.layouts": reason}


def _wanted(job: Job, plan: Plan) -> dict[str, list[Product]]:
    """Return by family the products of all its tiles, the smallest first. Pure, so the same on all ranks."""
    result: dict[str, dict[Product, None]] = {}
    for tile in plan.tiles:
        what = job.train.resolved_dtype, job.data.sequence_length, bool(job.overlap.forward)
        of_tile = products_of(job.model, plan, tile, *what)
        result.setdefault(tile.family, {}).update(dict.fromkeys(of_tile))
    return {family: sorted(of, key=lambda product: (product.flops, product)) for family, of in result.items()}


def _format_reason(wanted: Sequence[Product], new: Sequence[Product], result: Mapping[str, Tuned]) -> str:
    parts, measured = [], [tuned for tuned in result.values() if tuned.times]
    if known := len(wanted) - len(new):
        parts.append(f"{known} of {len(wanted)} products as they were")
    if faster := sorted(tuned.times for tuned in measured if tuned.layout != "plain"):
        parts.append(
            f"{len(faster)} of {len(measured)} measured products with a copy, {faster[0]:.2f} to {faster[-1]:.2f} times"
            " as fast as without"
        )
    elif measured:
        parts.append(f"{len(measured)} measured products without copies, which make none {CLEARLY} times as fast")
    if missing := len(new) - len(measured):
        parts.append(f"{missing} without copies, too large to be measured in {SECONDS:g} s")
    return ", ".join(parts)


def measure(accelerator: Accelerator, products: Sequence[Product], seconds: float = SECONDS) -> dict[str, Tuned]:
    """Return by name the way of each product, the plain one for what is too large to be measured.

    Takes `seconds`, and at most what one product takes `LEAST_ROUNDS` times longer: each has an even share of the time
    that is left, so give the small ones first.
    """
    result, end = {}, time.monotonic() + seconds
    for number, product in enumerate(products):
        share = (end - time.monotonic()) / (len(products) - number)
        rounds = _rounds(accelerator, product, share)
        result[str(product)] = fastest(rounds) if len(rounds) >= LEAST_ROUNDS else Tuned("plain", 0.0)
    return result


def _rounds(accelerator: Accelerator, product: Product, seconds: float) -> list[dict[str, float]]:
    """Return what each way of a product takes, round by round, as many as there is time for; none if it is too long."""
    if seconds <= 0:
        return []
    end = time.monotonic() + seconds
    compute = _computing(accelerator, product)
    compute("plain")
    alone = _seconds(accelerator, compute, "plain", 1)
    if alone * len(LAYOUTS_BY_NAME) * (1 + LEAST_ROUNDS) > seconds:
        return []
    for layout in LAYOUTS_BY_NAME:  # the first time is another matter: memory is taken
        compute(layout)
    repeats = max(1, round(SHORTEST_SECONDS / max(alone, 1e-6)))
    rounds: list[dict[str, float]] = []
    layouts = list(LAYOUTS_BY_NAME)
    while len(layouts) > 1 and len(rounds) < ROUNDS and time.monotonic() < end:
        rounds.append({layout: _seconds(accelerator, compute, layout, repeats) for layout in layouts})
        if len(rounds) == LEAST_ROUNDS:  # most are out of the question by then
            layouts = [layout for layout in layouts if layout == "plain" or _times(rounds, layout) > 1.0]
    return rounds


def _computing(accelerator: Accelerator, product: Product) -> Callable[[str], object]:
    """Return what computes a product by the name of a way, on operands that lie as those of a layer do."""
    dtype, (_, _, m, k, n) = DTYPES[product.dtype], product

    def matrix(rows: int, columns: int) -> torch.Tensor:  # numbers that no device takes a short cut for
        values = torch.linspace(-1.0, 1.0, rows * columns, device=accelerator.device)
        return values.view(rows, columns).to(dtype)

    match product.use:
        case "forward":
            a, b = matrix(m, k), matrix(n, k).t()
        case "input":
            a, b = matrix(m, k), matrix(k, n)
        case _:
            a, b = matrix(k, m).t(), matrix(k, n)
            gradient = torch.zeros(m, n, device=accelerator.device)
            return lambda layout: LAYOUTS_BY_NAME[layout].add(gradient, a, b)
    return lambda layout: LAYOUTS_BY_NAME[layout].multiply(a, b)


def _seconds(accelerator: Accelerator, compute: Callable[[str], object], layout: str, repeats: int) -> float:
    taken = accelerator.stopwatch()
    for _ in range(repeats):
        compute(layout)
    return taken() / repeats


def _times(rounds: Sequence[Mapping[str, float]], layout: str) -> float:
    """Return how many times as fast as the plain way another was, in the best and in the median round at least."""
    best = min(each["plain"] for each in rounds) / min(each[layout] for each in rounds)
    return min(best, median(each["plain"] / each[layout] for each in rounds))


def fastest(rounds: Sequence[Mapping[str, float]]) -> Tuned:
    """Return the way to take, given the seconds of each in every round: the plain one unless another is clearly faster.

    Pure.
    """
    times = {layout: _times(rounds, layout) for layout in rounds[-1]}
    best = max(times, key=times.__getitem__)
    return Tuned(best, times[best]) if times[best] >= CLEARLY else Tuned("plain", 1.0)
