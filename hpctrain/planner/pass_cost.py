"""What a pass over one layer takes on a tile, with what it exchanges. Pure."""

from collections.abc import Container, Sequence

from hpctrain.comm.network import ClusterNetwork, Crowd
from hpctrain.plan.tiling import Tile
from hpctrain.planner.cost import Setup
from hpctrain.planner.devices import DeviceModel
from hpctrain.planner.prices import PassCost, slowed_by
from hpctrain.planner.work import Exchange, PassWork


def pass_cost(
    setup: Setup,
    network: ClusterNetwork,
    devices: Sequence[DeviceModel],
    work: PassWork,
    tile: Tile,
    data_ranks: Sequence[int],
    sharers: Crowd | None = None,
) -> PassCost:
    """Return what a pass over one layer takes on a tile whose ranks have such `devices`, the slowest of which counts.

    `data_ranks` hold the same weights as the tile's first rank; all `sharers` are in groups like that.

    Of what is overlapped (`setup.overlaps`, and over holders with `setup.bucket_bytes`) the exposed part counts, and by
    how much computing is slower meanwhile:
    - sums behind a product: what is longer than the product;
    - sums overlapped with the other half of the rows: what outlasts that half;
    - weights and gradients over z and over holders: what outlasts all else, as the next layer's weights come while
      this one computes.
    """
    moved = {"z": 0.0, "data": 0.0}
    coming = {"all_gather": 0.0, "reduce_scatter": 0.0}
    overlapped = {axis for axis, is_on in (("z", "z" in setup.overlaps), ("data", setup.bucket_bytes)) if is_on}
    times, slowed = max(device.overlap_slowdown for device in devices), 0.0
    compute = max(work.seconds(device, setup.dtype, setup.stack) for device in devices)
    waited = {"tensor": 0.0, "data": 0.0}
    # A product that is computed again may have the shape of one of a weight, and is not it.
    products = {id(each) for each in work.products}
    axes = {axis: tile.axis_ranks(axis, tile.ranks[0]) for axis in {e.axis for e in work.exchanges} - {"data"}}
    for exchange in work.exchanges:
        what, part = (exchange.operation, exchange.num_bytes), "data" if exchange.axis == "data" else "tensor"
        ranks, crowd = (data_ranks, sharers) if part == "data" else (axes[exchange.axis], network.crowd(tile.ranks))
        seconds = network.group_seconds(*what, ranks, crowd)
        if exchange.axis in overlapped:
            moved[exchange.axis] += seconds
            coming[exchange.operation] += seconds
            continue
        if part == "tensor" and (meanwhile := _overlapped_work(exchange, work, products, setup)) is not None:
            hidden = min(seconds, *(meanwhile.seconds(device, setup.dtype, setup.stack) for device in devices))
            longer = slowed_by(hidden, seconds, setup.stack.tensor_slowdown or times)
            slowed, seconds = slowed + longer, max(0.0, seconds - hidden - longer)
        waited[part] += seconds
    moving = sum(moved.values())
    slowed = min(slowed + slowed_by(min(moving, compute), moving, times), compute * (times - 1))
    # One after the other, as they share the links.
    late = max(0.0, moving - compute - slowed - sum(waited.values()))
    of_data = min(late, moved["data"])
    return PassCost(compute + slowed, waited["tensor"] + late - of_data, waited["data"] + of_data, *coming.values())


def _overlapped_work(exchange: Exchange, work: PassWork, products: Container[int], setup: Setup) -> PassWork | None:
    """Return what of a pass, which has these `products`, overlaps a sum over the tensor grid; None: nothing does."""
    if "tensor" not in setup.overlaps:
        return None
    if (behind := exchange.behind) and id(behind) in products:
        return PassWork([behind], passes=work.passes)
    return exchange.overlapped
