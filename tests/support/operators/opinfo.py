"""The operators of torch's own database of operators (OpInfo): whose rule there is, its samples as cases, or why there is none."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from planner_core.models.hooks import canonical_name, normalize_call
from planner_core.ops import Kind, Operator, operator
from tests.support.operators.judge import Case, leaves

MOST = 6
"""Samples of an operator that are judged."""
REASONS: tuple[tuple[str, str], ...] = (
    (
        r".*_copy(_dense)?|.*_scatter|_unsafe.*|torch\.ops\.aten\..*|_softmax_backward_data|native_.*|_native_.*|_batch_norm_.*|"
        r"max_pool2d_with_indices_backward|_upsample.*|nn\.functional\.upsample_.*|grid_sampler_.*|_segment_reduce|_chunk_cat|_refs.*",
        "made by torch's own passes, or deprecated: models call another form",
    ),
    (
        r"masked\..*|masked_select|to_sparse|sparse\..*|combinations|geqrf|argwhere|nonzero.*|unique.*|linalg\.lstsq|.*masked\..*|nn\.functional\.gaussian_nll_loss",
        "sizes of the result, or a check, depend on values",
    ),
    (
        r"bernoulli|.*rrelu|.*fractional_max_pool.*|svd_lowrank|pca_lowrank|.*dropout.*|normal.*|.*rand.*|nn\.functional\.scaled_dot_product_attention",
        "draws random numbers, which every GPU must draw alike",
    ),
    (
        r"triangular_solve|lu|lu_unpack|lu_solve|ormqr|renorm|linalg\.(multi_dot|tensorinv|tensorsolve|vander)|corrcoef|cov|trace|"
        r"block_diag|cartesian_prod|kron|addr|addbmm|tensordot|gradient|trapezoid|trapz|cumulative_trapezoid|dist|"
        r"nn\.functional\.(pdist|triplet_margin_with_distance_loss|linear_cross_entropy|multi_head_attention_forward)",
        "rare on large tensors: runs whole, and is said",
    ),
    (
        r"quantile|nanquantile|frexp|istft|stft|diag.*|meshgrid|put|take|index_(fill|copy|reduce)|rot90|[hvd]split|[vd]stack|column_stack|"
        r"atleast_.*|sum_to_size|inner|__rmod__|zero_|nextafter|unbind.*|unfold.*|cross|linalg\.cross",
        "moves or picks elements in a way of its own: runs whole, and is said",
    ),
)


@functools.cache
def entries() -> dict[str, list[Any]]:
    """Return what autograd differentiates, views among it: the forms of each operator in the database, by name."""
    # two seconds, which only who asks for the database pays
    from torch.testing._internal.common_methods_invocations import op_db

    by_name: dict[str, list[Any]] = {}
    for entry in op_db:
        if entry.supports_autograd:
            by_name.setdefault(entry.name, []).append(entry)
    return by_name


def rule_of(name: str) -> Operator | None:
    """Return the operator that describes it, if one does."""
    entry = entries()[name][0]
    if name.startswith(("sparse.", "masked.")):
        return None
    spelled = (
        canonical_name(entry.op) if hasattr(entry.op, "__name__") else None,
        name.replace(".", "_"),
        name.rpartition(".")[2],
    )
    return next((one for fn in spelled if fn and (one := operator(fn)).is_known), None)


def reason_of(name: str) -> str | None:
    """Return why it has no rule."""
    return next((why for pattern, why in REASONS if re.fullmatch(pattern, name)), None)


def cases(name: str) -> Iterator[Case]:
    """Yield the database's own samples in double precision, as calls that a capture would see."""
    one = rule_of(name)
    assert one is not None
    if one.kind in (Kind.RANDOM, Kind.CAST):  # switched off; rounds
        return
    for entry in entries()[name]:
        seen = canonical_name(entry.op) if hasattr(entry.op, "__name__") else None
        if torch.float64 not in entry.supported_dtypes("cpu") or seen is None or operator(seen) is not one:
            continue  # a wrapper of the database's own, which no model calls
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = list(entry.sample_inputs("cpu", torch.float64, requires_grad=False))
        # the largest ones have dims that can be split
        samples.sort(key=lambda s: -sum(t.dim() for t in leaves((s.input, s.args, s.kwargs))))
        for number, sample in enumerate(samples[:MOST]):
            func, args, kwargs = normalize_call(entry.op, (sample.input, *sample.args), dict(sample.kwargs))
            kinds = "".join("a" if t.is_floating_point() or t.is_complex() else "c" for t in leaves((args, kwargs)))
            if kinds:
                fn = seen if func is entry.op else canonical_name(func)
                yield Case(str(fn), func, args, kwargs, kinds, f"{entry.formatted_name} {number}")


def with_gradients(case: Case) -> Case:
    """Return the case with gradients for those operands that torch gives one: of all, of the first, or of none."""
    for kinds in (case.kinds, "a" + "c" * (len(case.kinds) - 1), "c" * len(case.kinds)):
        tried = Case(case.fn, case.func, case.args, case.kwargs, kinds, case.name)
        if _differentiable(tried):
            return tried
    return tried


def _differentiable(case: Case) -> bool:
    _, values = case.op()
    whole = [t.detach().clone().requires_grad_(values[i].grad) for i, t in enumerate(case.tensors)]
    try:
        made = [o for o in case.call([t.clone() for t in whole]) if o.requires_grad]
        wanted = [t for t in whole if t.requires_grad]
        if made and wanted:
            torch.autograd.grad(made, wanted, [torch.ones_like(o) for o in made], allow_unused=True)
    except RuntimeError:
        return False
    return True
