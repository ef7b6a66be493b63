"""The predictor against published measurements: the small sets whole, of the others some rows.

`python -m benchmarks.evidence.predictor` scores all of them.
"""

import statistics
from dataclasses import replace

import pytest

from benchmarks.evidence import published
from benchmarks.evidence.calibrate import SHIPPED
from benchmarks.evidence.mixed_runs import MixedRun
from hpctrain.config.errors import PlanError
from hpctrain.planner.prices.cost import layer_cost
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.items import BLOCK


@pytest.mark.parametrize(
    ("name", "every", "most_devices", "mean_error", "bias"),
    [
        ("korthikanti", 1, 280, 0.05, 0.05),
        ("megatron_2020", 1, 64, 0.08, 0.05),
        ("sc21", 1, 512, 0.08, 0.08),
        ("vtrain", 25, 8, 0.10, 0.06),
        ("foundry", 6, 64, 0.08, 0.05),
    ],
)
def test_steps_are_near_what_was_measured(name, every, most_devices, mean_error, bias):
    rows = [row for row in getattr(published, name)().rows[::every] if row.run.num_devices <= most_devices]
    assert len(rows) >= 6
    off = [SHIPPED.predict(row).step_seconds / row.seconds - 1 for row in rows]
    assert statistics.mean(map(abs, off)) < mean_error
    assert abs(statistics.mean(off)) < bias


def test_few_runs_of_fsdp_and_at_scale_are_near_what_was_measured_each():
    for row in published.torch_fsdp().rows:
        assert SHIPPED.predict(row).step_seconds == pytest.approx(row.seconds, rel=0.06), row.name
    for row in (*published.llama3().rows, *published.mcore().rows[:3]):
        assert SHIPPED.predict(row).step_seconds == pytest.approx(row.seconds, rel=0.16), row.name


@pytest.mark.parametrize(("name", "mean_error"), [("nemo", 0.05), ("nemo_gb200", 0.05), ("mcore", 0.07)])
def test_megatron_core_on_hopper_and_blackwell_is_near_what_was_measured(name, mean_error):
    rows = [row for row in getattr(published, name)().rows if row.run.num_devices <= 256]
    assert len(rows) >= 4
    off = [SHIPPED.predict(row).step_seconds / row.seconds - 1 for row in rows]
    assert statistics.mean(map(abs, off)) < mean_error


def test_time_and_memory_of_torchtitan_are_near_what_was_measured():
    rows = published.torchtitan().rows
    result = [SHIPPED.predict(row) for row in rows]
    off = {row.name: p.step_seconds / row.seconds - 1 for p, row in zip(result, rows, strict=True)}
    assert statistics.mean(map(abs, off.values())) < 0.1
    with_memory = [(p, row) for p, row in zip(result, rows, strict=True) if row.memory_bytes]
    assert len(with_memory) == 5
    for prediction, row in with_memory:
        assert max(s.memory.total for s in prediction.memory) == pytest.approx(row.memory_bytes, rel=0.06), row.name


def test_steps_in_fp8_which_no_constant_is_fitted_to_are_near_what_was_measured():
    rows = [row for row in published.nemo_fp8().rows if row.run.num_devices <= 128]
    off = [SHIPPED.predict(row).step_seconds / row.seconds - 1 for row in rows]
    assert len(rows) >= 10
    assert statistics.mean(map(abs, off)) < 0.07


def test_fp8_speeds_up_linear_layers_and_costs_casts():
    row = next(row for row in published.nemo_fp8().rows if row.run.pipeline == 1)
    half = replace(row.run, linear_dtype=None)
    setup, plain = row.run.setup(), half.setup()
    fast, slow = (layer_cost(each, TensorGrid(), BLOCK, 1) for each in (setup, plain))
    assert {p.dtype for p in fast.forward.products if not p.fused} == {"fp8"}
    assert {p.dtype for p in fast.forward.products if p.fused} == {None}
    assert fast.forward.passed_bytes > slow.forward.passed_bytes
    heads = [layer_cost(each, TensorGrid(), each.head, 1).forward for each in (setup, plain)]
    assert heads[0] == heads[1], "logits stay in half precision"
    assert row.run.predict().step_seconds < 0.85 * half.predict().step_seconds
    with pytest.raises(PlanError, match="no speed in fp8"):
        replace(row.run, accelerator="A100-80").predict()


def test_context_parallelism_halves_what_a_rank_computes_and_keeps():
    row = next(row for row in published.nemo().rows if row.run.context == 2)
    whole = replace(row.run, context=1, data=row.run.data * 2)
    assert whole.num_devices == row.run.num_devices
    assert row.run.predict().step_seconds == pytest.approx(whole.predict().step_seconds, rel=0.05)
    kept, kept_whole = (run.memory()[0].memory.activations for run in (row.run, whole))
    assert kept == pytest.approx(kept_whole / 2, rel=0.01)


