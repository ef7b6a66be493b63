"""A cluster as a run finds it while it trains: some of its ranks, with devices slower or faster than their family."""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import product

from hpctrain.config.clusters.cluster import Cluster, Device, Family, LinkClass, Nodes, Profile

OWN_SPEED = re.compile(r"-x\d+\.\d\d$")


def names_by_speed(cluster: Cluster, factors: Mapping[int, float], num_ranks: int) -> list[str]:
    """Return the family of each of the first ranks. A rank that needs a factor of its family's time has one of its own,
    such as `v100-x1.40`."""
    names = []
    for device in cluster.devices[:num_ranks]:
        factor = f"{factors.get(device.rank, 1.0):.2f}"
        names.append(device.family if factor == "1.00" else f"{device.family}-x{factor}")
    return names


def has_own_speed(name: str) -> bool:
    """Say whether a family's name is one of `names_by_speed`: its devices do the work of another family's."""
    return OWN_SPEED.search(name) is not None


def without_ranks(cluster: Cluster, lost: Collection[int]) -> Cluster:
    """Return the part of the cluster that is left without some ranks. The others are numbered in their order."""
    devices = [device for device in cluster.devices if device.rank not in lost]
    return with_speeds(cluster, [device.family for device in devices], devices)


def with_speeds(cluster: Cluster, names: Sequence[str], devices: Sequence[Device] = ()) -> Cluster:
    """Return the part of the cluster that the ranks of `names_by_speed` are, with these families.

    They are the first ranks, or those of `devices`.
    """
    devices = devices or cluster.devices[: len(names)]
    factors = {name: (device.family, _factor(name, device.family)) for name, device in zip(names, devices, strict=True)}
    variants: dict[str, list[str]] = {}
    for name, (family, _) in factors.items():
        variants.setdefault(family, []).append(name)
    return Cluster(
        families={name: _slower(cluster.families[family], factor) for name, (family, factor) in factors.items()},
        fabrics=cluster.fabrics,
        nodes=tuple(_nodes(cluster, names, devices)),
        links=tuple(each for link in cluster.links for each in _links(link, variants)),
        profiles=tuple(
            _profile(profile, name, factors[name][1])
            for profile in cluster.profiles
            for name in variants.get(profile.family, ())
        ),
    )


def _factor(name: str, family: str) -> float:
    return float(name.removeprefix(f"{family}-x")) if name != family else 1.0


def _slower(family: Family, factor: float) -> Family:
    speeds = "peak_flops_per_second", "sustained_flops_per_second"
    changes: dict = {key: {dtype: speed / factor for dtype, speed in getattr(family, key).items()} for key in speeds}
    changes["memory_bytes_per_second"] = family.memory_bytes_per_second / factor
    changes["products"] = tuple(
        each.model_copy(update={"flops_per_second": each.flops_per_second / factor}) for each in family.products
    )
    return family.model_copy(update=changes)


def _nodes(cluster: Cluster, names: Sequence[str], devices: Sequence[Device]) -> list[Nodes]:
    """Return tables that list their ranks, since devices of one family need not be neighbours any more."""
    ranks_of: dict[int, list[int]] = {}
    for rank, device in enumerate(devices):
        ranks_of.setdefault(device.node, []).append(rank)
    tables: list[Nodes] = []
    for ranks in ranks_of.values():
        families = list(dict.fromkeys(names[rank] for rank in ranks))
        by_family = {family: [rank for rank in ranks if names[rank] == family] for family in families}
        table = cluster.nodes[devices[ranks[0]].table]
        counts = {family: len(of_family) for family, of_family in by_family.items()}
        order = tuple(rank for of_family in by_family.values() for rank in of_family)
        made, last = table.model_copy(update={"count": 1, "devices": counts, "ranks": order}), tables[-1:]
        if last and last[0].model_copy(update={"count": 1, "ranks": order}) == made:
            more = {"count": last[0].count + 1, "ranks": (*(last[0].ranks or ()), *order)}
            tables[-1] = last[0].model_copy(update=more)
        else:
            tables.append(made)
    return tables


def _links(link: LinkClass, variants: Mapping[str, Sequence[str]]) -> list[LinkClass]:
    pairs = {tuple(sorted(pair)): pair for pair in product(*(variants.get(name, ()) for name in link.families))}
    return [link.model_copy(update={"families": pair}) for pair in pairs.values()]


def _profile(profile: Profile, name: str, factor: float) -> Profile:
    def slower(seconds: tuple[float, float]) -> tuple[float, float]:
        return seconds[0] * factor, seconds[1] * factor

    keys = ("embedding_seconds", "block_seconds", "head_seconds")
    times = tuple(t.model_copy(update={key: slower(getattr(t, key)) for key in keys}) for t in profile.times)
    update = profile.update_seconds and profile.update_seconds * factor
    return profile.model_copy(update={"family": name, "times": times, "update_seconds": update})
