"""How parameters are cut: every element is somewhere, counted once, whatever the grid and the plan."""

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.architectures.registry import presets
from hpctrain.config.errors import PlanError
from hpctrain.config.job import Model, load_job
from hpctrain.model.initialise import BLOCK, fill_initial, initial_values
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval, cut_evenly, tiles_exactly
from hpctrain.sharding.parameters import Parameter, all_parameters, check_grid, count_parameters, whole_rows

MODELS = [
    Model(architecture="gpt2", num_layers=4, hidden_size=16, num_heads=4, vocab_size=13, tie_head=True),
    Model(architecture="llama", num_layers=4, hidden_size=16, num_heads=4, num_kv_heads=2, ffn_size=24, vocab_size=13),
]


@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 9),
    row_cut=st.tuples(st.integers(1, 3), st.integers(0, 2)),
    column_cut=st.tuples(st.integers(1, 3), st.integers(0, 2)),
    data=st.data(),
)
def test_whole_rows_cut_any_interval_of_a_box_into_rectangles(rows, width, row_cut, column_cut, data):
    box = tuple(
        cut_evenly(size, parts)[min(index, parts - 1)]
        for size, (parts, index) in zip((rows, width), (row_cut, column_cut), strict=True)
    )
    size = math.prod(i.size for i in box)
    if size == 0:
        return
    start = data.draw(st.integers(0, size - 1))
    elements = Interval(start, data.draw(st.integers(start + 1, size)))
    parameter = Parameter("p", (rows, width), ("y", "x"), "normal")
    whole = np.arange(rows * width).reshape(rows, width)
    expected = whole[slice(*box[0]), slice(*box[1])].reshape(-1)[slice(*elements)]
    runs = list(whole_rows(parameter, box, elements))
    assert tiles_exactly([taken for *_, taken in runs], elements)
    assert np.array_equal(np.concatenate([whole[slice(*r), c].reshape(-1) for r, c, _ in runs]), expected)
    out = torch.empty(elements.size)
    fill_initial(parameter, box, elements, MODELS[0], 7, out)
    values = initial_values(parameter, Interval(0, rows * width), MODELS[0], 7).numpy()
    assert np.array_equal(
        out.numpy(), values.reshape(rows, width)[slice(*box[0]), slice(*box[1])].reshape(-1)[start : elements.stop]
    )


def test_initial_values_have_the_standard_deviation_that_is_asked_for():
    model = MODELS[0]
    parameter = all_parameters(model)["blocks.0.attention.q.weight"]
    values = initial_values(Parameter("big", (400, 400), ("y", "x"), "normal"), Interval(0, 160_000), model, 1)
    assert abs(values.std() / model.init_std - 1) < 0.01
    assert abs(values.mean()) < model.init_std / 100
    elements = Interval(0, 256)
    assert not torch.equal(initial_values(parameter, elements, model, 1), initial_values(parameter, elements, model, 2))


def test_initial_values_do_not_depend_on_where_they_are_cut_or_on_threads():
    parameter = Parameter("big", (3000, 700), ("y", "x"), "normal")
    whole = initial_values(parameter, Interval(0, 2_100_000), MODELS[0], 5)
    for interval in (Interval(0, 10), Interval(BLOCK - 3, 2 * BLOCK + 5), Interval(2_099_999, 2_100_000)):
        assert torch.equal(initial_values(parameter, interval, MODELS[0], 5), whole[slice(*interval)])
    box = (Interval(10, 3200), Interval(100, 500))  # with rows of padding
    expected = torch.zeros(3190, 400)
    expected[:2990] = whole.view(3000, 700)[10:, 100:500]
    threads = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        out = torch.full((3190 * 400,), 9.0)
        fill_initial(parameter, box, Interval(0, 3190 * 400), MODELS[0], 5, out)
        assert torch.equal(out.view(3190, 400), expected)
    torch.set_num_threads(threads)


def test_a_seed_gives_the_same_weights_with_every_version_of_numpy():
    values = initial_values(Parameter("p", (70_000,), ("y",), "normal"), Interval(0, 70_000), MODELS[0], 1)
    digest = hashlib.blake2b(values.numpy().tobytes(), digest_size=8).hexdigest()
    assert digest == "879b0de7126f2014", "numpy draws other numbers: new runs start elsewhere, resumed ones do not"


@pytest.mark.parametrize(
    ("preset", "billions"),
    [("gpt2-124m", 0.124), ("gpt2-1.5b", 1.56), ("llama-1b", 1.10), ("llama-8b", 8.03), ("llama-70b", 70.6)]
    + [("gpt-5b", 5.05), ("gpt-10b", 10.3), ("gpt-20b", 20.1), ("gpt-40b", 39.3), ("gpt-80b", 76.7)],
)
def test_presets_have_the_published_number_of_parameters(preset, billions):
    assert count_parameters(Model(**presets()[preset])) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (TensorGrid(x=3), "hidden_size 16 is not divisible by tensor x = 3; set x to one of 1, 2, 4, 8, 16"),
        (TensorGrid(y=3), "num_heads 4 is not divisible by tensor y = 3"),
        (TensorGrid(y=8), "num_heads 4 is not divisible by tensor y = 8"),
    ],
)
def test_grids_that_do_not_divide_are_refused(grid, message):
    with pytest.raises(PlanError, match=message):
        check_grid(MODELS[1], grid)


def test_the_ready_made_job_loads():
    assert load_job("tiny").model.num_layers == 4


COUNTS = {
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma3-1b": 999_885_952,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
}
"""Elements of the safetensors that their makers have published."""


@pytest.mark.parametrize("preset", COUNTS)
def test_presets_have_every_parameter_of_the_published_files(preset):
    assert count_parameters(Model(**presets()[preset])) == COUNTS[preset]
