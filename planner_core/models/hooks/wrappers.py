"""Open torch's wrappers, which would hide operators from a mode, while a model is captured or runs under a plan.

    checkpoint(f, x)            runs f, as a part of the model that is recomputed
    torch.jit.script(f)(x)      runs the Python function that was scripted
    torch.compile(f)(x)         runs f eagerly
    nn.SyncBatchNorm            is nn.BatchNorm: statistics are those of all samples, and its own collectives are not called
    torch.autograd.Variable(x)  is x.detach(), as a call that a mode sees
    torch.distributions         do not check the values of their arguments, unless validate_args=True is given

`batch_first_attention`: nn.MultiheadAttention keeps tokens as [length, batch] at its last product. Flattened to one dim, samples would
not be outermost, so a rank could not hold its own samples as one slice.
"""

# mypy: allow-untyped-calls, disable-error-code=attr-defined
from __future__ import annotations

import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as recompute
from torch import nn
from torch.distributions import Distribution

from planner_core.models.hooks.torch_private import (
    CHECKPOINT_GENERATOR,
    ScriptFunction,
    canonical_mask,
    check_attention_shapes,
    none_or_dtype,
    project_attention,
    project_packed_attention,
    scripted_function,
)

ContextFactory = Callable[[], AbstractContextManager[None]]
"""Makes a context manager, e.g. the one in which the function of a checkpoint runs."""


