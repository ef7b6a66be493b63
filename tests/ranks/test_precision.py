"""fp16 with a scaled loss, and families of different dtypes: near fp32, the same decisions everywhere, bit-equal."""

import functools

import pytest

from hpctrain.checkpoint.folder import latest_checkpoint
from hpctrain.config.precision import Precision
from hpctrain.data.order import open_datasets
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.ranks.small_runs import Alone, largest_relative_difference, make_job, make_trainer

STEPS, AGAIN = 8, 3
"""Steps of a curve, and of its repetition, which has the same bits or other ones from the first."""
HALF_TOLERANCE = 2e-2
"""Of losses in half precision, of those in fp32: an activation is rounded by 5e-4 (fp16) or 4e-3 (bf16), often."""
LAYOUTS = {
    2: [{"tensor": {"y": 2}}, {"pipeline": 2}],
    4: [{"tensor": {"x": 2, "y": 2}}, {"tensor": {"z": 2}, "data": 2, "zero": 3}],
    8: [{"tensor": {"x": 2, "y": 2}, "pipeline": 2}, {"tensor": {"y": 2}, "data": 4, "zero": 2}],
}
FORCED = Precision(loss_scale=2.0**23, loss_scale_window=3)
"""So large that the first steps overflow, and grown soon enough to be seen."""


def curve(world, job, plan=None, steps=STEPS, resume=None, save=None) -> list[dict]:
    """Return the metrics of some steps, from the start or from a folder's newest checkpoint."""
    _, training, _ = open_datasets(job.data, job.train.seed)
    with world.freeing():
        trainer = make_trainer(world, job, plan)
        if resume:
            trainer.resume(latest_checkpoint(resume))
        else:
            trainer.initialise()
        result = [trainer.step(training)[0] for _ in range(steps)]
        if save:
            trainer.save(save, {})
    keys = ("loss", "grad_norm", "loss_scale", "skipped")
    return [{key: metrics.get(key) for key in keys} for metrics in result]


def of(metrics: list[dict], key: str) -> list:
    return [each[key] for each in metrics]


def job_in(tokens, dtype: str, plan=None, precision=FORCED):
    job = make_job(tokens, "llama", plan, {"num_layers": 2}, dtype=dtype)
    return job.model_copy(update={"precision": precision})


@functools.cache
def alone(world, tokens, dtype: str) -> list[dict]:
    return world.broadcast_object(curve(Alone(), job_in(tokens, dtype)) if world.rank == 0 else None)


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.timeout(120)
def test_fp16_skips_the_same_steps_on_all_layouts_and_follows_one_rank(world, tokens):
    expected = alone(world, tokens, "fp16")
    skipped = of(expected, "skipped")
    assert skipped[0] and not skipped[-1], "the scale was too large at first, and then lowered"
    for layout in LAYOUTS[world.size]:
        result = curve(world, job_in(tokens, "fp16", layout))
        assert of(result, "skipped") == skipped and of(result, "loss_scale") == of(expected, "loss_scale")
        assert largest_relative_difference(of(result, "loss"), of(expected, "loss")) < HALF_TOLERANCE
        assert result == curve(world, job_in(tokens, "fp16", layout)), "bit for bit"


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
def test_fp16_follows_fp32_but_for_what_it_skips(world, tokens):
    precision = Precision(loss_scale=2.0**10)
    exact = alone(world, tokens, "fp32")
    result = curve(world, job_in(tokens, "fp16", {"data": 2}, precision))
    assert not any(of(result, "skipped"))
    for key in ("loss", "grad_norm"):
        assert largest_relative_difference(of(result, key), of(exact, key)) < HALF_TOLERANCE


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
def test_a_resumed_run_has_the_scale_of_the_checkpoint(world, tokens, folder):
    job = job_in(tokens, "fp16", {"data": 4})
    straight = curve(world, job)
    first = curve(world, job, steps=3, save=folder)
    assert first + curve(world, job, steps=STEPS - 3, resume=folder) == straight


def tile(items, rows, ranks, family, **more) -> Tile:
    grid = TensorGrid(y=len(ranks))
    return Tile(Interval(*items), Interval(*rows), tuple(ranks), grid, family=family, **more)


def mixed_plan(size: int, shape: str, zero: int) -> Plan:
    half = size // 2
    one, two = range(half), range(half, size)
    if shape == "pipeline":
        tiles = tile((0, 3), (0, 4), one, "a", zero=zero), tile((3, 6), (0, 4), two, "b", zero=zero)
    else:
        tiles = tile((0, 6), (0, 3), one, "a", zero=zero), tile((0, 6), (3, 4), two, "b", zero=zero)
    return Plan(tiles, 4, 4)


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("dtype", "shape"), [("fp16", "pipeline"), ("bf16", "side by side"), ("fp16", "side by side")])
def test_one_family_in_half_precision_and_one_in_fp32(world, tokens, dtype, shape):
    """A weak family does not force its dtype on the others; what they exchange is fp32."""
    precision = Precision(by_family={"a": dtype, "b": "fp32"}, loss_scale=2.0**10)
    exact = alone(world, tokens, "fp32")
    for zero in (1,) if shape == "pipeline" else (0, 1, 3):
        plan = mixed_plan(world.size, shape, zero)
        result = curve(world, job_in(tokens, "fp32", precision=precision), plan)
        for key in ("loss", "grad_norm"):
            assert largest_relative_difference(of(result, key), of(exact, key)) < HALF_TOLERANCE, zero
        again = curve(world, job_in(tokens, "fp32", precision=precision), plan, AGAIN)
        assert again == result[:AGAIN], "bit for bit"


@pytest.mark.ranks(2)
@pytest.mark.timeout(60)
def test_each_family_has_its_dtype_and_the_wire_is_fp32(world, tokens):
    import torch

    precision = Precision(by_family={"a": "bf16"})
    job = job_in(tokens, "fp32", precision=precision)
    with world.freeing():
        layout = make_trainer(world, job, mixed_plan(2, "pipeline", 1)).layout
        assert layout.dtype == (torch.bfloat16 if world.rank == 0 else torch.float32)
        assert set(layout.wires.values()) == {torch.float32}
