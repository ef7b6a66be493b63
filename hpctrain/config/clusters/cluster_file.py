"""The cluster file: TOML that a person can write, and that a probe writes with comments. See docs/cluster-file.md."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from hpctrain.config.clusters.cluster import Cluster, Profile
from hpctrain.config.clusters.cluster_defaults import SPEEDS, accelerator_of, fill, is_miniature
from hpctrain.config.clusters.device_catalogue import NETWORKS, lookup_network
from hpctrain.config.clusters.truth import Truth
from hpctrain.config.errors import JobError, TopologyError, did_you_mean
from hpctrain.config.paths import is_file, write_text
from hpctrain.config.tables import (
    HEADER,
    Table,
    explain,
    given_values,
    parse_toml,
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
    """Read a file's data, fill it in, and validate it.

    Raises TopologyError with all mistakes of a kind, one a line: first names that do not exist, then tables that are
    wrong, then what tables must have in common, then figures that cannot be meant.
    """
    filled = fill(parse_toml(text, where, TopologyError))
    mistakes = filled.mistakes
    if not mistakes:
        try:
            file = _File.model_validate(filled.tree)
            if not (mistakes := list(doubtful_figures(file, is_rehearsed=file.truth is not None))):
                return file
        except ValidationError as error:
            mistakes = [line for _, text in explain(error, _File) for line in text.splitlines()]
    lines = with_lines(text, dict.fromkeys(mistakes))
    raise TopologyError("\n".join(f"{where}: {line}" for line in lines))


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
# By how the name of a figure ends: the least and the most that is taken, and what is usual.
RANGES = {
    "memory_bytes": (1e5, 1e14, (4e9, 1e12)),
    "bytes_per_second": (1e4, 1e15, (1e9, 1e13)),
    "flops_per_second": (1e6, 1e18, (1e12, 1e16)),
    "latency_seconds": (0.0, 1.0, (1e-7, 1e-3)),
}
NAMES = dict(zip(RANGES, ("bytes", "bytes/s", "FLOP/s", "seconds"), strict=True))
PREFIXES = {
    1e-9: "nano",
    1e-6: "micro",
    1e-3: "milli",
    1e3: "k",
    1e6: "M",
    1e9: "G",
    1e12: "T",
}


def doubtful_figures(cluster: Cluster, is_rehearsed: bool = False) -> Iterator[str]:
    """Yield a question about each typed figure that cannot be meant: a unit forgotten, or applied twice.

    Two rules, which docs/cluster-file.md states:
    1. Every figure that was not measured must be in a wide physical range, whatever the file is for (`RANGES`).
    2. Where the catalogue knows the model or the network, a figure must be within `FACTOR` times of it. Left out are
       CPUs, files with a table `[truth]`, and miniatures for rehearsals: all families are slower and smaller than
       accelerators.
    """
    is_small = is_rehearsed or all(is_miniature(vars(family)) for family in cluster.families.values())
    catalogued = {} if is_small else _catalogued(cluster)
    for key, table in cluster.tables.items():
        for figure in table.given:
            unit = next((unit for unit in RANGES if figure.endswith(unit) and not figure.startswith("host_")), None)
            if unit is None or table.origin_of(figure) == "measured":
                continue
            value, place = getattr(table, figure), f"{key}.{figure}"
            values = {f"{place}.{d}": v for d, v in value.items()} if isinstance(value, dict) else {place: value}
            low, high, usual = RANGES[unit]
            for place, value in values.items():
                known, name = catalogued.get(place, (None, ""))
                is_off = known is not None and not known / FACTOR <= value <= known * FACTOR
                if value and (is_off or not low <= value <= high):
                    yield f"{place} = {_short(value)}: {_question(value, unit, known, name, usual)}"


def _catalogued(cluster: Cluster) -> dict[str, tuple[float, str]]:
    """Return by dotted key what the catalogue has in place of a figure, and of what."""
    result = {}
    for key, family in cluster.families.items():
        entry = accelerator_of(family.model)
        if entry is None or family.kind == "cpu":
            continue
        model = f"a{'n' * (str(family.model)[0] in 'AEIMaeim8')} {family.model}"
        for figure in ("memory_bytes", "memory_bytes_per_second"):
            result[f"families.{key}.{figure}"] = getattr(entry, figure), model
        for dtype, speed in entry.peak_flops_per_second.items():
            result |= {f"families.{key}.{figure}.{dtype}": (speed, f"{model} ({dtype})") for figure in SPEEDS}
    for i, nodes in enumerate(cluster.nodes):
        entries = [accelerator_of(cluster.families[name].model) for name in nodes.devices]
        if known := [entry.link_bytes_per_second for entry in entries if entry]:
            result |= {f"nodes.{i}.link_bytes_per_second": (min(known), "its node")} if all(entries) else {}
        for j, nic in enumerate(nodes.nics):
            if network := lookup_network(cluster.fabrics[nic.fabric].network or ""):
                speed = NETWORKS[network].bytes_per_second, network
                result |= {f"nodes.{i}.nics.{j}.{verb}_bytes_per_second": speed for verb in ("send", "receive")}
    return result


def _question(value: float, unit: str, known: float | None, name: str, usual: tuple[float, float]) -> str:
    meant = known if known is not None else math.sqrt(usual[0] * usual[1])
    has = f"{name} has {_short(known)}" if known is not None else f"usual are {usual[0]:g} to {usual[1]:g}"
    factors = PREFIXES if unit != "latency_seconds" else {f: n for f, n in PREFIXES.items() if f < 1}
    factor = min(factors, key=lambda factor: abs(math.log(value * factor / meant)))
    gap = abs(math.log10(value * factor / meant))
    unit_name = NAMES[unit]
    text = f"{_short(value)} {unit_name}? {has}"
    if gap > 1.5:
        return f"{text}; set it in {unit_name}"
    if factor < 1 and unit != "latency_seconds":
        return f"{text}; if the unit was applied twice write {_scaled(value, factor)}"
    word = PREFIXES[factor] + (unit_name.replace("bytes", "B") if unit != "latency_seconds" else unit_name)
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