def test_what_ran_on_whole_devices_fits():
    full = [row for row in published.foundry().rows if row.run.num_devices == 8][::4]
    assert all(stage.fits for row in full for stage in row.run.memory())
    assert any(stage.memory.total > 0.93 * stage.available_bytes for row in full for stage in row.run.memory())


def test_what_ran_at_scale_fits_and_what_ran_out_of_memory_does_not():
    result = published.bigscience()
    memory = {row.name: max(row.run.memory(), key=lambda stage: stage.memory.total) for row in result.rows[::3]}
    assert all(stage.fits for stage in memory.values())
    off = [memory[r.name].memory.total / r.memory_bytes - 1 for r in result.rows[::3] if r.memory_bytes]
    assert statistics.mean(map(abs, off)) < 0.06
    missed = [row.name for row in result.out_of_memory if all(stage.fits for stage in row.run.memory())]
    assert len(result.out_of_memory) == 6
    assert len(missed) <= 1


def test_memory_is_near_what_was_published_part_by_part():
    for name, summary, result in published.korthikanti_memory():
        assert result == pytest.approx(summary, rel=0.05), name


def test_time_and_memory_follow_from_profiles_of_layers():
    rows = [row for row in published.sailor().rows if row.run.num_devices <= 16]
    result = [SHIPPED.predict(row) for row in rows]
    assert statistics.mean(abs(p.step_seconds / row.seconds - 1) for p, row in zip(result, rows, strict=True)) < 0.1
    memory = [max(stage.memory.total for stage in p.memory) for p in result]
    assert statistics.median(abs(m / row.memory_bytes - 1) for m, row in zip(memory, rows, strict=True)) < 0.05
    assert all(p.fits for p in result), "they ran"


def test_mixed_groups_of_nccl_ring_as_if_all_devices_were_equal():
    row = next(row for row in published.amp_mixed().rows if row.name == "t1 p1 d16 b1")
    assert isinstance(row.run, MixedRun)
    equal = replace(row.run, groups=tuple(replace(group, accelerator="V100") for group in row.run.groups))
    mixed, same = (run.predict().breakdown_seconds["data"] for run in (row.run, equal))
    assert mixed == pytest.approx(same, rel=0.1)


def test_a_tied_embedding_is_summed_in_its_stage_and_between_the_ends_of_each_replica():
    row = next(row for row in published.amp_t4().rows if row.name == "t1 p2 d8 b1")
    tied, apart = (replace(row.run, tie_head=tie).predict().breakdown_seconds["data"] for tie in (True, False))
    embedding_bytes = 2 * row.run.vocabulary * row.run.hidden
    network = row.run.predictor().network
    pairs = network.group_seconds("all_reduce", embedding_bytes, (0, 8), network.concurrent(tuple(range(16))))
    assert tied - apart == pytest.approx(pairs, rel=0.25)
    assert row.run.predict().step_seconds == pytest.approx(row.seconds, rel=0.08)


def test_gradients_that_are_summed_in_half_precision_are_kept_in_it():
    run = next(row.run for row in published.nemo().rows if row.name == "Llama 3.1 8B on 8 H100")
    kept, wide = (max(s.memory.gradients for s in each.memory()) for each in (run, replace(run, overlapped=False)))
    assert kept == pytest.approx(wide * 2 / 4, rel=1e-3), "the part in fp32 is there for the update alone"


def test_a_message_as_large_as_nccls_buffers_holds_its_sender_up_for_none_of_its_time():
    run = next(row.run for row in published.sailor_gaming().rows if row.name == "mit_v2/N4_D2")
    software = run.setup().engine
    shares = [
        run.predictor(replace(software, buffered_bytes=buffered)).costs.blocking_share for buffered in (0, 2**20, 2**21)
    ]
    assert shares == [1.0, 0.5, 0.0], "2 rows of 2048 x 1024 numbers in fp32, by 8 ranks"


@pytest.mark.parametrize(("name", "mean_error"), [("amp_t4", 0.09), ("amp_mixed", 0.15), ("sailor_gaming", 0.09)])
def test_layouts_on_slow_networks_and_mixed_nodes_are_near_what_was_measured(name, mean_error):
    rows = getattr(published, name)().rows
    off = [SHIPPED.predict(row).step_seconds / row.seconds - 1 for row in rows]
    assert statistics.mean(map(abs, off)) < mean_error
