"""Cases of operators that few models use: linear algebra, losses, statistics, complex numbers, rare pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.support.operators.cases import ids, pos, t
from tests.support.operators.judge import Case


def matrices() -> torch.Tensor:
    """Symmetric, positive definite: `[4, 3, 3]`."""
    a = t(4, 3, 3)
    return a @ a.mT + 2 * torch.eye(3, dtype=torch.float64)


def _of_matrices(name: str) -> Callable[..., Any]:
    short = name.removeprefix("linalg_")
    func: Callable[..., Any] = getattr(torch.linalg if name.startswith("linalg_") else torch, short)
    return func


def linear_algebra() -> list[Case]:
    one = (
        "linalg_cholesky linalg_cholesky_ex cholesky cholesky_inverse linalg_inv linalg_inv_ex inverse linalg_det linalg_slogdet slogdet "
        "logdet linalg_eigh linalg_eigvalsh linalg_svdvals linalg_qr qr linalg_lu linalg_lu_factor linalg_lu_factor_ex matrix_exp linalg_pinv "
        "pinverse linalg_eigvals linalg_cond linalg_matrix_norm"
    )
    m, b = matrices(), t(4, 3, 2)
    lu, pivots = torch.linalg.lu_factor(m)
    return [
        *(Case(fn, _of_matrices(fn), (m,)) for fn in one.split()),
        Case("linalg_svd", lambda a: torch.linalg.svd(a)[1], (m,)),
        Case("svd", lambda a: torch.svd(a)[1], (m,)),
        Case("linalg_eig", lambda a: torch.linalg.eig(a)[0], (m,)),
        Case("linalg_matrix_power", torch.linalg.matrix_power, (m, 2)),
        *(Case(fn, _of_matrices(fn), (m, b), kinds="aa") for fn in ("linalg_solve", "linalg_solve_ex")),
        Case("linalg_solve_triangular", torch.linalg.solve_triangular, (m.tril(), b), {"upper": False}, "aa"),
        Case("linalg_lu_solve", torch.linalg.lu_solve, (lu, pivots, b), kinds="aca"),
        Case("cholesky_solve", torch.cholesky_solve, (b, m.tril()), kinds="aa"),
        Case("linalg_householder_product", torch.linalg.householder_product, (t(4, 3, 2), t(4, 2)), kinds="aa"),
        Case("mv", torch.mv, (t(4, 8), t(8)), kinds="pa"),
        Case("dot", torch.dot, (t(8), t(8)), kinds="aa"),
        Case("vdot", torch.vdot, (t(8), t(8)), kinds="aa"),
        Case("outer", torch.outer, (t(4), t(8)), kinds="aa"),
        Case("addmv", torch.addmv, (t(4), t(4, 8), t(8)), kinds="apa"),
        Case("linalg_vecdot", torch.linalg.vecdot, (t(4, 8), t(4, 8)), kinds="aa"),
        Case("cdist", torch.cdist, (t(4, 6, 3), t(4, 8, 3)), kinds="aa"),
        Case("cdist", torch.cdist, (t(6, 3), t(8, 3), 1.0), kinds="ap", name="cdist of two"),
    ]


def losses() -> list[Case]:
    x, y, z, sign = t(4, 8), t(4, 8), t(4, 8), torch.ones(4, 8).double()
    cases = []
    for reduction in ("mean", "sum", "none"):
        how = {"reduction": reduction}
        cases += [
            Case("kl_div", F.kl_div, (x.log_softmax(-1), y.softmax(-1)), how, "ac"),
            Case("poisson_nll_loss", F.poisson_nll_loss, (x, y.abs()), how, "ac"),
            Case("soft_margin_loss", F.soft_margin_loss, (x, sign), how, "ac"),
            Case("hinge_embedding_loss", F.hinge_embedding_loss, (x, sign), how, "ac"),
            Case("margin_ranking_loss", F.margin_ranking_loss, (x, y, sign), how, "aac"),
            Case("triplet_margin_loss", F.triplet_margin_loss, (x, y, z), how, "aaa"),
            Case("cosine_embedding_loss", F.cosine_embedding_loss, (x, y, torch.ones(4).double()), how, "aac"),
            Case("multi_margin_loss", F.multi_margin_loss, (x, ids(8, 4)), how, "ac"),
            Case("multilabel_margin_loss", F.multilabel_margin_loss, (x, ids(8, 4, 8)), how, "ac"),
            Case("multilabel_soft_margin_loss", F.multilabel_soft_margin_loss, (x, sign), how, "ac"),
        ]
    frames = t(6, 4, 5).log_softmax(-1)
    lengths = (torch.full((4,), 6), torch.full((4,), 3))
    cases.append(Case("ctc_loss", F.ctc_loss, (frames, ids(4, 4, 3) + 1, *lengths), {"reduction": "sum"}, "accc"))
    cases.append(Case("ctc_loss", F.ctc_loss, (frames, ids(4, 4, 3) + 1, *lengths), {}, "accc", "ctc_loss mean"))
    return [
        Case(c.fn, c.func, c.args, c.kwargs, c.kinds, c.name or f"{c.fn} {c.kwargs.get('reduction', '')}")
        for c in cases
    ]


def statistics() -> list[Case]:
    x, gap = t(4, 8, 6), t(4, 8, 6)
    gap[0, 0, 0] = float("nan")
    return [
        *(Case(fn, getattr(torch, fn), (x, 1)) for fn in ("cummax", "cummin", "median", "nanmedian", "mode")),
        *(Case(fn, getattr(torch, fn), (x,)) for fn in ("msort", "flipud", "fliplr")),
        Case("kthvalue", torch.kthvalue, (x, 2)),
        Case("kthvalue", torch.kthvalue, (x, 2, 1, True), name="kthvalue kept"),
        Case("nansum", torch.nansum, (gap, 1)),
        Case("nanmean", torch.nanmean, (gap, 1)),
        Case("aminmax", torch.aminmax, (x,), {"dim": 1}),
        Case("std_mean", torch.std_mean, (x, 1)),
        Case("pairwise_distance", F.pairwise_distance, (x, t(4, 8, 6)), kinds="aa"),
        Case("argsort", torch.argsort, (x, 1)),
        *(
            Case("cosine_similarity", F.cosine_similarity, (x, t(4, 8, 6)), {"dim": d}, "aa", f"cosine along {d}")
            for d in (0, 1, -1)
        ),
        Case(
            "cosine_similarity",
            F.cosine_similarity,
            (t(4, 1, 6), t(1, 8, 6), -1),
            kinds="aa",
            name="cosine of all pairs",
        ),
        Case(
            "cosine_similarity", F.cosine_similarity, (t(4, 8, 6), t(8, 6), -1), kinds="ap", name="cosine with a table"
        ),
        *(
            Case(fn, getattr(torch.fft, fn.removeprefix("fft_")), (x,))
            for fn in ("fft_hfft", "fft_ihfft", "fft_hfft2", "fft_ihfft2")
        ),
        *(
            Case(fn, getattr(torch.fft, fn.removeprefix("fft_")), (x,), {"dim": (1, 2)})
            for fn in ("fft_hfftn", "fft_ihfftn", "fft_fftshift", "fft_ifftshift")
        ),
    ]


def elements() -> list[Case]:
    x, y, z = pos(4, 8), pos(4, 8), torch.randn(4, 8, dtype=torch.complex128)
    binary = "copysign fmax fmin ldexp logaddexp logaddexp2 hypot xlogy complex polar"
    return [
        *(Case(fn, getattr(torch, fn), (x, y), kinds="aa") for fn in binary.split()),
        Case("special_xlog1py", torch.special.xlog1py, (x, y), kinds="aa"),
        *(Case(fn, getattr(torch, fn), (z,)) for fn in ("conj_physical", "resolve_conj", "resolve_neg")),
        Case("conj", torch.conj_physical, (z,)),
        Case("polygamma", torch.polygamma, (1, x)),
        Case("mvlgamma", torch.mvlgamma, (x + 2, 2)),
        Case("fill", torch.fill, (x, 2.0)),
        Case("broadcast_tensors", torch.broadcast_tensors, (t(4, 1), t(8)), kinds="aa"),
        Case("prelu", F.prelu, (t(4, 8, 6), pos(8)), kinds="ap"),
        Case("prelu", F.prelu, (t(4, 8), pos(1)), kinds="ap", name="prelu of one"),
        Case("embedding_bag", F.embedding_bag, (ids(9, 4, 3), t(9, 8)), kinds="cp"),
    ]


def pools() -> list[Case]:
    x, cube = t(4, 8, 4, 4), t(2, 4, 4, 4, 4)
    grid = torch.rand(4, 3, 3, 2, dtype=torch.float64) * 1.6 - 0.8
    return [
        *(
            Case(fn, getattr(F, fn), (cube, 2))
            for fn in ("max_pool3d", "avg_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d")
        ),
        Case("adaptive_max_pool1d", F.adaptive_max_pool1d, (t(4, 8, 6), 2)),
        Case("pixel_unshuffle", F.pixel_unshuffle, (x, 2)),
        Case("channel_shuffle", F.channel_shuffle, (x, 2)),
        Case("local_response_norm", F.local_response_norm, (x, 3)),
        Case("grid_sample", F.grid_sample, (x, grid), {"align_corners": False}, "aa"),
        *(Case(f"lp_pool{n}d", getattr(F, f"lp_pool{n}d"), (pos(4, 8, *[4] * n), 2, 2)) for n in (1, 2, 3)),
        *(
            Case(
                f"max_unpool{n}d",
                getattr(F, f"max_unpool{n}d"),
                (*getattr(F, f"max_pool{n}d")(t(4, 8, *[4] * n), 2, return_indices=True), 2),
                kinds="ac",
            )
            for n in (1, 2, 3)
        ),
        *(
            Case(
                f"max_pool{n}d_with_indices",
                getattr(F, f"max_pool{n}d"),
                (t(4, 8, *[4] * n), 2),
                {"return_indices": True},
            )
            for n in (1, 2, 3)
        ),
    ]


def recurrent() -> list[Case]:
    """Layers: input, states, weights of each layer and direction; then whether there are biases, how many layers, dropout, whether it
    trains, whether both ways, whether samples come first."""

    def weights(gates: int, width: int, *inner: int) -> list[torch.Tensor]:
        return [
            w for n in inner for w in (t(gates * width, n), t(gates * width, width), t(gates * width), t(gates * width))
        ]

    def layers(name: str, gates: int, states: int, *flags: Any, ways: int = 1, bias: bool = True) -> Case:
        x = t(4, 6, 3)
        first = flags[-1]
        held = tuple(t(2 * ways, 4 if first else 6, 5) for _ in range(states))
        given = weights(gates, 5, *[3] * ways, *[5 * ways] * ways)
        given = given if bias else [w for w in given if w.dim() == 2]
        args = (x, held if states > 1 else held[0], given, bias, 2, 0.0, False, ways > 1, first)
        return Case(
            name,
            getattr(torch, name),
            args,
            kinds="a" * (1 + states) + "p" * len(given),
            name=f"{name} {ways} {bias} {first}",
        )

    x, h, c = t(4, 3), t(4, 5), t(4, 5)
    return [
        layers("lstm", 4, 2, True),
        layers("lstm", 4, 2, False, ways=2),
        layers("gru", 3, 1, True, ways=2, bias=False),
        layers("gru", 3, 1, False),
        layers("rnn_tanh", 1, 1, True),
        layers("rnn_relu", 1, 1, False, bias=False),
        Case("lstm_cell", torch.lstm_cell, (x, (h, c), *weights(4, 5, 3)), kinds="aaapppp"),
        Case("gru_cell", torch.gru_cell, (x, h, *weights(3, 5, 3)), kinds="aapppp"),
        Case("rnn_tanh_cell", torch.rnn_tanh_cell, (x, h, *weights(1, 5, 3)), kinds="aapppp"),
        Case("rnn_relu_cell", torch.rnn_relu_cell, (x, h, *weights(1, 5, 3)[:2]), kinds="aapp"),
    ]


RARE = [*linear_algebra(), *losses(), *statistics(), *elements(), *pools(), *recurrent()]
