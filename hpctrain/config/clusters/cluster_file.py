"""The cluster file: TOML that a person can write, and that a probe writes with comments. See docs/cluster-file.md."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from hpctrain.config.clusters.cluster import Cluster, Profile
from hpctrain.config.clusters.cluster_defaults import fill
from hpctrain.config.clusters.truth import Truth
from hpctrain.config.errors import JobError, TopologyError, did_you_mean
from hpctrain.config.paths import is_file, write_text
from hpctrain.config.tables import (
    HEADER,
    Table,
    explain,
    given_values,
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


class _Tables(Cluster):
    truth: Truth | None = None


class ClusterFile(NamedTuple):
    """The content of a cluster file."""

    cluster: Cluster
    truth: Truth | None
    """The table `[truth]`: for pretend devices alone."""
    sources: dict[str, str]
    """The source of each figure that the file leaves out, by dotted key."""


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


def read_cluster_file(reference: str | Path) -> ClusterFile:
    """Read a cluster file, or a ready one by its name. Raises TopologyError that names file and key."""
    path = locate_cluster(reference)
    return parse_cluster_file(read_text(path, TopologyError), str(path))


def load_cluster(reference: str | Path) -> Cluster:
    """Read the cluster of `read_cluster_file` alone."""
    return read_cluster_file(reference).cluster


def parse_cluster(text: str, where: str) -> Cluster:
    """Read the cluster of `parse_cluster_file` alone; `where` is what errors call it."""
    return parse_cluster_file(text, where).cluster


def parse_cluster_file(content: str | Mapping[str, Any], where: str) -> ClusterFile:
    """Read all tables of TOML, or of its plain data, and fill in what they leave out. `where` is what errors call it.

    Raises TopologyError: with all mistakes in single tables, or, where there are none, with all between tables. Those
    of a text have their lines.
    """
    text = content if isinstance(content, str) else ""
    tree, repeated = (content, []) if isinstance(content, Mapping) else parse_toml_once(content, where, TopologyError)
    filled, tables = fill(tree), None
    mistakes = [*repeated, *filled.mistakes.values()]
    try:
        tables = _Tables.model_validate(filled.tree)
    except ValidationError as error:
        findings = [text for key, text in explain(error, _Tables) if key not in filled.mistakes]
        mistakes += [line for text in findings for line in text.splitlines()]
    if mistakes or tables is None:
        lines = with_lines(text, dict.fromkeys(mistakes))
        raise TopologyError("\n".join(f"{where}: {line}" for line in lines))
    cluster = Cluster.model_construct(**{name: getattr(tables, name) for name in Cluster.model_fields})  # valid by now
    return ClusterFile(cluster, tables.truth, filled.sources)


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
    """Return a cluster file's text with new profiles: each replaces the one with its key, or follows the others.

    Each may have a comment; everything else stays as it is. Raises TopologyError if the file is wrong, or written so
    that its profiles cannot be distinguished from the rest.
    """
    new, before = {profile.key for profile in profiles}, parse_cluster_file(text, where)
    kept = tuple(profile for profile in before.cluster.profiles if profile.key not in new)
    wanted = before.cluster.model_copy(update={"profiles": (*kept, *profiles)})
    keys = {f"profiles.{number}": comment for number, comment in enumerate(comments, len(kept))}
    lines = [*_without_profiles(text.splitlines()), *_listed("profiles", wanted.profiles, keys)]
    result = "\n".join(lines).rstrip("\n") + "\n"
    with suppress(TopologyError):
        if parse_cluster_file(result, where)[:2] == (wanted, before.truth):
            return result
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
