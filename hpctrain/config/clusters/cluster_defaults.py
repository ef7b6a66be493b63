"""Fills in what a cluster file leaves out and the catalogue knows: a model's figures, its node's link, a network's.

Works on the file's plain data, before it is validated; what a person typed always stays as it is.
"""

from collections.abc import Iterator, Mapping
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

MINIATURE_FLOPS_PER_SECOND = 1e12
"""Every family of a miniature has less than this, and than `MINIATURE_BYTES`."""
LATENCY_SOURCE = "assumed latency"
NEEDED = ("kind", "memory_bytes", "memory_bytes_per_second")
SPEEDS = ("peak_flops_per_second", "sustained_flops_per_second")


@dataclass
class Filled:
    """A file's data with what was filled in."""

    tree: dict[str, Any]
    sources: dict[str, str] = field(default_factory=dict)
    """By dotted key, which data sheet a figure is from."""
    mistakes: list[str] = field(default_factory=list)
    """What could not be looked up, each with its key."""

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
    filled.mistakes += _unknown_names(filled.tree)
    return filled


def _unknown_names(tree: Mapping[str, Any]) -> Iterator[str]:
    """Say which tables name a family or a fabric that the file does not have."""
    families, fabrics = tree.get("families"), tree.get("fabrics", {})
    used: list[tuple[str, Any, Any, str]] = []
    for i, nodes in enumerate(map(as_table, as_list(tree.get("nodes")))):
        used += [("family", name, families, f"nodes.{i}.devices") for name in as_table(nodes.get("devices"))]
        for j, nic in enumerate(as_list(nodes.get("nics"))):
            used.append(("fabric", as_table(nic).get("fabric"), fabrics, f"nodes.{i}.nics.{j}.fabric"))
    for i, link in enumerate(map(as_table, as_list(tree.get("links")))):
        used += [("family", name, families, f"links.{i}.families") for name in as_list(link.get("families"))]
        used.append(("fabric", link.get("fabric"), fabrics, f"links.{i}.fabric"))
    for i, profile in enumerate(map(as_table, as_list(tree.get("profiles")))):
        used.append(("family", profile.get("family"), families, f"profiles.{i}.family"))
    for what, name, known, key in used:
        if isinstance(name, str) and isinstance(known, dict) and name not in known and (known or what == "fabric"):
            yield f"{key}: no {what} '{name}'{did_you_mean(name, known) if known else '; none is described'}"


def accelerator_of(model: object) -> CatalogueEntry | None:
    """Return what the catalogue has of a family's model; None for what is no name of one."""
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
        keys = ["model", *Family.model_fields]
        if misspelt := next((key for key in family if "model" in get_close_matches(key, keys, n=1)), ""):
            if misspelt != "model":  # else the check of types refuses what it is
                filled.mistakes.append(f"families.{name}.{misspelt}: unknown key; did you mean 'model'?")
        elif len(missing) > len(NEEDED):
            filled.mistakes.append(
                f"families.{name}: nothing says what it is; set model, {LIST_COMMAND}; or set {', '.join(missing)}"
            )
        return
    known = accelerator_of(model)
    if known is None:
        hint = did_you_mean(model, ACCELERATORS)
        hint = "" if "known are" in hint else hint.rstrip("?") + "?"
        filled.mistakes.append(
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
        filled.mistakes.append(
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
    if sum(devices.values()) < 2:
        return
    key = f"nodes.{number}"
    if "link_latency_seconds" not in table:
        filled.put(table, key, "link_latency_seconds", LINK_LATENCY_SECONDS, LATENCY_SOURCE, "assumed")
    if any(is_miniature(families.get(name, {})) for name in devices):
        return
    known = [each for name in devices if (each := accelerator_of(families.get(name, {}).get("model")))]
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
        for key in ("send_bytes_per_second", "receive_bytes_per_second"):
            if known and key not in nic:
                network = NETWORKS[known]
                filled.put(nic, f"nodes.{number}.nics.{j}", key, network.bytes_per_second, network.source)


def is_miniature(family: Mapping[str, Any]) -> bool:
    """Say whether a family is slower and smaller than accelerators are, as the families of a miniature are."""
    memory, speeds = (
        family.get("memory_bytes"),
        [speed for key in SPEEDS for speed in as_table(family.get(key)).values()],
    )
    figures = (memory, MINIATURE_BYTES), *((speed, MINIATURE_FLOPS_PER_SECOND) for speed in speeds)
    return all(isinstance(value, int | float) and value < limit for value, limit in figures)


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
