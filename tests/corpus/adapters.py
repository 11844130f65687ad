"""Weights that are not plain: low-rank and quantised wrappers, parametrizations, tied, shared, frozen, sliced."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.corpus.base import Made, classes, numbers

WIDTH, NUM_CLASSES = 32, 8


class TwoLayers(nn.Module):
    """The two layers that every module of this file changes."""

    def __init__(self, first: nn.Module, last: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last = first, last or nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(F.relu(self.first(x))), y)


def _layers(first: nn.Module, last: nn.Module | None = None) -> Made:
    return TwoLayers(first, last), (numbers(8, WIDTH), classes(NUM_CLASSES))


class LoRA(nn.Module):
    """A frozen layer and a low-rank change beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer, self.scale = layer.requires_grad_(False), 2.0
        self.into = nn.Parameter(numbers(rank, layer.in_features) * 0.1)
        self.out = nn.Parameter(numbers(layer.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + (x @ self.into.T) @ self.out.T * self.scale


def lora() -> Made:
    """A frozen linear layer with a low-rank change."""
    return _layers(LoRA(nn.Linear(WIDTH, WIDTH)))


class FrozenBetween(nn.Module):
    """A frozen weight with a trained bias, between layers that are trained: backward needs the frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(16, 256), nn.Linear(256, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(F.relu(self.frozen(F.relu(self.first(x))))), y)


class Shifted(FrozenBetween):
    """A buffer is added to a product."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.arange(float(WIDTH)) / 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.frozen(F.relu(self.first(x))) + self.shift
        return F.cross_entropy(self.last(F.relu(h)), y)


def shifted_by_a_buffer() -> Made:
    """A buffer is added to the result of a product, which may be a sum over ranks."""
    return Shifted(), (numbers(8, 16), classes(NUM_CLASSES))


class Merged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH).requires_grad_(False)
        self.q, self.v = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.qkv(x).clone()
        h[..., :WIDTH] += self.q(x)
        h[..., -WIDTH:] += self.v(x)
        q, k, v = h.chunk(3, -1)
        return torch.sigmoid(q * k) * v


def lora_of_a_merged_layer() -> Made:
    """Changes are added in place to parts of one result."""
    return _layers(Merged())


class FakeQuantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        w = self.layer.weight
        scale = w.detach().abs().amax(1, keepdim=True) / 127
        rounded = (w / scale).round().clamp(-128, 127) * scale
        return F.linear(x, w + (rounded - w).detach(), self.layer.bias)


def fake_quantised() -> Made:
    """Rounded weights whose gradient passes straight through."""
    return _layers(FakeQuantised())


class LearnedSteps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.full((WIDTH,), 0.02))
        self.register_buffer("zero", torch.zeros(WIDTH, dtype=torch.int32))

    zero: Tensor

    def forward(self, x: Tensor) -> Tensor:
        w = torch.fake_quantize_per_channel_affine(self.layer.weight, self.scale.detach(), self.zero, 0, -128, 127)
        return F.linear(x, w, self.layer.bias) * self.scale.exp()


def fake_quantised_by_torch() -> Made:
    """torch.fake_quantize_per_channel_affine."""
    return _layers(LearnedSteps())


def spectral_norm() -> Made:
    """torch.nn.utils.parametrizations.spectral_norm, which writes its buffers."""
    return _layers(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))


def orthogonal() -> Made:
    """torch.nn.utils.parametrizations.orthogonal."""
    return _layers(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def symmetric() -> Made:
    """A parametrization of one's own."""
    layer = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return _layers(layer)


class TiedEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(numbers(WIDTH, 16) * 0.1), nn.Parameter(numbers(16, 8) * 0.1)])

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for w in self.weights:
            h = torch.tanh(h @ w)
        for w in reversed(list(self.weights)):
            h = h @ w.T
        return F.mse_loss(h, x) + 1e-3 * sum(w.pow(2).sum() for w in self.weights)


def tied_autoencoder() -> Made:
    """Weights used forwards and transposed, and once more in a penalty."""
    return TiedEncoder(), (numbers(8, WIDTH),)


class Universal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = (
            nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=True),
            nn.Linear(WIDTH, NUM_CLASSES),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x)
        return F.cross_entropy(self.head(x[:, -1]), y)


def one_layer_three_times() -> Made:
    """One layer's weights at every depth."""
    return Universal(), (numbers(8, 8, WIDTH), classes(NUM_CLASSES))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, NUM_CLASSES)).requires_grad_(
            False
        )
        self.student = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, NUM_CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        wanted = (self.teacher(x) / 2).softmax(-1)
        return F.kl_div(F.log_softmax(self.student(x) / 2, -1), wanted, reduction="batchmean") * 4


def distillation() -> Made:
    """A frozen teacher, kl_div with batchmean."""
    return Frozen(), (numbers(8, WIDTH),)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.left = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def unused_layer() -> Made:
    """A layer that forward does not touch stays in the plan."""
    return _layers(Unused())


def mixed_types() -> Made:
    """A layer in float64 between casts."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.double()).to(x.dtype)

    return _layers(Wide())


def lazy_layer() -> Made:
    """torch.nn.LazyLinear, whose weight has no size yet."""
    return _layers(nn.LazyLinear(WIDTH))


REFUSED = {"lazy_layer": "has no size before its module"}


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, head: nn.Module) -> Tensor:
        found = torch.zeros_like(x)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
            found = found + head(x)
        return found


class Refined(nn.Module):
    """A head that its parent calls first, and then the decoder, which gets it as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head, self.decoder = nn.Linear(WIDTH, WIDTH), _Head(), _Decoder()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.encoder(x)
        return F.mse_loss(self.head(first) + self.decoder(first, self.head), y)


def head_called_from_elsewhere() -> Made:
    """One head that is called by its parent and by another part."""
    return Refined(), (numbers(8, WIDTH), numbers(8, WIDTH))
