"""Operators along some dims: reductions, softmax, sorting, cumulated sums, Fourier transforms. Any other dim may be sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner_core.core import Op
from planner_core.ops.operators import Kind, LocalBytes, LocalExecution, Operator, operand_bytes, operators
from planner_core.ops.rules import DimOf, Rule, RuleFn, Shapes, dims_attr, ints, operand_dim, split, unknown


def _along_dim(default: int, linear: bool = False) -> RuleFn:
    """Return the rule of an operator along one dim, which is `default` if the call does not name one."""

    def rule(op: Op, ins: Shapes, outs: Shapes) -> Rule:
        rank = len(ins[0])
        if not rank:
            return Rule(())
        if "arg1" in op.attrs or len(ins) > 1:  # the dim may be an argument that capture could not name
            return unknown(op, ins, outs)
        named = op.attrs.get("dim", op.attrs.get("dims")) is not None
        along = dims_attr(op, "dim", rank) if named else (default % rank,)
        same = [d for d in range(rank) if d not in along and ins[0][d] > 1]
        splits = tuple(split(f"d{d}", [d], [d] * len(outs), ins[0][d]) for d in same)
        return Rule(splits, linear=(0,) if linear else ())

    return rule


def _reduction(sums: bool, linear: bool = True) -> RuleFn:
    """Return the rule of a reduction. The reduced dims vanish. A sum or mean may be sharded along them; its result is then Partial."""

    def rule(op: Op, ins: Shapes, outs: Shapes) -> Rule:
        rank = len(ins[0])
        raw = op.attrs.get("dim", op.attrs.get("dims"))
        every = raw in (None, ()) or isinstance(raw, bool)  # var(x, True): the bool is another argument
        along = set(range(rank)) if every else set(dims_attr(op, "dim", rank))
        keep = bool(op.attrs.get("keepdim", False))
        splits, j = [], 0
        rest: list[DimOf] = [None] * (len(ins) - 1)
        for d in range(rank):
            if d in along:
                # A maximum of parts is no sum of anything: only what adds up may be Partial.
                if sums and ins[0][d] > 1:
                    splits.append(split(f"d{d}", [d, *rest], [None], ins[0][d]))
                j += keep
                continue
            if ins[0][d] > 1:
                splits.append(split(f"d{d}", [d, *rest], [j] * len(outs), ins[0][d]))
            j += 1
        return Rule(tuple(splits), linear=(0,) if sums and linear else ())

    return rule


def _fourier(default: Callable[[Op, int], int]) -> RuleFn:
    """Return the rule of a Fourier transform. It is linear. The dims that it transforms (those named, else the last `default`) stay
    whole."""

    def rule(op: Op, ins: Shapes, outs: Shapes) -> Rule:
        rank = len(ins[0])
        named = "dim" in op.attrs
        along = dims_attr(op, "dim", rank) if named else tuple(range(rank - default(op, rank), rank))
        untouched = [d for d in range(rank) if d not in along and ins[0][d] > 1]
        return Rule(tuple(split(f"d{d}", [d], [d], ins[0][d]) for d in untouched), linear=(0,))

    return rule


def _num_sizes(op: Op, rank: int) -> int:
    return len(ints(op.attrs.get("s"))) if isinstance(op.attrs.get("s"), tuple) else rank


def _pairwise_distance(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Return the rule of a distance of two tensors along the last dim. Others may be sharded if neither tensor is broadcast along them."""
    same = [d for d, n in enumerate(ins[0][:-1]) if n > 1 and ins[0] == ins[1]]
    return Rule(tuple(split(f"d{d}", [d, d], [d], ins[0][d]) for d in same))


def _cosine_similarity(op: Op, ins: Shapes, outs: Shapes) -> Rule:
    """Return the rule of the cosine of two tensors along one dim. Others may be sharded; a tensor that is broadcast along one lacks it."""
    rank = max(map(len, ins))
    along = op.attrs.get("dim", 1)
    if not isinstance(along, int) or len(ins) != 2:
        return unknown(op, ins, outs)
    untouched = [d for d in range(rank) if d != along % rank]
    places = [(d, j, n) for (j, d), n in zip(enumerate(untouched), outs[0], strict=True) if n > 1]
    return Rule(tuple(split(f"d{d}", [operand_dim(s, rank, d) for s in ins], [j], n) for d, j, n in places))


def _forward_cast_bytes(local: LocalBytes) -> int:
    """Return the bytes of the operand in the wider dtype in which softmax is asked to compute. They are there until the result is."""
    return local.outs[0] if local.outs[0] != local.ins[0] else 0


def _backward_cast_bytes(local: LocalBytes) -> int:
    """Softmax's gradient is in the dtype of its result until it is cast to that of the operand: the bytes by which it is larger."""
    return max(0, local.outs[0] - local.ins[0])


