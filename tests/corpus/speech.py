"""Sound, text and other sequences: recurrent nets, convolutions over time, attention of every spelling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import Made, classes, numbers, variants

WORDS, WIDTH, TOKENS = 64, 32, 16


def _text() -> tuple[Tensor, Tensor]:
    return classes(WORDS, (8, TOKENS)), classes(WORDS, (8, TOKENS))


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.net = nn.Embedding(WORDS, WIDTH), getattr(nn, kind)(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, _ = self.net(self.embed(x))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def lstm() -> Made:
    """torch.nn.LSTM over embedded tokens."""
    return Recurrent("LSTM"), _text()


def gru() -> Made:
    """torch.nn.GRU over embedded tokens."""
    return Recurrent("GRU"), _text()


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(16, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], WIDTH)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return F.cross_entropy(self.head(h), y)


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.net = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.3, bidirectional=True, proj_size=16)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, (last, _) = self.net(self.embed(x).transpose(0, 1))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.t().flatten()) + last.square().mean()


def lstm_with_dropout() -> Made:
    """Layers both ways with a projection, tokens first; values are dropped between layers."""
    return Stacked(), _text()


def gru_cell_by_step() -> Made:
    """A cell that is called for each step of a Python loop."""
    return Cells(), (numbers(8, 4, 16), classes(8))


class Conformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(20, WIDTH)
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.wide = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.depth, self.batch = nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH), nn.BatchNorm1d(WIDTH)
        self.ends = nn.Linear(WIDTH, 12)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.into(x)
        n = self.norm(h)
        h = h + self.attention(n, n, n, need_weights=False)[0]
        h = h + self.batch(self.depth(F.glu(self.wide(h.mT), 1))).mT
        steps = torch.full((x.shape[0],), x.shape[1], dtype=torch.long)
        return F.ctc_loss(self.ends(h).log_softmax(-1).transpose(0, 1), y, steps, torch.full((x.shape[0],), y.shape[1]))


def conformer_ctc() -> Made:
    """Attention and depthwise convolution over frames, CTC loss."""
    return Conformer(), (numbers(8, TOKENS, 20), classes(11, (8, 4)) + 1)


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv1d(1, 16, 1)
        self.gates = nn.ModuleList([nn.Conv1d(16, 32, 2, dilation=2**i) for i in range(3)])
        self.out = nn.Conv1d(16, 8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, skip = self.into(x), None
        for i, gate in enumerate(self.gates):
            a, b = gate(F.pad(h, (2**i, 0))).chunk(2, 1)
            z = torch.tanh(a) * torch.sigmoid(b)
            h, skip = h + z, z if skip is None else skip + z
        return F.cross_entropy(self.out(F.relu(skip)), y)


def wavenet() -> Made:
    """Causal dilated convolutions with gates and skips."""
    return WaveNet(), (numbers(8, 1, 32), classes(8, (8, 32)))


class Vocoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(16, 16, 4, 2, 1)
        self.ways = nn.ModuleList([nn.Conv1d(16, 16, k, padding=k // 2) for k in (3, 7)])
        self.out = nn.Conv1d(16, 1, 7, padding=3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.up(F.leaky_relu(x, 0.1))
        h = torch.stack([way(F.leaky_relu(h, 0.1)) for way in self.ways]).mean(0)
        made = torch.tanh(self.out(h))
        return F.l1_loss(made, y) + (torch.fft.rfft(made).abs() - torch.fft.rfft(y).abs()).abs().mean()


def vocoder() -> Made:
    """Transposed convolutions, a mean over stacked ways, a loss of spectra."""
    return Vocoder(), (numbers(8, 16, 16), numbers(8, 1, 32))


class Attention(nn.Module):
    """Attention in a spelling that `mix` gives: q, k, v of `[batch, heads, tokens, size]`."""

    def __init__(self, mix: str, heads: int = 4) -> None:
        super().__init__()
        self.mix, self.heads = mix, heads
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.slopes = nn.Parameter(torch.full((heads, 1, 1), 0.1))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        b, t, d = h.shape
        q, k, v = (
            z.view(b, t, self.heads, d // self.heads).transpose(1, 2) for z in self.qkv(self.norm(h)).split(d, -1)
        )
        h = h + self.out(getattr(self, self.mix)(q, k, v).transpose(1, 2).reshape(b, t, d))
        return F.cross_entropy(self.head(h).view(-1, WORDS), y.view(-1))

    def _mask(self, t: int) -> Tensor:
        return torch.triu(torch.ones(t, t, dtype=torch.bool), 1)

    def attention_linear(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Linear attention by a cumulative sum of outer products."""
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
        return torch.einsum("bhtd,bhtde->bhte", q, state) / (q * k.cumsum(2)).sum(-1, keepdim=True)

    def attention_windowed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention within blocks of tokens, by unflatten and flatten."""
        q, k, v = (z.unflatten(2, (z.shape[2] // 4, 4)) for z in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).flatten(2, 3)

    def attention_batched(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Batch and heads as one dim, baddbmm and bmm, softmax in float32."""
        b, h, t, d = q.shape
        q, k, v = (z.reshape(b * h, t, d) for z in (q, k, v))
        scores = torch.baddbmm(torch.zeros(t, t).masked_fill(self._mask(t), -1e4), q, k.mT, alpha=d**-0.5)
        return torch.bmm(F.softmax(scores, -1, dtype=torch.float32).type_as(q), v).view(b, h, t, d)

    def attention_masked(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """scaled_dot_product_attention with a mask and a scale."""
        allowed = ~self._mask(q.shape[2]) & (torch.rand(q.shape[2], generator=torch.Generator().manual_seed(0)) > -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=0.3)


globals().update(variants(Attention, _text))


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.net = nn.Transformer(WIDTH, 4, 1, 1, 64, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
        h = self.net(self.embed(x), self.embed(y), tgt_mask=mask)
        logits = F.linear(h, self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=0, label_smoothing=0.1)


def encoder_decoder() -> Made:
    """torch.nn.Transformer, output tied to the embedding, label smoothing, ignored padding."""
    return EncoderDecoder(), _text()


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(WORDS, WIDTH, mode="mean"), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.bag(x)), y)


def bag_of_words() -> Made:
    """torch.nn.EmbeddingBag, the mean of a row's words."""
    return Bag(), (classes(WORDS, (8, TOKENS)), classes(8))


class PackedByLengths(nn.Module):
    """Packs by lengths that are given, as a loader returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return F.cross_entropy(self.head(self.net(packed)[1][-1]), y)


def packed_by_lengths() -> Made:
    """pack_padded_sequence by an input of lengths, on the CPU."""
    return PackedByLengths(), (numbers(8, 6, WIDTH), torch.tensor([6, 5, 4, 3, 6, 2, 1, 6]), classes(8))


_PADDED = "give the padded batch to the layer, and mask the padding in the loss"
REFUSED = {
    "packed_sequence": _PADDED,
    "packed_by_lengths": _PADDED,
    "attention_masked": "draws random numbers from a generator of its own",
}


class Spectra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scan, self.head = nn.LSTM(16, WIDTH, batch_first=True), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.scan(x)[0]).transpose(1, 2), y)


def lstm_of_features() -> Made:
    """An LSTM of what needs no gradient, whose kernel keeps all weights; a class of each frame."""
    return Spectra(), (numbers(8, 4, 16), torch.randint(0, 8, (8, 4)))
