"""Random numbers: which calls of torch draw them (masks of dropout, which the runtime draws itself, and others), and what a model draws
outside of torch, from Python's `random` and from `numpy.random`.

No mode of torch sees the latter. Whether some were drawn is told by the generators, whose states changed.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
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
"""Names of other functions that draw random numbers, which every rank must draw alike; each also in place, with `_` behind."""
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Recurrent layers. Between their layers they drop values."""
ATTENTION = "scaled_dot_product_attention"

NUMPY_SEED_LIMIT = 1 << 32
"""numpy takes seeds below this."""


def draws_random_numbers(fn: str) -> bool:
    """Whether a function (by canonical name) draws random numbers, other than a mask of dropout."""
    return fn.rstrip("_") in RANDOM_FUNCTIONS


def draws_dropout_mask(fn: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws a mask: dropout in training, attention with dropout of its weights, recurrent layers with it in between."""
    if fn == ATTENTION:
        return bool(kwargs.get("dropout_p") or (len(args) > 4 and args[4]))
    if fn in RECURRENT:
        at = _num_layers_position(args)
        num_layers, p, training = args[at : at + 3]
        return bool(p and training and num_layers > 1)
    given = dict(zip(("input", "p", "training"), args, strict=False)) | dict(kwargs)
    return fn in DROPOUTS and bool(given.get("training", given.get("train", True)) and given.get("p", 0.5))


def without_dropout_masks(
    fn: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of attention or of recurrent layers, so that no mask is drawn."""
    if fn == ATTENTION:
        given = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else tuple(args)
        return given, {k: v for k, v in kwargs.items() if k != "dropout_p"}
    if fn in RECURRENT:
        at = _num_layers_position(args) + 1
        return (*args[:at], 0.0, *args[at + 1 :]), dict(kwargs)
    return tuple(args), dict(kwargs)


def _num_layers_position(args: Sequence[Any]) -> int:
    """The position of the number of layers, which stands behind whether there are biases; then come dropout and training."""
    return next(i for i, a in enumerate(args) if isinstance(a, bool)) + 1


# --- outside of torch ---------------------------------------------------------------------------------


def host_state() -> tuple[Any, ...]:
    """The states of both generators. If numpy is not imported, nothing draws from its."""
    if (numpy := sys.modules.get("numpy")) is None:
        return random.getstate(), None
    name, keys, *rest = numpy.random.get_state()
    return random.getstate(), (name, keys.tobytes(), *rest)


def set_host_state(state: tuple[Any, ...]) -> None:
    """Go back to the states that `host_state` gave."""
    python, of_numpy = state
    random.setstate(python)
    if of_numpy is not None:
        numpy = sys.modules["numpy"]
        name, keys, *rest = of_numpy
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


@contextlib.contextmanager
def _restored_host_state() -> Iterator[None]:
    """Both generators are in the states behind this in which they were before."""
    before = host_state()
    try:
        yield
    finally:
        set_host_state(before)


@contextlib.contextmanager
def seeded_host_generators(seed: int) -> Iterator[None]:
    """Inside, both generators start from `seed`. Outside, nothing was drawn."""
    with _restored_host_state():
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % NUMPY_SEED_LIMIT)
        yield


@contextlib.contextmanager
def restored_generators(states: tuple[Any, ...]) -> Iterator[None]:
    """Inside, all generators start from the states that `generator_states` gave. Outside, nothing was drawn."""
    import torch

    cpu, gpu, host = states
    with torch.random.fork_rng([] if gpu is None else [torch.cuda.current_device()]), _restored_host_state():
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)
        set_host_state(host)
        yield


def generator_states() -> tuple[Any, ...]:
    """The states of the generators of torch (on the CPU, and on this GPU if there is one), Python and numpy."""
    import torch

    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None, host_state()
