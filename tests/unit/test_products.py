"""Products of linear layers: which there are, the ways to compute them, and which way is taken."""

import itertools
import tomllib

import pytest
import torch

from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.config.errors import JobError
from hpctrain.config.job import Model, load_job
from hpctrain.engine import tuning
from hpctrain.engine.tuning import fastest, measure
from hpctrain.model.operand_layouts import LAYOUTS_BY_NAME, OperandLayout, OperandLayouts
from hpctrain.model.products import Product, parse_product, products_of
from hpctrain.observe.run import dump_job
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval

SMALL = [Product("forward", "fp32", 24, 32, 40), Product("input", "fp32", 24, 40, 32)]
SMALL += [Product("weight", "fp32", 40, 24, 32), Product("weight", "bf16", 40, 24, 32)]


@pytest.mark.parametrize("by_columns", [*itertools.product([False, True], repeat=2)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS_BY_NAME)
def test_every_way_gives_the_same_numbers_in_the_same_order(layout, by_columns):
    a, b = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 7), (7, 3)))
    a, b = (t.t().contiguous().t() if turned else t for t, turned in zip((a, b), by_columns, strict=True))
    made = LAYOUTS_BY_NAME[layout].multiply(a, b)
    assert made.is_contiguous()
    torch.testing.assert_close(made, a @ b, rtol=1e-12, atol=1e-12)
    total = torch.ones(5, 3, dtype=torch.float64)
    LAYOUTS_BY_NAME[layout].add(total, a, b)
    torch.testing.assert_close(total, 1 + a @ b, rtol=1e-12, atol=1e-12)


def test_operands_in_half_precision_are_added_to_a_sum_in_fp32():
    a, b = torch.randn(5, 7, dtype=torch.bfloat16), torch.randn(7, 3, dtype=torch.bfloat16)
    for layout in LAYOUTS_BY_NAME.values():
        total = torch.ones(5, 3)
        layout.add(total, a, b)
        torch.testing.assert_close(total, 1 + (a @ b).float())


def test_a_way_is_taken_for_its_product_alone(monkeypatch):
    taken = []
    multiply = OperandLayout.multiply
    monkeypatch.setattr(OperandLayout, "multiply", lambda layout, a, b: taken.append(layout) or multiply(layout, a, b))
    layouts = OperandLayouts(
        {"forward-fp32-4x8x2": "both", "forward-bf16-4x8x3": "first", "input-fp32-4x8x3": "result"}, "fp32"
    )
    for use, n in itertools.product(("forward", "input"), (2, 3)):
        layouts.multiply(use, torch.ones(4, 8), torch.ones(8, n))
    assert taken == [
        LAYOUTS_BY_NAME["both"],
        LAYOUTS_BY_NAME["plain"],
        LAYOUTS_BY_NAME["plain"],
        LAYOUTS_BY_NAME["result"],
    ]


def test_products_follow_from_the_tile():
    """Rows over z and in row_chunks; key/value heads that several y hold are a product apart."""
    model = Model(architecture="llama", num_layers=2, hidden_size=16, num_heads=8, num_kv_heads=2, vocab_size=61)
    tile = Tile(Interval(1, 4), Interval(0, 5), tuple(range(8)), TensorGrid(1, 4, 2), row_chunks=2)
    other = Tile(Interval(0, 1), Interval(0, 5), (8,))
    result = products_of(model, Plan((tile, other), 2, 5), tile, "fp32", 10)
    tokens = {p.m for p in result if p.use == "forward"}
    assert tokens == {10, 20}, "5 rows over z are 2 and 3, in two pieces 1 and 2"
    halves = products_of(model, Plan((tile, other), 2, 5), tile, "fp32", 10, in_halves=True)
    of_head = {p.m for p in halves if (p.use, p.k, p.n) == ("forward", 16, 16)}  # and of blocks: q
    assert of_head == {10, 20} and {p.m for p in halves if p.use == "forward" and p.n == 4} == {10}
    shapes = {(p.k, p.n) for p in result if p.use == "forward"}
    # q alone, the one head of k and v together, o; gate and up; down; the padded vocabulary
    assert shapes == {(16, 4), (16, 4), (4, 16), (16, 32), (16, 16), (16, 16)}
    assert {(p.m, p.n) for p in result if p.use == "weight"} == {(n, k) for k, n in shapes}
    assert products_of(model, Plan((tile, other), 2, 5), other, "fp32", 10) == []
    assert all(parse_product(str(product)) == product for product in result)


