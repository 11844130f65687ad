"""Run ATen ops by name, through the Python functions that a model's own code would have called, so that capture names them alike.

A name from a file is looked up in `torch.ops.aten` and nowhere else. Only ops that compute tensors from tensors and numbers are
allowed. An op that takes a file name, a storage or a generator is refused, and so is a private op that is not listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from planner_core.core import InputError
from planner_core.models.hooks.callsites import tensors

Args = dict[str, Any]
Spelling = Callable[[Args], Any]

# What an export holds where the model's code calls a public function.
_PRIVATE = frozenset(
    {
        "_softmax",
        "_log_softmax",
        "_to_copy",
        "_unsafe_view",
        "_weight_norm",
        "_weight_norm_interface",
        "_native_batch_norm_legit",
        "_reshape_alias",
        "_fft_r2c",
        "_fft_c2r",
        "_fft_c2c",
        "_euclidean_dist",
        "_cdist_forward",
        "_adaptive_avg_pool2d",
        "_conj",
        "_conj_physical",
        "_neg_view",
    }
)
# Words that choose among formulas. Any other text could be the name of a file.
_STRINGS = frozenset(
    {"approximate", "rounding_mode", "equation", "indexing", "padding", "mode", "ord", "reduce", "UPLO", "side"}
)
_TYPES = frozenset(
    {
        "Tensor",
        "int",
        "SymInt",
        "float",
        "bool",
        "number",
        "Scalar",
        "ScalarType",
        "Layout",
        "Device",
        "MemoryFormat",
        "complex",
    }
)
_REDUCTIONS = ("none", "mean", "sum")


class NamedOp:
    """An ATen op with the name of its Python function, by which a capture records it."""

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self.__name__, self.run = name, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the op."""
        return self.run(*args, **kwargs)


@cache
def find_overload(target: str) -> Any:
    """Find the op that `torch.ops.aten.name.overload` names. Raises InputError for any other name, and for an unsafe schema."""
    if "grouped_mm" in target:
        raise InputError(
            "the program holds a layer of experts as grouped products, which do not say what weights belong to an expert; give the "
            "model's config.json, or path.py:callable"
        )
    # The whole name by a pattern: a file must not reach any other attribute of torch by dots of its own.
    parts = re.fullmatch(r"torch\.ops\.aten\.(\w+)\.(\w+)", target)
    refused = f"the program uses the op {target.removeprefix('torch.ops.')[:80]}, which is not one that is known to compute tensors only"
    if parts is None or (parts[1].startswith("_") and not parts[1].startswith("__") and parts[1] not in _PRIVATE):
        raise InputError(f"{refused}; export the model with plain torch functions in its place")
    try:
        op = getattr(getattr(torch.ops.aten, parts[1]), parts[2])
        schema = op._schema
    except AttributeError:
        raise InputError(
            f"the program uses the op aten.{parts[1]}.{parts[2]}, which torch {torch.__version__} does not have"
        ) from None
    for argument in schema.arguments:
        kind = str(argument.type)
        if not (
            _is_harmless(kind)
            or (kind in ("str", "Optional[str]") and argument.name in _STRINGS)
            or kind == "Optional[Generator]"
        ):
            raise InputError(
                f"{refused} (it takes a {kind[:40]}); export the model with plain torch functions in its place"
            )
    return op


def _is_harmless(kind: str) -> bool:
    inner = re.fullmatch(r"(?:Optional|List)\[(.*)\]", kind)
    return _is_harmless(inner[1]) if inner else kind in _TYPES


def run_op(target: str, args: Mapping[str, Any], by_keyword: frozenset[str]) -> Any:
    """Run one op. `args` are by the names of its schema; those in `by_keyword` are passed by keyword."""
    op = find_overload(target)
    if args.get("generator") is not None:
        raise InputError(f"the program hands a random generator to {target}; export the model in a form without it")
    name = target.split(".")[3]
    spelling = _SPELLINGS.get(name)
    if spelling is not None:
        return spelling(dict(args))
    passed = {k: v for k, v in args.items() if k != "generator"}
    named = {k: passed.pop(k) for k in by_keyword if k in passed}
    return dispatch(NamedOp(name, op), list(passed.values()), named)


