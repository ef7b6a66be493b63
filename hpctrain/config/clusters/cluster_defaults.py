"""Fills in what a cluster file leaves out and the catalogue knows: a model's figures, its node's link, a network's.

Works on the file's plain data, before it is validated; what a person typed always stays as it is.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from hpctrain.config.clusters.cluster import MINIATURE_BYTES, Family
from hpctrain.config.clusters.device_catalogue import (
    ACCELERATORS,
    LINK_LATENCY_SECONDS,
    LIST_COMMAND,
    NETWORKS,
    CatalogueEntry,
    lookup_accelerator,
    lookup_network,
)
from hpctrain.config.errors import did_you_mean
from hpctrain.config.tables import as_list, as_table

LATENCY_SOURCE = "assumed latency"
NEEDED = ("kind", "memory_bytes", "memory_bytes_per_second")
SPEEDS = ("peak_flops_per_second", "sustained_flops_per_second")


@dataclass
class Filled:
    """A file's data with what was filled in."""

    tree: dict[str, Any]
    sources: dict[str, str] = field(default_factory=dict)
    """By dotted key, which data sheet a figure is from."""
    mistakes: dict[str, str] = field(default_factory=dict)
    """By dotted key, what could not be looked up."""
    unresolved: list[str] = field(default_factory=list)
    """Tables whose missing figures follow from another mistake."""

    def put(self, table: dict, at: str, key: str, value: Any, source: str, origin: str | None = "datasheet") -> None:
        """Set a key that a table lacks; `origin` is None for what is no figure."""
        table[key] = value
        self.sources[f"{at}.{key}"] = source
        if origin:
            origins = table.setdefault("origins", {})
            if isinstance(origins, dict):
                origins.setdefault(key, origin)


def fill(tree: Mapping[str, Any]) -> Filled:
    """Return a copy of a cluster file's data, with what the catalogue knows in place of what is left out."""
    filled = Filled(deepcopy(dict(tree)))
    families, fabrics = (_tables(filled.tree.get(name)) for name in ("families", "fabrics"))
    for name, family in families.items():
        _fill_family(filled, name, family)
    for name, fabric in fabrics.items():
        _fill_fabric(filled, name, fabric)
    for i, table in enumerate(map(as_table, as_list(filled.tree.get("nodes")))):
        _fill_link(filled, i, table, families)
        _fill_nics(filled, i, table, fabrics)
    return filled


def accelerator_of(family: Mapping[str, Any]) -> CatalogueEntry | None:
    """Return what the catalogue has of a family's model."""
    model = family.get("model")
    name = lookup_accelerator(model) if isinstance(model, str) else None
    return ACCELERATORS[name] if name else None


def _tables(value: Any) -> dict[str, dict]:
    return {name: table for name, table in as_table(value).items() if isinstance(table, dict)}


def _fill_family(filled: Filled, name: str, family: dict) -> None:
    missing = [key for key in NEEDED if key not in family]
    if not any(speed in family for speed in SPEEDS):
        missing.append(SPEEDS[0])
    model = family.get("model")
    if not missing:
        return
    if not isinstance(model, str):
        misspelt = [key for key in family if "model" in get_close_matches(key, ["model", *Family.model_fields], n=1)]
        if "model" in family or misspelt or len(missing) > len(NEEDED):
            filled.unresolved.append(f"families.{name}")
        if not misspelt and "model" not in family and len(missing) > len(NEEDED):
            filled.mistakes[f"families.{name}.model"] = (
                f"families.{name}: nothing says what it is; set model, {LIST_COMMAND}; or set {', '.join(missing)}"
            )
        return
    known = accelerator_of(family)
    if known is None:
        hint = did_you_mean(model, ACCELERATORS)
        hint = "" if "known are" in hint else hint.rstrip("?") + "?"
        filled.unresolved.append(f"families.{name}")
        filled.mistakes[f"families.{name}.model"] = (
            f"families.{name}.model = {model!r}: not in the catalogue{hint} {LIST_COMMAND};"
            f" or set {', '.join(missing)} yourself"
        )
        return
    figures = {
        "kind": known.kind,
        "memory_bytes": int(known.memory_bytes),
        "memory_bytes_per_second": known.memory_bytes_per_second,
        "peak_flops_per_second": dict(known.peak_flops_per_second),
    }
    for key in missing:
        filled.put(family, f"families.{name}", key, figures[key], known.source, None if key == "kind" else "datasheet")


