"""Cuts a cluster into components: equal nodes that one request to the batch system can ask for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.launch import Launch
from hpctrain.config.errors import LaunchError

REQUESTED = (
    "partition",
    "account",
    "qos",
    "constraint",
    "reservation",
    "min_nodes",
    "sbatch",
    "srun",
    "container",
    "mounts",
)
"""Keys of `Launch` that are of a whole node: families that share nodes must agree in them."""


@dataclass(frozen=True)
class Component:
    """Nodes that are asked for together. Ranks are numbered component by component, node by node."""

    num_nodes: int
    devices: Mapping[str, int]
    """Of each node, by family, in their order; the empty name is for a family that hpctrain detects."""
    launch: Mapping[str, Launch]
    """By family."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Of devices, by family, where that is known."""

    @property
    def ranks_per_node(self) -> int:
        return sum(self.devices.values())

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def ranks_of_node(self) -> dict[str, range]:
        """The numbers of a node's ranks by family."""
        ends = accumulate(self.devices.values())
        return {name: range(end - self.devices[name], end) for name, end in zip(self.devices, ends, strict=True)}

    @property
    def request(self) -> Launch:
        """The keys that are of whole nodes."""
        return next(iter(self.launch.values()))

    @property
    def min_nodes(self) -> int:
        return min(self.request.min_nodes or self.num_nodes, self.num_nodes)

    @property
    def cores_per_node(self) -> int | None:
        """The cores that the ranks of a node are said to need; None where some family does not say it."""
        each = [self.launch[name].cores_per_rank for name in self.devices]
        if None in each:
            return None
        return sum(count * (cores or 0) for count, cores in zip(self.devices.values(), each, strict=True))

    @property
    def gres(self) -> dict[str, int]:
        """The resources that Slurm is asked for on each node, with their counts."""
        result: dict[str, int] = {}
        for name, count in self.devices.items():
            if resource := self.launch[name].gres or ("gpu" if self.kinds.get(name, "cpu") != "cpu" else ""):
                result[resource] = result.get(resource, 0) + count
        return result

    def describe(self) -> str:
        """Return what it is in one line, whatever the names: scripts have it in a comment, which a line break ends."""
        nodes = f"{self.num_nodes} node" + ("s" if self.num_nodes > 1 else "")
        each = " and ".join(f"{count} {' '.join(name.split()) or 'ranks'}" for name, count in self.devices.items())
        return f"{nodes} of {each}"


def components_of(cluster: Cluster, where: str) -> tuple[Component, ...]:
    """Return the components of a cluster; tables of nodes with the same devices, one after the other, are one.

    `where` is what errors call the cluster. Raises LaunchError where no batch system could start its ranks in order.
    """
    in_order = [(device.node, device.index) for device in cluster.devices]
    if in_order != sorted(in_order):
        raise LaunchError(
            f"{where}: nodes.*.ranks gives ranks to devices in another order than that of the nodes, in which a"
            " launcher starts them; leave nodes.*.ranks out"
        )
    components: list[Component] = []
    for number, nodes in enumerate(cluster.nodes):
        launch = {name: cluster.families[name].launch or Launch() for name in nodes.devices}
        _check_request(launch, f"{where}: nodes.{number}")
        devices = dict(nodes.devices)
        kinds = {name: cluster.families[name].kind for name in devices}
        count = nodes.count
        if components and list(components[-1].devices.items()) == list(devices.items()):
            count += components.pop().num_nodes
        components.append(Component(count, devices, launch, kinds))
    for component in components:
        if (component.request.min_nodes or 0) > component.num_nodes:
            raise LaunchError(
                f"{where}: families.{next(iter(component.devices))}.launch.min_nodes {component.request.min_nodes} is"
                f" more than the {component.num_nodes} nodes that there are; lower it"
            )
    return tuple(components)


def _check_request(launch: Mapping[str, Launch], where: str) -> None:
    (first, first_launch), *others = launch.items()
    for name, other_launch in others:
        for key in REQUESTED:
            values = getattr(first_launch, key), getattr(other_launch, key)
            if values[0] != values[1]:
                raise LaunchError(
                    f"{where}: has families '{first}' and '{name}' on one node, but launch.{key} is {values[0]!r} for"
                    f" one and {values[1]!r} for the other; set both the same"
                )
