"""`align` passes what is right in every dtype, and names an operator that is wrong on a device.

A device's fault is one in other dtypes than float64. What is wrong in all of them is wrong in the reference too: see
`test_gradients_are_differences_of_the_output`, and `test_model.py` and `test_huggingface.py` for the values.
"""

import json
import math

import pytest
import torch
from click.testing import CliRunner
from torch.autograd import Function

from hpctrain.architectures.registry import presets
from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.config.job import Job, Model
from hpctrain.config.precision import TRAINED_DTYPES, Precision
from hpctrain.engine import alignment
from hpctrain.engine.alignment import Case, OperatorError, align_rank
from hpctrain.jobs.align import format_alignment, mean_relative_difference, summarise
from hpctrain.jobs.compare import command as compare_runs
from hpctrain.model.operators import activation, attention, linear
from hpctrain.model.operators.cases import Operator, operators

SMALL = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 211, "max_positions": 64}


def small_job(**more) -> Job:
    model = SMALL | {"architecture": "llama", "num_kv_heads": 2, "ffn_size": 96} | more
    return Job.model_validate(
        {"name": "a", "model": model, "data": {"tokens": "t.bin", "sequence_length": 32}, "train": {"steps": 1}}
    )


def beyond(job: Job, dtypes=TRAINED_DTYPES, deviation: float = 1.0) -> dict[str, set[str]]:
    """Return by dtype which results are beyond their bounds."""
    compared = align_rank(CpuAccelerator(), job, dtypes, 2, 32, deviation).compared
    result = {dtype: set() for dtype in dtypes}
    for each in compared:
        if each.is_beyond:
            result[each.dtype].add(f"{each.operator} {each.result}")
    return result


@pytest.mark.parametrize(
    "preset", ["tiny-gpt2", "llama-3.2-1b", "gemma2-2b", "gemma3-1b", "qwen3-0.6b", "starcoder2-3b"]
)
def test_every_operator_of_every_architecture_is_within_its_bounds(preset):
    sizes = {"num_layers": 2, "hidden_size": 128, "head_size": 16, "ffn_size": 128, "vocab_size": 300, "window": 20}
    given = presets()[preset]
    model = Model.model_validate(given | {k: v for k, v in sizes.items() if k != "window" or given.get("window")})
    names = [operator.name for operator in operators(model, 2, 32)]
    assert len(names) == len(set(names)) >= 13
    job = small_job().model_copy(update={"model": model})
    assert beyond(job) == {dtype: set() for dtype in TRAINED_DTYPES}


@pytest.mark.parametrize("preset", ["tiny-gpt2", "gemma2-2b", "qwen3-0.6b"])
def test_gradients_are_differences_of_the_output(preset):
    """A backward pass is its own reference in `align`: here it is compared with two forward passes."""
    sizes = {"num_layers": 2, "hidden_size": 32, "head_size": 8, "ffn_size": 24, "vocab_size": 50}
    for operator in operators(Model.model_validate(presets()[preset] | sizes), 2, 8):
        assert _slope_error(operator) < 1e-7, operator.name


def test_a_gradient_that_is_wrong_in_all_dtypes_is_no_difference_of_the_output(monkeypatch):
    right = activation.forward
    monkeypatch.setattr(activation, "forward", lambda *tensors, **named: right(*tensors, **named) * 1.01)
    wrong = [operator.name for operator in operators(small_job().model, 2, 8) if _slope_error(operator) > 1e-3]
    assert wrong == ["activation"]


