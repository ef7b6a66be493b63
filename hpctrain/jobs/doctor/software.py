"""Compares the software of all ranks: families may have environments of their own, but one hpctrain and one MPI."""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain import __version__
from hpctrain.comm.watchdog.flight import write_ranks
from hpctrain.config.errors import LaunchError
from hpctrain.launch.files import PACKAGE, code_digest

if TYPE_CHECKING:
    from hpctrain.comm.world import World


def grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """Return the values of each key; keys and values in the order of `pairs`."""
    result: dict[Any, list[Any]] = {}
    for key, value in pairs:
        result.setdefault(key, []).append(value)
    return result


class Software(NamedTuple):
    """The software of one rank."""

    version: str
    """The version of hpctrain."""
    package: str
    """The folder that hpctrain is imported from."""
    environment: str
    """The folder of the virtual environment, or of Python."""
    mpi: str
    """The version text of the MPI library."""


def compare_software(world: "World") -> list[Software]:
    """Return the software of each rank, on every rank. All ranks must call.

    Raises LaunchError on all of them where hpctrain or the MPI library differs. The code is read and compared by one
    rank of each host and environment.
    """
    package = os.path.realpath(PACKAGE)
    own = Software(__version__, package, sys.prefix, world.library)
    everybody: list[Software] = world.all_objects(own)
    keys = [(place.host, each.package) for place, each in zip(world.topology.places, everybody, strict=True)]
    reads = len(set(keys)) > 1 and keys.index(keys[world.rank]) == world.rank
    digests = world.all_objects(code_digest() if reads else "")
    of_key = {key: digest for key, digest in zip(keys, digests, strict=True) if digest}
    with world.all_or_none():
        refuse_differences(everybody, [of_key.get(key, "") for key in keys])
    return everybody


def refuse_differences(everybody: Sequence[Software], digests: Sequence[str]) -> None:
    """Raise LaunchError where ranks have another hpctrain, or another MPI library, than rank 0. Pure.

    `digests` are those of the code, by rank.
    """
    codes = [
        f"hpctrain {each.version}" + (f" (code {code})" if code else "")
        for each, code in zip(everybody, digests, strict=True)
    ]
    for what, values, remedy in (
        ("hpctrain", codes, "install the same hpctrain in all environments"),
        ("the MPI library", [each.mpi for each in everybody], "load the same MPI library for all families"),
    ):
        if len(set(values)) > 1:
            groups = grouped(((value, everybody[rank].environment), rank) for rank, value in enumerate(values))
            parts = [f"{value} in {where} on ranks {write_ranks(ranks)}" for (value, where), ranks in groups.items()]
            raise LaunchError(f"{what} is not the same on all ranks: {'; '.join(parts)}; {remedy}")


def describe_environments(everybody: Sequence[Software], families: Sequence[str]) -> str:
    """Say which family runs in which environment; empty where all run in one. Pure."""
    where = grouped((each.environment, family) for each, family in zip(everybody, families, strict=True))
    if len(where) == 1:
        return ""
    parts = [f"{' and '.join(dict.fromkeys(names))} in {environment}" for environment, names in where.items()]
    return f"hpctrain {everybody[0].version} everywhere; {', '.join(parts)}"
