"""The model on one rank against the same model written plainly in PyTorch: loss and every gradient."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from hpctrain.architectures.description import Experts
from hpctrain.config.job import Model
from hpctrain.model.operators.activation import activate
from hpctrain.model.operators.running import run_eagerly
from hpctrain.model.parallel.axes import ONE_RANK, Axes
from hpctrain.model.stage import Stage, initialise
from hpctrain.model.storage.store import Store
from hpctrain.model.transformer import IGNORED, LayerContext
from hpctrain.plan.holdings import whole_model
from hpctrain.plan.tiling import Tile
from hpctrain.sharding.intervals import Interval

SMALL = {"num_layers": 2, "hidden_size": 24, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 17}
GEMMA = SMALL | {"head_size": 8, "window": 4, "tie_head": True, "score_divisor": 5.0}
EXPERTS = {"num_experts": 6, "experts_per_token": 2, "ffn_size": 10}
GROUPS = {"expert_groups": 3, "groups_per_token": 2, "shared_experts": 2, "score_scale": 1.5}
MODELS = {
    "gpt2": Model(architecture="gpt2", **(SMALL | {"num_kv_heads": None, "tie_head": True})),
    "llama": Model(architecture="llama", **SMALL),
    "llama scaled": Model(
        architecture="llama",
        rope_scaling={"kind": "llama3", "factor": 8.0, "original_positions": 16, "low_factor": 0.5, "high_factor": 2.0},
        **SMALL,
    ),
    "llama yarn": Model(
        architecture="llama",
        rope_base=100.0,
        rope_scaling={"kind": "yarn", "factor": 8.0, "original_positions": 64, "beta_fast": 4.0, "truncate": False},
        **SMALL,
    ),
    "qwen2": Model(architecture="qwen2", **SMALL),
    "qwen3": Model(architecture="qwen3", head_size=8, **SMALL),
    "mistral": Model(architecture="mistral", window=3, **SMALL),
    "starcoder2": Model(architecture="starcoder2", window=3, tie_head=True, **SMALL),
    "mixtral": Model(architecture="mixtral", **(SMALL | EXPERTS)),
    "qwen3_moe": Model(architecture="qwen3_moe", normalise_scores=False, dense_layers=1, **(SMALL | EXPERTS)),
    "dots1": Model(architecture="dots1", **(SMALL | EXPERTS | GROUPS)),
    "gpt_oss": Model(architecture="gpt_oss", window=3, global_every=2, **(SMALL | EXPERTS | {"expert_size": None})),
    "gemma2": Model(architecture="gemma2", global_every=2, score_cap=2.0, logit_cap=3.0, **GEMMA),
    "gemma3": Model(architecture="gemma3", global_every=2, rope_local_base=100.0, **GEMMA),
}


def make_stage(model: Model, recompute: str) -> Stage:
    axes = Axes()
    store = Store([ONE_RANK], whole_model(model), axes, torch.float32, torch.device("cpu"))
    tile = Tile(Interval(0, model.num_items), Interval(0, 3), (0,), recompute=recompute)
    stage = Stage(tile, LayerContext(model, axes, store))
    initialise(store, model, 3)
    group = store.groups[0]
    group.weights.add_(0.1 * torch.randn(group.size, generator=torch.Generator().manual_seed(0)))  # biases too
    return stage


def by_name(stage: Stage, of: str) -> dict[str, torch.Tensor]:
    group = stage.store.groups[0]
    flat = group.weights if of == "weights" else group.own_grads()
    return {
        p.parameter.name: flat[slice(*p.at)].view(p.parameter.shape).clone()
        for p in group.regions(Interval(0, group.size))
    }


def plain_loss(model: Model, p: dict[str, torch.Tensor], ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The summed loss, in plain operations on the unsplit parameters."""

    made_of = model.description

    def norm(x, name, of):
        weight = p[f"{name}.weight"] + of.offset
        if of.kind == "layer":
            return F.layer_norm(x, x.shape[-1:], weight, p[f"{name}.bias"], of.epsilon)
        return F.rms_norm(x, x.shape[-1:], weight, of.epsilon)

    def linear(x, name):
        return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    def rope(x, rotary):
        half = x.shape[-1] // 2
        frequencies = torch.tensor([turns_of(rotary, i / half) for i in range(half)], dtype=x.dtype)
        angle = torch.arange(x.shape[2])[:, None] * frequencies
        a, b = x[..., :half], x[..., half:]
        scale = 1 + math.log(8) / 10 if rotary.scaling and rotary.scaling.kind == "yarn" else 1
        return scale * torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    x = p["embedding.weight"][ids] * made_of.embedding_scale
    if "positions.weight" in p:
        x = x + p["positions.weight"][: ids.shape[1]]
    for i, block in enumerate(made_of.blocks):
        of, name = block.attention, f"blocks.{i}.attention"
        h = norm(x, f"{name}_norm", of.norm)
        q, k, v = (linear(h, f"{name}.{n}").unflatten(-1, (-1, of.head_size)).transpose(1, 2) for n in "qkv")
        if of.head_norm:
            q, k = norm(q, f"{name}.q_norm", of.head_norm), norm(k, f"{name}.k_norm", of.head_norm)
        if of.rotary:
            q, k = rope(q, of.rotary), rope(k, of.rotary)
        k, v = (t.repeat_interleave(of.heads // of.kv_heads, dim=1) for t in (k, v))
        scores = q @ k.transpose(2, 3) / (of.score_divisor or of.head_size) ** 0.5
        if of.score_cap:
            scores = of.score_cap * torch.tanh(scores / of.score_cap)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if of.window:
            seen &= ~torch.ones_like(seen).tril(-of.window)
        scores = scores.masked_fill(~seen, -torch.inf)
        if of.sinks:
            sinks = p[f"{name}.sinks.weight"][:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        mixed = scores.softmax(-1)[..., : v.shape[2]] @ v
        mixed = linear(mixed.transpose(1, 2).flatten(2), f"{name}.o")
        x = x + (norm(mixed, f"{name}_out_norm", of.out_norm) if of.out_norm else mixed)
        of, name = block.mlp, f"blocks.{i}.ffn"
        h = norm(x, f"{name}_norm", of.norm)
        if isinstance(of, Experts):
            x = x + plain_experts(h, of, p, f"blocks.{i}")
            continue
        activation = F.silu if of.activation == "silu" else functools.partial(F.gelu, approximate="tanh")
        up = linear(h, f"{name}.up")
        down = linear(activation(linear(h, f"{name}.gate")) * up if of.gated else activation(up), f"{name}.down")
        x = x + (norm(down, f"{name}_out_norm", of.out_norm) if of.out_norm else down)
    logits = norm(x, "norm", made_of.norm) @ p["embedding.weight" if made_of.tied_head else "head.weight"].T
    if made_of.logit_cap:
        logits = made_of.logit_cap * torch.tanh(logits / made_of.logit_cap)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def plain_experts(x: torch.Tensor, of: Experts, p: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return what a mixture of experts adds: every expert computes every token, and most results count nothing."""
    logits = F.linear(x, p[f"{name}.router.weight"], p.get(f"{name}.router.bias"))
    scores = logits.softmax(-1) if of.scores == "softmax" else logits.sigmoid()
    wanted = scores + p.get(f"{name}.router.balance", 0.0)
    if of.groups > 1:
        by_group = wanted.unflatten(-1, (of.groups, -1))
        worth = by_group.sort(-1, descending=True).values[..., :2].sum(-1)
        bar = worth.sort(-1, descending=True).values[..., of.chosen_groups - 1 : of.chosen_groups]
        wanted = by_group.masked_fill((worth < bar)[..., None], -torch.inf).flatten(-2)
    bar = wanted.sort(-1, descending=True).values[..., of.chosen - 1 : of.chosen]
    weights = scores * (wanted >= bar)
    if of.normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    result = torch.zeros_like(x)
    for expert in range(of.count):
        both = F.linear(x, p[f"{name}.experts.up.weight"].view(of.count, -1, x.shape[-1])[expert])
        up_bias, down_bias = (
            p[f"{name}.experts.{part}.bias"].view(of.count, -1)[expert] if of.bias else 0.0 for part in ("up", "down")
        )
        gate, up = (both + up_bias).chunk(2, -1)
        down = p[f"{name}.experts.down.weight"].view(of.count, x.shape[-1], -1)[expert]
        if of.activation == "clamped":
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        else:
            inner = F.silu(gate) * up
        result = result + of.scale * weights[..., expert, None] * (F.linear(inner, down) + down_bias)
    if of.shared_inner:
        gate, up = (F.linear(x, p[f"{name}.shared.{each}.weight"]) for each in ("gate", "up"))
        result = result + F.linear(F.silu(gate) * up, p[f"{name}.shared.down.weight"])
    return result


def turns_of(rotary, share: float) -> float:
    """Return by what angle a pair turns at each position, in cases, as the code of Llama 3 and the paper of YaRN do."""
    turn, scaling = rotary.base**-share, rotary.scaling
    if scaling is None:
        return turn
    if scaling.kind == "yarn":
        shares = [math.log(64 / (2 * math.pi * turns), rotary.base) for turns in (scaling.beta_fast, scaling.beta_slow)]
        if share <= shares[0]:
            return turn
        if share >= shares[1]:
            return turn / scaling.factor
        stretched = (share - shares[0]) / (shares[1] - shares[0])
        return (1 - stretched) * turn + stretched * turn / scaling.factor
    wave = 2 * math.pi / turn
    if wave < scaling.original_positions / scaling.high_factor:
        return turn
    if wave > scaling.original_positions / scaling.low_factor:
        return turn / scaling.factor
    smooth = (scaling.original_positions / wave - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)
    return (1 - smooth) * turn / scaling.factor + smooth * turn


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_loss_and_gradients_are_those_of_plain_pytorch(name, recompute):
    model = MODELS[name]
    stage = make_stage(model, recompute)
    tokens = torch.randint(0, model.vocab_size, (3, 10), generator=torch.Generator().manual_seed(1))
    ids, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[1, 3:] = IGNORED
    parameters = {n: t.double().requires_grad_() for n, t in by_name(stage, "weights").items()}
    expected = plain_loss(model, parameters, ids, targets)
    expected.backward()
    expected = expected.detach()
    for microbatch in range(2):  # gradients accumulate
        loss, saved = stage.forward(ids, targets, training=True)
        stage.backward(saved, torch.tensor(1.0, dtype=torch.float64))
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
        for n, gradient in by_name(stage, "grads").items():
            if n.endswith("router.balance"):  # counts: see test_experts.py
                continue
            wanted = parameters[n].grad * (microbatch + 1)
            torch.testing.assert_close(gradient.double(), wanted, rtol=1e-3, atol=1e-4, msg=lambda m, n=n: f"{n}: {m}")


def test_validation_saves_nothing_and_gives_the_same_loss():
    model = MODELS["llama"]
    stage = make_stage(model, "none")
    ids = torch.zeros(3, 9, dtype=torch.int64)
    trained, _ = stage.forward(ids, ids, training=True)
    validated, saved = stage.forward(ids, ids, training=False)
    assert float(trained) == float(validated)
    assert not saved.inputs


@pytest.mark.parametrize("activation", ["silu", "gelu", "clamped"])
def test_gated_activations_have_the_right_gradient(activation):
    both = (4 * torch.randn(3, 5, 8, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda both: activate(both, activation, True, run_eagerly), (both,))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_split_backward_pass_gives_the_bits_of_one_in_one(name, recompute):
    model = MODELS[name]
    tokens = torch.randint(0, model.vocab_size, (2, 3, 10), generator=torch.Generator().manual_seed(1))
    of_loss = torch.tensor(1.0, dtype=torch.float64)

    def forward(stage, m):
        return stage.forward(tokens[m, :, :-1], tokens[m, :, 1:].clone(), training=True)[1]

    whole, split = make_stage(model, recompute), make_stage(model, recompute)
    for m in (0, 1):
        whole.backward(forward(whole, m), of_loss)
    in_flight = []
    for m in (0, 1):
        in_flight.append(forward(split, m))
        split.backward_input(in_flight[m], of_loss)
        assert not any(gradient.any() for gradient in by_name(split, "grads").values())
    passed = []
    for saved in in_flight:
        split.backward_weight(saved, passed.append)
        assert not saved.deferred
    assert passed == [*reversed(range(model.num_items))] * 2
    expected, result = by_name(whole, "grads"), by_name(split, "grads")
    assert all(expected[name].any() for name in expected)
    assert [name for name in expected if not torch.equal(expected[name], result[name])] == []
