"""The cluster: which devices there are, on which nodes, and what is between them. Frozen data and pure functions.

A probe measures it, or a person types it from data sheets. `hpctrain.config.clusters.cluster_file` reads and writes it.
Every figure says where it is from. Devices are numbered as ranks are, node by node.

How a rehearsal's pretend devices really behave is not known here: see `hpctrain.config.clusters.truth`.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from hpctrain.config.bounds import (
    MOST_MEMORY_BYTES,
    MOST_NUMBER,
    MOST_RANKS,
    Count,
    Rank,
    RankCount,
    Rate,
    Seconds,
    SequenceCount,
    Slowdown,
)
from hpctrain.config.clusters.figures import (
    Bandwidth,
    Bytes,
    Figures,
    LinkLatency,
    MemoryBytes,
    Speed,
    whole_number,
)
from hpctrain.config.clusters.launch import Launch
from hpctrain.config.errors import did_you_mean
from hpctrain.config.tables import Several, Table, refused_for

if TYPE_CHECKING:  # files are checked for these words; the code computes with plain strings
    DType = str
    Kind = str
else:
    DType = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8"]
    Kind = Literal["cpu", "cuda", "rocm", "xpu", "npu", "hpu", "mps"]
ITEM_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
# What a device of an accelerator keeps from a program: the driver's context and libraries' kernels and workspaces
# (0.5 to 1 GB), buffers of communicators, and gaps between the blocks of its allocator, in proportion to its memory.
# An assumption, and listed as one. A rehearsal's miniature, smaller than any accelerator, counts memory exactly.
RESERVED_BYTES = 1_500_000_000
RESERVED_SHARE = 0.04
MINIATURE_BYTES = 4_000_000_000
MOST_NICS = 1000
HOST_COPY_SHARE = 1 / 64
"""Of a device's memory bandwidth, that a copy to or from pinned host memory reaches where nobody says: a V100 has 1/75,
an A100 and an H100 have 1/60 (data sheets; PCIe 3, 4 and 5 with 16 lanes)."""


def check_name(name: str) -> str:
    """Return the name of a family or a fabric. Raises ValueError if it is hard to see or to type."""
    if not name or name != name.strip() or not name.isprintable():
        raise ValueError(f"{name!r} is no name: it is empty, or has control characters, or blanks around it")
    return name


Name = Annotated[str, AfterValidator(check_name)]


OVERFLOW_MARGIN = 0.02
"""The share of a device's memory that stays free beyond what an overflow showed: the run ended before it needed all."""
HOST_OPERATION_SECONDS = 10e-6
"""What a host needs to start one operation of a pass, where nobody measured it: the interpreter, the library and the
driver of a server of x86."""
MANY_ROWS = 64
"""Products of so many times `half_speed_rows` have the sustained speed."""


class ProductSpeed(Table):
    """The speed of products [m, k] @ [k, n]."""

    dtype: DType
    shape: Annotated[tuple[Count, Count, Count], Field(strict=False)]
    """m, k, n."""
    flops_per_second: Rate
    """2 m k n for each product."""


class MemoryOverflow(Table):
    """A plan that was predicted to fit into a device's memory, and did not."""

    items: Annotated[tuple[int, int], Field(strict=False)]
    """The items of the rank that ran out of memory."""
    rows: Count
    """The rows of a microbatch that this rank had."""
    bytes: Bytes
    """The least that it would have needed."""
    predicted_bytes: Bytes

    def usable_bytes(self, whole: int) -> int:
        """Return how many bytes plans may fill after this overflow, where they might fill `whole` without it.

        `bytes` did not fit, so plans may fill less than that. Where the prediction was too low, they may also fill
        less by the factor by which it was.
        """
        return int(min(self.bytes, whole * self.predicted_bytes / self.bytes) * (1 - OVERFLOW_MARGIN))


