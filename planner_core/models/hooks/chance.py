"""Random numbers: which calls of torch draw them, and how a model draws others from Python's `random` and `numpy.random`.

The runtime draws masks of dropout itself, so they are listed apart from other random functions of torch. No mode of torch sees draws
of Python and numpy; a changed state of their generators shows them (`host_state`).
"""

from __future__ import annotations

import random
import sys
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
SHIFTING_DROPOUTS = frozenset({"alpha_dropout", "feature_alpha_dropout"})
"""Those that also shift and scale all elements. A plan draws masks, which are products alone, so it refuses these."""
RANDOM_FUNCTIONS = frozenset(
    {
        "rand",
        "randn",
        "randint",
        "randperm",
        "normal",
        "bernoulli",
        "uniform",
        "exponential",
        "cauchy",
        "geometric",
        "log_normal",
        "random",
        "multinomial",
        "poisson",
        "binomial",
        "rand_like",
        "randn_like",
        "randint_like",
        "rrelu",
        "rrelu_with_noise",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "fractional_max_pool2d_with_indices",
        "fractional_max_pool3d_with_indices",
        "_sample_dirichlet",
        "_standard_gamma",
        "gumbel_softmax",
        "svd_lowrank",
        "pca_lowrank",
        "kaiming_uniform",
        "kaiming_normal",
        "trunc_normal",
    }
)
"""Names of other functions that draw random numbers. Every rank must draw the same. The in-place forms have a trailing `_`."""
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Recurrent functions. They apply dropout between their layers."""
ATTENTION = "scaled_dot_product_attention"


def draws_random_numbers(fn: str) -> bool:
    """Return whether a function (by canonical name) draws random numbers other than a mask of dropout."""
    return fn.rstrip("_") in RANDOM_FUNCTIONS


def draws_dropout_mask(fn: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws a mask: dropout in training, attention with dropout of its weights, recurrent layers with dropout."""
    if fn == ATTENTION:
        return bool(kwargs.get("dropout_p") or (len(args) > 4 and args[4]))
    if fn in RECURRENT:
        at = _num_layers_position(args)
        # torch drops out between layers alone, so one layer draws nothing, whatever its rate.
        num_layers, p, training = args[at : at + 3]
        return bool(p and training and num_layers > 1)
    given = dict(zip(("input", "p", "training"), args, strict=False)) | dict(kwargs)
    return fn in DROPOUTS and bool(given.get("training", given.get("train", True)) and given.get("p", 0.5))


def without_dropout_masks(
    fn: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of attention or of a recurrent function with dropout set to zero."""
    if fn == ATTENTION:
        given = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else tuple(args)
        return given, {k: v for k, v in kwargs.items() if k != "dropout_p"}
    if fn in RECURRENT:
        at = _num_layers_position(args) + 1
        return (*args[:at], 0.0, *args[at + 1 :]), dict(kwargs)
    return tuple(args), dict(kwargs)


def _num_layers_position(args: Sequence[Any]) -> int:
    """Return the position of `num_layers` in lstm(..., has_biases, num_layers, dropout, train, ...): one after the first bool."""
    return next(i for i, a in enumerate(args) if isinstance(a, bool)) + 1


# --- outside of torch ---------------------------------------------------------------------------------


def host_state() -> tuple[Any, ...]:
    """Return the states of Python's and numpy's generators. None stands for numpy's if numpy is not imported."""
    # A model cannot have drawn from numpy if nobody has imported it.
    if (numpy := sys.modules.get("numpy")) is None:
        return random.getstate(), None
    name, keys, *rest = numpy.random.get_state()
    return random.getstate(), (name, keys.tobytes(), *rest)