def _fill_fabric(filled: Filled, name: str, fabric: dict) -> None:
    called = fabric.get("network")
    if not isinstance(called, str):
        return
    known = lookup_network(called)
    if known is None:
        hint = did_you_mean(called, NETWORKS)
        hint += "" if hint.endswith("?") else ";"
        filled.unresolved.append(f"fabrics.{name}")
        filled.mistakes[f"fabrics.{name}.network"] = (
            f"fabrics.{name}.network = {called!r}: not in the catalogue{hint} {LIST_COMMAND};"
            " or leave it out and set latency_seconds, and the bandwidth of its NICs"
        )
    elif "latency_seconds" not in fabric:
        latency = NETWORKS[known].latency_seconds
        filled.put(fabric, f"fabrics.{name}", "latency_seconds", latency, LATENCY_SOURCE, "assumed")


def _fill_link(filled: Filled, number: int, table: dict, families: Mapping[str, dict]) -> None:
    """The link of a node with devices of two models is the slower one's."""
    devices = as_table(table.get("devices"))
    if not all(isinstance(count, int) for count in devices.values()):
        return
    if any(name not in families or f"families.{name}" in filled.unresolved for name in devices):
        filled.unresolved.append(f"nodes.{number}")
    if sum(devices.values()) < 2:
        return
    key = f"nodes.{number}"
    if "link_latency_seconds" not in table:
        filled.put(table, key, "link_latency_seconds", LINK_LATENCY_SECONDS, LATENCY_SOURCE, "assumed")
    if any(_is_miniature(families.get(name, {})) for name in devices):
        filled.unresolved += [key] if all(accelerator_of(families.get(n, {})) for n in devices) else []
        return
    known = [each for name in devices if (each := accelerator_of(families.get(name, {})))]
    if not known or len(known) < len(devices) or "link_bytes_per_second" in table:
        return
    slowest = min(known, key=lambda accelerator: accelerator.link_bytes_per_second)
    source = slowest.source + (", the slower link of the node's models" if len(devices) > 1 else "")
    filled.put(table, key, "link_bytes_per_second", slowest.link_bytes_per_second, source)


def _fill_nics(filled: Filled, number: int, table: dict, fabrics: Mapping[str, dict]) -> None:
    for j, nic in enumerate(map(as_table, as_list(table.get("nics")))):
        fabric = nic.get("fabric")
        if not isinstance(fabric, str):
            continue  # the check of types refuses it
        called = fabrics.get(fabric, {}).get("network")
        known = lookup_network(called) if isinstance(called, str) else None
        if fabric not in fabrics or (called is not None and known is None):
            filled.unresolved.append(f"nodes.{number}.nics.{j}")
        for key in ("send_bytes_per_second", "receive_bytes_per_second"):
            if known and key not in nic:
                network = NETWORKS[known]
                filled.put(nic, f"nodes.{number}.nics.{j}", key, network.bytes_per_second, network.source)


def _is_miniature(family: Mapping[str, Any]) -> bool:
    memory = family.get("memory_bytes")
    return isinstance(memory, int | float) and memory < MINIATURE_BYTES


def describe_sources(sources: Mapping[str, str]) -> list[str]:
    """Return one line for each source, with the figures that are from it, those of one table together."""
    by_source: dict[str, dict[str, list[str]]] = {}
    for key, source in sources.items():
        table, _, figure = key.rpartition(".")
        by_source.setdefault(source, {}).setdefault(table, []).append(figure)
    return [
        f"{source}: " + "; ".join(f"{table} ({', '.join(figures)})" for table, figures in tables.items())
        for source, tables in by_source.items()
    ]
