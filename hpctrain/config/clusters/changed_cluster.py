"""Another machine than a cluster file describes: devices added, a family left out, keys set. Works on plain data."""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from hpctrain.config.bounds import MOST_RANKS
from hpctrain.config.clusters.cluster import Cluster, LinkClass
from hpctrain.config.clusters.cluster_defaults import fill
from hpctrain.config.clusters.cluster_file import ClusterFile, parse_cluster_file
from hpctrain.config.clusters.device_catalogue import ACCELERATORS, lookup_accelerator
from hpctrain.config.clusters.figures import Figures
from hpctrain.config.errors import TopologyError, did_you_mean
from hpctrain.config.tables import (
    as_list,
    as_table,
    parse_override,
    parse_toml,
    read_text,
    shorten,
    tables_of,
)

DEVICES_OF_A_NODE = 8
"""Devices of a new node of a family that the cluster does not have."""


class ClusterChanges:
    """Changes of a cluster file, made one after the other."""

    def __init__(self, path: Path):
        """Raises TopologyError where the file cannot be read."""
        self._where = str(path)
        self._tree = parse_toml(read_text(path, TopologyError), self._where, TopologyError)

    def changed(
        self, add: Sequence[str] = (), without: Sequence[str] = (), overrides: Sequence[str] = ()
    ) -> ClusterFile:
        """Return the cluster with all changes. Raises TopologyError that names what is wrong.

        `add` are `family=devices`, a family of the cluster or a model of the catalogue; `without` families;
        `overrides` are `key=value` of the cluster file, where `nics.FABRIC.key` is meant on every node.
        """
        tree = deepcopy(self._tree)
        # Links come last: how many of them there are depends on the models, which may be set too.
        for key, value in sorted(overrides_of(overrides), key=lambda override: _is_link(override[0])):
            _set(tree, key, value)
        if overrides and tree.get("links"):
            _scale_links(
                tree, self.changed().cluster, self._built(tree, [f"--set {each}" for each in overrides]).cluster
            )
        for family in without:
            _remove(tree, family)
        for text in add:
            _add(tree, text)
        changes = [*(f"--set {each}" for each in overrides), *(f"--without {each}" for each in without)]
        changes += [f"--add {each}" for each in add]
        return self._built(tree, changes)

    def _built(self, tree: dict, changes: Sequence[str]) -> ClusterFile:
        """Return the cluster of a changed tree. A mistake in all tables of nodes is reported for the first alone."""
        try:
            return parse_cluster_file(tree, " ".join([self._where, *changes]))
        except TopologyError as error:
            lines = {
                re.sub(r"nodes\.\d+\.(nics\.\d+\.)?", "", line): line for line in reversed(str(error).splitlines())
            }
            raise TopologyError("\n".join(reversed(lines.values()))) from None

    def machines(self, add: Sequence[str], without: Sequence[str], overrides: Sequence[str]) -> dict[str, ClusterFile]:
        """Return the changed clusters by name: by all changes, before that by each alone where that is a cluster.

        Without a change: by each of `usual_changes`. Raises as `changed`.
        """
        kinds = (("--add", "add", add), ("--without", "without", without), ("--set", "overrides", overrides))
        alone = {f"{option} {each}": {name: [each]} for option, name, several in kinds for each in several}
        if not alone:
            usual = usual_changes(self.changed().cluster)
            return {name: self.changed(**what) for name, what in usual.items()}
        whole = self.changed(add, without, overrides)
        if len(alone) == 1:
            return dict.fromkeys(alone, whole)
        result = {}
        for name, what in alone.items():
            with suppress(TopologyError):  # such as a family in place of the only one
                result[name] = self.changed(**what)
        return result | {"all of these": whole}


def overrides_of(overrides: Sequence[str]) -> list[tuple[list[str], Any]]:
    """Return the parts of the key and the value of each override. Raises TopologyError."""
    result = []
    for override in overrides:
        try:
            result.append(parse_override(override))
        except ValueError as error:
            raise TopologyError(f"--set {shorten(repr(override))}: {error}") from None
    return result


def _is_link(key: Sequence[str]) -> bool:
    return len(key) == 3 and (key[0], key[2]) == ("nodes", "link_bytes_per_second")


