"""What backward of an operator uses for a moment, held against what torch allocates on meta."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from planner_core.ops import LocalBytes, operator
from planner_core.ops.catalog.elementwise import UNARY
from planner_core.verification.fake.memory_tracker import MemoryTracker

ROWS, COLUMNS = 64, 128
ARGUMENTS = {"clamp_min": (0.0,), "clamp_max": (1.0,), "threshold": (0.0, 0.0)}
ON_A_GPU = {"mish"}
"""Torch's kernel for GPUs makes nothing beside the gradient; on meta its formula runs."""
NO_GRADIENT = {"isnan", "isinf", "logical_not", "bitwise_not", "frac"}
NOT_ON_META = {"log_sigmoid", "special_i1", "special_i1e"}

Tensors = tuple[torch.Tensor, ...]


def used(call: Callable[..., torch.Tensor], grads: tuple[bool, ...], shapes: list[tuple[int, ...]]) -> int:
    """Bytes that backward allocates at once, beside the gradients that it takes and makes."""
    given = [
        torch.empty(s, dtype=torch.bfloat16, device="meta", requires_grad=g) for s, g in zip(shapes, grads, strict=True)
    ]
    out = call(*given)
    gradient, memory = torch.empty_like(out), MemoryTracker()
    with memory:
        made: Tensors = torch.autograd.grad(out, [x for x in given if x.requires_grad], gradient)
    return sum(memory.peak.values()) - sum(m.nbytes for m in made)


def planned(fn: str, grads: tuple[bool, ...], shapes: list[tuple[int, ...]], out: tuple[int, ...]) -> int:
    sizes = [2 * torch.Size(s).numel() for s in shapes]
    own = operator(fn).backward_workspace_bytes
    where = (tuple(sizes), (2 * torch.Size(out).numel(),), (2,) * len(sizes), frozenset[str](), grads)
    return 0 if own is None else own(LocalBytes(*where, tuple(shapes), tuple(shapes)))


@pytest.mark.parametrize("name", [n for n in UNARY.split() if n not in NO_GRADIENT | NOT_ON_META])
def test_a_function_of_single_elements(name: str) -> None:
    call = getattr(torch, name, None) or getattr(F, name, None) or getattr(torch.special, name.removeprefix("special_"))
    found = used(lambda x: call(x, *ARGUMENTS.get(name, ())), (True,), [(ROWS, COLUMNS)])
    if name in ON_A_GPU:
        assert operator(name).backward_workspace_bytes is None
        return
    masks = ROWS * COLUMNS * (3 if name == "nan_to_num" else 1)  # of a byte for each element; they are left out
    assert abs(found - planned(name, (True,), [(ROWS, COLUMNS)], (ROWS, COLUMNS))) <= masks + 8


FULL, SMALL = (ROWS, COLUMNS), (ROWS, 1)


@pytest.mark.parametrize(
    ("name", "call", "grads", "shapes", "out"),
    [
        ("pow", lambda x: x**3, (True,), [FULL], FULL),
        ("rdiv", lambda x: 1 / x, (True,), [FULL], FULL),
        ("div", torch.div, (True, True), [FULL, FULL], FULL),
        ("div", torch.div, (False, True), [FULL, FULL], FULL),
        ("div", torch.div, (True, False), [FULL, FULL], FULL),
        ("div", torch.div, (True, True), [FULL, SMALL], FULL),
        ("mul", torch.mul, (True, True), [FULL, SMALL], FULL),
        ("normalize", lambda x: F.normalize(x, dim=-1), (True,), [FULL], FULL),
        ("logsumexp", lambda x: x.logsumexp(-1), (True,), [FULL], (ROWS,)),
        ("cumsum", lambda x: x.cumsum(-1), (True,), [FULL], FULL),
        ("prod", lambda x: x.prod(-1), (True,), [FULL], (ROWS,)),
        ("std", lambda x: x.std(-1), (True,), [FULL], (ROWS,)),
        ("norm", lambda x: x.norm(dim=-1), (True,), [FULL], (ROWS,)),
        ("linalg_vector_norm", lambda x: torch.linalg.vector_norm(x, dim=-1), (True,), [FULL], (ROWS,)),
    ],
)
def test_a_formula(
    name: str,
    call: Callable[..., torch.Tensor],
    grads: tuple[bool, ...],
    shapes: list[tuple[int, ...]],
    out: tuple[int, ...],
) -> None:
    found, told = used(call, grads, shapes), planned(name, grads, shapes, out)
    assert abs(found - told) <= 20 * ROWS, (found, told)  # a few numbers for each row
