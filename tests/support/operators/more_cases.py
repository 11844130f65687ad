# ruff: noqa: N803, N806  (A, B, C, D are the names that the papers and transformers give)
"""Cases of operators that pick and write elements, of scans and of rare ones: one call each on small tensors, with references written here."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from planner_core.models.adapters import scans
from planner_core.models.adapters.experts import expert_linear
from tests.support.operators.cases import ids, pos, t
from tests.support.operators.judge import Case
from tests.support.operators.rare_cases import RARE


def write(target: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    target[index] = value
    return target


def picking() -> list[Case]:
    """Gather, scatter, writes, tensors like another."""
    x, whole = t(4, 8, 12), slice(None)
    return [
        Case("gather", torch.gather, (x, 1, ids(8, 4, 2, 12)), kinds="ac"),
        Case("gather", torch.gather, (t(4, 8), -1, ids(8, 4, 2)), kinds="ac", name="gather last"),
        Case("gather", torch.gather, (x, 2, ids(12, 2, 8, 3)), kinds="ac", name="gather of a part"),
        Case("take_along_dim", torch.take_along_dim, (t(4, 8), ids(8, 4, 2)), {"dim": 1}, "ac"),
        Case("scatter", torch.scatter, (t(4, 8), 1, ids(8, 4, 2), 1.0), kinds="ac", name="scatter a number"),
        Case("scatter", torch.scatter, (t(4, 8), 1, torch.arange(2).expand(4, 2), t(4, 2)), kinds="aca"),
        Case("scatter_", torch.Tensor.scatter_, (t(4, 8), 1, ids(8, 4, 2), 0.0), kinds="ac"),
        Case("scatter_add", torch.scatter_add, (t(4, 8), 1, ids(8, 4, 2), t(4, 2)), kinds="aca"),
        Case("scatter_reduce", torch.scatter_reduce, (t(4, 8), 1, ids(8, 4, 2), t(4, 2), "sum"), kinds="aca"),
        *(Case(fn, getattr(torch, fn), (x,)) for fn in ("zeros_like", "ones_like")),
        Case("full_like", torch.full_like, (x, 3.0)),
        Case("empty_like", lambda a: torch.zeros_like(a), (x,)),
        *(Case(fn, getattr(torch.Tensor, fn), (x, (4, 2))) for fn in ("new_zeros", "new_ones")),
        Case("new_full", torch.Tensor.new_full, (x, (4, 2), 3.0)),
        Case("new_empty", lambda a, shape: a.new_zeros(shape), (x, (4, 2))),
        Case("copy_", torch.Tensor.copy_, (t(4, 8), t(4, 8)), kinds="aa"),
        Case("copy_", torch.Tensor.copy_, (t(4, 8), t(8)), kinds="ap", name="copy_ repeated"),
        Case("setitem", write, (t(4, 8, 12), (whole, slice(2, 4)), t(4, 2, 12)), kinds="aa"),
        Case("setitem", write, (t(4, 8, 12), (whole, 3), t(12)), kinds="aa", name="setitem repeated"),
        Case("setitem", write, (t(4, 8, 12), (Ellipsis, 0), 2.0), kinds="a", name="setitem a number"),
        Case("setitem", write, (t(4, 8), whole, t(4, 8)), kinds="aa", name="setitem whole"),
        Case("setitem", write, (t(4, 8), (slice(None, None, 2),), t(2, 8)), kinds="aa", name="setitem stepped"),
        Case(
            "setitem",
            write,
            (t(4, 8, 12), (whole, torch.tensor([5, 2])), t(4, 2, 12)),
            kinds="aca",
            name="setitem by index",
        ),
        Case("setitem", write, (t(4, 8), (torch.tensor([1, 3]),), 2.0), kinds="ac", name="setitem a number by index"),
        Case(
            "index_put_",
            torch.Tensor.index_put_,
            (t(4, 8), (torch.tensor([1, 1]),), t(2, 8)),
            {"accumulate": True},
            "aca",
        ),
        Case("view_as_complex", torch.view_as_complex, (t(4, 8, 2),)),
        Case("view_as_real", torch.view_as_real, (torch.randn(4, 8, dtype=torch.complex128),), kinds="c"),
        Case("masked_scatter", torch.masked_scatter, (t(4, 8), t(4, 8) > 0, t(40)), kinds="aca"),
        Case("data", torch.Tensor.detach, (x,)),
        Case("histc", torch.histc, (t(6, 4, 8), 5, -1, 1)),
        Case("histc", torch.histc, (t(8, 4), 5, 0, 0)),
        Case("one_hot", F.one_hot, (ids(6, 4, 8), 6), kinds="c"),
        Case("index_add", torch.index_add, (x, 1, ids(8, 3), t(4, 3, 12)), kinds="aca"),
        Case("index_add_", torch.Tensor.index_add_, (t(4, 8), 0, ids(4, 2), t(2, 8)), {"alpha": 2.0}, "acp"),
        Case("index_select", torch.index_select, (x, 1, ids(8, 3)), kinds="ac"),
        Case("log_sigmoid", F.logsigmoid, (x,)),
        Case("GeLUFunction", F.gelu, (x,)),
        Case("linalg_vector_norm", torch.linalg.vector_norm, (x, 2, 1)),
    ]


# --- references of the scans, over the sequence one token at a time ----------------------------------------


def mamba(hidden_states: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, delta_bias: Any) -> torch.Tensor:
    dt = F.softplus(dt + delta_bias[:, None])
    state, out = 0.0, []
    for i in range(dt.shape[2]):
        step = dt[:, :, i, None]
        state = torch.exp(A * step) * state + step * B[:, None, :, i] * hidden_states[:, :, i, None]
        out.append((state * C[:, None, :, i]).sum(-1) + D * hidden_states[:, :, i])
    return torch.stack(out, -1) * F.silu(z)


def mamba2(hidden_states: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, D: Any, dt_bias: Any) -> torch.Tensor:
    dt = F.softplus(dt + dt_bias)
    each = dt.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(each, 2), C.repeat_interleave(each, 2)
    state, out = 0.0, []
    for i in range(dt.shape[1]):
        step, x = dt[:, i, :, None, None], hidden_states[:, i]
        state = torch.exp(A[:, None, None] * step) * state + step * x[..., None] * B[:, i, :, None, :]
        out.append((state * C[:, i, :, None, :]).sum(-1) + D[:, None] * x)
    return torch.stack(out, 1)


def delta(query: Any, key: Any, value: Any, g: Any, beta: Any) -> tuple[torch.Tensor, None]:
    state, out = 0.0 * key[:, 0, :, :, None] * value[:, 0, :, None, :], []
    for i in range(query.shape[1]):
        k, decay = key[:, i], g[:, i].exp()
        state = state * (decay[..., None] if decay.dim() == 3 else decay[..., None, None])
        state = (
            state + k[..., None] * (beta[:, i, :, None] * (value[:, i] - (state * k[..., None]).sum(-2)))[..., None, :]
        )
        out.append((state * query[:, i, :, :, None]).sum(-2))
    return torch.stack(out, 1), None


def rwkv(time_decay: Any, time_first: Any, key: Any, value: Any) -> tuple[torch.Tensor, None]:
    top, bottom, out = 0.0, 0.0, []
    for i in range(key.shape[1]):
        now = (time_first + key[:, i]).exp()
        out.append((top + now * value[:, i]) / (bottom + now))
        top, bottom = (
            x * torch.exp(-time_decay.exp()) + y
            for x, y in ((top, key[:, i].exp() * value[:, i]), (bottom, key[:, i].exp()))
        )
    return torch.stack(out, 1), None


def griffin(hidden_states: Any, recurrent_gate: Any) -> tuple[torch.Tensor, None]:
    state, out = 0.0, []
    for i in range(hidden_states.shape[1]):
        state = recurrent_gate[:, i] * state + hidden_states[:, i]
        out.append(state)
    return torch.stack(out, 1), None


def xlstm(query: Any, key: Any, value: Any, igate: Any, fgate: Any) -> tuple[torch.Tensor, None]:
    state, norm, out = 0.0 * key[:, :, 0, :, None] * value[:, :, 0, None, :], 0.0 * key[:, :, 0], []
    for i in range(query.shape[2]):
        forget, take = torch.sigmoid(fgate[:, :, i, None]), igate[:, :, i, None].exp()
        k, q = key[:, :, i] / key.shape[-1] ** 0.5, query[:, :, i]
        state = forget[..., None] * state + (take * k)[..., None] * value[:, :, i, None, :]
        norm = forget * norm + take * k
        out.append((state * q[..., None]).sum(-2) / (norm * q).sum(-1, keepdim=True).abs().clamp(min=1.0))
    return torch.stack(out, 2), None


def scanning() -> list[Case]:
    b, d, n, s, h, p, g = 4, 8, 2, 3, 8, 4, 4
    u = t(b, d, s)
    q, k, v = t(b, s, h, p), t(b, s, h, p) / 4, t(b, s, h, 2)
    one, many = t(b, s, 1, n), t(b, s, g, n)
    x = t(b, s, h, p)
    return [
        Case(
            "selective_scan",
            scans.selective_scan,
            (u, t(b, d, s), -pos(d, n), t(b, n, s), t(b, n, s), t(d), t(b, d, s), t(d)),
            {"plain": mamba},
            "aapaapap",
        ),
        *(
            Case(
                "chunk_scan",
                scans.chunk_scan,
                (x, t(b, s, h), -pos(h), m, m.flip(3), 2, t(h), t(h)),
                {"plain": mamba2},
                "aapaapp",
                name,
            )
            for m, name in ((one, "chunk_scan one group"), (many, "chunk_scan"))
        ),
        Case("delta_rule", scans.delta_rule, (q, k, v, -pos(b, s, h), pos(b, s, h)), {"plain": delta}, "aaaaa"),
        Case(
            "delta_rule",
            scans.delta_rule,
            (q, k, v, -pos(b, s, h, p), pos(b, s, h)),
            {"plain": delta},
            "aaaaa",
            "delta_rule of Kimi",
        ),
        Case("wkv", scans.wkv, (t(d), t(d), t(b, s, d), t(b, s, d)), {"plain": rwkv}, "ppaa"),
        Case("linear_scan", scans.linear_scan, (t(b, s, d), pos(b, s, d)), {"plain": griffin}, "aa"),
        Case(
            "mlstm",
            scans.mlstm,
            (t(b, h, s, p), t(b, h, s, p), t(b, h, s, 2), t(b, h, s), t(b, h, s)),
            {"plain": xlstm},
            "aaaaa",
        ),
        Case("expert_linear", expert_linear, (t(8, 4), ids(4, 8), t(4, 12, 4)), kinds="acp"),
    ]


def rare() -> list[Case]:
    x, y = t(4, 8, 12), torch.arange(8)
    chunks = ((4, 3, 4, 6), (48, 12, 6, 1))  # of 8 tokens, overlapping by half
    logs, known = F.log_softmax(t(8, 6), -1), torch.where(y % 3 > 0, y % 6, -100)
    fourier = torch.fft
    return [
        Case("_weight_norm", torch._weight_norm, (t(4, 8, 6), t(1, 1, 6), 2), kinds="pp"),
        Case("_weight_norm", torch._weight_norm, (t(4, 8), t(4, 1)), kinds="pp", name="_weight_norm of rows"),
        *(Case(f"fft_{fn}", getattr(fourier, fn), (x,)) for fn in ("fft", "rfft", "fft2", "rfft2", "rfftn", "fftn")),
        *(
            Case(f"fft_{fn}", getattr(fourier, fn), (x.to(torch.complex128),), kinds="c")
            for fn in ("ifft", "irfft", "ifft2", "irfft2", "ifftn", "irfftn")
        ),
        Case("fft_fftn", fourier.fftn, (x,), {"dim": (1, 2)}, name="fft_fftn of dims"),
        Case("fft_fftn", fourier.fftn, (x, (8,)), name="fft_fftn of sizes"),
        Case("fft_fft", fourier.fft, (x, None, -2), name="fft_fft of a dim"),
        Case("unfold", F.unfold, (t(4, 2, 6, 6), 3), name="patches"),
        Case(
            "unfold",
            F.unfold,
            (t(4, 2, 6, 4),),
            {"kernel_size": (3, 1), "padding": (1, 0), "stride": (2, 1)},
            name="patches padded",
        ),
        Case("unfold", F.unfold, (t(2, 6, 6), 3), name="patches of one image"),
        Case("unfold", torch.Tensor.unfold, (x, -2, 4, 2), name="windows"),
        Case("as_strided", torch.as_strided, (t(4, 8, 6), *chunks)),
        Case("as_strided", torch.as_strided, (t(4, 8, 6), (2, 4), (48, 1)), name="as_strided of some"),
        Case("nll_loss", F.nll_loss, (logs, known), kinds="ac"),
        Case("nll_loss", F.nll_loss, (logs, known), {"reduction": "sum"}, "ac", "nll_loss summed"),
        Case("nll_loss", F.nll_loss, (logs, y % 6), {"ignore_index": 1}, "ac", "nll_loss without a class"),
        Case("SqrtBoundDerivative", torch.sqrt, (pos(4, 8),)),
        Case("einsum", torch.einsum, ("...nd,...ng->...gd", t(4, 2, 6, 8), t(4, 2, 6, 4)), name="einsum of any rank"),
        Case("einsum", torch.einsum, ("...hqk,...khd->...qhd", t(4, 2, 6, 8), t(4, 8, 2, 4)), name="einsum of heads"),
        Case("einsum", torch.einsum, ("...d,...d->...", t(2, 4, 8), t(4, 8)), name="einsum aligned at the last"),
        Case("einsum", torch.einsum, ("...d,de->...e", t(4, 1, 8), t(8, 6)), name="einsum with a weight"),
        Case("einsum", torch.einsum, ("b...d,b...d->b...", t(4, 6, 8), t(4, 1, 8)), name="einsum broadcast"),
    ]


MORE = [*picking(), *scanning(), *rare(), *RARE]