def _along_operators(names: str, rule: RuleFn, arguments: str = "", **common: Any) -> tuple[Operator, ...]:
    return operators(names, kind=Kind.ALONG, rule=rule, arguments=arguments, **common)


_SOFTMAX: dict[str, Any] = {
    "arguments": "input dim _stacklevel dtype",
    "default_dim": -1,
    "forward_workspace_bytes": _forward_cast_bytes,
    "backward_workspace_bytes": _backward_cast_bytes,
}

OPERATORS = (
    *_along_operators("softmax", _along_dim(-1), spellings=("_softmax",), **_SOFTMAX),
    *_along_operators("log_softmax", _along_dim(-1), spellings=("_log_softmax",), **_SOFTMAX),
    *_along_operators("softmin logcumsumexp", _along_dim(-1)),
    *_along_operators("cumsum", _along_dim(-1), "input dim", backward_workspace_bytes=operand_bytes(2)),
    *_along_operators("cumprod", _along_dim(-1), "input dim"),
    *_along_operators("sort", _along_dim(-1), "input dim descending stable", default_dim=-1),
    *_along_operators("argsort", _along_dim(-1), "input dim descending", default_dim=-1),
    *_along_operators("topk", _along_dim(-1), "input k dim largest sorted", default_dim=-1),
    *_along_operators("glu", _along_dim(-1), "input dim", default_dim=-1),
    *_along_operators("normalize", _along_dim(1), backward_workspace_bytes=operand_bytes(3)),
    *_along_operators("diff", _along_dim(-1, linear=True), "input n dim", default_dim=-1),
    *_along_operators("sum", _reduction(sums=True), "input dim keepdim"),
    *_along_operators("mean", _reduction(sums=True), "input dim keepdim", local_execution=LocalExecution.MEAN),
    *_along_operators("amax amin max min argmax argmin any all", _reduction(sums=False), "input dim keepdim"),
    *_along_operators("prod", _reduction(sums=False), "input dim keepdim", backward_workspace_bytes=operand_bytes(5)),
    *_along_operators(
        "logsumexp", _reduction(sums=False), "input dim keepdim", backward_workspace_bytes=operand_bytes(2)
    ),
    *_along_operators(
        "var std", _reduction(sums=False), "input dim unbiased keepdim", backward_workspace_bytes=operand_bytes(1)
    ),
    *_along_operators("var_mean std_mean", _reduction(sums=False), "input dim unbiased keepdim"),
    *_along_operators(
        "norm", _reduction(sums=False), "input p dim keepdim dtype", backward_workspace_bytes=operand_bytes(1)
    ),
    *_along_operators(
        "linalg_vector_norm",
        _reduction(sums=False),
        "input ord dim keepdim dtype",
        spellings=("vector_norm",),
        backward_workspace_bytes=operand_bytes(1),
    ),
    *_along_operators("fft_fft fft_ifft fft_rfft fft_irfft", _fourier(lambda op, rank: 1), "input n dim norm"),
    *_along_operators("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2", _fourier(lambda op, rank: 2), "input s dim norm"),
    *_along_operators("fft_fftn fft_ifftn fft_rfftn fft_irfftn", _fourier(_num_sizes), "input s dim norm"),
    *_along_operators("fft_hfft fft_ihfft", _fourier(lambda op, rank: 1), "input n dim norm"),
    *_along_operators("fft_hfft2 fft_ihfft2", _fourier(lambda op, rank: 2), "input s dim norm"),
    *_along_operators("fft_hfftn fft_ihfftn", _fourier(_num_sizes), "input s dim norm"),
    *_along_operators("fft_fftshift fft_ifftshift", _fourier(lambda op, rank: rank), "input dim"),
    *_along_operators("cummax cummin", _along_dim(-1), "input dim"),
    *_along_operators("msort flipud", _along_dim(0)),
    *_along_operators("fliplr", _along_dim(1)),
    *_along_operators("nansum", _reduction(sums=True, linear=False), "input dim keepdim"),
    *_along_operators("nanmean aminmax", _reduction(sums=False), "input dim keepdim"),
    *_along_operators("median nanmedian", _reduction(sums=False), "input dim keepdim"),
    *_along_operators("kthvalue", _reduction(sums=False), "input k dim keepdim", default_dim=-1),
    *_along_operators("mode", _reduction(sums=False), "input dim keepdim", default_dim=-1),
    *_along_operators(
        "cosine_similarity", _cosine_similarity, "x1 x2 dim eps", backward_workspace_bytes=operand_bytes(2)
    ),
    *_along_operators("pairwise_distance", _pairwise_distance, "x1 x2 p eps keepdim"),
)
