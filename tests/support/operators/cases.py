"""Calls of the operators that most models use, on small tensors: every spelling that matters to a rule."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from planner_core.models.adapters.experts import moe_experts
from planner_core.models.adapters.nf4 import LinearNF4
from planner_core.ops.catalog import elementwise
from tests.support.operators.judge import Case

torch.manual_seed(1)
DOUBLE = torch.float64


def t(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=DOUBLE)


def pos(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=DOUBLE) * 0.8 + 0.1


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


def flags(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) > 0.5


def unary() -> list[Case]:
    """Functions of one tensor, each with the torch function of that name."""
    cases = []
    for fn in ("neg", "positive", "clone", "detach", *elementwise.UNARY.split()):
        if fn in ("threshold", "clamp_min", "clamp_max", "bitwise_not", "log_sigmoid"):
            continue
        named = getattr(torch.special, fn.removeprefix("special_"), None) if fn.startswith("special_") else None
        func = named or getattr(torch, fn, None) or getattr(F, fn)
        cases.append(Case(fn, func, (pos(4, 8, 4) + (fn == "acosh"),)))
    x, z = t(4, 8, 4), torch.randn(4, 8, 4, dtype=torch.complex128)
    cases += [
        Case("contiguous", lambda a: a.clone(), (x,)),
        Case("alias", torch.ops.aten.alias, (x,)),
        Case("identity", lambda a: a * 1, (x,)),
        Case("dropout", F.dropout, (x, 0.0)),
        *(
            Case(fn, getattr(F, fn), (x, 0.0))
            for fn in ("dropout1d", "dropout2d", "alpha_dropout", "feature_alpha_dropout")
        ),
        Case("dropout3d", F.dropout3d, (t(4, 8, 2, 2, 2), 0.0)),
        Case("feature_dropout", torch.feature_dropout, (x, 0.0, True)),
        Case("rpow", lambda a: 2**a, (x,)),
        Case("threshold", F.threshold, (x, 0.1, 0.2)),
        Case("to", torch.Tensor.to, (x, torch.float64)),
        Case("to", torch.Tensor.long, (x * 3,), name="to integers"),
        Case("pow", torch.pow, (x, 2)),
        Case("clamp", torch.clamp, (x, -0.5, 0.5)),
        Case("clip", torch.clip, (x, -0.5, 0.5)),
        Case("clamp_min", torch.clamp_min, (x, 0.0)),
        Case("clamp_max", torch.clamp_max, (x, 0.0)),
        Case("clamp", torch.clamp, (x, t(8, 1), None), kinds="ac", name="clamp at a tensor"),
        Case("bitwise_not", torch.bitwise_not, (ids(9, 4, 8),)),
        Case("invert", torch.bitwise_not, (ids(9, 4, 8),)),
        Case("real", torch.real, (z,)),
        Case("imag", torch.imag, (z,)),
        Case("logsigmoid", F.logsigmoid, (x,)),
        Case("relu_", torch.relu_, (x,), name="relu in place"),
    ]
    return cases


def binary() -> list[Case]:
    """Functions of two tensors, broadcast each way."""
    cases = []
    python = {
        "and": torch.bitwise_and,
        "or": torch.bitwise_or,
        "xor": torch.bitwise_xor,
        "lshift": torch.bitwise_left_shift,
        "rshift": torch.bitwise_right_shift,
        "mod": torch.remainder,
        "floordiv": torch.floor_divide,
        "rdiv": lambda a, b: b / a,
        "rtruediv": lambda a, b: b / a,
        "rfloordiv": lambda a, b: b // a,
        "radd": torch.add,
    }
    for fn in (
        "add",
        "sub",
        "rsub",
        "radd",
        "mul",
        "div",
        "maximum",
        "minimum",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "rdiv",
        "rtruediv",
        "fmod",
        "remainder",
        "floor_divide",
        "logical_and",
        "logical_or",
        "logical_xor",
        "float_power",
        "atan2",
        "floordiv",
        "rfloordiv",
        "mod",
        "bitwise_and",
        "bitwise_or",
        "bitwise_left_shift",
        "bitwise_right_shift",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
    ):
        func = python.get(fn) or getattr(torch, fn)
        if fn.startswith("bitwise_") or fn in ("and", "or", "xor", "lshift", "rshift"):
            cases.append(Case(fn, func, (ids(9, 4, 8), ids(9, 8)), kinds="aa"))
            continue
        if fn in ("floor_divide", "floordiv", "rfloordiv"):  # no derivative
            cases.append(Case(fn, func, (pos(4, 8), pos(8)), kinds="cc"))
            continue
        for a, b, kinds in (
            ((4, 8, 4), (4, 8, 4), "aa"),
            ((4, 8, 4), (4,), "ap"),
            ((4, 1, 4), (8, 1), "aa"),
            ((4,), (4, 8, 4), "ca"),
        ):
            cases.append(Case(fn, func, (pos(*a), pos(*b)), kinds=kinds, name=f"{fn} {a} {b} {kinds}"))
    x, y = t(4, 8), t(4, 8)
    cases += [
        Case("add", torch.add, (x, 1.5), name="add a number"),
        Case("mul", torch.mul, (x, 1.5), name="mul by a number"),
        Case("sub", torch.sub, (x, y), {"alpha": 2}, "aa", "sub alpha"),
        Case("rsub", torch.rsub, (x, 2.0), name="rsub a number"),
        Case("div", torch.div, (x, y), {"rounding_mode": "floor"}, "aa", "div rounded"),
        Case("add_", torch.Tensor.add_, (x, t(8)), kinds="aa"),
        Case("mul_", torch.Tensor.mul_, (x, t(8)), kinds="ap"),
        Case("div_", torch.Tensor.div_, (x, pos(4, 1)), kinds="aa"),
        Case("where", torch.where, (flags(4, 1, 4), t(4, 8, 4), t(8, 1)), kinds="caa"),
        Case("where", torch.where, (flags(1, 4), t(8, 4), 7.0), kinds="ca", name="where with a number"),
        Case("masked_fill", torch.masked_fill, (t(4, 8), flags(8), -9.0), kinds="ac"),
        Case("lerp", torch.lerp, (x, y, 0.3), kinds="aa"),
        Case("addcmul", torch.addcmul, (x, t(8), y), kinds="apa"),
        Case("addcdiv", torch.addcdiv, (x, t(8), pos(4, 8)), kinds="apa"),
    ]
    return cases


def shapes() -> list[Case]:
    """Views, transposes, cuts and joins."""
    x = t(4, 8, 12)
    cases = [
        Case(fn, func, args, name=f"{fn} {n}")
        for n, (fn, func, args) in enumerate(
            [
                ("view", torch.Tensor.view, (x, 32, 12)),
                ("view", torch.Tensor.view, (x, 4, 8, 4, 3)),
                ("view", torch.Tensor.view, (x, 4, 96)),
                ("reshape", torch.reshape, (x, (4, 2, 4, 12))),
                ("reshape", torch.reshape, (x, (-1,))),
                ("flatten", torch.flatten, (x, 1)),
                ("flatten", torch.flatten, (t(1, 8, 4),)),
                ("unflatten", torch.unflatten, (x, 2, (4, 3))),
                ("squeeze", torch.squeeze, (t(4, 1, 8), 1)),
                ("unsqueeze", torch.unsqueeze, (x, 1)),
                ("ravel", torch.ravel, (x,)),
                ("view_as", torch.Tensor.view_as, (x, t(8, 4, 12))),
                ("reshape_as", torch.Tensor.reshape_as, (x, t(32, 12))),
                ("transpose", torch.transpose, (x, 0, 2)),
                ("permute", torch.permute, (x, (2, 0, 1))),
                ("t", torch.t, (t(4, 8),)),
                ("T", torch.t, (t(4, 8),)),
                ("mT", lambda a: a.mT, (x,)),
                ("swapaxes", torch.swapaxes, (x, 1, 2)),
                ("swapdims", torch.swapdims, (x, 1, 2)),
                ("movedim", torch.movedim, (x, 0, 2)),
                ("expand", torch.Tensor.expand, (t(4, 1, 8), 4, 4, 8)),
                (
                    "expand",
                    torch.Tensor.expand,
                    (
                        t(
                            8,
                        ),
                        4,
                        8,
                    ),
                ),
                ("expand_as", torch.Tensor.expand_as, (t(1, 8), t(4, 8))),
                ("broadcast_to", torch.broadcast_to, (t(1, 8), (4, 8))),
                ("repeat", torch.Tensor.repeat, (t(4, 8), 2, 1, 3)),
                ("repeat_interleave", torch.repeat_interleave, (x, 2, 1)),
                ("repeat_interleave", torch.repeat_interleave, (t(4, 8), 2)),
                ("tile", torch.tile, (t(4, 8), (2, 1))),
                ("split", torch.split, (x, 4, 2)),
                ("split", torch.split, (x, [4, 8], 2)),
                ("split", torch.split_with_sizes, (x, [4, 4, 4], 2)),
                ("chunk", torch.chunk, (x, 3, 2)),
                ("chunk", torch.chunk, (x, 2)),
                ("unsafe_chunk", torch.unsafe_chunk, (x, 2)),
                ("unsafe_split", torch.unsafe_split, (x, 4, 1)),
                ("tensor_split", torch.tensor_split, (x, 3, 2)),
                ("unbind", torch.unbind, (x, 1)),
                ("unbind", torch.unbind, (x,)),
                ("select", torch.select, (x, 1, 3)),
                ("narrow", torch.narrow, (x, 2, 4, 4)),
                ("pad", F.pad, (x, (1, 1))),
                ("pad", F.pad, (x, (0, 0, 2, 2), "constant", 3.0)),
                ("pad", F.pad, (x, (1, 1), "circular")),
                ("pad", F.pad, (x, (0, 0, 1, -1))),
                ("pad", F.pad, (x, (2, -2), "constant", 3.0)),
                ("constant_pad_nd", torch.constant_pad_nd, (x, (1, 1))),
                ("roll", torch.roll, (x, 1, 1)),
                ("roll", torch.roll, (x, 1)),
                ("flip", torch.flip, (x, (0, 2))),
                ("tril", torch.tril, (x,)),
                ("triu", torch.triu, (x,)),
                ("tril_", torch.Tensor.tril_, (x,)),
                ("H", lambda a: a.H, (t(4, 8),)),
                ("mH", lambda a: a.mH, (x,)),
                ("adjoint", torch.adjoint, (torch.randn(4, 8, 6, dtype=torch.complex128),)),
                ("diagonal", torch.diagonal, (x,)),
                ("diagonal", torch.diagonal, (x, 1, -2, 0)),
                ("moveaxis", torch.moveaxis, (x, 0, 2)),
            ]
        )
    ]
    y = t(4, 8, 12)
    cases += [
        Case(fn, func, args, kinds="aa", name=f"{fn} of two {n}")
        for n, (fn, func, args) in enumerate(
            [
                ("cat", torch.cat, ((x, y), 2)),
                ("cat", torch.cat, ((x, y),)),
                ("cat", torch.cat, ((x, t(4, 2, 12)), 1)),
                ("stack", torch.stack, ((x, y),)),
                ("stack", torch.stack, ((x, y), 2)),
                ("concat", torch.concat, ((x, y), 1)),
                ("concatenate", torch.concatenate, ((x, y), -1)),
                ("hstack", torch.hstack, ((x, y),)),
            ]
        )
    ]
    cases.append(Case("cat", torch.cat, ((x, y), 2), kinds="ac", name="cat with a constant"))
    index: list[Any] = [
        (slice(None), 3),
        (slice(None), slice(2, 6)),
        (Ellipsis, slice(0, 6)),
        (None, slice(None)),
        (0,),
        (slice(None), None, slice(0, 8), 2),
        (slice(None, None, 2),),
        ([0, 1],),
        (slice(None), [0, 1, 2, 3]),
        (True,),
        (slice(None), -1, None),
    ]
    cases += [Case("getitem", torch.Tensor.__getitem__, (x, i), name=f"getitem {i}") for i in index]
    cases += [Case("getitem", torch.Tensor.__getitem__, (t(2, 2, 4), ([0, 1],)), name="getitem where sizes coincide")]
    picks: dict[str, tuple[Any, ...]] = {
        "by a tensor": (slice(None), ids(8, 4)),
        "by two that are broadcast": (ids(4, 4, 1), ids(8, 1, 6)),
        "by rows and columns": (slice(None), ids(8, 4, 2), ids(4, 4, 2)),
        "by two apart": (ids(4, 6), slice(None), ids(4, 6)),
        "by a mask": (slice(None), torch.arange(8) % 2 == 0),
        "by a mask that is true": (torch.ones(4, dtype=torch.bool),),
        "by a mask of two dims": (torch.ones(4, 8, dtype=torch.bool),),
        "by a number in a tensor": (slice(None), torch.tensor(3)),
        "by a tensor and a number": (ids(4, 6), 2),
        "by a table of weights' rows": (ids(4, 2, 6), None, slice(0, 6)),
    }
    cases += [
        Case("getitem", torch.Tensor.__getitem__, (x, index), kinds="acc", name=f"getitem {name}")
        for name, index in picks.items()
    ]
    return cases


def along() -> list[Case]:
    """Reductions and functions along a dim."""
    x = pos(4, 8, 4)
    cases = []
    for fn in (
        "sum",
        "mean",
        "prod",
        "amax",
        "amin",
        "argmax",
        "argmin",
        "any",
        "all",
        "var",
        "std",
        "logsumexp",
        "max",
        "min",
    ):
        func, a = getattr(torch, fn), (x > 0.5 if fn in ("any", "all") else x)
        dims: list[tuple[Any, ...]] = [(1,), (2, True), (-1,)] if fn != "logsumexp" else [(1,), ((0, 2),)]
        cases += [Case(fn, func, (a, d[0]), {"keepdim": True} if len(d) > 1 else {}, name=f"{fn} {d}") for d in dims]
        if fn not in ("logsumexp",):
            cases.append(Case(fn, func, (a,), name=f"{fn} of all"))
        if fn in ("sum", "mean", "var", "amax"):
            cases.append(Case(fn, func, (a, (0, 2)), name=f"{fn} (0, 2)"))
    cases.append(Case("max", torch.max, (x, t(4, 8, 4)), kinds="aa", name="max of two"))
    for fn, args in (
        ("softmax", (1,)),
        ("log_softmax", (2,)),
        ("softmin", (1,)),
        ("cumsum", (1,)),
        ("cumprod", (0,)),
        ("logcumsumexp", (1,)),
        ("sort", (1,)),
        ("sort", ()),
        ("argsort", (1,)),
        ("argsort", ()),
        ("topk", (2,)),
        ("topk", (2, 1)),
        ("glu", (1,)),
        ("glu", ()),
        ("normalize", ()),
        ("normalize", (2.0, 0)),
    ):
        func = getattr(torch, fn, None) or getattr(F, fn)
        cases.append(Case(fn, func, (x, *args), name=f"{fn} {args}"))
    cases += [
        Case("diff", torch.diff, (t(4, 8, 4),), kinds="a"),
        Case("diff", torch.diff, (t(4, 8, 4), 1, 1), name="diff of a dim"),
        Case("diff", torch.diff, (t(4, 8),), {"prepend": t(4, 1)}, "aa", "diff prepended"),
        Case("norm", torch.norm, (x,)),
        Case("norm", torch.norm, (x, 2, 1), name="norm along"),
        Case("var_mean", torch.var_mean, (x, 1)),
        Case("var_mean", torch.var_mean, (x,), {"dim": 1}, name="var_mean by name"),
        Case("vector_norm", torch.linalg.vector_norm, (x, 2, 1)),
        Case("vector_norm", torch.linalg.vector_norm, (x,), {"dim": 1}, name="vector_norm by name"),
    ]
    return cases


def products() -> list[Case]:
    """Linear algebra, lookups, convolutions."""
    return [
        Case("linear", F.linear, (t(4, 4, 8), t(12, 8))),
        Case("linear", F.linear, (t(4, 4, 8), t(12, 8), t(12)), name="linear with bias"),
        Case("linear", F.linear, (t(4, 8), t(4, 8)), kinds="ca", name="linear of a constant"),
        Case("addmm", torch.addmm, (t(12), t(8, 4), t(4, 12)), kinds="pap"),
        Case("addmm", torch.addmm, (t(8, 1), t(8, 4), t(4, 12)), kinds="aap", name="addmm column"),
        Case("baddbmm", torch.baddbmm, (t(4, 4, 8), t(4, 4, 4), t(4, 4, 8)), kinds="aaa"),
        Case("baddbmm", torch.baddbmm, (t(1, 8), t(4, 4, 4), t(4, 4, 8)), kinds="paa", name="baddbmm row"),
        Case("matmul", torch.matmul, (t(4, 8, 4), t(4, 12))),
        Case("matmul", torch.matmul, (t(4, 2, 8, 4), t(2, 4, 12)), kinds="aa", name="matmul batched"),
        Case("matmul", torch.matmul, (t(8, 4), t(4)), kinds="ap", name="matmul vector"),
        Case("matmul", torch.matmul, (t(4), t(4, 8)), kinds="ap", name="vector matmul"),
        Case("matmul", torch.matmul, (t(1, 4), t(8, 4, 12)), kinds="pa", name="matmul broadcast"),
        Case("bmm", torch.bmm, (t(4, 8, 4), t(4, 4, 12)), kinds="aa"),
        Case("mm", torch.mm, (t(8, 4), t(4, 12))),
        Case("rmatmul", torch.Tensor.__rmatmul__, (t(4, 8), t(12, 4)), kinds="pa"),
        Case("rmatmul", torch.Tensor.__rmatmul__, (t(4, 8), t(6, 12, 4)), kinds="aa", name="rmatmul batched"),
        Case(
            "LinearNF4",
            LinearNF4.apply,
            (t(4, 2, 64), t(8, 1), flags(2).to(torch.uint8), pos(1).float(), 2),
            kinds="accc",
        ),
        Case("bilinear", F.bilinear, (t(4, 2, 8), t(4, 2, 6), t(12, 8, 6), t(12)), kinds="aapp"),
        Case("bilinear", F.bilinear, (t(4, 8), t(4, 6), t(12, 8, 6)), kinds="aap", name="bilinear without bias"),
        Case("einsum", torch.einsum, ("ij,jk", t(4, 8), t(8, 12)), name="einsum without arrow"),
        Case("einsum", torch.einsum, ("bTd,de", t(4, 4, 8), t(8, 12)), name="einsum of a capital letter"),
        Case(
            "einsum",
            torch.einsum,
            ("...d,Ad->...A", t(4, 4, 8), t(12, 8)),
            name="einsum of a capital letter beside dots",
        ),
        Case("einsum", torch.einsum, ("bsh,oh->bso", t(4, 4, 8), t(12, 8))),
        Case(
            "einsum", torch.einsum, ("bqhd,bkhd->bhqk", t(4, 4, 4, 8), t(4, 4, 4, 8)), kinds="aa", name="einsum scores"
        ),
        Case("einsum", torch.einsum, ("ij,jk,kl->il", t(4, 4), t(4, 8), t(8, 4)), kinds="apa", name="einsum of three"),
        Case("einsum", torch.einsum, ("bij->bj", t(4, 4, 8)), name="einsum sum"),
        Case("embedding", F.embedding, (ids(12, 4, 8), t(12, 8)), kinds="cp"),
        Case("embedding", F.embedding, (ids(12, 4, 8), t(12, 8)), kinds="ca", name="embedding of a computed table"),
        Case("conv1d", F.conv1d, (t(4, 4, 9), t(8, 4, 3), t(8))),
        Case("conv2d", F.conv2d, (t(4, 4, 6, 6), t(8, 4, 3, 3))),
        Case(
            "conv2d",
            F.conv2d,
            (t(4, 4, 6, 6), t(8, 4, 3, 3), t(8)),
            {"stride": 2, "padding": 1},
            kinds="cpp",
            name="conv2d of pixels",
        ),
        Case(
            "conv2d",
            F.conv2d,
            (t(4, 8, 6, 6), t(8, 1, 3, 3), t(8)),
            {"groups": 8, "padding": 1},
            name="conv2d depthwise",
        ),
        Case("conv1d", F.conv1d, (t(4, 8, 9), t(8, 1, 3)), {"groups": 8}, name="conv1d depthwise"),
        Case("conv1d", F.conv1d, (t(4, 8, 9), t(8, 4, 3)), {"groups": 2}, name="conv1d grouped"),
        Case("conv1d", F.conv1d, (t(4, 9), t(8, 4, 3)), name="conv1d of one sample"),
        Case("conv3d", F.conv3d, (t(4, 4, 4, 4, 4), t(4, 4, 3, 3, 3))),
        Case("conv_transpose3d", F.conv_transpose3d, (t(4, 4, 3, 3, 3), t(4, 8, 2, 2, 2))),
        Case("conv_transpose1d", F.conv_transpose1d, (t(4, 4, 9), t(4, 8, 3))),
        Case("conv_transpose2d", F.conv_transpose2d, (t(4, 4, 5, 5), t(4, 8, 3, 3), t(8))),
        Case("max_pool2d", F.max_pool2d, (t(4, 4, 8, 8), 2)),
        Case("max_pool2d", F.max_pool2d, (t(4, 8, 8), 3, 1, 1), name="max_pool2d of one sample"),
        Case("avg_pool2d", F.avg_pool2d, (t(4, 4, 8, 8), 2)),
        Case("max_pool1d", F.max_pool1d, (t(4, 4, 8), 2)),
        Case("avg_pool1d", F.avg_pool1d, (t(4, 4, 8), 2)),
        Case("avg_pool1d", F.avg_pool1d, (t(4, 8), 3, 1, 1), name="avg_pool1d of one sample"),
        Case("adaptive_avg_pool2d", F.adaptive_avg_pool2d, (t(4, 4, 8, 8), (1, 1))),
        Case("adaptive_avg_pool1d", F.adaptive_avg_pool1d, (t(4, 4, 8), 2)),
        Case("adaptive_max_pool2d", F.adaptive_max_pool2d, (t(4, 4, 8, 8), (2, 2))),
        Case("interpolate", F.interpolate, (t(4, 4, 4, 4),), {"scale_factor": 2}),
        Case("upsample", F.interpolate, (t(4, 4, 4, 4),), {"scale_factor": 2}),
        Case("pixel_shuffle", F.pixel_shuffle, (t(4, 16, 4, 4), 2)),
    ]


def gate(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


def layers() -> list[Case]:
    """Norms, attention, losses, experts."""
    q, k, v, few = t(4, 4, 8, 4), t(4, 4, 8, 4), t(4, 4, 8, 4), t(4, 2, 8, 4)
    sdpa = F.scaled_dot_product_attention
    stats = torch.zeros(8, dtype=DOUBLE), torch.ones(8, dtype=DOUBLE)
    target = ids(8, 16)
    target[3] = -100
    scores = pos(16, 2)
    expert: dict[str, Any] = {"apply_gate": gate, "act": "SiLU"}
    moe = (t(16, 8), ids(4, 16, 2), scores, t(4, 16, 8), t(4, 8, 8))
    other = (t(16, 8), ids(4, 16, 2), scores, t(4, 8, 16), t(4, 8, 8), t(4, 16), t(4, 8))
    return [
        Case("layer_norm", F.layer_norm, (t(4, 8, 4), (4,), t(4), t(4))),
        Case("layer_norm", F.layer_norm, (t(4, 8, 4), (8, 4)), name="layer_norm of two dims"),
        Case("rms_norm", F.rms_norm, (t(4, 8, 4), (4,), t(4))),
        Case("group_norm", F.group_norm, (t(4, 8, 4), 2, t(8), t(8))),
        Case("instance_norm", F.instance_norm, (t(4, 8, 4),)),
        Case(
            "instance_norm",
            F.instance_norm,
            (t(4, 8, 4), None, None, t(8), t(8)),
            kinds="app",
            name="instance_norm with weights",
        ),
        Case(
            "instance_norm",
            F.instance_norm,
            (t(4, 8, 4), *stats),
            kinds="acc",
            name="instance_norm that keeps statistics",
        ),
        Case(
            "batch_norm",
            F.batch_norm,
            (t(4, 8, 4, 4), *stats, t(8), t(8)),
            {"training": True, "momentum": 0.0},
            "accpp",
        ),
        Case(
            "batch_norm", F.batch_norm, (t(4, 8), *stats, t(8), t(8)), {"training": False}, "accpp", "batch_norm in use"
        ),
        Case("scaled_dot_product_attention", sdpa, (q, k, v), kinds="aaa", name="attention"),
        Case("scaled_dot_product_attention", sdpa, (q, k, v), {"is_causal": True}, "aaa", "attention causal"),
        Case(
            "scaled_dot_product_attention",
            sdpa,
            (q, few, few * 2),
            {"enable_gqa": True, "is_causal": True},
            "aaa",
            "attention grouped",
        ),
        Case(
            "scaled_dot_product_attention", sdpa, (q, k, v, t(1, 4, 8, 8)), kinds="aaaa", name="attention with a bias"
        ),
        Case(
            "scaled_dot_product_attention",
            sdpa,
            (q, k, v, flags(4, 1, 8, 8) | torch.eye(8, dtype=torch.bool)),
            kinds="aaac",
            name="attention with a mask",
        ),
        Case(
            "scaled_dot_product_attention",
            sdpa,
            (q, k, v, flags(8, 8) | torch.eye(8, dtype=torch.bool)),
            kinds="aaac",
            name="attention with a flat mask",
        ),
        Case(
            "scaled_dot_product_attention",
            sdpa,
            (t(4, 8, 4), t(4, 8, 4), t(4, 8, 4), t(4, 8, 8)),
            kinds="aaac",
            name="attention of one head",
        ),
        Case(
            "scaled_dot_product_attention",
            sdpa,
            (t(4, 8, 4), t(4, 8, 4), t(4, 8, 4), t(8, 8)),
            kinds="aaac",
            name="attention of one head, flat mask",
        ),
        Case("cross_entropy", F.cross_entropy, (t(16, 8), target), kinds="ac"),
        Case("cross_entropy", F.cross_entropy, (t(16, 8), target), {"reduction": "sum"}, "ac", "cross_entropy sum"),
        Case(
            "cross_entropy",
            F.cross_entropy,
            (t(16, 8), ids(8, 16)),
            {"label_smoothing": 0.1},
            "ac",
            "cross_entropy smooth",
        ),
        Case("cross_entropy", F.cross_entropy, (t(4, 8, 4), ids(8, 4, 4)), kinds="ac", name="cross_entropy of images"),
        Case("cross_entropy", F.cross_entropy, (t(16, 8), target, pos(8)), kinds="acc", name="cross_entropy weighted"),
        Case(
            "cross_entropy", F.cross_entropy, (t(16, 8), pos(16, 8)), kinds="ac", name="cross_entropy of probabilities"
        ),
        Case(
            "cross_entropy",
            F.cross_entropy,
            (t(4, 8, 4), ids(8, 4, 4), pos(8)),
            {"label_smoothing": 0.2},
            "acc",
            "cross_entropy of images, all",
        ),
        Case(
            "cross_entropy",
            F.cross_entropy,
            (t(4, 8, 4), ids(8, 4, 4)),
            {"reduction": "none"},
            "ac",
            "cross_entropy of images, each",
        ),
        Case(
            "cross_entropy",
            F.cross_entropy,
            (t(4, 8, 4), pos(4, 8, 4), pos(8)),
            kinds="acc",
            name="cross_entropy of probabilities, weighted",
        ),
        Case(
            "cross_entropy", F.cross_entropy, (t(16, 8), target), {"size_average": False}, "ac", "cross_entropy of old"
        ),
        Case(
            "binary_cross_entropy_with_logits",
            F.binary_cross_entropy_with_logits,
            (t(4, 8), pos(4, 8), pos(4, 1), None, None, "mean", pos(8)),
            kinds="accc",
            name="binary_cross_entropy_with_logits weighted",
        ),
        Case(
            "mse_loss",
            F.mse_loss,
            (t(4, 8), pos(4, 8), None, None, "mean", pos(4, 8)),
            kinds="acc",
            name="mse_loss weighted",
        ),
        Case("nll_loss", F.nll_loss, (t(4, 8, 4), ids(8, 4, 4), pos(8)), kinds="acc", name="nll_loss of images"),
        *(
            Case(fn, getattr(F, fn), (pos(4, 8), pos(4, 8)), {"reduction": how}, "ac", f"{fn} {how}")
            for fn in (
                "mse_loss",
                "l1_loss",
                "smooth_l1_loss",
                "huber_loss",
                "binary_cross_entropy",
                "binary_cross_entropy_with_logits",
            )
            for how in ("mean", "sum", "none")
        ),
        Case("moe_experts", moe_experts, moe, expert, "aaapp"),
        Case(
            "moe_experts",
            moe_experts,
            other,
            {**expert, "transposed": True},
            "aaapppp",
            "moe_experts transposed with bias",
        ),
        Case(
            "moe_experts",
            moe_experts,
            (*moe[:3], t(4, 8, 8), t(4, 8, 8)),
            {"apply_gate": F.silu, "gated": False},
            "aaapp",
            "moe_experts without gate",
        ),
    ]


CASES = [*unary(), *binary(), *shapes(), *along(), *products(), *layers()]
