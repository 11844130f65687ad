"""Which calls draw random numbers: masks of dropout, which the runtime draws itself, and others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

DROPOUTS = frozenset(
    {
        "dropout",
        "dropout_",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_alpha_dropout",
        "feature_dropout",
    }
)
"""Names of dropout. Capture runs it as the identity (p = 0)."""
DRAWS = frozenset({
    "rand", "randn", "randint", "randperm", "normal", "bernoulli", "uniform", "exponential", "cauchy", "geometric", "log_normal", "random",
    "multinomial", "poisson", "binomial", "rand_like", "randn_like", "randint_like", "rrelu", "rrelu_with_noise", "fractional_max_pool2d",
    "fractional_max_pool3d", "fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices", "_sample_dirichlet",
    "_standard_gamma", "gumbel_softmax", "svd_lowrank", "pca_lowrank", "kaiming_uniform", "kaiming_normal", "trunc_normal",
})  # fmt: skip
"""Names of other functions that draw random numbers, which every rank must draw alike; each also in place, with `_` behind."""
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Recurrent layers. Between their layers they drop values."""
ATTENTION = "scaled_dot_product_attention"


def draws(fn: str) -> bool:
    """Whether a function (by canonical name) draws random numbers, other than a mask of dropout."""
    return fn.rstrip("_") in DRAWS


def drops(fn: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws a mask: dropout in training, attention with dropout of its weights, recurrent layers with it in between."""
    if fn == ATTENTION:
        return bool(kwargs.get("dropout_p") or (len(args) > 4 and args[4]))
    if fn in RECURRENT:
        at = _layers_at(args)
        num_layers, p, training = args[at : at + 3]
        return bool(p and training and num_layers > 1)
    given = dict(zip(("input", "p", "training"), args, strict=False)) | dict(kwargs)
    return fn in DROPOUTS and bool(given.get("training", given.get("train", True)) and given.get("p", 0.5))


def without_masks(
    fn: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of attention or of recurrent layers, so that no mask is drawn."""
    if fn == ATTENTION:
        given = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else tuple(args)
        return given, {k: v for k, v in kwargs.items() if k != "dropout_p"}
    if fn in RECURRENT:
        at = _layers_at(args) + 1
        return (*args[:at], 0.0, *args[at + 1 :]), dict(kwargs)
    return tuple(args), dict(kwargs)


def _layers_at(args: Sequence[Any]) -> int:
    """The position of the number of layers, which stands behind whether there are biases; then come dropout and training."""
    return next(i for i, a in enumerate(args) if isinstance(a, bool)) + 1
