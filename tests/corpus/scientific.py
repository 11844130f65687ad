"""Physics, signals, complex numbers, state spaces: models with their own mathematics."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import Made, classes, numbers


class FourierLayer(nn.Module):
    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) * 0.05)
        self.local = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        f = torch.fft.rfft(x)
        kept = torch.einsum("bim,iom->bom", f[..., : self.modes], self.weight)
        f = torch.cat([kept, torch.zeros_like(f[..., self.modes :])], -1)
        return F.gelu(torch.fft.irfft(f, n=x.shape[-1]) + self.local(x))


class Operator1d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 16, 1), FourierLayer(16, 8), FourierLayer(16, 8), nn.Conv1d(16, 1, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.net(x)
        return (torch.linalg.vector_norm(made - y, dim=(1, 2)) / torch.linalg.vector_norm(y, dim=(1, 2))).mean()


def fourier_operator() -> Made:
    """Complex weights on the low frequencies, by rfft and einsum."""
    return Operator1d(), (numbers(8, 1, 32), numbers(8, 1, 32))


class Siren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 32), nn.Linear(32, 32), nn.Linear(32, 1)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.sin(30 * layer(x))
        return torch.log(torch.cosh(self.layers[-1](x)[:, 0] - y)).mean()


def sine_network() -> Made:
    """Sines of linear layers, log-cosh loss."""
    return Siren(), (numbers(8, 2), numbers(8))


class RadianceField(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3 + 3 * 8, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, start: Tensor, way: Tensor, colour: Tensor) -> Tensor:
        t = torch.linspace(0.1, 1.0, 8, device=start.device)
        points = start[:, None] + way[:, None] * t[:, None]
        turned = points[..., None] * (2.0 ** torch.arange(4)) * math.pi
        coded = torch.cat([points, torch.cat([turned.sin(), turned.cos()], -1).flatten(-2)], -1)
        out = self.net(coded)
        alpha = 1 - torch.exp(-F.softplus(out[..., 3]) * 0.1)
        left = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-6], -1), -1)[:, :-1]
        return F.mse_loss(((alpha * left)[..., None] * out[..., :3].sigmoid()).sum(1), colour)


def radiance_field() -> Made:
    """Rays, coded positions, light that is left by cumprod."""
    return RadianceField(), (numbers(8, 3), numbers(8, 3), torch.rand(8, 3))


class PDE(nn.Module):
    """A residual by differences on a grid, so no gradient is taken inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 1, 3, padding=1))
        self.register_buffer("stencil", torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]])[None, None])

    stencil: Tensor

    def forward(self, x: Tensor) -> Tensor:
        u = self.net(F.pad(x, (1, 1, 1, 1), mode="circular"))
        return F.conv2d(u, self.stencil).pow(2).mean() + u.diff(dim=-1).abs().mean()


def finite_differences() -> Made:
    """Circular padding, a fixed stencil as a buffer, torch.diff."""
    return PDE(), (numbers(8, 1, 8, 8),)


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        _, slope = torch.func.jvp(self.net, (x,), (torch.ones_like(x),))
        return slope.square().mean()


def residual_by_jvp() -> Made:
    """torch.func.jvp inside forward."""
    return Wave(), (numbers(8, 2),)


class HandSlope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        slope = ((1 - h * h) * self.last.weight) @ self.first.weight
        return (slope.norm(dim=-1) - 1).square().mean() + self.last(h).abs().mean()


def slope_by_hand() -> Made:
    """The derivative of a net written out, which a plan can hold."""
    return HandSlope(), (numbers(8, 4),)


class Hamiltonian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.mass = nn.Parameter(numbers(8, 8) * 0.1), nn.Parameter(torch.eye(8))

    def forward(self, q: Tensor, p: Tensor) -> Tensor:
        whole = self.left - self.left.T
        turn = torch.matrix_exp(whole)
        solved = torch.linalg.solve(self.mass @ self.mass.T + torch.eye(8), p.T).T
        return (q @ turn - solved).square().mean() + torch.linalg.slogdet(self.mass)[1].abs()


def matrix_functions() -> Made:
    """matrix_exp, linalg.solve, slogdet of small weights."""
    return Hamiltonian(), (numbers(8, 8), numbers(8, 8))