def direction(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return alignment.draw("direction", name, tensor.shape, 1.0).double()


def _slope_error(operator: Operator, step: float = 1e-5) -> float:
    """Return how far the slope of gradients in float64 is from that of the output between two points."""
    case, ends = Case(operator), []
    for signed in (step, -step):
        inputs = case.inputs(torch.device("cpu"), torch.float64)
        values = {name: v.detach() + signed * direction(name, v) for name, v in inputs.values.items()}
        for name, weight in inputs.weights.items():
            weight.data = weight.data + signed * direction(name, weight.data)
        with alignment.InFloat64():
            ends.append(operator.compute(**values, **inputs.weights, **inputs.ids))
    slope = ((ends[0] - ends[1]).detach() / (2 * step) * case.gradient).sum()
    gradients = {name.removeprefix("d "): tensor for name, tensor in case.expected.items() if name != "output"}
    terms = torch.cat([(gradient * direction(name, gradient)).flatten() for name, gradient in gradients.items()])
    return float((slope - terms.sum()).abs() / terms.abs().max())


def test_blocks_that_differ_are_operators_of_their_own():
    model = Model.model_validate(presets()["gemma2-2b"] | {"vocab_size": 300})
    names = [operator.name for operator in operators(model, 1, 8)]
    assert {"attention 1", "attention 2", "logit_cap"} <= set(names), "with a window and without"


class _HalfGradient(Function):
    """The identity, but its gradient, on devices."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy if dy.dtype == torch.float64 else dy / 2


def test_a_wrong_operator_is_named_in_the_dtype_in_which_it_is_wrong(monkeypatch):
    right = attention.attend

    def wrong(queries, keys, values, of, **more):
        if queries.dtype == torch.bfloat16:  # as a kernel would that forgets the last position
            keys = torch.cat([keys[:, :, :-1], keys[:, :, -2:-1]], dim=2)
        return right(queries, keys, values, of, **more)

    monkeypatch.setattr(attention, "attend", wrong)
    result = beyond(small_job())
    assert result["fp32"] == result["fp16"] == set()
    assert result["bf16"] and {name.split()[0] for name in result["bf16"]} == {"attention"}
    every = [align_rank(CpuAccelerator(), small_job(), ("bf16",), 2, 32)]
    text = format_alignment(summarise(every, 0.015) | {"rows": 2, "positions": 32})
    assert "--set precision.overrides.attention=fp32" in text and "not aligned" in text


def test_a_wrong_gradient_is_named_although_the_output_is_right(monkeypatch):
    right = activation.activate
    monkeypatch.setattr(activation, "activate", lambda x, *of: right(_HalfGradient.apply(x), *of))
    assert beyond(small_job(), ("fp32",)) == {"fp32": {"activation d x"}}


def test_gradients_of_weights_that_are_rounded_before_they_are_added_are_beyond_the_bound(monkeypatch):
    def rounded(grad, dy, x, overwrite):
        linear.add_part(grad, (dy.t() @ x).to(dy.dtype), overwrite)

    monkeypatch.setattr(linear, "add_product", rounded)
    result = beyond(small_job())
    assert result["fp32"] == set()
    for dtype in ("bf16", "fp16"):
        assert {"attention.qkv d weight", "ffn.down d weight"} <= result[dtype]


def test_products_of_operands_with_10_bits_are_beyond_the_bound_of_fp32(monkeypatch):
    """Tensor cores take so many of fp32 operands where they may (TF32)."""

    class Short(linear.Linear):
        def whole_product(self, x):
            return super().whole_product(x if x.dtype == torch.float64 else x * (1 + 2**-11))

    monkeypatch.setattr(linear, "Linear", Short)
    assert "ffn.down output" in beyond(small_job(), ("fp32",))["fp32"]


def test_overflow_is_located_with_what_it_should_be():
    compared = align_rank(CpuAccelerator(), small_job(), ("fp16", "bf16"), 2, 32, deviation=400.0).compared
    overflows = {each.operator: each for each in compared if each.overflow}
    assert {each.dtype for each in overflows.values()} == {"fp16"} and "activation" in overflows
    overflow = overflows["activation"].overflow
    assert overflow and overflow["count"] and len(overflow["at"]) == 3 and abs(overflow["expected"]) > 65504
    every = [align_rank(CpuAccelerator("v100"), small_job(), ("fp16",), 2, 32, deviation=400.0, host="n1")]
    text = format_alignment(summarise(every, 0.015) | {"rows": 2, "positions": 32})
    assert "overflow: activation, output, on v100 in fp16, rank 0 on n1" in text
    assert "--set precision.by_family.v100=fp32" in text


def test_a_pinned_operator_is_nearer_to_float64():
    job = small_job()
    pinned = job.model_copy(update={"precision": Precision(overrides={"attention": "fp32", "head": "fp32"})})

    def error(of: Job, operator: str, result: str) -> float:
        compared = align_rank(CpuAccelerator(), of, ("bf16",), 2, 32).compared
        return next(each.error for each in compared if (each.operator, each.result) == (operator, result))

    # Of what is fp32 in the end: other results are rounded to bf16 again.
    assert error(pinned, "head.loss", "d table") < 0.01 * error(job, "head.loss", "d table")
    assert beyond(pinned, ("bf16",)) == {"bf16": set()}


def test_bounds_follow_from_the_dtype_and_the_sensitivity_of_results():
    """What is rounded once has a sensitivity of about 1; a sum of 32 terms in fp32 is as exact as that."""
    by_name = {operator.name: operator for operator in operators(small_job().model, 2, 32)}
    residual = Case(by_name["residual"])
    assert 0.5 < residual.sensitivity["output"] <= 1
    one = torch.ones(1)
    assert 3e-3 * 2 < residual.error_bound("output", one.bfloat16(), torch.bfloat16) < 2**-8 * 4.1
    assert residual.error_bound("output", one, torch.bfloat16) == residual.error_bound("output", one, torch.float32)
    product, loss = Case(by_name["ffn.up"]), Case(by_name["head.loss"])
    assert (
        product.error_bound("d weight", one, torch.bfloat16) < 1e-5 < loss.error_bound("d table", one, torch.bfloat16)
    )


def test_inputs_depend_on_names_alone_and_are_numbers_of_every_dtype():
    (one, *_), (two, *_) = (operators(small_job().model, 2, 16) for _ in range(2))
    assert Case(one).digest() == Case(two).digest()
    values = alignment.draw("a", "b", (1000,), 1.0)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(values.to(dtype).float(), values)
    assert not torch.equal(values, alignment.draw("a", "c", (1000,), 1.0))


def test_the_worst_rank_is_the_one_that_is_reported():
    def of(rank: int, error: float):
        compared = OperatorError("norm", "output", "bf16", error, 1e-2, None, True)
        return alignment.RankAlignment(rank, f"n{rank}", "h200", "H200", {}, [compared])

    summary = summarise([of(0, 1e-3), of(1, math.nan), of(2, 2e-3)], 0.015)
    assert not summary["aligned"]
    assert [(entry["rank"], entry["beyond"]) for entry in summary["operators"]] == [(1, True)]
    assert summary["families"] == {"h200": {"model": "H200", "ranks": 3}}


def test_losses_are_compared_by_their_mean_relative_difference():
    assert mean_relative_difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.05)
    assert mean_relative_difference([math.nan], [1.0]) == math.inf


def test_runs_are_compared_by_their_mean(tmp_path):
    """One step in ten is 4 % off: too far for the largest difference, and near on the mean."""
    for name, factor in (("a", 1.0), ("b", 1.04)):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step, "loss": 2.0 * (factor if step == 3 else 1.0)}) for step in range(1, 11)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    runs = [str(tmp_path / name) for name in "ab"]

    def compared(*options: str):
        return CliRunner().invoke(compare_runs, [*runs, *options])

    assert compared("--tolerance", "0.015").exit_code == 1
    done = compared("--tolerance", "0.015", "--mean", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["mean_difference"] == pytest.approx(0.04 / 1.04 / 10)
    assert compared("--tolerance", "0.003", "--mean").exit_code == 1
    assert compared("--exact", "--mean").exit_code == 2
