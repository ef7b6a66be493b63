"""RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016) over features that may be cut among ranks.

Both compute in fp32 and round once. Where an axis cuts the features, the caller passes sums over all ranks' features;
else the functions compute them. Shapes: hidden states and dy [..., F], F this rank's features; statistics [..., 1].

A norm of the residual stream is one operator with the sum before it. Its backward pass adds the gradient that comes
along the residual stream to that of the norm's input, where a kernel has it at hand.
"""

import torch
from torch.autograd import Function

from hpctrain.architectures.description import Norm
from hpctrain.model.operators.running import Run, add_part
from hpctrain.model.parallel.axes import Axis
from hpctrain.model.recompute import Recompute
from hpctrain.model.storage.units import Weight


class RmsNorm:
    """y = x / rms(x) * (weight + offset), with the statistic 1 / rms(x)."""

    @staticmethod
    def forward(x, weight, squares=None, *, features: int, epsilon: float, offset: float):
        x32 = x.float()
        squares = _squares(x32) if squares is None else squares
        rstd = (squares / features).add_(epsilon).rsqrt_()
        return _rms_scaled(x32, weight, rstd, offset).to(x.dtype), rstd

    @staticmethod
    def from_statistics(x, weight, rstd, *, offset: float):
        """Return y of the same x and its statistic."""
        return _rms_scaled(x.float(), weight, rstd, offset).to(x.dtype)

    @staticmethod
    def sums(x, run: Run, x_axis: Axis, features: int) -> list[torch.Tensor]:
        """Return the sums that `forward` needs where ranks have parts of the features; all of them must call."""
        return [x_axis.all_reduce(run(squares_of, x))]

    @staticmethod
    def backward_sums(dy, x, weight, rstd, *, offset: float):
        """Return the sum over features of dy * (weight + offset) * normed x."""
        return _row_product(dy.float() * (x.float() * rstd), _scale(weight, offset))

    @staticmethod
    def backward(dy, x, weight, rstd, dot=None, *, features: int, offset: float):
        """Return the gradients of x and, in fp32, of the weight."""
        normed, dy32, scale = x.float() * rstd, dy.float(), _scale(weight, offset)
        product = dy32 * normed
        dot = (_row_product(product, scale) if dot is None else dot) / features
        dx = (dy32 * scale).sub_(normed.mul_(dot)).mul_(rstd)
        return dx.to(x.dtype), product.flatten(0, -2).sum(0)


class LayerNorm:
    """y = (x - mean) / deviation * weight + bias, with the statistics mean and 1 / deviation."""

    @staticmethod
    def forward(x, weight, bias, mean=None, squares=None, *, features: int, epsilon: float, offset: float):
        x32 = x.float()
        mean = x32.sum(-1, keepdim=True).div_(features) if mean is None else mean
        centred = x32 - mean
        squares = _squares(centred) if squares is None else squares
        rstd = (squares / features).add_(epsilon).rsqrt_()
        return _scaled(centred, weight, bias, rstd).to(x.dtype), mean, rstd

    @staticmethod
    def from_statistics(x, weight, bias, mean, rstd, *, offset: float):
        """Return y of the same x and its statistics."""
        return _scaled(x.float() - mean, weight, bias, rstd).to(x.dtype)

    @staticmethod
    def sums(x, run: Run, x_axis: Axis, features: int) -> list[torch.Tensor]:
        """Return the sums that `forward` needs where ranks have parts of the features; all of them must call."""
        mean = x_axis.all_reduce(run(sums_of, x)).div_(features)
        return [mean, x_axis.all_reduce(run(squares_of, x, mean))]

    @staticmethod
    def backward_sums(dy, x, weight, bias, mean, rstd, *, offset: float):
        """Return the sums over features of dy * weight, and of that times normed x: [..., 2]."""
        return _layer_sums(dy.float() * weight, (x.float() - mean).mul_(rstd))

    @staticmethod
    def backward(dy, x, weight, bias, mean, rstd, sums=None, *, features: int, offset: float):
        """Return the gradients of x and, in fp32, of weight and bias."""
        normed, dy32 = (x.float() - mean).mul_(rstd), dy.float()
        d_weight, d_bias = (dy32 * normed).flatten(0, -2).sum(0), dy32.flatten(0, -2).sum(0)
        scaled = dy32 * weight
        means = (_layer_sums(scaled, normed) if sums is None else sums) / features
        dx = scaled.sub_(means[..., :1]).sub_(normed.mul_(means[..., 1:])).mul_(rstd)
        return dx.to(x.dtype), d_weight, d_bias


