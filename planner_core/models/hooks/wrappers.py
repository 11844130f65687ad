"""Open torch's wrappers, which would hide operators from a mode, while a model is captured or runs under a plan.

    checkpoint(f, x)            runs f: the plan says what is recomputed
    Checkpoint.apply(f, x)      runs f, if a trial says that the model's own autograd function does what torch's checkpoint does
    torch.jit.script(f)(x)      runs the Python function that was scripted
    torch.compile(f)(x)         runs f eagerly
    nn.SyncBatchNorm            is nn.BatchNorm: statistics are those of all samples, and its own collectives are not called
    torch.autograd.Variable(x)  is x.detach(), as a call that a mode sees
    torch.distributions         do not check the values of their arguments, unless validate_args=True is given

`attention_by_samples`: nn.MultiheadAttention keeps tokens as [length, batch] at its last product. As one dim, in which the samples
are not outermost, no rank could hold its own samples.

Imports torch and nothing of ours.
"""

# mypy: allow-untyped-calls, disable-error-code=attr-defined
from __future__ import annotations

import copy
import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as recompute
from torch import nn
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

OURS = "_shardscope"
"""Attribute of functions that are ours: they are left as they are."""


@contextmanager
def opened(seen: Callable[[str], None] = lambda name: None) -> Iterator[None]:
    """Inside, wrapped code runs as if it were not wrapped. `seen` gets the name of each wrapper that is met."""
    with ExitStack() as stack:
        for owner, name, value in _replacements(seen):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        checked = Distribution._validate_args
        stack.callback(Distribution.set_default_validate_args, checked)
        Distribution.set_default_validate_args(False)
        if "torch._dynamo" in sys.modules:  # else nothing can have been compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _replacements(seen: Callable[[str], None]) -> list[tuple[Any, str, Any]]:
    without_reentry = recompute._checkpoint_without_reentrant_generator

    def generator(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if getattr(function, OURS, False):
            yield from without_reentry(function, *args, **kwargs)
        else:
            seen("torch.utils.checkpoint")
            yield

    class Reentrant:
        """In place of the autograd function that runs with `use_reentrant=True`."""

        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            """The function, once."""
            seen("torch.utils.checkpoint")
            return function(*args)

    def scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
        plain = getattr(function, "_torchdynamo_inline", None)
        return called(function, *args, **kwargs) if plain is None else plain(*args, **kwargs)

    def detached(cls: type, *args: Any, **kwargs: Any) -> Any:
        plain = len(args) == 1 and isinstance(args[0], torch.Tensor) and not any(kwargs.values())
        return args[0].detach() if plain else new(cls, *args, **kwargs)

    called, new = torch._C.ScriptFunction.__call__, torch.autograd.Variable.__new__
    return [
        (recompute, "_checkpoint_without_reentrant_generator", generator),
        (recompute, "CheckpointFunction", Reentrant),
        (torch._C.ScriptFunction, "__call__", scripted),
        (nn.SyncBatchNorm, "forward", nn.modules.batchnorm._BatchNorm.forward),
        (torch.autograd.Variable, "__new__", staticmethod(detached)),
    ]


HELP = "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False) in its place, or run the layers outside of the function"
_CALLED = (types.FunctionType, types.MethodType, functools.partial, nn.Module)
_LITERALS = (type(None), bool, int, float, str, torch.dtype)


@dataclass
class Own:
    """The model's own autograd functions that are opened. `refused` makes an error of what the model does and what would help. `older()`
    gives a function that says whether a tensor was known by then."""

    refused: Callable[[str, str], Exception] = lambda what, help_: RuntimeError(f"the model {what}; {help_}")
    older: Callable[[], Callable[[torch.Tensor], bool]] = lambda: lambda tensor: False
    running: list[_OnlyGiven] = field(default_factory=list)

    def check(self, module: nn.Module) -> None:
        """Refuse a layer that is called inside of one which gives no gradient to the layer's weights."""
        for mode in self.running:
            for weight in module.parameters():
                mode.check(weight)


def as_checkpoint(name: str, apply: Callable[..., Any], args: Sequence[Any], own: Own) -> Callable[[], Any] | None:
    """For a call of an autograd function that recomputes what it is given to run: a call of that alone. None if it does not.

    The function is tried on small tensors, with a known function to run: its results and gradients must be those of a plain call.
    """
    at = [i for i, a in enumerate(args) if isinstance(a, _CALLED)]
    if len(at) != 1:
        return None
    trial = _Trial(args, at[0])
    if not trial.alike(apply):
        return None
    places, alone = trial.places, not trial.reaches_all

    def run() -> Any:
        given, named = pytree.tree_map_only(_At, lambda p: args[p.index], places)
        passed = {id(a) for a in args if isinstance(a, torch.Tensor)}
        with _OnlyGiven(name, passed, own) if alone else nullcontext():
            out = args[at[0]](*given, **named)
        several = isinstance(out, tuple) and all(isinstance(x, torch.Tensor) for x in out)
        if not (isinstance(out, torch.Tensor) or (several and _Trial(args, at[0], pair=True).alike(apply))):
            raise own.refused(f"runs what returns a {type(out).__name__} by the autograd function {name}", HELP)
        return out

    return run


_SLOPES = torch.tensor([[1.0, -1e-12, 1e12], [-1e24, 0.5, torch.nan]])
"""The gradients of a trial. A function that clips, rounds or mends gradients changes some of them."""


class _At:
    """An argument of the autograd function, by its position."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Trial:
    """An autograd function is given small tensors with as many dims as its own, and in place of the function at `at` one that uses all of
    them, and one more."""

    def __init__(self, args: Sequence[Any], at: int, *, pair: bool = False) -> None:
        self.args, self.at, self.pair = args, at, pair
        self.places: Any = None
        self.reaches_all = True
        """Whether tensors that are not among its arguments get gradients, too."""

    def alike(self, apply: Callable[..., Any]) -> bool:
        """Whether it does what a plain call does. Whatever it raises, it does not."""
        inside = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        try:
            with torch._C.DisableTorchFunction(), inside, torch.enable_grad(), torch.random.fork_rng(devices=[]):
                self.given = [self._function if i == self.at else self._stand_in(i, a) for i, a in enumerate(self.args)]
                self.beside = torch.ones(2, 3, requires_grad=True)
                found = self._gradients(lambda: apply(*self.given))
                positional, named = pytree.tree_map_only(_At, lambda p: self.given[p.index], self.places)
                wanted = self._gradients(lambda: self._function(*positional, **named))
        except Exception:
            return False
        self.reaches_all = found[0] is not None
        return all(map(_same, found[1:], wanted[1:])) and (not self.reaches_all or _same(found[0], wanted[0]))

    def _stand_in(self, i: int, given: Any) -> Any:
        if not isinstance(given, torch.Tensor):
            return given if isinstance(given, _LITERALS) else copy.deepcopy(given)
        dims = given.dim()
        shape = (1,) * (dims - 2) + (2, 3)[max(2 - dims, 0) :]
        if not given.is_floating_point():
            return torch.zeros(shape, dtype=given.dtype)
        return (torch.arange(float(math.prod(shape))).view(shape) / 7 + i).requires_grad_(given.requires_grad)

    def _function(self, *given: Any, **named: Any) -> Any:
        """The known function: its value depends on the order of what it is given, and on tensors that it is not given."""
        leaves = pytree.tree_leaves((given, named))
        if self.places is None:
            self.places = pytree.tree_map(self._place, (given, named))
        taken = {p.index for p in pytree.tree_leaves(self.places) if isinstance(p, _At)}
        rest = [t for i, t in enumerate(self.given) if i not in taken]
        used = [t for t in (*leaves, *rest) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        out = sum(((t * (i + 2)).sin() for i, t in enumerate(used)), start=(self.beside * 3).cos())
        return (out, out.square()) if self.pair else out

    def _place(self, item: Any) -> Any:
        for i, given in enumerate(self.given):
            if isinstance(item, torch.Tensor) and isinstance(given, torch.Tensor):
                if item.data_ptr() == given.data_ptr() and item.shape == given.shape:
                    return _At(i)
            elif item is given:
                return _At(i)
        if not isinstance(item, _LITERALS):
            raise TypeError(type(item))
        return item

    def _gradients(self, call: Callable[[], Any]) -> list[torch.Tensor | None]:
        """Those of the tensor beside the arguments and of the arguments; then the results."""
        leaves = [self.beside, *(t for t in self.given if isinstance(t, torch.Tensor) and t.requires_grad)]
        for leaf in leaves:
            leaf.grad = None
        out = call()
        results = list(out) if isinstance(out, tuple) else [out]
        torch.stack([(x * (i + 1) * _SLOPES).sum() for i, x in enumerate(results)]).sum().backward()
        return [*(leaf.grad for leaf in leaves), *(x.detach() for x in results)]


def _same(found: torch.Tensor | None, wanted: torch.Tensor | None) -> bool:
    return found is not None and wanted is not None and torch.allclose(found, wanted, atol=0.0, equal_nan=True)


class _OnlyGiven(TorchFunctionMode):
    """Refuses a tensor that needs a gradient and was neither given nor made inside: the autograd function would give it none."""

    def __init__(self, name: str, given: set[int], own: Own) -> None:
        super().__init__()
        self.name, self.given, self.own, self.older = name, given, own, own.older()

    def __enter__(self) -> Any:
        self.own.running.append(self)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self.own.running.pop()

    def check(self, tensor: torch.Tensor) -> None:
        """Refuse one tensor."""
        if id(tensor) not in self.given and _grad(tensor) and self.older(tensor):
            raise self.own.refused(
                f"uses a tensor of shape {list(tensor.shape)} inside the autograd function {self.name}, which gives a gradient to its "
                "arguments alone", f"hand it over as an argument, or {HELP}",
            )  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call."""
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self.check(tensor)
        return func(*args, **(kwargs or {}))


def _grad(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.requires_grad


_ARGUMENTS = inspect.signature(F.multi_head_attention_forward)
_RARE = ("bias_k", "bias_v", "static_k", "static_v")


def attention_by_samples(plain: Callable[..., Any]) -> Callable[..., Any]:
    """What takes the place of `F.multi_head_attention_forward`. `plain` runs what is rarely asked for."""

    def attended(*args: Any, **kwargs: Any) -> Any:
        bound = _ARGUMENTS.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        rare = given["add_zero_attn"] or given["query"].dim() != 3 or any(given[n] is not None for n in _RARE)
        return plain(*args, **kwargs) if rare else _attention(**given)

    return attended


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_heads: int, in_proj_weight: torch.Tensor | None,
    in_proj_bias: torch.Tensor | None, dropout_p: float, out_proj_weight: torch.Tensor, out_proj_bias: torch.Tensor | None,
    training: bool, key_padding_mask: torch.Tensor | None, need_weights: bool, attn_mask: torch.Tensor | None,
    use_separate_proj_weight: bool, q_proj_weight: torch.Tensor, k_proj_weight: torch.Tensor, v_proj_weight: torch.Tensor,
    average_attn_weights: bool, is_causal: bool, **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """`F.multi_head_attention_forward`: query [length, batch, width], key and value [source, batch, ...] -> the result, as the query, and
    the weights [batch, length, source] if they are asked for. The heads are [batch * head, length, width of a head]."""
    F._mha_shape_check(query, key, value, key_padding_mask, attn_mask, num_heads)
    (length, batch, width), source = query.shape, key.shape[0]
    mask, is_causal = _mask(query, source, num_heads, key_padding_mask, attn_mask, is_causal, need_weights)
    if use_separate_proj_weight:
        biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        q, k, v = F._in_projection(query, key, value, q_proj_weight, k_proj_weight, v_proj_weight, *biases)
    else:
        assert in_proj_weight is not None
        q, k, v = F._in_projection_packed(query, key, value, in_proj_weight, in_proj_bias)
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


def _mask(
    query: torch.Tensor, source: int, num_heads: int, padding: torch.Tensor | None, mask: torch.Tensor | None, is_causal: bool,
    need_weights: bool,
) -> tuple[torch.Tensor | None, bool]:  # fmt: skip
    """Both masks as one that is added to the scores, [1 or batch * head, 1 or length, source], and whether attention is causal beside
    it."""
    batch, kind = query.shape[1], query.dtype
    padding = F._canonical_mask(padding, "key_padding_mask", F._none_or_dtype(mask), "attn_mask", kind)
    if is_causal and mask is None:
        raise RuntimeError("is_causal is a hint about attn_mask, which is not given")
    if is_causal and padding is None and not need_weights:
        return None, True
    mask = F._canonical_mask(mask, "attn_mask", None, "", kind, check_other=False)
    if mask is not None and mask.dim() == 2:
        mask = mask.unsqueeze(0)
    if padding is None:
        return mask, is_causal
    wide = padding.view(batch, 1, 1, source).expand(-1, num_heads, -1, -1).reshape(batch * num_heads, 1, source)
    return wide if mask is None else mask + wide, False
