"""What communicates while ranks compute, where the job leaves it open: a value and a reason each."""

from hpctrain.comm.topology import Topology
from hpctrain.job import Overlap


def resolve_overlap(overlap: Overlap, topology: Topology) -> tuple[Overlap, dict[str, str]]:
    """Return the switches with values for those that are `auto`, and the reasons of these by key. Pure.

    It pays where bytes move by something else than the cores that compute. Among CPU ranks of one host there is no such
    thing: what is moved beside a product is taken from the product.
    """
    shared = "all ranks compute on the cores of one host, which would move the bytes too"
    hosts = len({place.host for place in topology.places})
    if not topology.shares_memory:
        tensor = data = z = (True, "a rehearsal's devices and its network are described apart")
    elif topology.has_devices:
        tensor = (True, "devices compute while bytes move")
        several = "collectives of several groups that are under way together may wait for each other on a device"
        data = z = (False, several)
    elif hosts > 1:
        tensor = data = z = (True, f"{hosts} hosts: bytes are on the network meanwhile")
    else:
        tensor = data = z = (False, shared)
    values, reasons = {}, {}
    for key, (value, reason) in {"tensor": tensor, "data": data, "z": z}.items():
        if getattr(overlap, key) is None:
            values[key], reasons[f"overlap.{key}"] = value, f"{'on' if value else 'off'}: {reason}"
    return overlap.model_copy(update=values), reasons
