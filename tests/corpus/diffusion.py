"""Models that make data: diffusion, flows, variational encoders, pairs of nets that play against each other."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import Made, classes, images, numbers


def waves(t: Tensor, size: int) -> Tensor:
    """Sines and cosines of `t`: `[batch] -> [batch, size]`."""
    rates = torch.exp(-math.log(1e4) * torch.arange(size // 2, device=t.device) / (size // 2))
    turned = t.float()[:, None] * rates
    return torch.cat([turned.sin(), turned.cos()], -1)


class TimedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(32, 2 * width)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        scale, shift = self.time(F.silu(t))[:, :, None, None].chunk(2, 1)
        return x + self.conv(F.silu(self.norm(x) * (1 + scale) + shift))


class Denoiser(nn.Module):
    """Predicts the noise that was added to an image."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.blocks = nn.ModuleList([TimedBlock(16) for _ in range(2)])
        self.time = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32))
        self.register_buffer("kept", torch.linspace(0.99, 0.01, 100).cumprod(0))

    kept: Tensor

    def noise(self, x: Tensor, t: Tensor) -> Tensor:
        """What was added to `x` at step `t`."""
        h, when = self.into(x), self.time(waves(t, 32))
        for block in self.blocks:
            h = block(h, when)
        return self.out(h)

    def forward(self, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        kept = self.kept[t][:, None, None, None]
        return F.mse_loss(self.noise(kept.sqrt() * x + (1 - kept).sqrt() * noise, t), noise)


class Drawn(Denoiser):
    def forward(self, x: Tensor) -> Tensor:
        t = torch.randint(0, 100, (x.shape[0],), device=x.device)
        return super().forward(x, torch.randn_like(x), t)


def ddpm_draws_its_noise() -> Made:
    """Noise and steps are drawn inside forward."""
    return Drawn(), (images(),)


class DiTBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width, elementwise_affine=False) for _ in range(2)])
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU("tanh"), nn.Linear(2 * width, width))
        self.change = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        a, b, g, d, e, h = self.change(c).unsqueeze(1).chunk(6, -1)
        n = self.norms[0](x) * (1 + a) + b
        x = x + g * self.attention(n, n, n, need_weights=False)[0]
        return x + h * self.mlp(self.norms[1](x) * (1 + d) + e)


class DiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.labels = nn.Conv2d(3, 32, 4, 4), nn.Embedding(8, 32)
        self.blocks, self.out = nn.ModuleList([DiTBlock(32) for _ in range(2)]), nn.Linear(32, 48)

    def forward(self, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
        h, c = self.into(x).flatten(2).mT, self.labels(y) + waves(t, 32)
        for block in self.blocks:
            h = block(h, c)
        made = self.out(h).unflatten(1, (4, 4)).unflatten(3, (4, 4, 3)).permute(0, 5, 1, 3, 2, 4).reshape(x.shape)
        return F.mse_loss(made, x)


def dit() -> Made:
    """A diffusion transformer: scales and shifts from labels and time, patches put together again."""
    return DiT(), (images(), classes(8), classes(100))


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)), nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        prior = -0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp()) / len(x)
        return F.binary_cross_entropy(torch.sigmoid(self.decode(z)), x, reduction="mean") + prior


def vae() -> Made:
    """Numbers are drawn between an encoder and a decoder."""
    return VAE(), (torch.rand(8, 64),)


class Distributions(VAE):
    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encode(x).chunk(2, -1)
        z = torch.distributions.Normal(mean, spread.exp(), validate_args=False)
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean), validate_args=False)
        apart = torch.distributions.kl_divergence(z, prior).sum(-1).mean()
        return F.mse_loss(self.decode(z.rsample()), x) + 0.1 * apart


def vae_of_distributions() -> Made:
    """torch.distributions: rsample and kl_divergence."""
    return Distributions(), (torch.rand(8, 64),)


class Gumbel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.codes, self.decode = nn.Linear(32, 16), nn.Parameter(numbers(16, 8)), nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        picked = F.gumbel_softmax(self.encode(x), tau=0.7, hard=True)
        return F.mse_loss(self.decode(picked @ self.codes), x)


def gumbel_softmax() -> Made:
    """Straight-through choices with drawn noise."""
    return Gumbel(), (numbers(8, 32),)


class VQ(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 8), nn.Linear(8, 16)
        self.codes = nn.Embedding(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        table = self.codes.weight
        apart = z.pow(2).sum(-1, keepdim=True) - 2 * z @ table.t() + table.pow(2).sum(-1)
        q = self.codes(apart.argmin(-1))
        made = self.decode(z + (q - z).detach())
        return F.mse_loss(made, x) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())


def vector_quantised() -> Made:
    """The nearest code is looked up; gradients pass straight through."""
    return VQ(), (numbers(8, 4, 16),)


class Adversary(nn.Module):
    """Both losses of a pair in one step, parted by detach."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 64), nn.Tanh())
        self.judge = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        made = self.make(z)
        real, fake = self.judge(x), self.judge(made.detach())
        judged = F.binary_cross_entropy_with_logits(real, torch.ones_like(real)) + F.softplus(fake).mean()
        return judged + F.softplus(-self.judge(made)).mean()


def gan_pair() -> Made:
    """A generator and a discriminator in one loss, parted by detach."""
    return Adversary(), (numbers(8, 8), numbers(8, 64))


class Penalty(Adversary):
    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        mixed = torch.lerp(x, self.make(z).detach(), 0.5).requires_grad_(True)
        (slope,) = torch.autograd.grad(self.judge(mixed).sum(), mixed, create_graph=True)
        return (slope.norm(dim=1) - 1).pow(2).mean()


def gan_gradient_penalty() -> Made:
    """A penalty on the gradient of the discriminator, by torch.autograd.grad."""
    return Penalty(), (numbers(8, 8), numbers(8, 64))


class StyleLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.style, self.weight = nn.Linear(8, 16), nn.Parameter(numbers(16, 16, 3, 3) * 0.1)
        self.out = nn.Conv2d(16, 3, 1)
        self.start = nn.Parameter(numbers(1, 16, 8, 8))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        w = self.weight[None] * (self.style(z) + 1)[:, None, :, None, None]
        w = w * torch.rsqrt(w.square().sum((2, 3, 4), keepdim=True) + 1e-8)
        b = z.shape[0]
        h = F.conv2d(
            self.start.expand(b, -1, -1, -1).reshape(1, -1, 8, 8), w.view(b * 16, 16, 3, 3), padding=1, groups=b
        )
        return F.l1_loss(self.out(h.view(b, 16, 8, 8)), x)


def style_convolution() -> Made:
    """A kernel of its own for each sample, as groups of one convolution."""
    return StyleLayer(), (numbers(8, 8), images(8))


REFUSED = {
    "gan_gradient_penalty": "differentiates inside forward (torch.autograd.grad)",
}
