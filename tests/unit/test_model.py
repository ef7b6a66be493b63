"""The model on one rank against the same model written plainly in PyTorch: loss and every gradient."""

import pytest
import torch
import torch.nn.functional as F

from hpctrain.comm.communicator import Communicator
from hpctrain.config.job import Model
from hpctrain.model.axes import Axes
from hpctrain.model.functions import swiglu
from hpctrain.model.stage import Stage, initialise
from hpctrain.model.store import Store
from hpctrain.model.transformer import IGNORED
from hpctrain.plan.holders import whole_model
from hpctrain.plan.tiling import Tile
from hpctrain.sharding.intervals import Interval

MODELS = {
    "gpt2": Model(architecture="gpt2", num_layers=2, hidden_size=24, num_heads=4, vocab_size=17, tie_head=True),
    "llama": Model(architecture="llama", num_layers=2, hidden_size=24, num_heads=4, num_kv_heads=2, vocab_size=17),
}


def make_stage(model: Model, recompute: str) -> Stage:
    alone = Communicator([0])
    axes = Axes(alone, alone, alone)
    store = Store([alone], whole_model(model), axes, torch.float32, torch.device("cpu"))
    tile = Tile(Interval(0, model.num_items), Interval(0, 3), (0,), recompute=recompute)
    stage = Stage(model, tile, axes, store)
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

    def norm(x, name):
        if model.architecture == "gpt2":
            return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], model.norm_epsilon)
        return F.rms_norm(x, x.shape[-1:], p[f"{name}.weight"], model.norm_epsilon)

    def linear(x, name):
        return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    def heads(x, count):
        return x.unflatten(-1, (count, model.head_size)).transpose(1, 2)

    def rope(x):
        half = model.head_size // 2
        angle = torch.arange(x.shape[2])[:, None] * model.rope_base ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    x = p["embedding.weight"][ids]
    if model.architecture == "gpt2":
        x = x + p["positions.weight"][: ids.shape[1]]
    for i in range(model.num_layers):
        h = norm(x, f"blocks.{i}.attention_norm")
        q, k, v = (linear(h, f"blocks.{i}.attention.{n}") for n in "qkv")
        q, k, v = heads(q, model.num_heads), heads(k, model.kv_heads), heads(v, model.kv_heads)
        if model.architecture == "llama":
            q, k = rope(q), rope(k)
        k, v = (t.repeat_interleave(model.num_heads // model.kv_heads, dim=1) for t in (k, v))
        scores = q @ k.transpose(2, 3) / model.head_size**0.5
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        mixed = scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v
        x = x + linear(mixed.transpose(1, 2).flatten(2), f"blocks.{i}.attention.o")
        h = norm(x, f"blocks.{i}.ffn_norm")
        up = linear(h, f"blocks.{i}.ffn.up")
        gpt2 = model.architecture == "gpt2"
        inner = F.gelu(up, approximate="tanh") if gpt2 else F.silu(linear(h, f"blocks.{i}.ffn.gate")) * up
        x = x + linear(inner, f"blocks.{i}.ffn.down")
    logits = norm(x, "norm") @ p["embedding.weight" if model.tie_head else "head.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


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


def test_swiglu_has_the_right_gradient():
    both = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, (both,))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", ["none", "full"])
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
