"""Images: classifiers, detectors, segmentation, in the ways that people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import Made, classes, images, numbers


class Residual(nn.Module):
    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width * stride, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width * stride, width * stride, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width * stride), nn.BatchNorm2d(width * stride)])
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(width, width * stride, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.skip(x))


class Classifier(nn.Module):
    """A body, then the mean over all places, then a linear layer and cross-entropy."""

    def __init__(self, body: nn.Module, width: int, kinds: int = 8) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, kinds)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x).mean((2, 3))), y)


def _classified(body: nn.Module, width: int) -> Made:
    return Classifier(body, width), (images(), classes(8))


class LongSkip(nn.Module):
    """EDSR: what enters a stack of equal layers is added to what leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.layers = nn.ModuleList([Residual(16) for _ in range(3)])
        self.end = nn.Sequential(nn.Conv2d(16, 12, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = h = self.stem(x)
        for layer in self.layers:
            h = layer(h)
        return F.l1_loss(self.end(h + first), y)


def skip_over_layers() -> Made:
    """A skip over a stack of equal layers."""
    return LongSkip(), (images(), images(32))


class WindowBias(nn.Module):
    """Attention scores get a bias by the distance of two places, looked up through a buffer, as in Swin and MaxViT."""

    def __init__(self, width: int = 16, places: int = 16) -> None:
        super().__init__()
        at = torch.arange(places)
        self.register_buffer("relative_position_index_of_every_pair_of_places", at[:, None] - at[None, :] + places - 1)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(2 * places - 1, 2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        index = self.relative_position_index_of_every_pair_of_places.view(-1)
        bias = self.relative_position_bias_table[index].view(q.shape[2], q.shape[2], 2).permute(2, 0, 1)
        scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5 + bias
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def window_bias() -> Made:
    """A bias of attention by a buffer of long name, in layers inside of layers."""
    layers = nn.ModuleDict({f"window_attention_of_layer_number_{i}": WindowBias() for i in range(2)})
    return Pooled(Windows(nn.ModuleDict({"layers_of_the_only_stage": layers})), 16), (images(), classes(8))


class Windows(nn.Module):
    """Patches of an image as tokens, through every layer of every stage."""

    def __init__(self, stages: nn.ModuleDict) -> None:
        super().__init__()
        self.patches, self.stages = nn.Conv2d(3, 16, 4, 4), stages

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for layers in self.stages.values():
            for layer in layers.values():
                x = layer(x)
        return x


class Pooled(nn.Module):
    """The mean over all places, then a linear layer and cross-entropy."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x).mean(1)), y)


class InvertedResidual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.layers = nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, 8, 1), nn.SiLU(), nn.Conv2d(8, width, 1), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return x + y * self.gate(y)


def mobilenet() -> Made:
    """Depthwise convolutions, in-place ReLU6, squeeze and excitation."""
    return _classified(nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), InvertedResidual(16), InvertedResidual(16)), 16)


class Inception(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Conv2d(width, 8, k, padding=k // 2) for k in (1, 3, 5)])
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(width, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([*(way(x) for way in self.ways), self.pool(x)], 1)


def inception() -> Made:
    """Several kernels side by side, joined."""
    return _classified(nn.Sequential(nn.Conv2d(3, 16, 3), Inception(16), nn.ReLU(), Inception(32)), 32)


class WindowAttention(nn.Module):
    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.02)
        at = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer("index", apart[..., 0] * (2 * window - 1) + apart[..., 1])

    index: Tensor

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        n, heads = self.window, self.heads
        x = torch.roll(x, (-1, -1), (1, 2))
        y = x.view(b, h // n, n, w // n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, n * n, c)
        q, k, v = self.qkv(y).reshape(-1, n * n, 3, heads, c // heads).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(n * n, n * n, heads).permute(2, 0, 1)
        mixed = ((q @ k.transpose(-2, -1)) * (c // heads) ** -0.5 + bias).softmax(-1) @ v
        y = self.out(mixed.transpose(1, 2).reshape(-1, n * n, c))
        y = y.view(b, h // n, w // n, n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return torch.roll(y, (1, 1), (1, 2))


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 32, 2, 2), nn.LayerNorm(32)
        self.attention, self.head = WindowAttention(32, 4, 4), nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.patches(x).permute(0, 2, 3, 1)
        h = h + self.attention(self.norm(h))
        return F.cross_entropy(self.head(h.mean((1, 2))), y)


def swin() -> Made:
    """Shifted windows with a table of relative positions."""
    return Swin(), (images(), classes(8))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)])
        self.middle = nn.Conv2d(32, 32, 3, padding=1)
        self.up, self.join = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(32, 16, 3, padding=1)
        self.out = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a = F.relu(self.down[0](x))
        b = F.relu(self.middle(F.relu(self.down[1](F.max_pool2d(a, 2)))))
        h = F.relu(self.join(torch.cat([self.up(b), a], 1)))
        logits = self.out(h)
        picked = logits.softmax(1).gather(1, y[:, None]).squeeze(1)
        dice = 1 - 2 * picked.sum((1, 2)) / (y.shape[1] * y.shape[2] + 1.0)
        return F.cross_entropy(logits, y) + dice.mean()


def unet() -> Made:
    """Segmentation with a transposed convolution, a skip, and cross-entropy and dice for each pixel."""
    return UNet(), (images(), classes(4, (8, 16, 16)))


class Pyramid(nn.Module):
    """Features of two sizes, boxes and kinds for each place, focal and smooth-L1 losses."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 2, 1)
        self.across, self.kinds, self.boxes = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 4, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor, kinds: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        a = F.relu(self.fine(x))
        b = F.relu(self.coarse(a))
        a = self.across(a) + F.interpolate(b, scale_factor=2.0, mode="nearest")
        scores = torch.cat([self.kinds(h).flatten(2) for h in (a, b)], 2).mT
        places = torch.cat([self.boxes(h).flatten(2) for h in (a, b)], 2).mT
        p = scores.sigmoid()
        focal = F.binary_cross_entropy_with_logits(scores, kinds, reduction="none") * (p - kinds).abs() ** 2
        return {"loss": focal.mean() + F.smooth_l1_loss(places, boxes), "scores": scores}


def detector() -> Made:
    """A feature pyramid with focal loss and boxes; a dict that holds the loss."""
    return Pyramid(), {"x": images(), "kinds": torch.rand(8, 80, 4), "boxes": numbers(8, 80, 4)}


class Queries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.queries = nn.Conv2d(3, 32, 4, 4), nn.Parameter(torch.randn(8, 32) * 0.1)
        layer = nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.decoder, self.boxes = nn.TransformerDecoder(layer, 1), nn.Linear(32, 4)

    def forward(self, x: Tensor, boxes: Tensor) -> Tensor:
        memory = self.body(x).flatten(2).mT
        found = self.boxes(self.decoder(self.queries.expand(x.shape[0], -1, -1), memory)).sigmoid()
        return torch.cdist(found, boxes, p=1.0).amin(-1).mean() + F.l1_loss(found, boxes)


def detection_by_queries() -> Made:
    """Learned queries look at an image by torch.nn.TransformerDecoder; the nearest box counts."""
    return Queries(), (images(), torch.rand(8, 8, 4))


class Points(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1))
        self.turn, self.head = nn.Linear(64, 9), nn.Linear(64, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        turn = self.turn(self.each(x).max(-1).values).view(-1, 3, 3) + torch.eye(3, device=x.device)
        h = self.each(torch.bmm(turn, x)).max(-1)[0]
        loss = F.nll_loss(F.log_softmax(self.head(h), 1), y)
        return loss + 0.01 * (torch.eye(3, device=x.device) - turn @ turn.mT).pow(2).sum((1, 2)).mean()


def point_cloud() -> Made:
    """Points are turned by a learned matrix; the largest over all points."""
    return Points(), (numbers(8, 3, 32), classes(8))


class Video(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv3d(3, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(), nn.MaxPool3d(2))
        self.time, self.head = nn.Conv3d(16, 16, (3, 1, 1), padding=(1, 0, 0)), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.time(self.body(x)).mean((2, 3, 4))), y)


def video() -> Made:
    """Convolutions over time and space."""
    return Video(), (numbers(8, 3, 4, 8, 8), classes(8))


class Warp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.find = nn.Sequential(nn.Flatten(), nn.Linear(3 * 256, 32), nn.ReLU(), nn.Linear(32, 6))
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        grid = F.affine_grid(self.find(x).view(-1, 2, 3), list(x.shape), align_corners=False)
        h = self.conv(F.grid_sample(x, grid, align_corners=False))
        return F.cross_entropy(self.head(h.mean((2, 3))), y)


def spatial_transformer() -> Made:
    """An image is sampled where a small net says."""
    return Warp(), (images(), classes(8))


class SuperResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.PReLU(16), nn.Conv2d(16, 12, 3, padding=1))
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        up = self.shuffle(self.body(x)) + F.interpolate(x, size=y.shape[-2:], mode="bilinear", align_corners=False)
        return F.l1_loss(up, y)


def super_resolution() -> Made:
    """Pixel shuffle, PReLU, bilinear interpolation."""
    return SuperResolution(), (images(), images(32))


class LearnedStart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 16, 4, 4))
        self.style, self.conv, self.out = nn.Linear(8, 32), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 3, 1)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        scale, shift = self.style(z)[:, :, None, None].chunk(2, 1)
        h = self.conv(self.start.repeat(len(z), 1, 1, 1)) * (1 + scale) + shift
        return ((self.out(F.relu(h)) - y) ** 2).sum() / z.size(0)


