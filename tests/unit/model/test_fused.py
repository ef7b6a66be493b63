"""Fused kernels on one rank: within the bounds of every dtype, computed again bit by bit, and chosen with a reason."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import config as inductor

from hpctrain.architectures.registry import presets
from hpctrain.comm.accelerators.compiling import Compiled
from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.comm.accelerators.kinds import CUDA, Ability
from hpctrain.comm.accelerators.torch_device import TorchAccelerator
from hpctrain.comm.topology import Place
from hpctrain.config.clusters.truth import PretendDevice
from hpctrain.config.errors import JobError
from hpctrain.config.job import Data, Job, Model
from hpctrain.config.kernels import KernelChoice
from hpctrain.engine.alignment import Case, compare
from hpctrain.engine.start.resolve_kernels import ON_CPU, RankTrial, continued_kernels, resolve_fused, resolve_kernels
from hpctrain.model.operators import loss as losses
from hpctrain.model.operators import norm
from hpctrain.model.operators.cases import operators
from hpctrain.model.operators.running import Kernels
from hpctrain.model.parallel.axes import Axes
from hpctrain.model.stage import Stage
from hpctrain.model.transformer import LayerContext
from hpctrain.rehearsal.accelerator import RehearsedAccelerator
from hpctrain.rehearsal.clock import Clock
from tests.compilers import need_compiler
from tests.unit.fake_torch import FakeCupy, FakeTorchModule
from tests.unit.model.test_model import MODELS, make_stage

LOSS = {"cross_entropy", "head.loss"}
FUSED = {"norm", "norm_of_sum", "head_norm", "rotary", "activation"} | LOSS
WORKS, FAILS = Ability(True, "the same numbers"), Ability(False, "torch.compile: no Triton")


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    need_compiler()
    return Kernels(Compiled())


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("preset", "dtype", "names"),
    [("tiny-gpt2", "fp32", {"norm", "norm_of_sum", "activation"}), ("gemma3-1b", "bf16", FUSED)],
)
def test_every_fused_operator_is_within_its_bounds(kernels, preset, dtype, names):
    """The loss, which takes the longest to compile, once: in the dtype that rounds."""
    sizes = {"num_layers": 1, "hidden_size": 32, "head_size": 8, "ffn_size": 24, "vocab_size": 30}
    model = Model.model_validate(presets()[preset] | sizes)
    fused, plain = ({op.name: op for op in operators(model, 2, 8, by)} for by in (kernels, None))
    assert fused.keys() & FUSED == names | LOSS
    errors = [error for name in names for error in compare(fused[name], Case(plain[name]), CPU, dtype, {})]
    assert {error.operator for error in errors} == names
    assert not [error for error in errors if error.is_beyond or not error.repeats]


CPU = CpuAccelerator()
ROWS, LENGTH = 3, 12


def differentiated(name: str, recompute: str, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the gradients of weights of a microbatch."""
    made = make_stage(MODELS[name], recompute)
    stage = Stage(made.tile, LayerContext(MODELS[name], made.layers[0].axes, made.store, kernels))
    tokens = torch.randint(0, MODELS[name].num_ids, (ROWS, LENGTH + 1), generator=torch.manual_seed(3))
    loss, saved = stage.forward(tokens[:, :-1], tokens[:, 1:], True)
    stage.backward(saved, torch.tensor(1.0, dtype=torch.float64))
    return loss, stage.store.groups[0].own_grads()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_what_is_computed_again_has_the_same_bits_and_those_of_single_operations_are_near(kernels, name):
    loss, gradients = differentiated(name, "none", kernels)
    again = differentiated(name, "selective", kernels)
    assert torch.equal(loss, again[0]) and torch.equal(gradients, again[1])
    plain = differentiated(name, "none", Kernels())
    assert torch.allclose(loss, plain[0], rtol=1e-6)
    assert 0 < (gradients - plain[1]).abs().max() < 1e-5 * plain[1].abs().max()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("cap", [None, 3.0], ids=["plain", "capped"])
