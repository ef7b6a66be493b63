"""Other people's runs on nodes of several accelerators, beside what `DescribedRun` says of one kind."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Self

from hpctrain.config.clusters.cluster import Cluster, Fabric, Nic, Nodes
from hpctrain.config.clusters.device_catalogue import ACCELERATORS, LINK_LATENCY_SECONDS, NETWORKS
from hpctrain.plan.tiling import Plan
from hpctrain.software.run import DescribedRun


@dataclass(frozen=True)
class NodeGroup:
    """Nodes that are equal."""

    accelerator: str
    devices_per_node: int
    count: int
    link_bytes_per_second: float
    nic_bytes_per_second: float
    """Of the one NIC of a node."""


@dataclass(frozen=True)
class MixedRun(DescribedRun):
    """A run on nodes in their order; `accelerator` is that of the first."""

    groups: tuple[NodeGroup, ...] = ()

    @classmethod
    def of(cls, run: DescribedRun, *groups: NodeGroup) -> Self:
        """Return a run as on these nodes."""
        return cls(**{field.name: getattr(run, field.name) for field in fields(run)}, groups=groups)

    @cached_property
    def plan(self) -> Plan:
        """Return the plan; each tile is of the family, or families, that its ranks are of."""
        plan = DescribedRun.plan.func(self)
        kinds = [group.accelerator for group in self.groups for _ in range(group.count * group.devices_per_node)]
        tiles = (
            replace(tile, family="+".join(dict.fromkeys(kinds[rank] for rank in tile.ranks))) for tile in plan.tiles
        )
        return replace(plan, tiles=tuple(tiles))

    @cached_property
    def cluster(self) -> Cluster:
        nodes = [
            Nodes(
                origin="datasheet",
                count=group.count,
                devices={group.accelerator: group.devices_per_node},
                link_latency_seconds=LINK_LATENCY_SECONDS,
                link_bytes_per_second=group.link_bytes_per_second,
                nics=(
                    Nic(
                        origin="datasheet",
                        fabric=self.network,
                        count=1,
                        send_bytes_per_second=group.nic_bytes_per_second,
                        receive_bytes_per_second=group.nic_bytes_per_second,
                    ),
                ),
            )
            for group in self.groups
        ]
        names = dict.fromkeys(group.accelerator for group in self.groups)
        latency = NETWORKS[self.network].latency_seconds
        return Cluster(
            families={name: ACCELERATORS[name].family(name, reserved_bytes=0) for name in names},
            fabrics={self.network: Fabric(origin="datasheet", latency_seconds=latency)},
            nodes=tuple(nodes),
        )