def learned_start() -> Made:
    """A learned picture, repeated for each sample and styled by it; the loss is divided by the number of samples."""
    return LearnedStart(), (numbers(8, 8), numbers(8, 3, 4, 4))


REFUSED: dict[str, str] = {}


class Cut(nn.Module):
    """Half of the channels by a product, half by cheap sums of those, as many of both as are wanted: all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.product, self.cheap = (
            nn.Conv2d(width, width // 2, 1),
            nn.Conv2d(width // 2, width // 2, 3, padding=1, groups=width // 2),
        )
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        half = self.product(x)
        return torch.cat([half, self.cheap(half)], 1)[:, : self.width]


class Ghost(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = Cut(width), Cut(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.relu(self.first(x)))
        y += x
        return y


def ghost() -> Made:
    """Layers that add in place to a view of what they made."""
    return _classified(nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Ghost(16) for _ in range(4))), 16)


class InVain(nn.Module):
    """A sum between two runs of layers that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.first, self.second = (nn.ModuleList([Residual(16) for _ in range(2)]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.first:
            x = layer(x)
        self.seen = (x * x).mean()
        for layer in self.second:
            x = layer(x)
        return x


def in_vain() -> Made:
    """What nothing reads is computed all the same."""
    return _classified(InVain(), 16)


class Selective(nn.Module):
    """Two paths of channels are cut out of one tensor that a batch norm made, as in SK-Net and Res2Net."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.wide, self.norm = nn.Conv2d(width, 2 * width, 1, bias=False), nn.BatchNorm2d(2 * width)
        self.paths = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        halves = self.norm(self.wide(x)).chunk(2, 1)
        return x + sum(path(half) for path, half in zip(self.paths, halves, strict=True))


def selective_kernels() -> Made:
    """Running statistics of channels that are cut in two."""
    return _classified(nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Selective(), Selective(), Selective()), 16)


class Standardised(nn.Conv2d):
    """Weight standardisation: the weight is read for its values, and once more for its shape."""

    def forward(self, x: Tensor) -> Tensor:
        flat = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True, momentum=0.0)
        return x + F.relu(F.conv2d(x, flat.reshape_as(self.weight), self.bias, padding=1))


def standardised_weights() -> Made:
    """Weights that are normalised, then take the shape that they had."""
    layers = (Standardised(16, 16, 3) for _ in range(4))
    return _classified(nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *layers), 16)


class Dropping(nn.Conv2d):
    """Dropout that its own code calls, with a rate of its own."""

    def __init__(self) -> None:
        super().__init__(16, 16, 3, padding=1)
        self.drop_rate = 0.3

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(F.relu(super().forward(x)), self.drop_rate)


def functional_dropout() -> Made:
    """Dropout by F.dropout; a run under a plan is held against one process without it."""
    return _classified(nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Dropping() for _ in range(4))), 16)


class Segmenting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))
        self.stem, self.head = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 8, 1)
        self.register_buffer("rare", torch.linspace(0.2, 1.6, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.stem(x)
        for layer in self.layers:
            h = h + F.relu(layer(h))
        return F.cross_entropy(self.head(h), y, weight=self.rare, label_smoothing=0.1, ignore_index=3)


def segmentation_by_rare_kinds() -> Made:
    """A loss of each pixel, with a weight for each class, smoothed, without the pixels of one class."""
    return Segmenting(), (numbers(8, 3, 8, 8), torch.randint(0, 8, (8, 8, 8)))
