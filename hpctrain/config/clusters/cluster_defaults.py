"""Fills in what a cluster file leaves out and the catalogue knows: a model's figures, its node's link, a network's.

Typed figures that are far from the catalogue's are questioned. Works on the file's plain data, before it is validated;
what a person typed always stays as it is.

All mistakes of a file are reported at once, and nothing that only follows from one of them. So a misspelt key counts as
the key that it means, and a model or a network that cannot be looked up has the figures of another one: the file is
refused in any case, and nothing else is missing in it.
"""

import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from hpctrain.config.clusters.cluster import (
    MINIATURE_BYTES,
    Fabric,
    Family,
    LinkClass,
    Nic,
    Nodes,
    Profile,
)
from hpctrain.config.clusters.device_catalogue import (
    ACCELERATORS,
    LINK_LATENCY_SECONDS,
    LIST_COMMAND,
    NETWORKS,
    CatalogueEntry,
    NetworkEntry,
    lookup,
    lookup_accelerator,
)
from hpctrain.config.errors import did_you_mean
from hpctrain.config.tables import Table, as_list, as_table, tables_of, toml_value

LATENCY_SOURCE = "assumed latency"
NEEDED = ("kind", "memory_bytes", "memory_bytes_per_second")
PEAK, SUSTAINED = "peak_flops_per_second", "sustained_flops_per_second"
FAR = 30.0
"""By how many times a typed figure may be more or less than the catalogue's."""
MINIATURE_FLOPS_PER_SECOND = 1e12
"""Every family of a miniature has less than this, and than `MINIATURE_BYTES`."""
UNKNOWN_MODEL = replace(ACCELERATORS["H100"], source="")
UNKNOWN_NETWORK = NETWORKS["NDR"]._replace(source="")
"""In place of a model and a network that cannot be looked up."""
SECTIONS: dict[str, type[Table]] = {
    "families": Family,
    "fabrics": Fabric,
    "nodes": Nodes,
    "links": LinkClass,
    "profiles": Profile,
}


@dataclass
class Filled:
    """A file's data with what was filled in."""

    tree: dict[str, Any]
    is_miniature: bool
    """Whether all families are slower and smaller than accelerators: a rehearsal's, with figures that are scaled."""
    compares: bool
    """Whether typed figures should be those of the catalogue: not in miniatures, and where pretend devices differ."""
    sources: dict[str, str] = field(default_factory=dict)
    """The data sheet of each figure, by dotted key."""
    mistakes: dict[str, str] = field(default_factory=dict)
    """The names that could not be looked up and the figures far from the catalogue's, by dotted key."""

    def put(self, key: str, table: dict, figures: Mapping[str, Any], source: str, origin: str = "datasheet") -> None:
        """Set those of some figures that a table lacks."""
        for figure, value in figures.items():
            if figure not in table:
                table[figure] = value
                self.sources[f"{key}.{figure}"] = source
                origins = table.setdefault("origins", {})
                if figure != "kind" and isinstance(origins, dict):
                    origins.setdefault(figure, origin)

    def compare(self, key: str, typed: Mapping[str, Any], known: Mapping[str, float]) -> None:
        """Question typed figures that are far from what the catalogue has in their place."""
        for figure, value in typed.items():
            expected = known.get(figure)
            if not self.compares or expected is None or type(value) not in (int, float) or not 0 < value < math.inf:
                continue
            if not expected / FAR <= value <= expected * FAR:
                meant = toml_value(float(f"{value * 1000 ** round(math.log(expected / value, 1000)):.6g}"))
                self.mistakes[f"{key}.{figure}"] = (
                    f"{key}.{figure} = {toml_value(value)}: the catalogue has {toml_value(float(f'{expected:.4g}'))};"
                    f" a unit was forgotten, or applied twice; did you mean {meant}?"
                )


def fill(tree: Mapping[str, Any]) -> Filled:
    """Return a copy of a cluster file's data, with what the catalogue knows in place of what is left out."""
    copied = deepcopy(dict(tree))
    for section, kind in SECTIONS.items():
        for _, table in tables_of(copied, section):
            _respell(table, kind.model_fields)
            for nic in as_list(table.get("nics")):
                _respell(as_table(nic), Nic.model_fields)
    limits = []
    for _, family in tables_of(copied, "families"):
        speeds = [*as_table(family.get(PEAK)).values(), *as_table(family.get(SUSTAINED)).values()] or [None]
        limits += [(speed, MINIATURE_FLOPS_PER_SECOND) for speed in speeds]
        limits.append((family.get("memory_bytes"), MINIATURE_BYTES))
    are_less = all(isinstance(value, int | float) and value < limit for value, limit in limits)
    is_miniature = bool(limits) and are_less
    filled = Filled(copied, is_miniature, compares=not is_miniature and "truth" not in copied)
    models = {key.partition(".")[2]: _fill_family(filled, key, table) for key, table in tables_of(copied, "families")}
    networks = {key.partition(".")[2]: _fill_fabric(filled, key, table) for key, table in tables_of(copied, "fabrics")}
    for key, nodes in tables_of(copied, "nodes"):
        _fill_link(filled, key, nodes, models)
        for nic_key, nic in tables_of(nodes, "nics"):
            _fill_nic(filled, f"{key}.{nic_key}", nic, networks)
    return filled


def _respell(table: dict, known: Iterable[str]) -> None:
    """Add the key that each misspelt one means; the misspelt one is refused as unknown."""
    for key in set(table).difference(known):
        for meant in get_close_matches(key, known, n=1):
            table.setdefault(meant, table[key])