class Process(nn.Module):
    """The log likelihood of a Gaussian process with a learned kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.noise = nn.Linear(4, 8), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        f = self.features(x)
        kernel = torch.exp(-0.5 * torch.cdist(f, f).square()) + (self.noise.exp() + 0.1) * torch.eye(len(x))
        root = torch.linalg.cholesky(kernel)
        z = torch.linalg.solve_triangular(root, y[:, None], upper=False)
        return 0.5 * z.square().sum() + root.diagonal().log().sum()


def gaussian_process() -> Made:
    """A kernel of all pairs, Cholesky, a triangular solve."""
    return Process(), (numbers(8, 4), numbers(8))


class ComplexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.real, self.imag, self.head = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 4)
        self.turn = nn.Parameter(torch.rand(32))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = torch.complex(self.real(x), self.imag(x)) * torch.polar(torch.ones_like(self.turn), self.turn)
        z = torch.view_as_complex(torch.view_as_real(z).relu())
        return F.cross_entropy(self.head(z.abs() + z.conj().real), y)


def complex_numbers() -> Made:
    """torch.complex, polar, view_as_real, abs and conj."""
    return ComplexNet(), (numbers(8, 16), classes(4))


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(8, 4)
        self.register_buffer("turn", torch.polar(torch.ones(8, 8), torch.outer(torch.arange(8.0), torch.rand(8))))

    turn: Tensor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k = (
            torch.view_as_real(torch.view_as_complex(z.float().reshape(*z.shape[:-1], -1, 2)) * self.turn).flatten(2)
            for z in (self.q(x), self.k(x))
        )
        return F.cross_entropy(self.head((q @ k.mT).softmax(-1).mean(1)), y)


def rotary_by_complex() -> Made:
    """Rotary positions as a product of complex numbers."""
    return Rotary(), (numbers(8, 8, 16), classes(4))


class S4(nn.Module):
    """A diagonal state space as one long convolution by FFT."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.freq = nn.Parameter(torch.rand(16, 4)), nn.Parameter(torch.rand(16, 4) * 3)
        self.out, self.head = nn.Parameter(numbers(16, 4) * 0.1), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        t = x.shape[-1]
        power = torch.complex(-self.decay.exp(), self.freq)[..., None] * torch.arange(t)
        kernel = 2 * (self.out[..., None] * power.exp()).sum(1).real
        h = torch.fft.irfft(torch.fft.rfft(x, n=2 * t) * torch.fft.rfft(kernel, n=2 * t), n=2 * t)[..., :t]
        return F.cross_entropy(self.head(F.gelu(h).mean(-1)), y)


def state_space_by_fft() -> Made:
    """A kernel of complex powers, convolved by FFT."""
    return S4(), (numbers(8, 16, 16), classes(4))


class Mamba(nn.Module):
    """A selective state space, step by step in Python."""

    def __init__(self, width: int = 16, states: int = 4) -> None:
        super().__init__()
        self.into, self.conv = nn.Linear(width, 2 * width), nn.Conv1d(width, width, 4, groups=width, padding=3)
        self.choose, self.step = nn.Linear(width, 2 * states), nn.Linear(width, width)
        self.decay = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1))
        self.skip, self.out, self.head = nn.Parameter(torch.ones(width)), nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, gate = self.into(x).chunk(2, -1)
        h = F.silu(self.conv(h.mT)[..., : x.shape[1]].mT)
        b, c = self.choose(h).chunk(2, -1)
        step = F.softplus(self.step(h))
        a = torch.exp(step[..., None] * -self.decay.exp())
        into = (step * h)[..., None] * b[:, :, None]
        state, found = torch.zeros_like(into[:, 0]), []
        for t in range(x.shape[1]):
            state = a[:, t] * state + into[:, t]
            found.append((state * c[:, t, None]).sum(-1))
        made = torch.stack(found, 1) + h * self.skip
        return F.cross_entropy(self.head(self.out(made * F.silu(gate)).mean(1)), y)


def selective_state_space() -> Made:
    """Mamba written out: a loop over steps, states stacked."""
    return Mamba(), (numbers(8, 8, 16), classes(4))