class Family(Figures):
    """The speeds and the memory of one device of a family."""

    kind: Kind
    model: str | None = None
    """Its maker's name for it."""
    like: str | None = None
    """A model of the catalogue whose figures count where none are typed, and whose shares of them are assumed."""
    memory_bytes: MemoryBytes
    """The memory of one device, or of a CPU rank, with what is reserved."""
    reserved_bytes: Annotated[int, BeforeValidator(whole_number), Field(ge=0, le=MOST_MEMORY_BYTES)] | None = None
    """The part that no plan may fill: context, communicators, workspaces, fragmentation; left out: `reserve_bytes`."""
    memory_bytes_per_second: Bandwidth
    """Read or written, as data sheets count: a copy of n bytes moves 2 n."""
    host_copy_bytes_per_second: Rate | None = None
    """The bandwidth of copies from or to pinned host memory, per direction; CPUs leave it out."""
    peak_flops_per_second: dict[DType, Speed] = Field(default_factory=dict)
    """The maker's figure for dense products."""
    sustained_flops_per_second: dict[DType, Speed] = Field(default_factory=dict)
    """The speed of the best of the `products`."""
    products: Several[ProductSpeed] = ()
    half_speed_rows: Annotated[float, Field(ge=0, le=MOST_NUMBER)] | None = None
    """Rows of a product's result at which it has half of the speed of very large ones. Products of `MANY_ROWS` times as
    many have the sustained speed. Left out: by the tiles of the catalogue's model."""
    operation_seconds: Seconds | None = None
    """What its host needs to start one operation of a pass; CPUs leave it out."""
    overlap_slowdown: Slowdown | None = None
    """The factor by which it computes longer while it communicates; left out: no slow-down."""
    measured_at_once: Count | None = None
    """The number of devices of a node that were measured at the same time: CPU ranks share memory, and maybe cores."""

    overflows: Several[MemoryOverflow] = ()
    """Plans that did not fit, though predicted to; what a plan may fill is less by as much."""

    launch: Launch | None = None
    """The start of its ranks. Only `hpctrain slurm` and `hpctrain mpirun` read it."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        mistakes = []
        if not self.peak_flops_per_second and not self.sustained_flops_per_second:
            mistakes.append("no speed: set peak_flops_per_second or sustained_flops_per_second, by dtype")
        memory, reserved = self.memory_bytes, self.reserved_bytes
        if reserved is not None and memory <= reserved:
            mistakes.append(f"reserved_bytes {reserved} leaves nothing of memory_bytes {memory}; lower it")
        products = Counter(f"{product.dtype} {[*product.shape]}" for product in self.products)
        mistakes += [f"products has {name} twice; keep one" for name, count in products.items() if count > 1]
        return refused_for(self, mistakes)

    def slower_by_rows(self, rows: int) -> float:
        """Return the time of a product of so many rows, over its time at the sustained speed."""
        half = self.half_speed_rows
        return (1 + half / rows) / (1 + 1 / MANY_ROWS) if half else 1.0

    @property
    def reserve_bytes(self) -> int:
        """The bytes kept free: as the file says, else assumed for accelerators; nothing for CPUs and miniatures."""
        if self.reserved_bytes is not None:
            return self.reserved_bytes
        if self.kind == "cpu" or self.memory_bytes < MINIATURE_BYTES:
            return 0
        return RESERVED_BYTES + int(RESERVED_SHARE * self.memory_bytes)

    @property
    def reserve_reason(self) -> str:
        """Say where `reserve_bytes` is from."""
        if self.reserved_bytes is not None:
            return "reserved_bytes of the cluster file"
        if not self.reserve_bytes:
            return "a CPU, or a miniature of a device"
        return f"assumed: {RESERVED_BYTES / 1e9:g} GB of context and communicators, {RESERVED_SHARE:.0%} fragmentation"

    @property
    def usable_bytes(self) -> int:
        """The bytes of one device that a plan may fill."""
        whole = self.memory_bytes - self.reserve_bytes
        return min((overflow.usable_bytes(whole) for overflow in self.overflows), default=whole)


class Fabric(Figures):
    """A network that connects NICs of nodes: InfiniBand, RoCE, Ethernet."""

    network: str | None = None
    """Its name in the catalogue, such as `NDR`, by which a file leaves figures out."""
    latency_seconds: LinkLatency
    """The time from a byte's departure to its arrival, the software's share included."""
    bytes_per_second: Rate | None = None
    """The most that goes through it between two nodes; left out: what their NICs let through."""


class Nic(Figures):
    """Network interfaces of a node that are equal; both directions are used at once."""

    fabric: Name
    count: Annotated[int, Field(ge=1, le=MOST_NICS)] = 1
    send_bytes_per_second: Bandwidth
    """The bandwidth of one of them."""
    receive_bytes_per_second: Bandwidth


class Nodes(Figures):
    """Nodes that are equal. A node's i-th device takes its i-th NIC of each fabric; fewer are shared round-robin."""

    count: RankCount = 1
    devices: Annotated[dict[Name, RankCount], Field(min_length=1)]
    """The number of devices of each family, in their order."""
    link_latency_seconds: LinkLatency | None = None
    """The latency between two devices of a node."""
    link_bytes_per_second: Bandwidth | None = None
    fully_connected: bool = False
    """Whether each two devices of a node have such a link of their own; else a device has one to all others."""
    nics: Several[Nic] = ()
    host_memory_bytes: Bytes | None = None
    """The memory of one host that ranks may fill with what they offload; left out: not known."""
    ranks: Several[Rank] | None = None
    """The ranks of the devices, node by node; left out: consecutive."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        mistakes, devices = [], self.num_devices
        missing = [key for key in ("link_latency_seconds", "link_bytes_per_second") if getattr(self, key) is None]
        if devices > 1 and missing:
            mistakes.append(
                f"{devices} devices on a node, and nothing said of the link between them; set {' and '.join(missing)}"
            )
        if self.ranks is not None and len(self.ranks) != self.count * devices:
            mistakes.append(f"{len(self.ranks)} ranks for {self.count} x {devices} devices; give one for each, or none")
        return refused_for(self, mistakes)

    @property
    def num_devices(self) -> int:
        """The devices of one node."""
        return sum(self.devices.values())

    @cached_property
    def nics_by_fabric(self) -> dict[str, tuple[Nic, ...]]:
        """Return the NICs on each fabric, with an entry for each single one."""
        result: dict[str, tuple[Nic, ...]] = {}
        for nic in self.nics:
            result[nic.fabric] = result.get(nic.fabric, ()) + (nic,) * nic.count
        return result


class MessageTiming(Table):
    """The measured seconds of a message until it has arrived, while `flows` equal ones are in flight."""

    message_bytes: Bytes
    flows: Count = 1
    """The number of such messages from one node, each from a device of its own, this one included."""
    seconds: Seconds


class LinkClass(Figures):
    """The link of all pairs of devices at one distance. It replaces what follows from nodes, NICs and fabrics."""

    families: Annotated[tuple[Name, Name], Field(strict=False)]
    fabric: Name | None = None
    """The network between them; left out: they are on one node."""
    latency_seconds: LinkLatency
    bytes_per_second: Bandwidth
    """The bandwidth of a single message."""
    times: Several[MessageTiming] = ()

    @property
    def key(self) -> tuple[str | None, tuple[str, ...]]:
        return self.fabric, tuple(sorted(self.families))


Pass = Annotated[tuple[Seconds, Seconds], Field(strict=False)]
"""Seconds of a forward and of a backward pass."""


class RowTimes(Table):
    """The seconds of each item of a model for a number of rows: a forward and a backward pass."""

    rows: SequenceCount
    embedding_seconds: Pass
    block_seconds: Pass
    head_seconds: Pass


class Profile(Figures):
    """Times of one job on a device that is a replica of the whole model, measured by `hpctrain probe --job`."""

    family: Name
    work: str
    """The model, sequences and dtype, in the profiler's words: a profile is valid for equal words alone."""
    zero: Annotated[int, Field(ge=1, le=3)]
    """The ZeRO stage; 1 covers 0 too."""
    replicas: Count
    """The number of replicas among which the ZeRO stage cuts the state."""
    largest_rows: Annotated[int, Field(ge=0)] | None = None
    """The most of which the whole model can be trained at once; 0: not one; left out: not measured."""
    limited_by: Literal["job", "time", "memory"] | None = None
    """Why no more rows were tried, or fit."""
    update_seconds: Seconds | None = None
    """The seconds of the replica's part of the optimizer's work; left out where the whole model does not fit."""
    times: Annotated[tuple[RowTimes, ...], Field(min_length=1, strict=False)]
    """The times for each number of rows, ascending, without communication."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        rows = [times.rows for times in self.times]
        wrong = rows != sorted(set(rows))
        mistake = f"times are of rows {rows}; list each number of rows once, in ascending order"
        return refused_for(self, [mistake] if wrong else [])

    @property
    def key(self) -> tuple[str, str, int]:
        return self.family, self.work, self.zero


class Device(NamedTuple):
    """The place of a rank's device."""

    rank: int
    table: int
    """The index of its node's table in `Cluster.nodes`."""
    node: int
    """Counted over the whole cluster."""
    family: str
    index: int
    """Its number among the devices of its node."""


