"""The prices of a step, which `simulate.py` puts on a plan's instructions: seconds by tile, message and exchange."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hpctrain.plan.schedule import COMPUTING
from hpctrain.plan.tiling import Tile

PASSES = {op: op.value.replace(" ", "_") for op in COMPUTING}
"""The field of `TileCost` for each kind of pass."""


@dataclass(frozen=True)
class PassCost:
    """Seconds of one pass over a tile's items, for one row chunk."""

    compute: float
    tensor: float = 0.0
    """Collectives over the axes of its tensor grid."""
    data: float = 0.0
    """Collectives over the holders of its weights, in ZeRO 2 and 3."""

    gathered: float = 0.0
    """Of the weights that come over z and over holders during computation, all of it."""
    scattered: float = 0.0
    """Of their gradients."""

    def __add__(self, other: "PassCost") -> "PassCost":
        return PassCost(
            self.compute + other.compute,
            self.tensor + other.tensor,
            self.data + other.data,
            self.gathered + other.gathered,
            self.scattered + other.scattered,
        )

    @property
    def seconds(self) -> float:
        return self.compute + self.tensor + self.data


def slowed_by(overlapped: float, moving: float, times: float) -> float:
    """Return how many seconds longer a rank computes, as its device takes `times` as long while bytes move.

    `overlapped` are the seconds of computing that communication overlaps, `moving` the seconds of communication.
    """
    return min(moving, overlapped * times) * (1 - 1 / times)


@dataclass(frozen=True)
class Sharing:
    """What the same ranks exchange of their gradients and weights in a step."""

    tiles: tuple[Tile, ...]
    reduce_seconds: float
    gather_seconds: float
    ready_seconds: Mapping[Tile, float] = field(default_factory=dict)
    """How long before the end of a tile's last backward pass its gradients are final; 0 where they are not here."""
    needed_seconds: Mapping[Tile, float] | None = None
    """How long after the beginning of a tile's first forward pass it needs the weights; None: they are gathered at the
    end of a step, and nothing runs meanwhile."""


@dataclass(frozen=True)
class TileCost:
    """What the instructions of a tile take for one microbatch, in seconds."""

    forward: tuple[PassCost, ...]
    """For each row chunk."""
    backward: tuple[PassCost, ...]
    update_seconds: float = 0.0
    backward_input: tuple[PassCost, ...] = ()
    """The two parts of `backward`, for schedules that split it."""
    backward_weight: tuple[PassCost, ...] = ()
    overlap_slowdown: float = 1.0
    """How many times as long its ranks compute while they communicate."""
    before_seconds: float = 0.0
    """Before a step's first forward pass, of weights that come while nothing computes."""
    after_seconds: float = 0.0
    """After its last backward pass."""
    alone_on: str = "tensor"
    """The axis of these two."""

    @property
    def seconds(self) -> float:
        """Of a microbatch, there and back."""
        return sum(each.seconds for each in (*self.forward, *self.backward))


@dataclass(frozen=True)
class Costs:
    """All that a simulation needs to know of model and machine."""

    tiles: Mapping[Tile, TileCost]
    """Of each microbatch."""
    messages: Mapping[tuple[Tile, Tile], float]
    """Of an activation, or its gradient, from a tile to another."""
    sharings: tuple[Sharing, ...] = ()
    """In the order in which all ranks exchange them."""
    agree_seconds: float = 0.0
    """Until all ranks agree on the loss and the norm."""
    blocking_share: float = 0.0
    """Of the time of each message, during which its sender computes nothing."""
    leaving: frozenset[tuple[Tile, Tile]] = frozenset()
    """The messages that leave a node: what a rank sends forward and backward shares its NIC."""

    def of(self, tiles: Mapping[Tile, Tile]) -> "Costs":
        """Return the same for other tiles in the place of these."""

        def placed(seconds: Mapping[Tile, float] | None) -> dict[Tile, float] | None:
            return None if seconds is None else {tiles[tile]: each for tile, each in seconds.items()}

        return replace(
            self,
            tiles={tiles[tile]: cost for tile, cost in self.tiles.items()},
            messages={(tiles[a], tiles[b]): seconds for (a, b), seconds in self.messages.items()},
            leaving=frozenset((tiles[a], tiles[b]) for a, b in self.leaving),
            sharings=tuple(
                replace(
                    each,
                    tiles=tuple(tiles[tile] for tile in each.tiles),
                    ready_seconds=placed(each.ready_seconds),
                    needed_seconds=placed(each.needed_seconds),
                )
                for each in self.sharings
            ),
        )
