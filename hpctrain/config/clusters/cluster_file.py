"""The cluster file: TOML that a person can write, and that a probe writes with comments. See docs/cluster-file.md."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpctrain.config.clusters.cluster import MINIATURE_BYTES, Cluster, Profile
from hpctrain.config.clusters.cluster_checks import NO_LINK, NO_SPEED, inconsistencies, table_mistakes
from hpctrain.config.clusters.cluster_defaults import SPEEDS, accelerator_of, fill
from hpctrain.config.clusters.device_catalogue import NETWORKS, lookup_network
from hpctrain.config.clusters.truth import Truth
from hpctrain.config.errors import JobError, TopologyError, did_you_mean
from hpctrain.config.paths import is_file, write_text
from hpctrain.config.tables import (
    HEADER,
    Table,
    as_list,
    as_table,
    explain,
    given_values,
    misspelt,
    parse_toml,
    parse_toml_once,
    read_text,
    shorten,
    toml_comment,
    toml_key,
    toml_value,
    with_lines,
)

LINE = 110
READY_MADE = Path(__file__).parents[2] / "jobs" / "clusters"


class _File(Cluster):
    truth: Truth | None = None


def ready_clusters() -> dict[str, Path]:
    """Return the cluster files that come with hpctrain, by name."""
    return {path.stem: path for path in sorted(READY_MADE.glob("*.toml"))}


def locate_cluster(reference: str | Path) -> Path:
    """Return the path of a cluster file, or of the ready one of that name. Raises TopologyError if there is neither."""
    path, ready = Path(reference), ready_clusters()
    if is_file(path) or path.suffix == ".toml":  # who reads the file reports that it is missing
        return path
    if str(reference) not in ready:
        hint = did_you_mean(str(reference), ready)
        raise TopologyError(f"{shorten(reference)}: no such cluster file, nor a ready one of that name{hint}")
    return ready[str(reference)]


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file, `[truth]` left out. Raises TopologyError that names file and key."""
    return parse_cluster(read_text(path, TopologyError), str(path))


def parse_cluster(text: str, where: str) -> Cluster:
    """Read a cluster from TOML; `where` is what errors call it. Raises TopologyError."""
    file = _parse(text, where)
    return Cluster(**{name: getattr(file, name) for name in Cluster.model_fields})


def load_truth(path: Path) -> Truth | None:
    """Read the table `[truth]` of a cluster file, None where it has none. For pretend devices alone.

    Raises TopologyError as `load_cluster` does.
    """
    return parse_truth(read_text(path, TopologyError), str(path))


def parse_truth(text: str, where: str) -> Truth | None:
    """Read the table `[truth]` from TOML; see `load_truth` and `parse_cluster`."""
    return _parse(text, where).truth


def filled_figures(path: Path) -> dict[str, str]:
    """Return by dotted key where each figure that a cluster file leaves out is from. Raises as `load_cluster`."""
    text = read_text(path, TopologyError)
    _parse(text, str(path))
    return fill(parse_toml(text, str(path), TopologyError)).sources


def _parse(text: str, where: str) -> _File:
    """Read a file's data, fill it in, and validate it. Raises TopologyError with all mistakes, one a line."""
    tree, repeated = parse_toml_once(text, where, TopologyError)
    filled, result = fill(tree), None
    doubts = doubtful_figures(tree)
    lines = [*repeated, *filled.mistakes.values(), *doubts.values()]
    try:
        result = _File.model_validate(filled.tree)
    except ValidationError as error:
        problems = [(key, text) for key, text in explain(error, _File) if key and key not in doubts]
        problems += [(key, f"{key}: {text}") for key, text in table_mistakes(filled.tree)]
        known = filled.unresolved, misspelt(error, _File)
        causes = [text for key, text in problems if not _follows(key, text, *known)]
        others = inconsistencies(filled.tree)
        lines += [*causes, *others] if lines or causes or others else [text for _, text in problems]
    if lines or result is None:
        lines = with_lines(text, dict.fromkeys(lines))
        raise TopologyError("\n".join(f"{where}: {line}" for line in lines))
    return result


def _follows(key: str, text: str, unresolved: Sequence[str], typos: Collection[str]) -> bool:
    """Say whether a mistake in a model, a network, a fabric or a name is the only reason why a figure is missing."""
    is_missing = text.endswith(": missing; set it") or NO_LINK in text or NO_SPEED in text
    misspelt_here = [typo for typo in typos if typo.rpartition(".")[0] == key and typo.rpartition(".")[2] in text]
    return is_missing and (bool(misspelt_here) or any(f"{key}.".startswith(f"{table}.") for table in unresolved))