class Cluster(Table):
    """The whole description. Raises pydantic's ValueError where it is not consistent, with the key that is to blame."""

    families: Annotated[dict[Name, Family], Field(min_length=1)]
    fabrics: dict[Name, Fabric] = Field(default_factory=dict)
    nodes: Annotated[tuple[Nodes, ...], Field(min_length=1, strict=False)]
    links: Several[LinkClass] = ()
    profiles: Several[Profile] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        mistakes = [*_unknown_names(self), *_repeated(self), *_wrong_ranks(self), *_unconnected(self)]
        if self.num_devices > MOST_RANKS:
            mistakes.append(
                f"nodes: have {self.num_devices:,} devices; lower count or devices to {MOST_RANKS:,} in all"
            )
        return refused_for(self, mistakes)

    @property
    def num_devices(self) -> int:
        return sum(nodes.count * nodes.num_devices for nodes in self.nodes)

    @property
    def num_nodes(self) -> int:
        return sum(nodes.count for nodes in self.nodes)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Return all devices by rank."""
        result: list[Device] = []
        node = 0
        for table, nodes in enumerate(self.nodes):
            families = [family for family, count in nodes.devices.items() for _ in range(count)]
            for number in range(nodes.count):
                for index, family in enumerate(families):
                    rank = nodes.ranks[number * len(families) + index] if nodes.ranks else len(result)
                    result.append(Device(rank, table, node, family, index))
                node += 1
        return tuple(sorted(result))

    @cached_property
    def links_by_key(self) -> dict[tuple[str | None, tuple[str, ...]], LinkClass]:
        return {link.key: link for link in self.links}

    def without_environment(self) -> Self:
        """Return the cluster without its ranks' environment variables, which may hold keys and passwords."""
        changed = {
            name: family.model_copy(update={"launch": family.launch.model_copy(update={"environment": {}})})
            for name, family in self.families.items()
            if family.launch and family.launch.environment
        }
        return self.model_copy(update={"families": self.families | changed}) if changed else self

    def num_of(self, family: str) -> int:
        return sum(nodes.count * nodes.devices.get(family, 0) for nodes in self.nodes)

    def describe(self) -> str:
        """Say what there is in a few words, such as `16 a100 and 16 v100 on 4 nodes, by ib`."""
        families = " and ".join(f"{self.num_of(family)} {family}" for family in self.families if self.num_of(family))
        nodes = f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''}"
        fabrics = ", ".join(name for name in self.fabrics if name in self._families_by_fabric)
        return f"{families} on {nodes}" + (f", by {fabrics}" if fabrics else "")

    @cached_property
    def _families_by_fabric(self) -> dict[str, set[str]]:
        """The families whose nodes are on each fabric."""
        result: dict[str, set[str]] = {}
        for nodes in self.nodes:
            for nic in nodes.nics:
                result.setdefault(nic.fabric, set()).update(nodes.devices)
        return result

    @property
    def without_effect(self) -> list[str]:
        """Warnings of tables without an effect: no device, NIC or pair of devices uses them."""
        warnings = [f"families.{name}: no node has it" for name in self.families if not self.num_of(name)]
        warnings += [
            f"fabrics.{name}: no node has a NIC on it" for name in self.fabrics if name not in self._families_by_fabric
        ]
        for i, link in enumerate(self.links):
            if link.fabric and not self._families_by_fabric.get(link.fabric, set()).issuperset(link.families):
                pair = " and ".join(dict.fromkeys(link.families))
                warnings.append(f"links.{i}: {pair} are not both on {link.fabric}, so that it counts for nothing")
        return warnings


