"""One description for each operator: complete, without two meanings of a name, and agreeing with what stands beside torch."""

from __future__ import annotations

import inspect
import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from planner_core.core import Op, TensorMeta, Value
from planner_core.models.exported import aten
from planner_core.models.hooks import DROPOUTS, callsites
from planner_core.ops import (
    Kind,
    LocalExecution,
    Operator,
    is_heavy,
    known_functions,
    operator,
    rows,
    rules,
    writes_in_place,
)
from planner_core.ops.catalog import OPERATORS
from planner_core.ops.operators import FLOPS_BOUND_KINDS
from planner_core.ops.registry import operators_by_name
from planner_core.ops.rules import unknown
from planner_core.runtime.write import operators
from tests.support.operators.cases import t
from tests.support.operators.every_case import EVERY, mark_repetitions
from tests.support.operators.judge import LOCAL, Case, all_rows, even, judge
from tests.support.operators.local_judge import judge_local

# --- one entry ---------------------------------------------------------------------------------------------


def test_a_name_has_one_meaning() -> None:
    again = Operator(name="squash", kind=Kind.ELEMENTWISE, rule=unknown, spellings=("relu",))
    with pytest.raises(ValueError, match="'relu' is claimed by relu and by squash"):
        operators_by_name((*OPERATORS, again))


@pytest.mark.parametrize("kind", sorted(FLOPS_BOUND_KINDS))
def test_a_product_without_flops_cannot_be_made(kind: Kind) -> None:
    with pytest.raises(ValueError, match=f"squash is of kind {kind} and says no kernels"):
        Operator(name="squash", kind=kind, rule=unknown)


def test_what_nobody_described_runs_whole_and_is_not_known() -> None:
    values = (Value(TensorMeta((4, 8), "float32"), "activation", grad=True),) * 2
    op = Op("m/squash_", "squash_", (0,), (1,), {})
    assert not operator("squash_").is_known and [r.name for r in rows(op, values)] == ["R"]
    assert not is_heavy(op) and operator("squash_").plain_title == "squash"


def test_an_operator_is_found_by_every_spelling() -> None:
    for one in OPERATORS:
        for name in (one.name, *one.spellings):
            assert operator(name) is one and operator(name.rstrip("_") + "_").is_known
    assert operator("add_") is operator("radd") is operator("add") and operator("concat").name == "cat"
    assert operator("mul_").plain_title == "multiply" and operator("layer_norm").plain_title == "layer norm"


# --- what stands beside torch ----------------------------------------------------------------------------


def test_operators_of_python_are_recognised() -> None:
    names = {
        method: callsites.canonical_name(getattr(torch.Tensor, method))
        for method in ("__iand__", "__and__", "__imod__", "__ifloordiv__", "__itruediv__", "__radd__", "__invert__")
    }
    assert names == {
        "__iand__": "bitwise_and_",
        "__and__": "bitwise_and",
        "__imod__": "remainder_",
        "__ifloordiv__": "floor_divide_",
        "__itruediv__": "div_",
        "__radd__": "add",
        "__invert__": "bitwise_not",
    }
    # A number is made of the tensor, and no operator.
    assert callsites.canonical_name(torch.Tensor.__index__) is None


def test_torchs_functions_are_recognised() -> None:
    """A function of torch that an operator names has the operator's name to a running model."""
    seen = 0
    for one in OPERATORS:
        for name in (one.name, *one.spellings):
            for owner in (torch.Tensor, torch, F, torch.fft, torch.linalg):
                func = getattr(owner, name.removeprefix("fft_").removeprefix("linalg_"), None)
                if name.startswith(("fft_", "linalg_")) != (owner in (torch.fft, torch.linalg)):
                    continue
                if not callable(func) or inspect.isclass(func) or isinstance(func, torch.dtype):
                    continue
                fn = callsites.canonical_name(func)
                wanted = name if name in callsites._ATEN_ARGUMENTS else one.name
                assert fn in (None, wanted), (owner, name, fn)
                seen += fn is not None
    assert seen > 300


def test_dropout_is_known_by_the_same_names() -> None:
    random_ones = {n for one in OPERATORS if one.kind is Kind.RANDOM for n in (one.name, *one.spellings)}
    assert {name.rstrip("_") for name in DROPOUTS} == random_ones


def test_a_function_that_writes_in_place_is_known_by_its_name() -> None:
    names = ("add_", "setitem", "__x__", "__iadd__", "add", "index_put_", "relu_")
    assert [name for name in names if writes_in_place(name)] == ["add_", "setitem", "index_put_", "relu_"]


def test_aten_calls_become_operators() -> None:
    """What the reader of exported programs spells anew is a spelling of an operator."""
    assert {name for name in aten._SPELLINGS if not operator(name).is_known} == set()


