"""Lists the inputs of a prediction that nobody measured or read in a data sheet. Pure."""

from collections.abc import Mapping, Sequence

from hpctrain.config.cluster import Cluster, assumed_figures
from hpctrain.plan.tiling import Tile
from hpctrain.planner.devices import DeviceModel


def list_assumed_inputs(
    cluster: Cluster, devices: Mapping[str, DeviceModel], tiles: Mapping[str, Sequence[Tile]], overlaps: bool
) -> list[str]:
    """Return the inputs that are assumed, by their keys; `tiles` are by the families that a plan uses.

    `overlaps` says whether anything is communicated while ranks compute.
    """
    result = assumed_figures(cluster)
    are_profiled = any(devices[family].profiled for family in tiles)
    for family, of_family in tiles.items():
        device = devices[family]
        result += device.profiled.assumptions(of_family) if device.profiled else device.guesses
        if are_profiled and not device.profiled:
            result.append(f"families.{family}: no profile of this job, which other families have")
        if overlaps and device.family.overlap_slowdown is None:
            times = device.overlap_slowdown
            slower = f"makes overlapped computation take {times} times as long" if times > 1 else "slows nothing"
            result.append(f"families.{family}.overlap_slowdown: communication {slower}")
    return result
