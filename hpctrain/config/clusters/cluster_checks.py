"""Checks what tables of a cluster file must have in common: names that exist, ranks that fit, fabrics that connect.

Works on plain data, so that a file with a broken table is checked in all others: each check leaves out what it cannot
read, since that is said elsewhere.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hpctrain.config.bounds import MOST_RANKS
from hpctrain.config.errors import did_you_mean
from hpctrain.config.tables import as_list, as_table, tables_of


def inconsistencies(tree: Mapping[str, Any]) -> list[str]:
    """Return all of them, each with the key that is to blame."""
    nodes = [as_table(table) for table in as_list(tree.get("nodes"))]
    checks = {"families": _family_mistakes, "nodes": _node_mistakes, "profiles": _profile_mistakes}
    return [
        *(
            f"{key}: {mistake}"
            for section, check in checks.items()
            for key, table in tables_of(tree, section)
            for mistake in check(table)
        ),
        *_unknown_names(tree),
        *_repeated(tree),
        *_wrong_ranks(nodes),
        *_unconnected(nodes),
        *_too_many(nodes),
    ]


def _family_mistakes(family: Mapping[str, Any]) -> Iterator[str]:
    if not family.get("peak_flops_per_second") and not family.get("sustained_flops_per_second"):
        yield "no speed: set peak_flops_per_second or sustained_flops_per_second, by dtype"
    memory, reserved = family.get("memory_bytes"), family.get("reserved_bytes")
    if isinstance(memory, int | float) and isinstance(reserved, int | float) and 0 < memory <= reserved:
        yield f"reserved_bytes {reserved:.0f} leaves nothing of memory_bytes {memory:.0f}; lower it"
    products = [as_table(product) for product in as_list(family.get("products"))]
    known = [f"{product.get('dtype')} {as_list(product.get('shape'))}" for product in products]
    for product in dict.fromkeys(name for name in known if known.count(name) > 1):
        yield f"products has {product} twice; keep one"


def _node_mistakes(nodes: Mapping[str, Any]) -> Iterator[str]:
    total = _num_devices(nodes)
    if total is None:
        return
    count = nodes.get("count", 1)
    devices = total // count
    keys = ("link_latency_seconds", "link_bytes_per_second")
    if devices > 1 and (missing := [key for key in keys if nodes.get(key) is None]):
        yield f"{devices} devices on a node, and nothing said of the link between them; set {' and '.join(missing)}"
    ranks = nodes.get("ranks")
    if isinstance(ranks, list | tuple) and len(ranks) != total:
        yield f"{len(ranks)} ranks for {count} x {devices} devices; give one for each, or none"


def _profile_mistakes(profile: Mapping[str, Any]) -> Iterator[str]:
    rows = [as_table(times).get("rows") for times in as_list(profile.get("times"))]
    numbers = [number for number in rows if isinstance(number, int)]
    if len(numbers) == len(rows) and numbers != sorted(set(numbers)):
        yield f"times are of rows {rows}; list each number of rows once, in ascending order"


def _unknown_names(tree: Mapping[str, Any]) -> Iterator[str]:
    families, fabrics = tree.get("families"), tree.get("fabrics") or {}
    used: list[tuple[str, Any, Any, str]] = []
    for key, nodes in tables_of(tree, "nodes"):
        used += [("family", name, families, f"{key}.devices") for name in as_table(nodes.get("devices"))]
        used += [("fabric", nic.get("fabric"), fabrics, f"{key}.{at}.fabric") for at, nic in tables_of(nodes, "nics")]
    for key, link in tables_of(tree, "links"):
        used += [("family", name, families, f"{key}.families") for name in as_list(link.get("families"))]
        used.append(("fabric", link.get("fabric"), fabrics, f"{key}.fabric"))
    for key, profile in tables_of(tree, "profiles"):
        used.append(("family", profile.get("family"), families, f"{key}.family"))
    for what, name, known, key in used:
        if isinstance(name, str) and isinstance(known, dict) and name not in known:
            hint = did_you_mean(name, known) if known else "; none is described"
            yield f"{key}: no {what} '{name}'{hint}"


def _repeated(tree: Mapping[str, Any]) -> Iterator[str]:
    seen: set[str] = set()
    for key, link in tables_of(tree, "links"):
        families = sorted(map(str, as_list(link.get("families"))))
        name = repr((link.get("fabric"), families))  # the values may be of any type
        if families and name in seen:
            yield f"{key}: these families' link is described above already; keep one"
        seen.add(name)
    for key, profile in tables_of(tree, "profiles"):
        work = [profile.get(part) for part in ("family", "work", "zero")]
        if None not in work and repr(work) in seen:
            yield f"{key}: this family's work in this ZeRO stage is above already; keep one"
        seen.add(repr(work))


def _num_devices(table: Mapping[str, Any]) -> int | None:
    """Return those of all nodes of a table; None where that cannot be read."""
    devices, count = as_table(table.get("devices")), table.get("count", 1)
    if not devices:
        return None
    sizes = [count, *devices.values()]
    return count * sum(devices.values()) if all(type(size) is int and size > 0 for size in sizes) else None


def _too_many(nodes: list[dict]) -> Iterator[str]:
    total = sum(_num_devices(table) or 0 for table in nodes)
    if total > MOST_RANKS:
        yield f"nodes: have {total:,} devices; lower count or devices to {MOST_RANKS:,} in all"


def _wrong_ranks(nodes: list[dict]) -> Iterator[str]:
    listed = [table.get("ranks") for table in nodes]
    if all(ranks is None for ranks in listed):
        return
    for i, ranks in enumerate(listed):
        if ranks is None:
            yield f"nodes.{i}.ranks: missing, other nodes have theirs; set it for all or for none"
    sizes = [_num_devices(table) for table in nodes]
    whole = all(isinstance(ranks, list | tuple) and all(type(rank) is int for rank in ranks) for ranks in listed)
    given = [ranks or () for ranks in listed]
    if None in sizes or not whole or [len(ranks) for ranks in given] != sizes:
        return  # said of the nodes themselves
    total = sum(map(len, given))
    if missing := sorted(set(range(total)) - {rank for ranks in given for rank in ranks}):
        yield f"nodes.*.ranks: rank {missing[0]} is in none of them; list 0 to {total - 1} once each"


def _fabrics(table: Mapping[str, Any]) -> Collection[str] | None:
    nics = table.get("nics", [])
    if not isinstance(nics, list | tuple):
        return None
    names = [as_table(nic).get("fabric") for nic in nics]
    known = frozenset(name for name in names if isinstance(name, str))
    return known if all(isinstance(name, str) for name in names) else None


def _unconnected(nodes: list[dict]) -> Iterator[str]:
    """Say which kinds of nodes have no fabric in common, each pair of kinds once."""
    kinds: dict[Collection[str], list[int]] = {}
    for i, table in enumerate(nodes):
        fabrics = _fabrics(table)
        if fabrics is not None:
            kinds.setdefault(fabrics, []).append(i)
    for place, (here, tables) in enumerate(kinds.items()):
        for there, others in list(kinds.items())[place:]:
            several = here != there or len(tables) > 1 or nodes[tables[0]].get("count", 1) != 1
            if several and not set(here) & set(there):
                yield (
                    f"nodes.{tables[0]} and nodes.{others[-1]}: no fabric in common"
                    f" ({', '.join(sorted(here)) or 'none'}; {', '.join(sorted(there)) or 'none'});"
                    " give both a NIC on the same one"
                )
