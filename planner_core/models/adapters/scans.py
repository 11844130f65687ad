"""State-space scans and linear attention as one torch function each. Imports torch and nothing else of the planner.

On a GPU transformers calls fused kernels for these. Without the packages of these kernels it falls back to loops over the sequence.
`register_scans` replaces each such fallback by one function, so that capture and a running model see one call. On real tensors
that function runs the fallback.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

Plain = Callable[..., Any]
Maybe = torch.Tensor | None
CHUNK = 64
"""Tokens between two states that a chunked kernel saves."""


def selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: Maybe = None,
    z: Maybe = None,
    delta_bias: Maybe = None,
    *,
    plain: Plain,
    **options: Any,
) -> Any:
    """Mamba: states [d, n] per sample. hidden, dt, z [b, d, s]; A [d, n]; B, C [b, n, s]; D, delta_bias [d] -> [b, d, s]."""
    given = (hidden_states, dt, A, B, C, D, z, delta_bias)
    # mamba_ssm's kernel saves a state for every 2048 tokens, with the sum of its decays: x [b, d, chunks, 2 n] (selective_scan.cpp).
    states = (hidden_states.shape[0], A.shape[0], -(-hidden_states.shape[2] // 2048), 2 * A.shape[1])
    return _call_scan(selective_scan, given, plain, options, hidden_states.shape, states)


def chunk_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int = 256,
    D: Maybe = None,
    dt_bias: Maybe = None,
    *,
    plain: Plain,
    **options: Any,
) -> Any:
    """Mamba-2: hidden [b, s, h, p]; dt [b, s, h]; A, D, dt_bias [h]; B, C [b, s, g, n], g groups of heads -> [b, s, h, p]."""
    heads, groups = hidden_states.shape[2], B.shape[2]
    if heads % groups:  # on meta tensors nothing else looks at the two
        raise ValueError(f"{groups} groups do not divide {heads} heads")
    given = (hidden_states, dt, A, B, C, chunk_size, D, dt_bias)
    saved = (*dt.shape[:1], dt.shape[2], dt.shape[1])  # dA_cumsum of mamba_ssm; chunk states are computed again
    return _call_scan(chunk_scan, given, plain, options, hidden_states.shape, saved)


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    plain: Plain,
    **options: Any,
) -> Any:
    """Gated delta rule and Kimi delta attention: query, key [b, s, h, k]; value [b, s, h, v]; g [b, s, h(, k)]; beta [b, s, h].

    Returns ([b, s, h, v], None).
    """
    given = (query, key, value, g, beta)
    return _call_scan(delta_rule, given, plain, options, value.shape, (*value.shape[:3], CHUNK), pair=True)


def wkv(
    time_decay: torch.Tensor,
    time_first: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    plain: Plain,
    **options: Any,
) -> Any:
    """RWKV: decay and first [d]; key, value [b, s, d] -> ([b, s, d], None)."""
    return _call_scan(wkv, (time_decay, time_first, key, value), plain, options, key.shape, key.shape, pair=True)


def mlstm(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    igate: torch.Tensor,
    fgate: torch.Tensor,
    *,
    plain: Plain,
    **options: Any,
) -> Any:
    """xLSTM's matrix memory: query, key [b, h, s, k]; value [b, h, s, v]; gates [b, h, s] -> ([b, h, s, v], None)."""
    chunks = -(-query.shape[2] // int(options.get("chunk_size", CHUNK)))
    states = (*query.shape[:2], chunks * query.shape[3], value.shape[3])
    return _call_scan(mlstm, (query, key, value, igate, fgate), plain, options, value.shape, states, pair=True)


def linear_scan(hidden_states: torch.Tensor, recurrent_gate: torch.Tensor, *, plain: Plain) -> Any:
    """Griffin's recurrence, h[t] = gate[t] h[t-1] + hidden[t]: hidden, gate [b, s, d] -> ([b, s, d], None)."""
    given = (hidden_states, recurrent_gate)
    return _call_scan(linear_scan, given, plain, {}, hidden_states.shape, hidden_states.shape, pair=True)


def _call_scan(
    fn: Plain,
    given: tuple[Any, ...],
    plain: Plain,
    options: dict[str, Any],
    out: Sequence[int],
    saved: Sequence[int],
    pair: bool = False,
) -> Any:
    operands = tuple(t for t in given if isinstance(t, torch.Tensor))
    if has_torch_function(operands):
        return handle_torch_function(fn, operands, *given, plain=plain, **options)
    if not operands[0].is_meta:
        names = list(inspect.signature(fn).parameters)
        return plain(**dict(zip(names, given, strict=False)), **options)
    # Operands have several dtypes (decays may be float32). The result has that of one of its shape, such as the values.
    like = next(t for t in operands if tuple(t.shape) == tuple(out))
    result = _Fused.apply(like.dtype, tuple(out), tuple(saved), *operands)  # type: ignore[no-untyped-call]
    return (result, None) if pair else result


class _Fused(torch.autograd.Function):
    """The shape of the result, and what the kernel saves for backward: its operands, and states or decays between chunks."""

    _shardscope = True

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, out: tuple[int, ...], saved: tuple[int, ...], *operands: torch.Tensor
    ) -> torch.Tensor:
        """Save states in float32."""
        ctx.save_for_backward(*operands, operands[0].new_empty(saved, dtype=torch.float32))
        return operands[0].new_empty(out, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return gradients of the operands' shapes."""
        return (None, None, None, *(torch.empty_like(t) for t in ctx.saved_tensors[:-1]))


FALLBACKS: dict[str, Plain] = {
    "mamba_selective_scan": selective_scan,
    "mamba2_chunk_scan": chunk_scan,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "rwkv_linear_attention": wkv,
    "wrap_chunkwise_arbitrary_sequence_length": mlstm,
}
"""Names of fallbacks in transformers, and their replacements."""
_STATES = ("state", "initial_state", "initial_states", "c_initial")
_RETURNED = ("return_last_state", "return_final_states", "output_final_state", "return_state")


def register_scans() -> None:
    """Replace the fallbacks in every model file of transformers that has been imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and ".modeling_" in name:
            # Each model file of transformers has its own copy of a fallback.
            for fallback, fused in FALLBACKS.items():
                plain = module.__dict__.get(fallback)
                if plain is not None and not hasattr(plain, "_shardscope"):
                    setattr(module, fallback, _replace_fallback(plain, fused))


def _replace_fallback(plain: Plain, fused: Plain) -> Plain:
    """Return a function that calls `fused` without a state, as in training, and otherwise the fallback."""
    names = inspect.signature(fused).parameters
    known = set(inspect.signature(plain).parameters)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        # A state comes from an earlier call of the same text, as in generation: no kernel is priced for that.
        if any(kwargs.get(n) is not None for n in _STATES) or any(kwargs.get(n) for n in _RETURNED):
            return plain(*args, **kwargs)
        kwargs = {k: v for k, v in kwargs.items() if k in names or (k in known and v is not None)}
        return fused(*args, **kwargs, plain=plain)

    call._shardscope = True  # type: ignore[attr-defined]
    return call
