"""Prices the losses of a machine beforehand: what is left trains by which plan, what moves, and how long it stands.

The losses that are alike are one row. The best plans of those left are searched for as the machines of
`hpctrain.planner.what_if`: a search begins with the old plan without the rows that are lost.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from hpctrain.comm.topology import SEGMENT_BYTES
from hpctrain.config.clusters.cluster import Cluster, Device
from hpctrain.config.clusters.measured_speeds import without_ranks
from hpctrain.config.job import Job
from hpctrain.config.training.optimizers import RULES
from hpctrain.plan.keepers import host_bytes
from hpctrain.plan.moves import ElementBytes, PlanState
from hpctrain.plan.tiling import Plan
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.network import ClusterNetwork
from hpctrain.planner.what_if import ComparedMachine, PossibleMachine, what_if

RANK, NODE, FAMILY = KINDS = "rank", "node", "family"
MASTER_BYTES = 4
GIVEN_BACK, COPIES, RESTARTED = ROADS = "given back", "from copies", "restarted"
"""The roads on which a run goes on. `RUN/resize` gives ranks back: the state moves in memory. Where ranks die, the
same command starts those that are left, from copies in the memory of hosts, or from the last checkpoint."""


@dataclass(frozen=True)
class Delays:
    """The parts of a stall that do not follow from plans and networks. The defaults are assumed."""

    noticed_seconds: float = 1.0
    """From the loss until the ranks that are left start."""
    mpi_seconds: float = 0.2
    """MPI's start: 0.16 s for 4 ranks of a host were measured."""
    import_seconds: float = 2.8
    """Torch's import: 2.8 s for 4 ranks on 2 cores were measured."""
    made_seconds: float = 0.5
    """Groups, buffers and weights are made."""
    file_bytes_per_second: float = 1e9
    """Of a node that reads a checkpoint."""
    copy_bytes_per_second: float = 1e9
    """Of a rank that checks and reads its copy in memory."""

    def assumed(self) -> list[str]:
        """Say which of them nobody measured."""
        names = {
            "noticed_seconds": "a loss: {:g} s until it is noticed and ranks are started",
            "mpi_seconds": "a start: {:g} s of MPI",
            "import_seconds": "a start: {:g} s of torch's import",
            "made_seconds": "a start: {:g} s to make groups and weights",
            "file_bytes_per_second": "a checkpoint: a node reads {:,.0f} bytes/s",
            "copy_bytes_per_second": "copies in memory: a rank checks and reads {:,.0f} bytes/s",
        }
        return [text.format(getattr(self, key)) for key, text in names.items() if getattr(self, key) == DEFAULTS[key]]


DEFAULTS = asdict(Delays())


@dataclass(frozen=True)
class Loss:
    """A loss, which stands for all that are alike."""

    name: str
    count: int
    """How many losses are like it."""
    ranks: tuple[int, ...]
    """The ranks that one of them takes: that with the most state."""


