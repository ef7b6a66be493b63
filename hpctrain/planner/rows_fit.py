"""Checks the memory model against how many rows of the whole model fit when the job was profiled. Pure."""

from hpctrain.config.cluster import Cluster
from hpctrain.planner.cost import Setup
from hpctrain.planner.curves import describe_training
from hpctrain.planner.space import StageChoice
from hpctrain.planner.stack import HPCTRAIN
from hpctrain.planner.stages import Stage, StageCosts
from hpctrain.sharding.grid import TensorGrid

CLEAR_SHARE, CLEAR_ROWS = 0.1, 1
"""By more than this share of the rows, and by more than so many, the model contradicts the profile."""


def memory_warnings(setup: Setup, cluster: Cluster) -> list[str]:
    """Return a warning for each profile of the setup's work that the memory model clearly contradicts.

    Only profiles of as many replicas as the cluster has devices say anything, since these share the state. Where rows
    were limited by the job or by time, not by memory, more may have fit.
    """
    work = describe_training(setup.model, setup.positions, setup.dtype, setup.by_family)
    profiles = [
        p
        for p in cluster.profiles
        if p.work == work and p.replicas == cluster.num_devices and p.largest_rows is not None
    ]
    if not profiles or setup.stack.name != HPCTRAIN.name:
        return []
    costs, result = StageCosts(setup, cluster, ()), []
    for profile in profiles:
        available = cluster.families[profile.family].usable_bytes
        rows, measured = _rows_that_fit(costs, profile.zero, available), profile.largest_rows or 0
        clear = max(CLEAR_ROWS, CLEAR_SHARE * measured)
        if rows < measured - clear or (profile.limited_by == "memory" and rows > measured + clear):
            result.append(
                f"families.{profile.family}: of the whole model {measured} rows fit when it was profiled (ZeRO"
                f" {profile.zero}), {rows} by the memory model: do not trust its verdicts here; compare peaks in a"
                " short run, or set train.global_batch so that plans keep fewer rows"
            )
    return result


def _rows_that_fit(costs: StageCosts, zero: int, available_bytes: int) -> int:
    """Return how many rows of the whole model fit on a device that is one of as many replicas as there are devices."""

    num_devices = costs.cluster.num_devices

    def fits(rows: int) -> bool:
        stage = Stage(0, StageChoice(TensorGrid(), 1, 1), rows, (True, True), zero=zero, holders=num_devices)
        return costs.needs(stage, "none", 1).on_device.at(costs.setup.model.num_layers) <= available_bytes

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