class Phases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary, self.head = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 4)
        self.turn = nn.Parameter(numbers(32))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = torch.complex(self.real(x.real) - self.imaginary(x.imag), self.real(x.imag) + self.imaginary(x.real))
        z = F.relu(z.abs() - 0.1) * torch.exp(1j * z.angle())
        z = z * torch.polar(torch.ones_like(self.turn), self.turn)
        return F.cross_entropy(self.head(z.real), y)


def phases() -> Made:
    """Complex inputs; a complex number among the operands; modReLU."""
    return Phases(), (torch.randn(8, 16, dtype=torch.cfloat), classes(4))


class Signs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.body(x)
        h = (-h) ** 2 / np.sqrt(32) + h * (-1.0) ** torch.arange(32, device=x.device)
        return F.cross_entropy(self.head(h + torch.pow(-2.0, (h > 0).float())), y)


def signs() -> Made:
    """Powers of negative numbers; a number of numpy."""
    return Signs(), (numbers(8, 16), classes(4))


class Splines(nn.Module):
    """A layer of a Kolmogorov-Arnold network: a learned function of one number at each edge."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.base = nn.Linear(32, 16), nn.Parameter(numbers(8, 16) * 0.1)
        self.bends, self.scale = nn.Parameter(numbers(8, 16, 8) * 0.1), nn.Parameter(torch.ones(8, 16))
        self.register_buffer("knots", ((torch.arange(-3, 9) * 0.4) - 1).expand(16, -1).contiguous())

    knots: Tensor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        base, g, x = F.linear(F.silu(x), self.base), self.knots, x[..., None]
        b = ((x >= g[:, :-1]) & (x < g[:, 1:])).to(x.dtype)
        for k in range(1, 4):
            left = (x - g[:, : -k - 1]) / (g[:, k:-1] - g[:, : -k - 1]) * b[..., :-1]
            b = left + (g[:, k + 1 :] - x) / (g[:, k + 1 :] - g[:, 1:-k]) * b[..., 1:]
        z = base + F.linear(b.flatten(1), (self.bends * self.scale[..., None]).flatten(1))
        return F.cross_entropy(z, y) + 1e-3 * self.bends.abs().mean(-1).sum()


def spline_edges() -> Made:
    """B-splines on edges; a weight that is also regularised."""
    return Splines(), (numbers(8, 32), classes(8))


class Mixing(nn.Module):
    """A step of a normalising flow: an affine map, a 1 x 1 convolution with its determinant, a coupling."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale, self.shift = nn.Parameter(torch.zeros(1, 4, 1, 1)), nn.Parameter(torch.zeros(1, 4, 1, 1))
        self.mix = nn.Parameter(torch.linalg.qr(numbers(4, 4))[0])
        self.net = nn.Sequential(nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        x = x.view(n, 1, 4, 2, 4, 2).permute(0, 1, 3, 5, 2, 4).reshape(n, 4, 4, 4)
        z = F.conv2d((x + self.shift) * self.log_scale.exp(), self.mix[:, :, None, None])
        a, b = z.chunk(2, 1)
        t, s = self.net(a).chunk(2, 1)
        s = torch.sigmoid(s + 2)
        volume = 16 * (self.log_scale.sum() + torch.slogdet(self.mix)[1]) + s.log().flatten(1).sum(1)
        return (0.5 * torch.cat([a, (b + t) * s], 1).square().flatten(1).sum(1) - volume).mean()


def flow_step() -> Made:
    """A small matrix as a convolution and in slogdet."""
    return Mixing(), (numbers(4, 1, 8, 8),)


class Windows(nn.Module):
    """Overlapping windows of tokens by strides, of a tensor that lies token by token in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.score = nn.Linear(32, 32), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        heads = self.project(x.transpose(0, 1)).view(tokens, samples, 4, 8).permute(1, 2, 0, 3)
        parts = heads.reshape(samples * 4, tokens, 8).view(samples * 4, tokens // 8, 8, 8)
        size, stride = list(parts.size()), list(parts.stride())
        size[1], stride[1] = 2 * size[1] - 1, stride[1] // 2
        return self.score(parts.as_strided(size, stride)).square().mean()


def overlapping_windows() -> Made:
    """Longformer's windows: as_strided of a transposed tensor."""
    return Windows(), (numbers(4, 16, 32),)


REFUSED = {"residual_by_jvp": "runs its operators inside a transform of torch.func"}
