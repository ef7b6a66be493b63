"""Losses of mixtures of experts on many layouts against those of one rank: with its choices replayed, and free.

    mpirun -n 8 python -m benchmarks.expert_parity

Layouts are those of as many ranks as were started. A flip is a token for which rounding would have chosen others than
one rank's experts.
"""

import tempfile
from pathlib import Path

import pytest

from hpctrain.comm.world import World
from hpctrain.model import feed_forward
from tests.ranks.small_runs import largest_relative_difference, write_tokens

STEPS = 20
LAYOUTS = {
    2: [
        *(({"tensor": {axis: 2}}, ["mixtral", "evened", "qwen3_moe", "dots1", "gpt_oss"]) for axis in "yzc"),
        ({"pipeline": 2, "recompute": "selective"}, ["dots1", "evened"]),
        *(({"data": 2, "zero": zero}, ["dots1"]) for zero in range(4)),
    ],
    4: [
        *(({"tensor": {axis: 4}}, ["mixtral", "evened", "qwen3_moe", "dots1"]) for axis in "yzc"),
        ({"tensor": {"y": 2, "c": 2}, "sequence_parallel": True, "recompute": "full"}, ["dots1", "evened"]),
        ({"tensor": {"y": 2}, "pipeline": 2, "schedule": "zb-h1"}, ["gpt_oss", "evened"]),
        *(({"tensor": {"y": 2}, "data": 2, "zero": zero}, ["dots1"]) for zero in range(4)),
        ({"tensor": {"y": 2}, "pipeline": 2, "virtual_stages": 2}, ["deep"]),
    ],
    8: [
        *(({"tensor": {axis: 8}}, ["mixtral", "evened", "qwen3_moe", "dots1"]) for axis in "yzc"),
        ({"tensor": {"y": 2, "z": 2, "c": 2}, "recompute": "selective"}, ["gpt_oss", "evened", "dots1"]),
        ({"tensor": {"y": 2, "c": 2}, "pipeline": 2, "sequence_parallel": True}, ["gpt_oss", "evened"]),
        *(({"tensor": {"y": 2}, "pipeline": 2, "data": 2, "zero": zero}, ["dots1"]) for zero in (0, 1)),
        *(({"tensor": {"y": 2}, "data": 4, "zero": zero}, ["dots1"]) for zero in (2, 3)),
        ({"tensor": {"z": 2}, "pipeline": 2, "virtual_stages": 2, "data": 2, "recompute": "full"}, ["deep"]),
    ],
}


def compare(world, tokens: Path, family: str, plan: dict) -> tuple[float, int, float]:
    """Return how far losses are with choices replayed, the number of flips, and how far losses are free."""
    from tests.ranks.test_experts import job_of, reference, run  # its marks are known under pytest alone

    expected, _, _, choices = reference(tokens, family, STEPS)
    job, choices.flipped = job_of(tokens, family, plan), 0
    with world.freeing(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_forward, "choose", choices.replay)
        replayed = run(world, job, steps=STEPS)[0]
    with world.freeing():
        free = run(world, job, steps=STEPS)[0]
    flipped = sum(world.all_objects(choices.flipped))
    return largest_relative_difference(replayed, expected), flipped, largest_relative_difference(free, expected)


def main() -> None:
    from tests.ranks.test_experts import SHAPES

    world = World.start(120.0, watched=False)
    first = world.rank == 0
    tokens = world.on_first_rank(lambda: write_tokens(Path(tempfile.mkdtemp()) / "tokens.bin"))
    if first:
        print("| ranks | experts of a token | family | layout | replayed | flips | free |")
        print("|--:|--:|---|---|--:|--:|--:|", flush=True)
    for plan, families in LAYOUTS[world.size]:
        layout = ", ".join(
            f"{key} {value}" for key, value in {**plan.get("tensor", {}), **plan}.items() if key != "tensor"
        )
        for family in families:
            replayed, flips, free = compare(world, tokens, family, plan)
            if first:
                count = SHAPES[family]["experts_per_token"]
                row = f"| {world.size} | {count} | {family} | {layout} | {replayed:.1e} | {flips} | {free:.1e} |"
                print(row, flush=True)
    world.close()


if __name__ == "__main__":
    main()