def test_the_fused_loss_is_that_of_single_operations(kernels, cap, dtype):
    """With padded columns, targets of other ranks, and targets that do not count; the given logits stay as they are."""
    generator = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(40, 12, generator=generator)).to(dtype)
    targets = torch.randint(-1, 30, (40,), generator=generator)
    of = 7, 11, cap  # ids 7 to 17, and a column of padding
    given = logits.clone()
    (expected, logs), (result, fused_logs) = (
        losses.TokenLoss(Axes(), by, *of).losses(each, targets)
        for each, by in ((logits.clone(), Kernels()), (given, kernels))
    )
    assert torch.allclose(result, expected, rtol=1e-5, atol=1e-5) and torch.allclose(fused_logs, logs)
    d_loss = torch.tensor(3.0, dtype=torch.float64)
    gradients = [
        losses.TokenLoss(Axes(), by, *of).gradient(each, targets, logs, d_loss)
        for each, by in ((logits.clone(), Kernels()), (given, kernels))
    ]
    assert torch.equal(given, logits)
    assert gradients[0].dtype == gradients[1].dtype == dtype
    rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert torch.allclose(*(each.float() for each in gradients), rtol=rtol, atol=1e-6)
    assert not gradients[1][targets < 0].any() and not gradients[1][:, 11].any()


@pytest.mark.timeout(120)
def test_later_calls_go_past_torchs_own_checks_and_return_the_same(kernels, monkeypatch):
    """Also where a function does not read all tensors, returns one of them, or the same twice."""

    def of(a, unused, b, *, factor):
        product = factor * a * b
        return b - a, a, product.sum(), product.sum()

    run, (a, b) = Compiled(), torch.randn(2, 3, 4, generator=torch.manual_seed(0))
    first, negative = run(of, a, a, b, factor=2.0), run(torch.neg, a)
    monkeypatch.setattr(torch._dynamo.eval_frame, "set_eval_frame", lambda *_: pytest.fail("torch looks at a call"))
    again, swapped = run(of, a, a, b, factor=2.0), run(of, b.requires_grad_(), b, a, factor=2.0)
    assert all(torch.equal(*each) for each in zip(first, again, strict=True))
    assert torch.equal(swapped[0], a - b) and swapped[1] is b and swapped[2] == swapped[3] == again[2]
    assert torch.equal(run(torch.neg, b), -b) and torch.equal(negative, -a), "one tensor, not a list of one"


@pytest.mark.timeout(120)
def test_a_torch_that_hands_over_copies_is_the_reason_why_nothing_is_fused(kernels, monkeypatch):
    real = torch.compile

    def copying(function, **settings):
        made = real(function, **settings)
        return lambda *tensors: made(*tensors).clone()

    monkeypatch.setattr(torch, "compile", copying)
    ability = CPU.compiles()
    assert not ability.works and f"torch {torch.__version__} hands copies of tensors" in ability.reason


