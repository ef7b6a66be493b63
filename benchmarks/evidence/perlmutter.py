"""4D layouts with their communication hidden, against Megatron-style ones with it exposed, as predicted for Perlmutter.

    python -m benchmarks.evidence.perlmutter              5 B on 64 GPUs to 80 B on 1,024
    python -m benchmarks.evidence.perlmutter gpt-80b --sequences 8192

Collectives have the bandwidths that AxoNN found there (Singh et al. 2024, arXiv 2502.08145): by the size of a group and
by how many groups like it share a node's network cards. Computation is by the data sheet of an A100-40. Both kinds of
layouts are predicted for the same engine, so that what differs is the layout, and what of it is hidden.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.scale import cluster_of, nodes_of
from hpctrain.architectures.registry import presets
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.errors import PlanError
from hpctrain.config.job import Model
from hpctrain.plan.tiling import Plan, even_plan
from hpctrain.planner.prediction.cut_products import predict_in_parts
from hpctrain.planner.prediction.predictor import Prediction, Predictor
from hpctrain.planner.prices.network import ClusterNetwork
from hpctrain.planner.prices.setup import HPCTRAIN, Setup
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.parameters import check_grid

DEVICES = {"gpt-5b": 64, "gpt-10b": 128, "gpt-20b": 256, "gpt-40b": 512, "gpt-80b": 1024}
GPU, GPUS_OF_NODE, BATCH, POSITIONS = "A100-40", 4, 1024, 2048
ROWS = (1, 2, 4)
"""That a rank may have at once."""
BUCKET_BYTES = 4 << 20
EXPOSED, HIDDEN = frozenset(), frozenset(("tensor", "z"))
"""What overlaps: nothing; all, outputs too where products in parts are faster."""
GIGABYTES = {1: {2: 76, 4: 225}, 2: {2: 76}}
"""Per second, inside nodes: by the distance of neighbours in a group, by its size."""
ACROSS = {1: 80, 2: 40}
"""Of larger groups, by distance; 20 for all larger distances."""
MESSAGE_SECONDS = 10e-6
"""Between neighbours of a ring."""


def gigabytes(distance: int, size: int) -> float:
    return GIGABYTES.get(distance, {}).get(size) or ACROSS.get(distance, 20)


class Perlmutter(ClusterNetwork):
    """Collectives as rings with AxoNN's bandwidths."""

    def group_seconds(
        self, operation: str, num_bytes: float, ranks: Sequence[int], overlapped: Sequence[int] = ()
    ) -> float:
        size = len(ranks)
        if size < 2:
            return 0.0
        turns = 2 if operation == "all_reduce" else 1
        moved = turns * num_bytes * (size - 1) / size
        steps = turns * (min(size, GPUS_OF_NODE) - 1 + (size - 1).bit_length())  # rings inside nodes, trees across
        return moved / gigabytes(ranks[1] - ranks[0], size) / 1e9 + steps * MESSAGE_SECONDS


class OnPerlmutter(Predictor):
    def __init__(self, setup: Setup, plan: Plan, cluster: Cluster):
        super().__init__(setup, plan, cluster)
        self.network = Perlmutter(cluster)


@dataclass(frozen=True)
class Layout:
    grid: tuple[int, int, int]
    pipeline: int
    rows: int

    def plan(self, model: Model, num_devices: int, batch: int = BATCH, family: str = GPU) -> Plan | None:
        """Return the plan for so many devices; None where there is none."""
        x, y, z = self.grid
        data, left = divmod(num_devices, x * y * z * self.pipeline)
        rows = self.rows * z * data
        if left or not data or batch % rows:
            return None
        try:
            check_grid(model, TensorGrid(*self.grid))
            return even_plan(
                model.num_items,
                TensorGrid(*self.grid),
                self.pipeline,
                data,
                batch // rows,
                rows,
                family=family,
                recompute="full",
                zero=1,
            )
        except PlanError:
            return None

    def __str__(self) -> str:
        x, y, z = self.grid
        return f"x{x} y{y} z{z} pipeline {self.pipeline}, {self.rows} rows"