def dump_cluster(cluster: Cluster, comments: Mapping[str, str] | None = None, truth: Truth | None = None) -> str:
    """Write TOML that `load_cluster` reads back to an equal cluster.

    `comments` are by dotted key, such as "families.cpu.memory_bytes" or "links.0", and "" for the head of the file.
    """
    comments = comments or {}
    lines = _comment("", comments)
    for kind, tables in (("families", cluster.families), ("fabrics", cluster.fabrics)):
        for name, table in tables.items():
            lines += ["", *_comment(f"{kind}.{name}", comments), f"[{kind}.{toml_key(name)}]"]
            lines += _pairs(table, f"{kind}.{name}", comments)
    for kind, listed in (("nodes", cluster.nodes), ("links", cluster.links), ("profiles", cluster.profiles)):
        lines += _listed(kind, listed, comments)
    if truth:
        lines += ["", *_comment("truth", comments), "[truth]", *_pairs(truth, "truth", comments)]
    return "\n".join(lines).lstrip("\n") + "\n"


def merge_profiles(text: str, where: str, profiles: Sequence[Profile], comments: Sequence[str]) -> str:
    """Return a cluster file's text with new profiles in place of those with their keys, and after the others."""
    new = {profile.key for profile in profiles}
    kept = [profile for profile in parse_cluster(text, where).profiles if profile.key not in new]
    keys = {f"profiles.{number}": comment for number, comment in enumerate(comments, len(kept))}
    return with_profiles(text, where, [*kept, *profiles], keys)


def with_profiles(text: str, where: str, profiles: Sequence[Profile], comments: Mapping[str, str]) -> str:
    """Return the text of a cluster file with these profiles instead of its own; everything else stays as it is.

    `comments` are by key, such as "profiles.0". Raises TopologyError if the file is wrong, or written so that its
    profiles cannot be distinguished from the rest.
    """
    before = _parse(text, where)
    lines = [*_without_profiles(text.splitlines()), *_listed("profiles", profiles, comments)]
    made = "\n".join(lines).rstrip("\n") + "\n"
    with suppress(TopologyError):
        if _parse(made, where) == before.model_copy(update={"profiles": tuple(profiles)}):
            return made
    raise TopologyError(f"{where}: its profiles cannot be distinguished from the rest; remove them, and profile again")


def write_cluster_text(path: Path, text: str) -> None:
    """Write a cluster file so that it is there whole or not at all. Raises JobError where the disk refuses."""
    write_text(path, text, JobError, "choose another --out", synced=True)


def _without_profiles(lines: Sequence[str]) -> list[str]:
    """Leave out the tables [[profiles]], and comments right above them."""
    kept: list[str] = []
    waiting: list[str] = []  # comments and empty lines, which belong to what follows
    inside = False
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            waiting.append(line)
            continue
        if header := HEADER.fullmatch(line):
            was_inside, inside = inside, header[1] == "profiles"
            if inside:
                while waiting and waiting[-1].strip():
                    waiting.pop()
                kept += [] if was_inside else waiting
        if not inside:
            kept += [*waiting, line]
        waiting = []
    while kept and not kept[-1].strip():
        kept.pop()
    return kept + ([] if inside else waiting)


def _listed(kind: str, tables: Sequence[Table], comments: Mapping[str, str]) -> list[str]:
    lines = []
    for i, table in enumerate(tables):
        key = f"{kind}.{i}"
        lines += ["", *_comment(key, comments), f"[[{kind}]]", *_pairs(table, key, comments)]
    return lines


def _comment(key: str, comments: Mapping[str, str]) -> list[str]:
    return toml_comment(comments.get(key, ""), LINE)


def _pairs(table: Table, key: str, comments: Mapping[str, str]) -> list[str]:
    """Return a line for each key that is set; tables inside are written in line, several of them one below another."""
    lines = []
    for name, value in given_values(table).items():
        lines += _comment(f"{key}.{name}", comments)
        if isinstance(value, tuple) and isinstance(value[0], Table):
            lines += [f"{name} = [", *(f"  {toml_value(entry)}," for entry in value), "]"]
        else:
            lines.append(f"{name} = {toml_value(value)}")
    return lines