def assumed_figures(cluster: Cluster) -> list[str]:
    """Return the keys of all figures that are given but neither measured nor from a data sheet."""
    tables: dict[str, Figures] = {f"families.{name}": family for name, family in cluster.families.items()}
    tables |= {f"fabrics.{name}": fabric for name, fabric in cluster.fabrics.items()}
    for i, nodes in enumerate(cluster.nodes):
        tables[f"nodes.{i}"] = nodes
        tables |= {f"nodes.{i}.nics.{j}": nic for j, nic in enumerate(nodes.nics)}
    tables |= {f"links.{i}": link for i, link in enumerate(cluster.links)}
    tables |= {f"profiles.{i}": profile for i, profile in enumerate(cluster.profiles)}
    return [
        f"{key}.{figure}"
        for key, table in tables.items()
        for figure in table.given
        if table.origin_of(figure) == "assumed"
    ]


def _unknown_names(cluster: Cluster) -> Iterator[str]:
    families: list[tuple[str, str]] = []
    fabrics: list[tuple[str, str]] = []
    for i, nodes in enumerate(cluster.nodes):
        families += [(f"nodes.{i}.devices", name) for name in nodes.devices]
        fabrics += [(f"nodes.{i}.nics.{j}.fabric", nic.fabric) for j, nic in enumerate(nodes.nics)]
    for i, link in enumerate(cluster.links):
        families += [(f"links.{i}.families", name) for name in link.families]
        fabrics += [(f"links.{i}.fabric", link.fabric)] if link.fabric is not None else []
    families += [(f"profiles.{i}.family", profile.family) for i, profile in enumerate(cluster.profiles)]
    for kind, names, known in (("family", families, cluster.families), ("fabric", fabrics, cluster.fabrics)):
        for key, name in names:
            if name not in known:
                yield f"{key}: no {kind} '{name}'{did_you_mean(name, known) if known else '; none is described'}"