def _set(tree: dict, key: list[str], value: Any) -> None:
    """Set a key of the file, or of all NICs on a fabric. Raises TopologyError where its table is not there.

    Links that the catalogue fills in get another bandwidth, and stay as many.
    """
    text = f"--set {'.'.join(key)}"
    names = *as_table(tree.get("families")), *as_table(tree.get("fabrics"))
    for name in sorted(names, key=len, reverse=True):
        parts = name.split(".")  # a name may have dots
        if key[1 : 1 + len(parts)] == parts:
            key = [key[0], name, *key[1 + len(parts) :]]
            break
    if key[0] == "nics" and len(key) == 3:
        every = [as_table(nic) for _, nodes in tables_of(tree, "nodes") for nic in as_list(nodes.get("nics"))]
        tables = [nic for nic in every if nic.get("fabric") == key[1]]
        if not tables:
            fabrics = {str(nic.get("fabric")) for nic in every}
            hint = did_you_mean(key[1], fabrics) if fabrics else "; no node has one"
            raise TopologyError(f"{text}: no node has a NIC on '{key[1]}'{hint}")
    else:
        tables = [tree]
        for place, name in enumerate(key[:-1]):
            inside = tables[0]
            known = {str(number): each for number, each in enumerate(inside)} if isinstance(inside, list) else inside
            if name not in known or not isinstance(known[name], dict | list):
                kind = ".".join(key[:place]) or "a cluster file"
                others = [each for each, table in known.items() if isinstance(table, dict | list)]
                hint = did_you_mean(name, [*others, *(["nics"] if not place else [])])
                raise TopologyError(f"{text}: {kind} has no table '{name}'{hint}")
            tables = [known[name]]
        if not isinstance(tables[0], dict):
            raise TopologyError(f"{text}: '{'.'.join(key[:-1])}' is a list; say which table, such as {key[0]}.0")
    if _is_link(key) and dict(tables_of(fill(tree).tree, "nodes"))[".".join(key[:-1])].get("fully_connected"):
        tables[0]["fully_connected"] = True
    for table in tables:
        table[key[-1]] = value
        if key[-1].endswith(Figures.UNITS) and ("origin" in table or "origins" in table):  # typed, so not measured
            table["origins"] = {**as_table(table.get("origins")), key[-1]: "datasheet"}


def _remove(tree: dict, family: str) -> None:
    """Take a family from all nodes, and what only describes it. Raises TopologyError where nothing is left."""
    families = as_table(tree.get("families"))
    if family not in families:
        raise TopologyError(f"--without {shorten(family)}: no such family{did_you_mean(family, families)}")
    del families[family]
    nodes = [table for _, table in tables_of(tree, "nodes")]
    for table in nodes:
        if as_table(table.get("devices")).pop(family, None) is not None:
            table.pop("ranks", None)
    tree["nodes"] = [table for table in nodes if table.get("devices")]
    if not tree["nodes"]:
        raise TopologyError(f"--without {family}: nothing is left of the cluster; --add other devices too, or keep it")
    for table in tree["nodes"]:
        table.pop("ranks", None)
    tree["links"] = [each for _, each in tables_of(tree, "links") if family not in as_list(each.get("families"))]
    tree["profiles"] = [each for _, each in tables_of(tree, "profiles") if each.get("family") != family]
    as_table(as_table(tree.get("truth")).get("devices")).pop(family, None)


def _add(tree: dict, text: str) -> None:
    """Add nodes with devices of a family, like those that it has, or else like the first node. Raises TopologyError."""
    family, _, number = text.partition("=")
    if not number.isdecimal() or not 0 < int(number[:10]) <= MOST_RANKS:
        raise TopologyError(f"--add {shorten(text)}: write it as family=devices, such as h100=8")
    families, nodes = as_table(tree.get("families")), [table for _, table in tables_of(tree, "nodes")]
    model, equal = lookup_accelerator(family), [each for each in nodes if family in as_table(each.get("devices"))]
    if family not in families:
        if model is None:
            hint = did_you_mean(family, [*families, *map(str.lower, ACCELERATORS)])
            raise TopologyError(f"--add {shorten(text)}: neither a family of the cluster nor a model{hint}")
        families[family] = {"model": model}
    alone = [each for each in equal if len(each["devices"]) == 1]
    of_node = as_table((alone or equal or [{}])[0].get("devices")).get(family) or DEVICES_OF_A_NODE
    links = ("link_latency_seconds", "link_bytes_per_second", "fully_connected")
    kept = ("origin", "origins", "nics", *links, "host_memory_bytes")
    new = {key: value for key, value in (alone or equal or [{}])[0].items() if key in kept}
    new.setdefault("nics", next((each["nics"] for each in nodes if each.get("nics")), []))
    full, rest = divmod(int(number), of_node)
    for count, devices in ((full, of_node), (1, rest)):
        if count and devices:
            tree["nodes"] = [*as_list(tree["nodes"]), deepcopy(new) | {"count": count, "devices": {family: devices}}]
    for each in as_list(tree["nodes"]):
        each.pop("ranks", None)