@pytest.mark.timeout(120)
def test_no_measurement_selects_the_order_of_a_sum(kernels, monkeypatch):
    """Torch compiles a long sum for a GPU with several block sizes and keeps the fastest, which differs by rank.

    The test evaluates the condition under which torch does so.
    """
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.hints import HeuristicType
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    if not hasattr(CachingAutotuner, "_could_rblock_scale"):
        pytest.skip(f"torch {torch.__version__} has the same condition in a function that needs a device")
    scales, compile_to_module = [], GraphLowering.compile_to_module

    def noted(graph):
        h100 = SimpleNamespace(type="cuda", major=9, regs_per_multiprocessor=1 << 16)
        autotuner = SimpleNamespace(
            deterministic_mode=inductor.deterministic,
            inductor_meta={"dynamic_scale_rblock": inductor.dynamic_scale_rblock},
            heuristic_type=HeuristicType.REDUCTION,
            size_hints={"x": 1, "r0_": 4096},
            device_props=h100,
        )
        scales.append(CachingAutotuner._could_rblock_scale.func(autotuner))
        assert inductor.deterministic, "and of the configurations at the start it takes one by a rule"
        return compile_to_module(graph)

    monkeypatch.setattr(GraphLowering, "compile_to_module", noted)
    with inductor.patch(force_disable_caches=True):
        Compiled()(norm.squares_of, torch.ones(3, 4097))
    assert scales == [False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, for which torch compiles")
def test_a_device_for_which_torch_is_not_built_says_so():
    device = TorchAccelerator(CUDA, 0, "h200", 1, FakeTorchModule(), FakeCupy())
    ability = device.compiles()
    built = torch.version.cuda or torch.version.hip
    reason = "RuntimeError: Found no NVIDIA driver" if built else "AssertionError: Torch not compiled with CUDA enabled"
    assert not ability.works and ability.reason.startswith(f"torch.compile: {reason}")
    assert ability.reason.endswith("(it needs g++ and, for devices, Triton)")
    kernels, reasons = resolve_fused(KernelChoice(), [trial(0, "h200", ability)])
    assert kernels.fused is False and reasons == {"kernels.fused": f"h200 off: {ability.reason} (rank 0 on node0)"}


@pytest.mark.timeout(120)
def test_a_host_without_a_compiler_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with inductor.patch({"cpp.cxx": ("/nowhere/g++",)}):
        ability = CPU.compiles()
    assert not ability.works and "No working C++ compiler found" in ability.reason


def trial(rank: int, family: str, compiles: Ability | None = None) -> RankTrial:
    return RankTrial(rank, family, f"node{rank}", compiles)


def test_auto_is_on_for_devices_that_compile_and_off_for_processors():
    trials = [trial(0, "h100", WORKS), trial(1, "cpu"), trial(2, "h100", WORKS)]
    kernels, reasons = resolve_fused(KernelChoice(), trials)
    assert [kernels.fused_of(family) for family in ("h100", "cpu")] == [True, False]
    assert reasons == {"kernels.fused": f"h100 on: the same numbers; cpu off: {ON_CPU}"}


def test_a_pretended_device_is_no_processor():
    world = SimpleNamespace(
        rank=0,
        place=Place("node0", "h100"),
        topology=SimpleNamespace(shares_memory=False),
        all_objects=lambda own: [own],
    )
    truth = PretendDevice(memory_bytes=10**9, memory_bytes_per_second=1e9, flops_per_second={"fp32": 1e9})
    pretended = RehearsedAccelerator("h100", truth, Clock(), 1.0, seed=0)
    job = Job(name="a", model=MODELS["gpt2"], data=Data(tokens=Path("t.bin")))
    resolved, reasons = resolve_kernels(world, pretended, job, [0])  # pyright: ignore[reportArgumentType] - what it asks
    assert resolved.kernels.fused is False
    text = "h100 off: a pretended device sees operations one by one (rank 0 on node0)"
    assert reasons == {"kernels.fused": text, "kernels.attention": "h100 torch: its own choice by shape and dtype"}


def test_one_rank_that_cannot_decides_for_its_family_alone():
    trials = [trial(0, "h100", WORKS), trial(1, "h100", FAILS), trial(2, "a100", WORKS)]
    kernels, reasons = resolve_fused(KernelChoice(), trials)
    assert [kernels.fused_of(family) for family in ("h100", "a100")] == [False, True]
    assert reasons["kernels.fused"].startswith("h100 off: torch.compile: no Triton (rank 1 on node1); a100 on")


def test_what_a_job_asks_for_is_done_or_refused():
    trials = [trial(0, "h100", WORKS), trial(1, "v100", FAILS)]
    with pytest.raises(JobError, match=r"rank 1 \(v100\) on node1 cannot compile: torch.compile: no Triton; ") as error:
        resolve_fused(KernelChoice(fused=True), trials)
    assert str(error.value).endswith("set kernels.fused_by_family = {v100 = false}, or kernels.fused = false")
    kernels, reasons = resolve_fused(
        KernelChoice(fused=True, fused_by_family={"v100": False}), [trials[0], trial(1, "v100")]
    )
    assert [kernels.fused_of(family) for family in ("h100", "v100")] == [True, False] and not reasons


def test_a_run_that_continues_has_the_kernels_of_the_one_before():
    theirs = KernelChoice(fused=True, fused_by_family={"cpu": False}, attention="torch")
    kernels, taken = continued_kernels(KernelChoice(), theirs)
    assert kernels == theirs and taken == {"kernels.fused": "on, but cpu", "kernels.attention": "torch"}
    kernels, taken = continued_kernels(KernelChoice(), KernelChoice())
    assert kernels.fused is False and taken["kernels.fused"] == "off", "from before there was a choice"
    asked = KernelChoice(fused=False, attention="math")
    assert continued_kernels(asked, theirs) == (asked, {})