FACTOR = 30.0
MINIATURE_FLOPS_PER_SECOND = 1e12
"""Every family of a miniature has less than this, and than `MINIATURE_BYTES`."""
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
    """Return by dotted key a question about each typed figure that cannot be meant: a unit forgotten, or applied twice.

    Two rules, which docs/cluster-file.md states:
    1. Every figure that was not measured must be in a wide physical range, whatever the file is for (`RANGES`).
    2. Where the catalogue knows the model or the network, a figure must be within `FACTOR` times of it. Left out are
       CPUs, files with a table `[truth]`, and miniatures for rehearsals: all families are slower and smaller than
       accelerators.
    """
    doubts = {}
    for key, value, unit, known, name in _figures(tree, "truth" in tree or _is_miniature(tree)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            continue  # that is said otherwise
        if value <= 0 or (value < 1 and unit != "seconds"):
            continue  # that too
        low, high, usual = RANGES[unit]
        is_off = known is not None and not known / FACTOR <= value <= known * FACTOR
        if is_off or not low <= value <= high:
            doubts[key] = f"{key} = {_short(value)}: {_question(value, unit, known, name, usual)}"
    return doubts


def _is_miniature(tree: Mapping[str, Any]) -> bool:
    families = [as_table(family) for family in as_table(tree.get("families")).values()]
    for family in families:
        speeds = [*as_table(family.get("peak_flops_per_second")).values()]
        speeds += as_table(family.get("sustained_flops_per_second")).values()
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
    families, fabrics = as_table(tree.get("families")), as_table(tree.get("fabrics"))
    for name, family in families.items():
        family, key = as_table(family), f"families.{name}"
        known = None if is_miniature or family.get("kind") == "cpu" else accelerator_of(family)
        model = f"an {family['model']}" if known and family["model"][0] in "AEIMaeim8" else f"a {family.get('model')}"
        yield from _typed(key, family, ("memory_bytes", "memory_bytes_per_second"), vars(known) if known else {}, model)
        for figure in SPEEDS:
            for dtype, value in as_table(family[figure] if _is_typed(family, figure) else None).items():
                like = known.peak_flops_per_second.get(dtype) if known else None
                yield f"{key}.{figure}.{dtype}", value, "flops_per_second", like, f"{model} ({dtype})"
    for name, fabric in fabrics.items():
        yield from _typed(f"fabrics.{name}", as_table(fabric), ("latency_seconds",))
    for i, nodes in enumerate(map(as_table, as_list(tree.get("nodes")))):
        models = [accelerator_of(as_table(families.get(name))) for name in as_table(nodes.get("devices"))]
        slowest = min((model.link_bytes_per_second for model in models if model), default=None)
        like = {} if is_miniature or None in models else {"link_bytes_per_second": slowest}
        yield from _typed(f"nodes.{i}", nodes, ("link_latency_seconds", "link_bytes_per_second"), like, "its node")
        for j, nic in enumerate(map(as_table, as_list(nodes.get("nics")))):
            fabric, speeds = nic.get("fabric"), ("send_bytes_per_second", "receive_bytes_per_second")
            called = as_table(fabrics.get(fabric)).get("network") if isinstance(fabric, str) else None
            network = lookup_network(called) if isinstance(called, str) and not is_miniature else None
            like = dict.fromkeys(speeds, NETWORKS[network].bytes_per_second) if network else {}
            yield from _typed(f"nodes.{i}.nics.{j}", nic, speeds, like, str(network))
    for i, link in enumerate(map(as_table, as_list(tree.get("links")))):
        yield from _typed(f"links.{i}", link, ("latency_seconds", "bytes_per_second"))


def _typed(
    key: str, table: Mapping[str, Any], figures: Sequence[str], known: Mapping[str, float | None] = {}, name: str = ""
) -> Iterator[tuple[str, Any, str, float | None, str]]:
    """Yield those of some figures of a table that were not measured, as `_figures` does."""
    for figure in figures:
        if _is_typed(table, figure):
            unit = next(unit for unit in RANGES if figure.endswith(unit))
            yield f"{key}.{figure}", table[figure], unit, known.get(figure), name


def _is_typed(table: Mapping[str, Any], figure: str) -> bool:
    """Say whether a table has a figure that was not measured."""
    return figure in table and as_table(table.get("origins")).get(figure, table.get("origin")) != "measured"