def rounds(**seconds):
    return [dict(zip(seconds, each, strict=True)) for each in zip(*seconds.values(), strict=True)]


@pytest.mark.parametrize(
    "seconds, layout",
    [
        ({"plain": [10, 10, 10], "first": [8, 8, 8], "both": [9, 9, 9]}, "first"),
        ({"plain": [10, 10, 10], "first": [9.5, 9.5, 9.5]}, "plain"),  # not clearly
        ({"plain": [10, 40, 40], "first": [9.9, 10, 10]}, "plain"),  # somebody else took the core from the plain one
        ({"plain": [10, 10, 10], "first": [2, 11, 11]}, "plain"),  # a single good round
    ],
)
def test_another_way_has_to_be_clearly_faster_in_the_best_and_in_the_median_round(seconds, layout):
    assert fastest(rounds(**seconds)).layout == layout


def test_a_slow_way_is_found_out(monkeypatch):
    """What is measured is what is computed: plain products that are slowed down lose."""

    class Slow(OperandLayout):
        def multiply(self, a, b):
            for _ in range(20):
                a @ b
            return super().multiply(a, b)

    monkeypatch.setitem(LAYOUTS_BY_NAME, "plain", Slow())
    product = Product("forward", "fp32", 96, 128, 128)
    result = measure(CpuAccelerator(), [product], seconds=60.0)
    assert result[str(product)].layout != "plain"
    assert result[str(product)].times > 3


def test_what_is_too_large_for_its_share_of_the_time_is_left_as_it_is():
    large = Product("forward", "fp32", 800, 800, 800)
    assert all(tuned.times for tuned in measure(CpuAccelerator(), SMALL, seconds=60.0).values())
    assert measure(CpuAccelerator(), [large], seconds=0.02) == {str(large): ("plain", 0.0)}
    assert measure(CpuAccelerator(), SMALL, seconds=0.0) == {str(product): ("plain", 0.0) for product in SMALL}


def test_ways_are_written_and_read_back(tmp_path):
    name = "weight-fp32-256x512x768"
    job = load_job("tiny", ["model.vocab_size=100", f'products.layouts={{"a100-mig-3g.40gb" = {{{name} = "both"}}}}'])
    (tmp_path / "resolved.toml").write_text(dump_job(job, {}, "plan.toml"))
    assert tomllib.loads((tmp_path / "resolved.toml").read_text())["products"]["layouts"]["a100-mig-3g.40gb"]
    assert load_job(str(tmp_path / "resolved.toml")).products == job.products


@pytest.mark.parametrize(
    "value, text",
    [
        ('{cpu = {forward-fp32-1x2 = "both"}}', r"products.layouts.cpu.forward-fp32-1x2.*should match pattern"),
        ('{cpu = {forward-fp32-1x2x3 = "fast"}}', r"products.layouts.cpu.forward-fp32-1x2x3 = 'fast': input should be"),
    ],
)
def test_a_way_that_there_is_not_is_refused(value, text):
    with pytest.raises(JobError, match=text):
        load_job("tiny", [f"products.layouts={value}"])


def test_the_names_in_a_job_are_those_of_the_model():
    from typing import get_args

    from hpctrain.config.job import Products

    of_family = get_args(Products.model_fields["layouts"].annotation)[1]
    assert set(get_args(get_args(of_family)[1])) == set(LAYOUTS_BY_NAME)
    assert tuning.CLEARLY > 1
