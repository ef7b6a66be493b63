"""Cluster files for tests: each function returns the text of one table, whose figures a test may replace."""

import json
from collections.abc import Mapping

SPEEDS = {"peak_flops_per_second", "sustained_flops_per_second"}


def family(name: str, flops_per_second: float = 1e9, **more: object) -> str:
    """Return the table of a family of CPUs; `more` are further keys, or other values. A speed there is the only one."""
    speeds = {} if SPEEDS & more.keys() else {"sustained_flops_per_second": {"fp32": flops_per_second}}
    figures = {"kind": "cpu", "origin": "assumed", "memory_bytes": 2e9, "memory_bytes_per_second": 1e10}
    return table(f"[families.{name}]", figures | speeds | more)


def nodes(
    devices: Mapping[str, int],
    nic_bytes_per_second: float | None = 1e8,
    fabric: str = "net",
    num_nics: int = 1,
    origin: str = "assumed",
    **more: object,
) -> str:
    """Return the table of equal nodes with so many devices of each family, and NICs of that bandwidth, or none."""
    figures: dict[str, object] = {"origin": origin, "devices": devices}
    figures |= {"link_latency_seconds": 1e-5, "link_bytes_per_second": 1e9} | more
    if nic_bytes_per_second is not None:
        bandwidths = dict.fromkeys(("send_bytes_per_second", "receive_bytes_per_second"), nic_bytes_per_second)
        figures["nics"] = [{"fabric": fabric, "origin": origin, "count": num_nics} | bandwidths]
    return table("[[nodes]]", figures)


def fabric(name: str = "net", latency_seconds: float = 1e-4, origin: str = "assumed") -> str:
    """Return the table of a fabric."""
    return table(f"[fabrics.{name}]", {"origin": origin, "latency_seconds": latency_seconds})


def table(header: str, figures: Mapping[str, object]) -> str:
    """Return a table under a header such as `[truth.devices.fast]`."""
    return "\n".join((header, *(f"{key} = {_toml(value)}" for key, value in figures.items()), ""))


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