def megatron_style() -> Iterable[Layout]:
    for y in (1, 2, 4, 8):
        for pipeline in (1, 2, 4, 8, 16):
            yield from (Layout((1, y, 1), pipeline, rows) for rows in ROWS)


def four_d() -> Iterable[Layout]:
    for x in (1, 2, 4, 8):
        for y in (1, 2, 4, 8):
            for z in (1, 2, 4, 8, 16, 32) if x * y <= 16 else ():
                yield from (Layout((x, y, z), 1, rows) for rows in ROWS)


def predict_fitting(
    model: Model, positions: int, dtype: str, plan: Plan, bucket_bytes: int | None, make: Callable[[Setup], Predictor]
) -> Prediction | None:
    """Return what is predicted of a plan, all exposed (no `bucket_bytes`) or all hidden; None where it does not fit."""
    overlaps = HIDDEN if bucket_bytes else EXPOSED
    setup = Setup(model, positions, dtype, HPCTRAIN, overlaps, bucket_bytes=bucket_bytes, tensor_parts=None)
    if not all(stage.fits for stage in make(setup).memory):
        return None
    return predict_in_parts(setup, plan, lambda setup, _: make(setup))[1]


def best(layouts: Iterable[Layout], predicted: Callable[[Layout], Prediction | None]) -> tuple[Layout, Prediction]:
    result = [(layout, prediction) for layout in layouts if (prediction := predicted(layout))]
    if not result:
        sys.exit("no layout fits: try more --sequences")
    return min(result, key=lambda each: each[1].step_seconds)


def compare(name: str, batch: int) -> None:
    devices, model = DEVICES[name], Model(**presets()[name] | {"max_positions": POSITIONS})
    cluster = cluster_of([nodes_of(GPU, devices // GPUS_OF_NODE, GPUS_OF_NODE, ["Slingshot-11"])])

    def predicted(layout: Layout, hides: bool) -> Prediction | None:
        plan = layout.plan(model, devices, batch)
        if plan is None:
            return None
        bucket_bytes = BUCKET_BYTES if hides else None
        return predict_fitting(
            model, POSITIONS, "bf16", plan, bucket_bytes, lambda setup: OnPerlmutter(setup, plan, cluster)
        )

    print(f"{name} on {devices} GPUs", flush=True)
    scores = {}
    for title, layouts, hides in (
        ("Megatron-style, exposed", megatron_style, False),
        ("Megatron-style, hidden", megatron_style, True),
        ("4D, exposed", four_d, False),
        ("4D, hidden", four_d, True),
    ):
        layout, prediction = best(layouts(), lambda layout, hides=hides: predicted(layout, hides))
        step = scores[title] = prediction.step_seconds
        parts = ", ".join(
            f"{part} {seconds / step:.0%}"
            for part, seconds in prediction.exposed_seconds.items()
            if seconds > 0.005 * step
        )
        print(f"  {title:24} {step:7.2f} s, MFU {prediction.mfu:.1%}, {layout}: {parts}", flush=True)
    exposed, hidden, four_exposed, four_hidden = scores.values()
    print(f"  4D hidden is {exposed / four_hidden:.2f} times as fast as Megatron-style exposed:")
    print(f"  the layout alone {exposed / four_exposed:.2f}, hiding in it {four_exposed / four_hidden:.2f},", end=" ")
    print(f"hiding without it {exposed / hidden:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(DEVICES)}; all of them if none is named")
    parser.add_argument("--sequences", type=int, default=BATCH, help="of a step")
    given = parser.parse_args()
    if unknown := [name for name in given.models if name not in DEVICES]:
        parser.error(f"no such model: {unknown[0]}; there are {', '.join(DEVICES)}")
    print(
        f"{given.sequences:,} sequences of {POSITIONS:,}, blocks computed again, ZeRO 1, 1F1B;"
        f" {GPUS_OF_NODE} {GPU} a node; exposed: all that is communicated is waited for"
    )
    for name in given.models or DEVICES:
        compare(name, given.sequences)


if __name__ == "__main__":
    main()