@dataclass(frozen=True)
class PricedLoss:
    """The costs of a loss."""

    loss: Loss
    row: ComparedMachine
    """What is left, and its best plan."""
    moved_bytes: int = 0
    """Masters and moments that ranks need by the next plan and do not own by the last one."""
    lost_bytes: int = 0
    """Masters and moments that nobody has any more: they come from a checkpoint."""
    stall_seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The parts of the stall on each road."""
    assumed: tuple[str, ...] = ()
    repeated_steps: float = 0.0
    """Steps since the last checkpoint, on the mean, which are repeated."""
    copies: str = ""
    """What copies in memory take of hosts while all is there, and where that is too much."""

    def data(self) -> dict:
        """Return it as plain data, for JSON."""
        own = {"lost": self.loss.name, "count": self.loss.count, "ranks": list(self.loss.ranks)}
        keys = "moved_bytes", "lost_bytes", "stall_seconds", "repeated_steps", "copies"
        data = own | {key: getattr(self, key) for key in keys} | self.row.data()
        return data | {"assumed": [*self.assumed, *self.row.assumed]}


def losses_of(cluster: Cluster, kind: str, state_bytes: Mapping[int, int]) -> list[Loss]:
    """Return the losses of one kind, those that are alike once. `state_bytes` are those of each rank.

    Ranks are alike that have the same family on equal nodes; nodes that are of one table. What would leave nothing is
    no loss.
    """

    def key(device: Device) -> tuple:
        return {RANK: (device.table, device.family), NODE: (device.table,), FAMILY: (device.family,)}[kind]

    equivalent: dict[tuple, dict[int | str, list[int]]] = {}
    for device in cluster.devices:
        member = {RANK: device.rank, NODE: device.node, FAMILY: device.family}[kind]
        equivalent.setdefault(key(device), {}).setdefault(member, []).append(device.rank)
    result = []
    for members in equivalent.values():
        ranks = max(members.values(), key=lambda ranks: sum(state_bytes.get(rank, 0) for rank in ranks))
        families = Counter(cluster.devices[rank].family for rank in ranks)
        what = " and ".join(f"{number} {family}" for family, number in families.items())
        name = {RANK: f"a rank of {next(iter(families))}", NODE: f"a node of {what}", FAMILY: f"all {what}"}[kind]
        if len(ranks) < cluster.num_devices:
            result.append(Loss(name, len(members), tuple(ranks)))
    return result


def price_losses(
    job: Job,
    cluster: Cluster,
    best: Predictor,
    kind: str,
    search: Callable[[Cluster, float], Predictor],
    predict: Callable[[Cluster, Plan], Predictor],
    delays: Delays | None = None,
) -> list[PricedLoss]:
    """Return what each loss of a kind costs, and before them what there is. `best` is the plan that trains.

    `search` and `predict` are those of `what_if`.
    """
    rule, delays = RULES[job.train.optimizer], delays or Delays()

    def element_bytes(shape: tuple[int, ...]) -> int:
        return MASTER_BYTES + rule.moment_bytes(shape)

    before = PlanState(best.setup.model, best.plan, job.overlap.bucket_bytes)
    state_bytes = before.bytes_of(element_bytes)
    copies = before.bytes_of(element_bytes, is_owned=True)
    losses = losses_of(cluster, kind, state_bytes)
    kept = [tuple(rank for rank in range(cluster.num_devices) if rank not in loss.ranks) for loss in losses]
    machines = [PossibleMachine("now", cluster)]
    machines += [
        PossibleMachine(loss.name, without_ranks(cluster, loss.ranks), kept=left)
        for loss, left in zip(losses, kept, strict=True)
    ]
    searched: dict[int, float] = {}

    def timed(machine: Cluster, known_seconds: float) -> Predictor:
        if machine is cluster:
            return best
        since = time.perf_counter()
        try:
            return search(machine, known_seconds)
        finally:
            searched[id(machine)] = time.perf_counter() - since

    now, *rows = what_if(machines, timed, predict)
    assumed = tuple(delays.assumed())
    every, result = (
        job.checkpoint.every,
        [PricedLoss(Loss("nothing", 1, ()), now, copies=_copies_text(cluster, copies))],
    )
    for loss, left, row in zip(losses, kept, rows, strict=True):
        if row.plan is None or row.prediction is None:
            result.append(PricedLoss(loss, row))
            continue
        after = PlanState(best.setup.model, row.plan, job.overlap.bucket_bytes)
        moves = before.moves_to(after, left, element_bytes)
        made = {"made": delays.made_seconds, "first step": row.prediction.step_seconds}
        started = {"noticed": delays.noticed_seconds, "MPI": delays.mpi_seconds, "import": delays.import_seconds}
        looked = {"searched": searched[id(row.machine.cluster)]}
        moved = {"moved": move_seconds(moves, cluster.num_devices, best.network)}
        read = _read_seconds(after, row.machine.cluster, element_bytes, delays)
        parts_a_rank = math.ceil(len(copies) / len(left))  # those that are left read the others' too
        copied = parts_a_rank * max(copies.values()) / delays.copy_bytes_per_second
        roads = {
            GIVEN_BACK: looked | moved | made,
            COPIES: started | looked | {"read": copied} | moved | made,
            RESTARTED: started | looked | {"read": read} | made,
        }
        lost_bytes = before.lost_bytes(loss.ranks, element_bytes)
        steps = every / 2 if every else job.train.steps / 2
        result.append(PricedLoss(loss, row, sum(moves.values()), lost_bytes, roads, assumed, steps))
    return result


def _copies_text(cluster: Cluster, owned_bytes: Mapping[int, int]) -> str:
    """Say how much host memory copies take, of the node that has the least left or else needs the most."""
    counts = [owned_bytes.get(rank, 0) // MASTER_BYTES for rank in range(cluster.num_devices)]
    needed = host_bytes([str(device.node) for device in cluster.devices], counts)
    have = {str(device.node): cluster.nodes[device.table].host_memory_bytes for device in cluster.devices}
    short = {node: there for node, there in have.items() if there is not None and needed[node] > there}
    node = min(short, key=lambda each: short[each] - needed[each], default=max(needed, key=needed.__getitem__))
    text = f"copies in memory take {needed[node] / 1e9:,.3g} GB of node {node}"
    return f"{text}, which has {short[node] / 1e9:,.3g}: set recovery.copies_folder" if short else text


def _read_seconds(state: PlanState, cluster: Cluster, element_bytes: ElementBytes, delays: Delays) -> float:
    """Return the seconds in which all nodes read what their ranks update."""
    of_nodes: Counter[int] = Counter()
    for rank, num_bytes in state.bytes_of(element_bytes).items():
        of_nodes[cluster.devices[rank].node] += num_bytes
    return max(of_nodes.values()) / delays.file_bytes_per_second


def move_seconds(moves: Mapping[tuple[int, int], int], num_ranks: int, network: ClusterNetwork) -> float:
    """Return the seconds of a move between ranks: in round i each sends to the rank i places after it, in messages of
    bounded size, one after the other. Ranks that share a NIC share its bandwidth."""
    rounds: dict[int, list[tuple[int, int, int]]] = {}
    for (source, to), num_bytes in moves.items():
        rounds.setdefault((to - source) % num_ranks, []).append((source, to, num_bytes))
    total = 0.0
    for pairs in rounds.values():
        sources = [source for source, _, _ in pairs]
        seconds = []
        for source, to, num_bytes in pairs:
            whole, rest = divmod(num_bytes, SEGMENT_BYTES)
            flows = network.flows(source, sources, to)
            one, last = (network.seconds(source, to, size, flows) for size in (SEGMENT_BYTES, rest))
            seconds.append(whole * one + (last if rest else 0.0))
        total += max(seconds)
    return total