def dispatch(function: NamedOp, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call an op through `handle_torch_function`, so that a TorchFunctionMode sees it."""
    operands = tensors((args, kwargs))
    # By hand, so that the mode sees this object with its Python name, and not the overload inside.
    if not torch.overrides.has_torch_function(tuple(operands)):
        return function(*args, **kwargs)
    return torch.overrides.handle_torch_function(function, operands, *args, **kwargs)


def index_tensor(source: torch.Tensor, items: tuple[Any, ...]) -> torch.Tensor:
    """Return `source[items]` without full slices at the end."""
    # As a model's code writes it: x[:, 0] and x[:, 0, :] are one op, and a capture would give them other attributes.
    while items and items[-1] == slice(None):
        items = items[:-1]
    part: torch.Tensor = source[items] if items else source[...]
    return part


# --- ops whose Python function takes its arguments otherwise ----------------------------------------------


def _given(args: Args, *names: str) -> Args:
    return {n: args[n] for n in names if args.get(n) is not None}


def _embedding(a: Args) -> Any:
    padding = a.get("padding_idx", -1)
    # ATen's -1 stands for none. In Python it would be the last row of the table.
    return F.embedding(a["indices"], a["weight"], None if padding == -1 else padding)


def _cross_entropy(a: Args) -> Any:
    return F.cross_entropy(
        a["self"],
        a["target"],
        a.get("weight"),
        ignore_index=a.get("ignore_index", -100),
        reduction=_REDUCTIONS[a.get("reduction", 1)],
        label_smoothing=a.get("label_smoothing", 0.0),
    )


def _loss_spelling(function: Callable[..., Any], *names: str) -> Spelling:
    def spell(a: Args) -> Any:
        return function(a["self"], a["target"], **_given(a, *names), reduction=_REDUCTIONS[a.get("reduction", 1)])

    return spell


def _attention(a: Args) -> Any:
    return F.scaled_dot_product_attention(
        a["query"],
        a["key"],
        a["value"],
        attn_mask=a.get("attn_mask"),
        is_causal=a.get("is_causal", False),
        **_given(a, "scale"),
        enable_gqa=a.get("enable_gqa", False),
    )


def _norm_spelling(function: Callable[..., Any], *names: str) -> Spelling:
    return lambda a: function(a["input"], *(a.get(n) for n in names), **_given(a, "eps"))


def _softmax_spelling(function: Callable[..., Any]) -> Spelling:
    return lambda a: function(a["self"], dim=a["dim"], **_given(a, "dtype"))


def _cast(a: Args) -> Any:
    """Cast to a dtype. A move to a device changes nothing."""
    dtype = a["other"].dtype if isinstance(a.get("other"), torch.Tensor) else a.get("dtype")
    return a["self"] if dtype is None else a["self"].to(dtype)


def _slice(a: Args) -> Any:
    dim = a.get("dim", 0) % max(a["self"].dim(), 1)
    return index_tensor(a["self"], (*[slice(None)] * dim, slice(a.get("start"), slice_end(a), a.get("step", 1))))


def slice_end(a: Args) -> int | None:
    """Return the end of a slice, None for the end of the dim, which an export writes as 2**63 - 1."""
    return None if a.get("end") is None or a["end"] >= 2**62 else a["end"]


def _select(a: Args) -> Any:
    return index_tensor(a["self"], (*[slice(None)] * (a["dim"] % a["self"].dim()), a["index"]))


def _index_by_tensors(a: Args) -> Any:
    return index_tensor(a["self"], tuple(slice(None) if i is None else i for i in a["indices"]))


def _index_put(a: Args) -> Any:
    """Write in place, and return the written tensor."""
    if a.get("accumulate"):
        return a["self"].index_put_(tuple(a["indices"]), a["values"], accumulate=True)
    a["self"][tuple(slice(None) if i is None else i for i in a["indices"])] = a["values"]
    return a["self"]


def _first_operand(a: Args) -> Any:
    return a.get("self", a.get("input"))


def _conv_spelling(name: str) -> Spelling:
    function = getattr(F, name)

    def spell(a: Args) -> Any:
        steps = (a.get("stride", 1), a.get("padding", 0), a.get("dilation", 1), a.get("groups", 1))
        return function(a["input"], a["weight"], a.get("bias"), *steps)

    return spell


_SPELLINGS: dict[str, Spelling] = {
    "embedding": _embedding,
    "cross_entropy_loss": _cross_entropy,
    "scaled_dot_product_attention": _attention,
    "batch_norm": _norm_spelling(F.batch_norm, "running_mean", "running_var", "weight", "bias", "training", "momentum"),
    "instance_norm": _norm_spelling(
        F.instance_norm, "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum"
    ),
    "layer_norm": _norm_spelling(F.layer_norm, "normalized_shape", "weight", "bias"),
    "rms_norm": _norm_spelling(F.rms_norm, "normalized_shape", "weight"),
    "group_norm": _norm_spelling(F.group_norm, "num_groups", "weight", "bias"),
    "softmax": _softmax_spelling(F.softmax),
    "log_softmax": _softmax_spelling(F.log_softmax),
    "_softmax": _softmax_spelling(F.softmax),
    "_log_softmax": _softmax_spelling(F.log_softmax),
    "to": _cast,
    "_to_copy": _cast,
    "type_as": _cast,
    "slice": _slice,
    "select": _select,
    "index": _index_by_tensors,
    "index_put_": _index_put,
    "alias": lambda a: index_tensor(a["self"], ()),
    "lift_fresh_copy": _first_operand,
    "lift_fresh": _first_operand,
    "dropout": _first_operand,
    "dropout_": _first_operand,
    "feature_dropout": _first_operand,
    "conv1d": _conv_spelling("conv1d"),
    "conv2d": _conv_spelling("conv2d"),
    "conv3d": _conv_spelling("conv3d"),
    "einsum": lambda a: torch.einsum(a["equation"], *a["tensors"]),
    "gelu": lambda a: F.gelu(a["self"], **_given(a, "approximate")),
    "silu": lambda a: F.silu(a["self"]),
    "relu": lambda a: F.relu(a["self"]),
    "pad": lambda a: F.pad(a["self"], a["pad"], a.get("mode", "constant"), a.get("value")),
    "mse_loss": _loss_spelling(F.mse_loss),
    "l1_loss": _loss_spelling(F.l1_loss),
    "smooth_l1_loss": _loss_spelling(F.smooth_l1_loss, "beta"),
    "huber_loss": _loss_spelling(F.huber_loss, "delta"),
    "binary_cross_entropy_with_logits": _loss_spelling(F.binary_cross_entropy_with_logits, "weight", "pos_weight"),
    "binary_cross_entropy": _loss_spelling(F.binary_cross_entropy, "weight"),
    "nll_loss_nd": _loss_spelling(F.nll_loss, "weight", "ignore_index"),
    "nll_loss": _loss_spelling(F.nll_loss, "weight", "ignore_index"),
    "contiguous": lambda a: a["self"].contiguous(),
}
"""By ATen op: the call as Python code of a model writes it. Its operands and order are those that a capture of the model records."""