def _repeated(cluster: Cluster) -> Iterator[str]:
    links = [link.key for link in cluster.links]
    for i, key in enumerate(links):
        if key in links[:i]:
            yield f"links.{i}: these families' link is described above already; keep one"
    profiles = [profile.key for profile in cluster.profiles]
    for i, key in enumerate(profiles):
        if key in profiles[:i]:
            yield f"profiles.{i}: this family's work in this ZeRO stage is above already; keep one"


def _wrong_ranks(cluster: Cluster) -> Iterator[str]:
    if all(nodes.ranks is None for nodes in cluster.nodes):
        return
    given: list[int] = []
    for i, nodes in enumerate(cluster.nodes):
        if nodes.ranks is None:
            yield f"nodes.{i}.ranks: missing, other nodes have theirs; set it for all or for none"
        given += nodes.ranks or ()
    missing = set(range(len(given))).difference(given)
    if missing and len(given) == cluster.num_devices:
        yield f"nodes.*.ranks: rank {min(missing)} is in none of them; list 0 to {len(given) - 1} once each"


def _unconnected(cluster: Cluster) -> Iterator[str]:
    """Yield which kinds of nodes have no fabric in common, each pair of kinds once."""
    kinds: dict[frozenset[str], list[int]] = {}
    for i, nodes in enumerate(cluster.nodes):
        kinds.setdefault(frozenset(nic.fabric for nic in nodes.nics), []).append(i)
    for number, (here, tables) in enumerate(kinds.items()):
        for there, others in list(kinds.items())[number:]:
            several = here != there or len(tables) > 1 or cluster.nodes[tables[0]].count != 1
            if several and not here & there:
                yield (
                    f"nodes.{tables[0]} and nodes.{others[-1]}: no fabric in common"
                    f" ({', '.join(sorted(here)) or 'none'}; {', '.join(sorted(there)) or 'none'});"
                    " give both a NIC on the same one"
                )