def test_argument_names_are_torchs() -> None:
    """In the order of the Python function's signature, or of some overload of the ATen op."""
    wrong = []
    for one in OPERATORS:
        own = one.arguments.split()
        orders = [*_signature(one.name), *_overloads(one.name)]
        if own and orders and not any(_fits(own, order) for order in orders):
            wrong.append((one.name, own, orders))
    assert wrong == []


def _signature(name: str) -> list[list[str]]:
    func = getattr(F, name, None)
    if not inspect.isfunction(func):
        return []
    return [[p.name for p in inspect.signature(func).parameters.values() if p.kind is not p.VAR_KEYWORD]]


def _overloads(name: str) -> list[list[str]]:
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, n) for n in packet.overloads()] if packet else []
    return [[a.name.replace("self", "input") for a in o._schema.arguments] for o in overloads]


def _fits(own: list[str], order: list[str]) -> bool:
    """Where torch names its first operands otherwise, theirs are as good."""
    same = [n for n in own if n in order]
    return [order.index(n) for n in same] == [own.index(n) for n in same] and bool(same)


# --- on one GPU's part -------------------------------------------------------------------------------------

OWN_FORM = [c for c in EVERY if operator(c.fn).local_execution is not LocalExecution.AS_IT_IS]


def test_every_operator_runs_as_itself_or_has_a_local_form() -> None:
    """The runtime's local forms and the judge's are those of the operators that say they need one."""
    needs = {one.name for one in OPERATORS if one.local_execution is not LocalExecution.AS_IT_IS}
    assert needs - {"to"} <= {operator(fn).name for fn in operators._RULES}
    assert set(operators._RULES) <= known_functions()  # by the name that a running model's calls have
    same_numbers = {one.name for one in OPERATORS if one.local_execution is LocalExecution.MEMORY}
    assert {operator(fn).name for fn in LOCAL} == needs - same_numbers
    assert {operator(c.fn).name for c in OWN_FORM} == needs  # and below each is judged


@pytest.mark.parametrize("case", mark_repetitions(keep=tuple(OWN_FORM)), ids=str)
def test_the_runtime_computes_every_row(case: Case) -> None:
    op, values = case.op()
    for row in all_rows(case):
        if even(op, values, (row,), (2,)):
            assert judge_local(case, (row,), (2,)) == "", f"{case} by row {row.name}"


@pytest.mark.parametrize("case", OWN_FORM, ids=str)
def test_a_local_form_computes_rows_on_two_axes(case: Case) -> None:
    op, values = case.op()
    pairs = list(itertools.product(all_rows(case), repeat=2))
    for chosen in random.Random(1).sample(pairs, min(len(pairs), 12)):
        if even(op, values, chosen, (2, 2)):
            assert judge_local(case, chosen, (2, 2)) == "", f"{case} by rows {[r.name for r in chosen]}"


def test_the_judge_of_local_forms_sees_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken on purpose: without its local form each of these computes something else, or nothing."""
    named = {str(c): c for c in EVERY}
    for name, label in (
        ("embedding", "vocab"),
        ("mean (1,)", "d1"),
        ("cross_entropy", "tokens"),
        ("moe_experts", "experts"),
    ):
        case = named[name]
        monkeypatch.setitem(operators._RULES, case.fn, operators.LocalCall.unchanged)
        row = next(r for r in all_rows(case) if r.name == label)
        try:
            said = judge_local(case, (row,), (2,))
        except (RuntimeError, IndexError) as error:
            said = str(error)
        assert said, f"{name} runs as itself by row {label}"


def test_the_example_of_the_walk_through_is_right() -> None:
    """The operator that docs/OPERATORS.md describes, judged as any other."""
    text = (Path(__file__).parents[2] / "docs" / "OPERATORS.md").read_text(encoding="utf-8")
    code = "".join(f"{line[4:]}\n" for line in text.splitlines() if line.startswith("    ") or not line)
    names: dict[str, Any] = {**vars(rules), "Op": Op, "Operator": Operator, "Kind": Kind}
    exec(code, names)
    for dim in (0, 1, -1):
        case = Case("cosine_similarity", F.cosine_similarity, (t(4, 8, 6), t(4, 8, 6)), {"dim": dim}, "aa")
        op, values = case.op()
        op = replace(op, attrs={"dim": dim % 3})
        shapes = [[values[i].meta.shape for i in ids] for ids in (op.inputs, op.outputs)]
        found = rules.expand_rule(names["_cosine"](op, *shapes), op, values, summed_later=True)
        assert len(found) == 4 and {judge(case, (row,), (2,)) for row in found} == {""}