def backward_of_sum(d_total, *operands, backward, **settings):
    """Return what a norm's `backward` does, with `d_total` added to the gradient of x."""
    dx, *gradients = backward(*operands, **settings)
    return dx.add_(d_total), *gradients


def _scale(weight: torch.Tensor, offset: float) -> torch.Tensor:
    return weight.float() + offset if offset else weight


def _rms_scaled(x32, weight, rstd, offset: float) -> torch.Tensor:
    return (x32 * rstd).mul_(_scale(weight, offset))


def _scaled(centred, weight, bias, rstd) -> torch.Tensor:
    """Return y, written over x - mean."""
    return centred.mul_(rstd).mul_(weight).add_(bias)


def _layer_sums(scaled: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    return torch.cat([scaled.sum(-1, keepdim=True), (scaled * normed).sum(-1, keepdim=True)], dim=-1)


def _squares(x32: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_()


def _row_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the product with a vector, [..., 1]: the quickest operation for it, or one that fuses with others."""
    if torch.compiler.is_compiling():
        return (rows * weight).sum(-1, keepdim=True)
    return rows @ weight.float().unsqueeze(1)


def sums_of(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of this rank's features of each token, fp32 [..., 1]."""
    return x.float().sum(-1, keepdim=True)


def squares_of(x: torch.Tensor, mean: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum of squares of this rank's features of each token, or of their distances from a mean."""
    return _squares(x.float() if mean is None else x.float() - mean)


class NormLayer:
    """A norm over the last dim, whose `features` are cut by an axis; of heads, which no axis cuts, that is one rank's.

    Its weights are the weight, and the bias of a LayerNorm.
    """

    def __init__(self, weights: list[Weight], axis: Axis, features: int, of: Norm, run: Run):
        self.weights, self.axis, self.features, self.run = weights, axis, features, run
        self.kind = LayerNorm if of.has_bias else RmsNorm
        self.epsilon, self.offset = of.epsilon, of.offset

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., features / x]. All ranks of the axis must call."""
        return self.of_sum(x)[1]

    def of_sum(
        self, x: torch.Tensor, added: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, Recompute]:
        """Return x + added, its norm, and a function that recomputes the norm from the sum and the kept statistics.

        That function involves no other rank.
        """
        return _Norm.apply(x, added, self)


class _Norm(Function):
    @staticmethod
    def forward(ctx, x, added, layer: NormLayer):
        kind, run, features, offset = layer.kind, layer.run, layer.features, layer.offset
        x = x if added is None else x + added
        sums = kind.sums(x, run, layer.axis, features) if layer.axis.size > 1 else ()
        weights = [weight.data for weight in layer.weights]
        y, *statistics = run(kind.forward, x, *weights, *sums, features=features, epsilon=layer.epsilon, offset=offset)
        ctx.save_for_backward(x, *statistics)
        ctx.layer, ctx.adds = layer, added is not None
        ctx.set_materialize_grads(False)

        def again(x: torch.Tensor) -> torch.Tensor:
            return run(kind.from_statistics, x, *(w.data for w in layer.weights), *statistics, offset=offset)

        return x, y, again

    @staticmethod
    def backward(ctx, d_total, dy, _):
        x, *statistics = ctx.saved_tensors
        layer: NormLayer = ctx.layer
        kind, run, offset = layer.kind, layer.run, layer.offset
        operands = dy, x, *(weight.data for weight in layer.weights), *statistics
        is_cut = layer.axis.size > 1
        sums = [layer.axis.all_reduce(run(kind.backward_sums, *operands, offset=offset))] if is_cut else ()
        settings = {"features": layer.features, "offset": offset}
        if d_total is None:
            dx, *gradients = run(kind.backward, *operands, *sums, **settings)
        else:
            dx, *gradients = run(backward_of_sum, d_total, *operands, *sums, backward=kind.backward, **settings)
        for weight, gradient in zip(layer.weights, gradients, strict=True):
            weight.accumulate(add_part, gradient)
        return dx, dx if ctx.adds else None, None
