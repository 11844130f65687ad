"""Functions that run as one operator: they must behave on meta as the GPU's fused kernels do, and not as their decomposition on the CPU,
and the model's own autograd functions may use nothing but their arguments."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from planner_core.core import NO_GRADIENT, Attr, CaptureError, PlannerError
from planner_core.models.capture.refusals import refuse, shown
from planner_core.models.hooks import RECURRENT, canonical, is_inplace, tensors
from planner_core.models.hooks.callsites import OWN
from planner_core.models.hooks.meta_kernels import tables_on_meta
from planner_core.models.hooks.wrappers import HELP


class FlashAttention(torch.autograd.Function):
    """Shapes and saved tensors of a flash attention kernel: q, k, v, result, log-sum-exp (and the mask, if any)."""

    _shardscope = True

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Result [..., heads, query length, value width]; keys and values keep their own number of heads."""
        batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])  # type: ignore[no-untyped-call]
        rows = (*batch, *query.shape[-3:-1])
        # the flash kernels write [b, s, h, d] and hand out its transpose, so model code need not copy
        out = query.new_empty((*batch, query.shape[-2], query.shape[-3], value.shape[-1])).transpose(-2, -3)
        ctx.save_for_backward(
            query, key, value, out, query.new_empty(rows, dtype=torch.float32), *([] if mask is None else [mask])
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Gradients have the shapes of what they belong to."""
        saved = ctx.saved_tensors
        return (*(torch.empty_like(t) for t in saved[:3]), torch.empty_like(saved[5]) if len(saved) > 5 else None)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """`scaled_dot_product_attention` on meta tensors, as the flash kernel would do it."""
    if query.dim() < 3:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal)
    heads, groups = query.shape[-3], key.shape[-3]
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise RuntimeError(
            f"attention of query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
        )
    if heads != groups and not (enable_gqa and heads % groups == 0) and 1 not in (heads, groups):
        raise RuntimeError(f"attention of {heads} query heads and {groups} key heads")
    out: torch.Tensor = FlashAttention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]
    return out


def kept_by_kernel(fn: str, args: Any) -> list[torch.Tensor]:
    """What a kernel keeps for backward whatever it is called with: that of a recurrent layer keeps all weights, also where the
    decomposition on meta would not need one."""
    return [t for t in tensors(args) if t.requires_grad] if fn in RECURRENT else []


@dataclass(frozen=True, slots=True)
class _Ran:
    """A call whose backward is Python code. `edges`: by which each operand takes its gradient."""

    fn: str
    scope: str
    node: Any
    given: Sequence[torch.Tensor]
    results: Sequence[torch.Tensor]
    edges: Sequence[Any]
    attrs: dict[str, Attr]
    own: bool
    """Whether it is the model's function itself, which takes all gradients: there is none for a tensor in a list."""

    def without_gradient(self, returned: Any) -> set[int]:
        """The positions of those operands to which such a return value of its backward gives no gradient, though they could have one."""
        needed = zip(returned if isinstance(returned, tuple) else (returned,), self.node.needs_input_grad, strict=False)
        results = [gradient for gradient, needs in needed if needs]
        edges = [edge for edge in self.node.next_functions if edge[0] is not None]
        given = {edge for edge, gradient in zip(edges, results, strict=True) if gradient is not None}
        return {k for k, edge in enumerate(self.edges) if edge and edge not in given and (self.own or edge in edges)}


class Alone:
    """The model's own autograd functions. Each runs as one operator, so it may use nothing but its arguments: what it reads beside them,
    in forward or in backward, would be missing from the plan, and get no gradient. `foreign` says whether a tensor was made outside of
    it; `computed` has the ids of weights and computed tensors. `spoiled` is called with an argument that it has written in place and not
    returned, as sparsemax does: nothing may read that again."""

    def __init__(
        self, foreign: Callable[[torch.Tensor], bool], computed: Container[int], scope: Callable[[], str],
        spoiled: Callable[[torch.Tensor], None],
    ) -> None:  # fmt: skip
        self.foreign, self.computed, self.scope, self.spoiled = foreign, computed, scope, spoiled
        self.fn = ""  # of the one that runs
        self.calls: list[_Ran] = []

    def __call__(self, fn: str, func: Callable[..., Any], operands: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """What takes the place of a call of one; any other function is as it was."""
        if not hasattr(func, OWN):
            return func

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.fn = self.fn, fn
            inside: list[TorchFunctionMode] = getattr(func, OWN)
            given = (*tensors((args, kwargs)), *operands)
            inside.append(seen := _Arguments(self, f"inside the autograd function {fn}", self.scope(), given))
            try:
                out = func(*args, **kwargs)
            finally:
                self.fn = before
                inside.pop()
            with torch._C.DisableTorchFunction():
                returned = {_memory(t) for t in tensors(out)}
                for target in seen.written:
                    if _memory(target) in returned:
                        raise seen.written_argument()
                    self.spoiled(target)
            return out

        return run

    def ran(
        self, func: Callable[..., Any], fn: str, operands: Sequence[torch.Tensor], moved: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor], attrs: dict[str, Attr],
    ) -> None:  # fmt: skip
        """Note a call whose backward is Python code of the model, or of a custom operator. It ran on the operands as `moved` to meta;
        `attrs` are those of its record."""
        with torch._C.DisableTorchFunction():
            node: Any = next((t.grad_fn for t in results if isinstance(t.grad_fn, BackwardCFunction)), None)
            if node is not None and not getattr(node._forward_cls, "_shardscope", False):
                edges = [get_gradient_edge(t)[:2] if t.requires_grad else None for t in moved]
                given = *operands, *moved, *results
                self.calls.append(_Ran(fn, self.scope(), node, given, results, edges, attrs, hasattr(func, OWN)))

    def check_module(self, scope: str) -> None:
        """Refuse a module that is called inside of one."""
        if self.fn:
            raise refuse(scope, f"is run inside the autograd function {self.fn}, whose ops cannot be seen", HELP)

    def check_backward(self) -> None:
        """Run the backward of each call, last first, as a step does after its forward, and note which operands get no gradient."""
        for call in reversed(self.calls):
            self.fn = call.fn
            answers = self._backward(call, [torch.zeros_like(t) for t in call.results])
            if stopped := set.intersection(*map(call.without_gradient, answers)):
                call.attrs[NO_GRADIENT] = tuple(sorted(stopped))
        self.fn = ""

    def _backward(self, call: _Ran, grads: Sequence[torch.Tensor]) -> list[Any]:
        """What one returns. Where it asks for values, which a gradient on meta has not, both answers are tried; one may be there to
        raise."""
        found: list[Any] = []
        failed: Exception | None = None
        for answer in (False, True):
            where = f"in the backward of the autograd function {self.fn}"
            asked = _Arguments(self, where, call.scope, (*call.given, *grads), answer)
            try:
                with torch.no_grad(), tables_on_meta(), asked:
                    found.append(call.node.apply(*grads))
            except PlannerError:
                raise
            except Exception as error:
                if failed or not asked.questions:
                    raise _cannot_run(call.scope, self.fn, error) from error
                failed = error
            if not asked.questions:
                break
        return found


def _cannot_run(scope: str, fn: str, error: Exception) -> CaptureError:
    where, text = shown(traceback.extract_tb(error.__traceback__)), " ".join(str(error).split())[:200].rstrip(".")
    return CaptureError(
        f"{scope or 'the model'} has an autograd function {fn}, whose backward cannot be run without values{where}, so that it cannot be "
        f"seen what it uses: {type(error).__name__}: {text}; let it compute in torch with what it is given"
    )


class _Arguments(TorchFunctionMode):
    """Inside an autograd function: refuses a tensor from outside that is not among its arguments, nor a part of one. With an `answer`, it
    gives that to all questions for values."""

    def __init__(
        self, alone: Alone, where: str, scope: str, given: Sequence[torch.Tensor], answer: bool | None = None
    ) -> None:
        super().__init__()
        self.alone, self.where, self.scope, self.answer = alone, where, scope, answer
        self.questions = 0
        self.written: list[torch.Tensor] = []  # arguments, by forward
        with torch._C.DisableTorchFunction():
            self.given = {id(t) for t in given}
            self.memory = {_memory(t) for t in given}
            self.kept = {_memory(t) for t in given if id(t) in alone.computed}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call inside."""
        kwargs = kwargs or {}
        fn = canonical(func, kwargs)
        if fn is not None:
            self._check(tensors((args, kwargs)))
            self._check_written(tensors((args[:1] if is_inplace(fn) else (), kwargs.get("out"))))
        name = getattr(func, "__name__", "")
        if name == "__set__" and getattr(func.__self__, "__name__", "") == "grad":
            raise refuse(
                self.scope, f"sets the gradient of a tensor {self.where}", "let its backward return the gradient"
            )
        if self.answer is not None and name in _ANSWERS and args[0].is_meta:
            self.questions += 1
            return _ANSWERS[name](self.answer and self.questions <= MOST_QUESTIONS)
        return func(*args, **kwargs)

    def _check(self, operands: Sequence[torch.Tensor]) -> None:
        for tensor in operands:
            with torch._C.DisableTorchFunction():
                other = id(tensor) not in self.given and _memory(tensor) not in self.memory
            if other and self.alone.foreign(tensor):
                raise refuse(
                    self.scope, f"uses a tensor {self.where} that is not one of its arguments",
                    f"hand it over as an argument; if the function is there to save memory, {HELP}",
                )  # fmt: skip

    def _check_written(self, targets: Sequence[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunction():
            hit = [t for t in targets if _memory(t) in self.kept]
        self.written += hit
        if hit and (self.answer is not None or any(isinstance(t, torch.nn.Parameter) for t in hit)):
            raise self.written_argument()

    def written_argument(self) -> CaptureError:
        """The error for a write into an argument that the plan would miss."""
        return refuse(self.scope, f"writes in place into an argument {self.where}", "let it return a new tensor")


_ANSWERS = {"__bool__": bool, "__int__": int, "__index__": int, "__float__": float, "item": float, "is_nonzero": bool}
"""How code asks for a value, and of which kind the answer is."""
MOST_QUESTIONS = 64
"""So many times the answer is yes, and no from then on: a loop may ask until it is."""


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)