def usual_changes(cluster: Cluster) -> dict[str, dict[str, list[str]]]:
    """Return the changes that say what the parts of a machine are worth, by name, as arguments of `changed`: each
    family left out, one more NIC on each fabric, twice the GB/s of networks and of links, twice the GB of devices."""
    changes: dict[str, dict[str, list[str]]] = {}
    families = {name: family for name, family in cluster.families.items() if cluster.num_of(name)}
    if len(families) > 1:
        changes = {f"without {name}": {"without": [name]} for name in families}
    nics = [(f"nodes.{i}.nics.{j}", nic) for i, nodes in enumerate(cluster.nodes) for j, nic in enumerate(nodes.nics)]
    for name, fabric in cluster.fabrics.items():
        own = [(key, nic) for key, nic in nics if nic.fabric == name] if cluster.num_nodes > 1 else []
        if own:
            if not any(link.times for link in cluster.links if link.fabric == name):
                changes[f"one more NIC on {name}"] = {"overrides": [f"{key}.count={nic.count + 1}" for key, nic in own]}
            speeds = ("send_bytes_per_second", "receive_bytes_per_second")
            twice = [f"{key}.{speed}={2 * getattr(nic, speed)}" for key, nic in own for speed in speeds]
            if fabric.bytes_per_second:
                twice.append(f"fabrics.{name}.bytes_per_second={2 * fabric.bytes_per_second}")
            changes[f"{name}: twice the GB/s"] = {"overrides": twice}
    links = [
        f"nodes.{number}.link_bytes_per_second={2 * nodes.link_bytes_per_second}"
        for number, nodes in enumerate(cluster.nodes)
        if nodes.link_bytes_per_second and nodes.num_devices > 1
    ]
    if links:
        changes["in nodes: twice the GB/s"] = {"overrides": links}
    for name, family in families.items():
        memory = [f"families.{name}.memory_bytes={2 * family.memory_bytes}"]
        changes[f"{name}: twice the GB"] = {"overrides": memory}
    return changes


def _scale_links(tree: dict, before: Cluster, after: Cluster) -> None:
    """Scale the links of a file, which count instead of NICs and fabrics, as what these are was changed.

    Raises TopologyError for another number of NICs where messages were timed: these show how they share the old ones.
    """
    for link, old, new in zip(as_list(tree["links"]), before.links, after.links, strict=True):
        (bandwidth, latency, counts), (faster, later, others) = (_link_figures(each, old) for each in (before, after))
        if counts != others and old.times:
            raise TopologyError(
                f"--set nics.{old.fabric}.count: links of {' and '.join(old.families)} by {old.fabric} have `times`,"
                " measured with the NICs that there are; take `times` out of the file, or set bytes_per_second"
            )
        if old != new or (bandwidth, latency) == (faster, later):  # a link that is set itself is as it is set
            continue
        gain, delay = faster / bandwidth, later / latency if latency else 1.0
        link |= {"bytes_per_second": old.bytes_per_second * gain, "latency_seconds": old.latency_seconds * delay}
        if old.times:
            waits = [min(each.seconds, old.latency_seconds) for each in old.times]
            link["times"] = [
                each.model_dump(exclude_unset=True) | {"seconds": wait * delay + (each.seconds - wait) / gain}
                for each, wait in zip(old.times, waits, strict=True)
            ]


def _link_figures(cluster: Cluster, link: LinkClass) -> tuple[float, float, list[int]]:
    """Return the GB/s, the latency and the numbers of NICs by which a link would be if nobody had measured it."""
    ends = set(link.families)
    if link.fabric is None:
        nodes = [each for each in cluster.nodes if ends <= each.devices.keys()]
        figures = [(each.link_bytes_per_second or 1.0, each.link_latency_seconds or 0.0) for each in nodes]
        return min((each for each, _ in figures), default=1.0), max((each for _, each in figures), default=0.0), []
    nics = [
        nic for each in cluster.nodes if ends & each.devices.keys() for nic in each.nics if nic.fabric == link.fabric
    ]
    fabric = cluster.fabrics[link.fabric]
    speeds = [min(nic.send_bytes_per_second, nic.receive_bytes_per_second) for nic in nics]
    return min([*speeds, fabric.bytes_per_second or math.inf]), fabric.latency_seconds, [nic.count for nic in nics]
