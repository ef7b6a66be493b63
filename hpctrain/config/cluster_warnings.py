"""Figures of a cluster file that cannot be meant: a unit forgotten, or applied twice.

Two rules, which docs/cluster-file.md states:
1. Every figure that was not measured must be in a wide physical range, whatever the file is for (`RANGES`).
2. Where the catalogue knows the model or the network, a figure must be within `FACTOR` times of it. Left out are CPUs,
   files with a table `[truth]`, and miniatures for rehearsals: all families are slower and smaller than accelerators.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from hpctrain.config.cluster_defaults import accelerator_of
from hpctrain.config.device_catalogue import NETWORKS, lookup_network

FACTOR = 30.0
MINIATURE_FLOPS_PER_SECOND, MINIATURE_BYTES = 1e12, 4e9
"""Every family of a miniature has less than these."""
# By unit of a figure: the least and the most that is taken, what is usual, and the units that people forget.
RANGES = {
    "bytes": (1e5, 1e14, (4e9, 1e12)),
    "bytes_per_second": (1e4, 1e15, (1e9, 1e13)),
    "flops_per_second": (1e6, 1e18, (1e12, 1e16)),
    "seconds": (0.0, 1.0, (1e-7, 1e-3)),
}
NAMES = {"bytes": "bytes", "bytes_per_second": "bytes/s", "flops_per_second": "FLOP/s", "seconds": "seconds"}
PREFIXES = {
    1e-9: "nano",
    1e-6: "micro",
    1e-3: "milli",
    1e3: "k",
    1e6: "M",
    1e9: "G",
    1e12: "T",
}


def doubtful_figures(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return by dotted key a question about each typed figure of a file's data that cannot be meant."""
    doubts = {}
    for key, value, unit, known, name in _figures(tree, "truth" in tree or _is_miniature(tree)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            continue  # that is said otherwise
        low, high, usual = RANGES[unit]
        is_off = known is not None and not known / FACTOR <= value <= known * FACTOR
        if is_off or not low <= value <= high:
            doubts[key] = f"{key} = {_short(value)}: {_question(value, unit, known, name, usual)}"
    return doubts


def _is_miniature(tree: Mapping[str, Any]) -> bool:
    families = [_dict(family) for family in _dict(tree.get("families")).values()]
    for family in families:
        speeds = [*_dict(family.get("peak_flops_per_second")).values()]
        speeds += _dict(family.get("sustained_flops_per_second")).values()
        figures = [(speed, MINIATURE_FLOPS_PER_SECOND) for speed in speeds]
        figures.append((family.get("memory_bytes"), MINIATURE_BYTES))
        if not speeds or not all(isinstance(value, int | float) and value < limit for value, limit in figures):
            return False
    return bool(families)


def _question(value: float, unit: str, known: float | None, name: str, usual: tuple[float, float]) -> str:
    meant = known if known is not None else math.sqrt(usual[0] * usual[1])
    has = f"{name} has {_short(known)}" if known is not None else f"usual are {usual[0]:g} to {usual[1]:g}"
    factors = PREFIXES if unit != "seconds" else {f: n for f, n in PREFIXES.items() if f < 1}
    factor = min(factors, key=lambda factor: abs(math.log(value * factor / meant)))
    gap = abs(math.log10(value * factor / meant))
    unit_name = NAMES[unit]
    text = f"{_short(value)} {unit_name}? {has}"
    if gap > 1.5:
        return f"{text}; set it in {unit_name}"
    if factor < 1 and unit != "seconds":
        return f"{text}; if the unit was applied twice write {_scaled(value, factor)}"
    word = PREFIXES[factor] + (unit_name.replace("bytes", "B") if unit != "seconds" else unit_name)
    return f"{text}; if it is {word} write {_scaled(value, factor)}"


def _short(value: float) -> str:
    if isinstance(value, int) and value < 1e6:
        return str(value)
    if value >= 1e6:
        power = 3 * int(math.log10(value) // 3)
        return f"{value / 10**power:.4g}e{power}"
    return f"{value:g}"


def _scaled(value: float, factor: float) -> str:
    if factor < 1 and value >= 1e6:
        return _short(value * factor)
    return f"{value:g}e{round(math.log10(factor))}" if "e" not in f"{value:g}" else _short(value * factor)


def _figures(tree: Mapping[str, Any], is_miniature: bool) -> Iterator[tuple[str, Any, str, float | None, str]]:
    """Yield for each typed figure its key, value, unit, what the catalogue has in its place, and of what."""
    families, fabrics = _dict(tree.get("families")), _dict(tree.get("fabrics"))
    for name, family in families.items():
        family, key = _dict(family), f"families.{name}"
        known = None if is_miniature or family.get("kind") == "cpu" else accelerator_of(family)
        model = f"an {family['model']}" if known and family["model"][0] in "AEIMaeim8" else f"a {family.get('model')}"
        for figure, unit in (("memory_bytes", "bytes"), ("memory_bytes_per_second", "bytes_per_second")):
            if _is_typed(family, figure):
                like = getattr(known, figure, None)
                yield f"{key}.{figure}", family[figure], unit, like, model
        for figure in ("peak_flops_per_second", "sustained_flops_per_second"):
            for dtype, value in _dict(family[figure] if _is_typed(family, figure) else None).items():
                like = known.peak_flops_per_second.get(dtype) if known else None
                yield f"{key}.{figure}.{dtype}", value, "flops_per_second", like, f"{model} ({dtype})"
    for name, fabric in fabrics.items():
        if _is_typed(_dict(fabric), "latency_seconds"):
            yield f"fabrics.{name}.latency_seconds", fabric["latency_seconds"], "seconds", None, ""
    for i, nodes in enumerate(tree["nodes"] if isinstance(tree.get("nodes"), list) else []):
        nodes = _dict(nodes)
        if _is_typed(nodes, "link_latency_seconds"):
            yield f"nodes.{i}.link_latency_seconds", nodes["link_latency_seconds"], "seconds", None, ""
        if _is_typed(nodes, "link_bytes_per_second"):
            models = [accelerator_of(_dict(families.get(name))) for name in _dict(nodes.get("devices"))]
            known = [model.link_bytes_per_second for model in models if model]
            like = min(known) if known and len(known) == len(models) and not is_miniature else None
            yield (
                f"nodes.{i}.link_bytes_per_second",
                nodes["link_bytes_per_second"],
                "bytes_per_second",
                like,
                "its node",
            )
        for j, nic in enumerate(nodes["nics"] if isinstance(nodes.get("nics"), list) else []):
            nic = _dict(nic)
            fabric = nic.get("fabric")
            called = _dict(fabrics.get(fabric)).get("network") if isinstance(fabric, str) else None
            network = lookup_network(called) if isinstance(called, str) and not is_miniature else None
            for figure in ("send_bytes_per_second", "receive_bytes_per_second"):
                if _is_typed(nic, figure):
                    like = NETWORKS[network].bytes_per_second if network else None
                    yield f"nodes.{i}.nics.{j}.{figure}", nic[figure], "bytes_per_second", like, str(network)

    for i, link in enumerate(tree["links"] if isinstance(tree.get("links"), list) else []):
        for figure, unit in (("latency_seconds", "seconds"), ("bytes_per_second", "bytes_per_second")):
            if _is_typed(_dict(link), figure):
                yield f"links.{i}.{figure}", link[figure], unit, None, ""


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_typed(table: Mapping[str, Any], figure: str) -> bool:
    """Say whether a table has a figure that was not measured."""
    return figure in table and _dict(table.get("origins")).get(figure, table.get("origin")) != "measured"