def _fill_family(filled: Filled, key: str, family: dict) -> CatalogueEntry | None:
    """Fill in a family; return the catalogue's entry of its model, None where it has none."""
    missing = [figure for figure in NEEDED if figure not in family]
    missing += [] if PEAK in family or SUSTAINED in family else [PEAK]
    model, like = family.get("model"), family.get("like")
    name = lookup_accelerator(model) if isinstance(model, str) else None
    equivalent = lookup_accelerator(like) if isinstance(like, str) else None
    if "like" in family and equivalent is None:
        _refuse_name(filled, f"{key}.like", like, ACCELERATORS, "or leave it out")
    if name or "like" in family:
        entry = ACCELERATORS[name] if name else ACCELERATORS[equivalent] if equivalent else UNKNOWN_MODEL
    elif not missing:
        return None
    elif "model" in family:
        entry, instead = UNKNOWN_MODEL, f"or set {', '.join(missing)} yourself"
        _refuse_name(filled, f"{key}.model", model, ACCELERATORS, instead)
    elif len(missing) > len(NEEDED):
        entry, instead = UNKNOWN_MODEL, f"or set {', '.join(missing)}"
        filled.mistakes[key] = f"{key}: nothing says what it is; set model, {LIST_COMMAND}; {instead}"
    else:
        return None  # each figure is reported as missing
    figures = {
        "kind": entry.kind,
        "memory_bytes": int(entry.memory_bytes),
        "memory_bytes_per_second": entry.memory_bytes_per_second,
    }
    source = entry.source if name or not equivalent else f"taken to be like {equivalent} ({entry.source})"
    origin = "datasheet" if name or not equivalent else "assumed"
    filled.put(key, family, figures, source, origin)
    if PEAK in missing:
        filled.put(key, family, {PEAK: dict(entry.peak_flops_per_second)}, source, origin)
    if name and family.get("kind") != "cpu":
        filled.compare(key, _typed(family, figures), vars(entry))
        for speeds, by_dtype in _typed(family, (PEAK, SUSTAINED)).items():
            filled.compare(f"{key}.{speeds}", as_table(by_dtype), entry.peak_flops_per_second)
    return entry


def _fill_fabric(filled: Filled, key: str, fabric: dict) -> NetworkEntry | None:
    """Fill in a fabric; return the catalogue's entry of its network, None where it names none."""
    if "network" not in fabric:
        return None
    called = fabric["network"]
    name = lookup(called, NETWORKS) if isinstance(called, str) else None
    if name is None:
        instead = "or leave it out and set latency_seconds, and the bandwidth of its NICs"
        _refuse_name(filled, f"{key}.network", called, NETWORKS, instead)
    entry = NETWORKS[name] if name else UNKNOWN_NETWORK
    filled.put(key, fabric, {"latency_seconds": entry.latency_seconds}, LATENCY_SOURCE, "assumed")
    return entry


def _refuse_name(filled: Filled, key: str, name: Any, known: Iterable[str], instead: str) -> None:
    """Report a name that the catalogue does not have; one that is no text is refused by its type."""
    if isinstance(name, str):
        hint = did_you_mean(name, known, likeness=0.7)  # an A40 is no A100-40
        hint = hint if hint.endswith("?") else ";"
        filled.mistakes[key] = f"{key} = {name!r}: not in the catalogue{hint} {LIST_COMMAND}; {instead}"


def _fill_link(filled: Filled, key: str, nodes: dict, models: Mapping[str, CatalogueEntry | None]) -> None:
    """Fill in the link between devices of a node; that of devices of two models is the slower one's."""
    devices = as_table(nodes.get("devices"))
    if not all(isinstance(count, int) for count in devices.values()) or sum(devices.values()) < 2:
        return
    filled.put(key, nodes, {"link_latency_seconds": LINK_LATENCY_SECONDS}, LATENCY_SOURCE, "assumed")
    entries = [entry for name in devices if (entry := models.get(name, UNKNOWN_MODEL))]
    if filled.is_miniature or len(entries) < len(devices):
        return
    slowest = min(entries, key=lambda entry: entry.link_bytes_per_second)
    source = slowest.source + (", the slower link of the node's models" if len(devices) > 1 else "")
    figures = {"link_bytes_per_second": slowest.link_bytes_per_second}
    if "link_bytes_per_second" not in nodes and all(entry.fully_connected for entry in entries):
        # A bandwidth that is typed may be that of all links together.
        source += "; one for each two devices" if nodes.setdefault("fully_connected", True) else ""
    filled.put(key, nodes, figures, source)
    if UNKNOWN_MODEL not in entries:
        filled.compare(key, _typed(nodes, figures), figures)


def _fill_nic(filled: Filled, key: str, nic: dict, networks: Mapping[str, NetworkEntry | None]) -> None:
    fabric = nic.get("fabric")
    entry = networks.get(fabric, UNKNOWN_NETWORK) if isinstance(fabric, str) else UNKNOWN_NETWORK
    if entry:
        speed = entry.bytes_per_second
        figures = {"send_bytes_per_second": speed, "receive_bytes_per_second": speed}
        filled.put(key, nic, figures, entry.source)
        if entry is not UNKNOWN_NETWORK:
            filled.compare(key, _typed(nic, figures), figures)


def _typed(table: Mapping[str, Any], figures: Iterable[str]) -> dict[str, Any]:
    """Return those of some figures that a table has, and that were not measured."""
    origins, origin = as_table(table.get("origins")), table.get("origin")
    return {name: table[name] for name in figures if name in table and origins.get(name, origin) != "measured"}


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