@contextmanager
def unwrap_torch(checkpoint_context: ContextFactory) -> Iterator[None]:
    """Run wrapped code as if it were not wrapped, while entered. The function of a checkpoint runs in `checkpoint_context()`."""
    with ExitStack() as stack:
        for owner, name, value in _replacements(checkpoint_context):
            # Before the change, so that what is there comes back even if a later replacement fails.
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        checked = Distribution._validate_args
        stack.callback(Distribution.set_default_validate_args, checked)
        # A check would ask tensors on meta for values that they do not have.
        Distribution.set_default_validate_args(False)
        if "torch._dynamo" in sys.modules:  # otherwise nothing can have been compiled, and the import takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _replacements(checkpoint_context: ContextFactory) -> list[tuple[Any, str, Any]]:
    def generator(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with checkpoint_context():
            yield

    class Reentrant:
        """In place of the autograd function that runs with `use_reentrant=True`."""

        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            """Run the function once."""
            with checkpoint_context():
                return function(*args)

    def scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
        plain = scripted_function(function)
        return called(function, *args, **kwargs) if plain is None else plain(*args, **kwargs)

    def detached(cls: type, *args: Any, **kwargs: Any) -> Any:
        plain = len(args) == 1 and isinstance(args[0], torch.Tensor) and not any(kwargs.values())
        return args[0].detach() if plain else new(cls, *args, **kwargs)

    # Taken now, as both names are replaced below.
    called, new = ScriptFunction.__call__, torch.autograd.Variable.__new__
    return [
        (*CHECKPOINT_GENERATOR, generator),
        (recompute, "CheckpointFunction", Reentrant),
        (ScriptFunction, "__call__", scripted),
        (nn.SyncBatchNorm, "forward", nn.modules.batchnorm._BatchNorm.forward),
        (torch.autograd.Variable, "__new__", staticmethod(detached)),
    ]


CHECKPOINT_HELP = "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False) in its place, or run the layers outside of the function"
_CALLABLES = (types.FunctionType, types.MethodType, functools.partial, nn.Module)


def takes_a_callable(args: Sequence[Any]) -> bool:
    """Return whether an autograd function gets a callable, as one that recomputes activations does.

    The operators and weights of that callable would be missing from the graph.
    """
    return any(isinstance(a, _CALLABLES) for a in args)


_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_RARE_ARGUMENTS = ("bias_k", "bias_v", "static_k", "static_v")


def batch_first_attention(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `F.multi_head_attention_forward`. It calls `plain` where rare arguments are set."""

    def attend(*args: Any, **kwargs: Any) -> Any:
        bound = _SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        rare = given["add_zero_attn"] or given["query"].dim() != 3 or any(given[n] is not None for n in _RARE_ARGUMENTS)
        return plain(*args, **kwargs) if rare else _attend_batch_first(**given)

    return attend


def _attend_batch_first(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    num_heads: int,
    in_proj_weight: torch.Tensor | None,
    in_proj_bias: torch.Tensor | None,
    dropout_p: float,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    training: bool,
    key_padding_mask: torch.Tensor | None,
    need_weights: bool,
    attn_mask: torch.Tensor | None,
    use_separate_proj_weight: bool,
    q_proj_weight: torch.Tensor,
    k_proj_weight: torch.Tensor,
    v_proj_weight: torch.Tensor,
    average_attn_weights: bool,
    is_causal: bool,
    **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `F.multi_head_attention_forward` with the batch as the outermost dim of every product.

    A copy of torch's function and no wrapper of it: the flattening to [length * batch, width] stands between two of its own lines. The
    parameters have torch's names and are bound by its signature (`_SIGNATURE`), so another release with another one fails in the tests.

    Args: query [length, batch, width]; key and value [source, batch, ...]. Heads are [batch * head, length, head width].
    Returns: the result [length, batch, width], and the weights [batch, length, source] if `need_weights`.
    """
    check_attention_shapes(query, key, value, key_padding_mask, attn_mask, num_heads)
    (length, batch, width), source = query.shape, key.shape[0]
    mask, is_causal = _combine_masks(query, source, num_heads, key_padding_mask, attn_mask, is_causal, need_weights)
    if use_separate_proj_weight:
        biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        q, k, v = project_attention(query, key, value, q_proj_weight, k_proj_weight, v_proj_weight, *biases)
    else:
        assert in_proj_weight is not None
        q, k, v = project_packed_attention(query, key, value, in_proj_weight, in_proj_bias)
    q, k, v = (x.view(x.shape[0], batch * num_heads, -1).transpose(0, 1) for x in (q, k, v))
    rate, weights = dropout_p if training else 0.0, None
    if need_weights:
        scaled = q * math.sqrt(1.0 / q.shape[-1])
        scores = scaled.bmm(k.transpose(-2, -1)) if mask is None else torch.baddbmm(mask, scaled, k.transpose(-2, -1))
        weights = F.softmax(scores, dim=-1)
        weights = F.dropout(weights, p=rate) if rate > 0 else weights
        out = weights.bmm(v).view(batch, num_heads, length, -1)
        weights = weights.view(batch, num_heads, length, source)
        weights = weights.mean(dim=1) if average_attn_weights else weights
    else:
        if mask is not None:
            mask = mask.unsqueeze(0) if mask.shape[0] == 1 else mask.view(batch, num_heads, -1, source)
        q, k, v = (x.view(batch, num_heads, x.shape[1], -1) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, mask, rate, is_causal)
    joined = out.permute(2, 0, 1, 3).reshape(length, batch, width)
    return F.linear(joined, out_proj_weight, out_proj_bias), weights


def _combine_masks(
    query: torch.Tensor,
    source: int,
    num_heads: int,
    padding: torch.Tensor | None,
    mask: torch.Tensor | None,
    is_causal: bool,
    need_weights: bool,
) -> tuple[torch.Tensor | None, bool]:
    """Join both masks into one that is added to the scores.

    Returns: the mask [1 or batch * head, 1 or length, source] or None, and whether attention is causal in addition.
    """
    batch, kind = query.shape[1], query.dtype
    padding = canonical_mask(padding, "key_padding_mask", none_or_dtype(mask), "attn_mask", kind)
    if is_causal and mask is None:
        raise RuntimeError("is_causal is a hint about attn_mask, which is not given")
    # Then the fused kernel masks by itself, and the mask of [length, length] need not be read.
    if is_causal and padding is None and not need_weights:
        return None, True
    mask = canonical_mask(mask, "attn_mask", None, "", kind, check_other=False)
    if mask is not None and mask.dim() == 2:
        mask = mask.unsqueeze(0)
    if padding is None:
        return mask, is_causal
    wide = padding.view(batch, 1, 1, source).expand(-1, num_heads, -1, -1).reshape(batch * num_heads, 1, source)
    return wide if mask is None else mask + wide, False
