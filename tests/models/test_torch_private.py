"""What is private in torch is used in two modules, which say why; what else is used is listed here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from planner_core.models.hooks import torch_private

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "planner_core"
HOMES = ("models/hooks/torch_private.py", "runtime/program/torch_private.py")

EVERYWHERE = {
    "_pytree": "torch.utils._pytree, nested arguments: DTensor and torch.export are built on it",
    "_parameters": "of a module: nn.Module's own code assigns weights there, and setattr would register hooks and check types",
    "_buffers": "of a module",
    "_modules": "of a module",
    "_non_persistent_buffers_set": "of a module: state_dict has no other list of them",
    "_local_tensor": "of a DTensor: to_local() is a call that autograd and modes see",
    "_spec": "of a DTensor: mesh, placements and shape as one value",
    "_version": "of a tensor: counts its writes in place; torch's documentation of autograd names it",
    "_schema": "of an operator: its name and arguments; torch's guides to dispatch modes use it",
}
"""Attributes of torch's objects that many modules use, with the reason."""
BY_FILE = {
    ("models/adapters/experts.py", "_apply_gate"): "of transformers' experts, not of torch",
    ("models/adapters/masks.py", "_non_vmap_expansion_sdpa"): "of transformers, not of torch",
    (
        "models/capture/checks/refusals.py",
        "_backward_hooks",
    ): "hooks of a module and of a tensor, which a plan would not run",
    ("models/capture/checks/refusals.py", "_backward_pre_hooks"): "the same",
    ("models/capture/checks/refusals.py", "_post_accumulate_grad_hooks"): "the same",
    ("runtime/record/frozen.py", "_backward_hooks"): "the same",
    ("runtime/record/frozen.py", "_forward_pre_hooks"): "the same",
    ("runtime/record/frozen.py", "_post_accumulate_grad_hooks"): "the same",
    ("runtime/loop/stand_in.py", "_forward_pre_hooks"): "the same",
    ("models/capture/record/fused_kernels.py", "_forward_cls"): "of the node of an autograd function: its class",
    ("models/hooks/module_state.py", "_bit_generator"): "of numpy, not of torch",
    ("models/hooks/wrappers.py", "_BatchNorm"): "the class that all norms over batches share",
    (
        "models/hooks/wrappers.py",
        "_validate_args",
    ): "of a distribution: there is a function that sets it and none that reads it",
    (
        "models/sandbox/lean_torch.py",
        "_compile",
    ): "the file is about this: it spares a child process the import of the compiler",
    ("models/sandbox/lean_torch.py", "_decomp"): "the same",
    ("models/sandbox/lean_torch.py", "_disable_dynamo"): "the same",
    ("models/sandbox/lean_torch.py", "_refs"): "the same",
    (
        "runtime/program/gradients.py",
        "_make_wrapper_subclass",
    ): "torch's guide to subclasses without a storage names no other",
    ("verification/build_models.py", "_apply"): "of a module: what module.to() calls",
    ("verification/fake/pipeline.py", "_PipelineSchedule"): "the base class of all schedules",
    ("verification/fake/pipeline.py", "_inference_mode"): "of a pipeline stage: its shapes are given",
    ("verification/fake/pipeline.py", "_utils"): "of torch.distributed.pipelining, for the mode above",
}
"""Private names that one module uses, with the reason."""
PYTHON = {"_exit", "_fields", "_getframe", "_replace", "_ActionsContainer"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _private_names(tree: ast.Module, defined: set[str]) -> Iterator[str]:
    """Yield private names that a module imports from torch, or reads of objects and that planner_core does not define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
            yield from (part for name in imported for part in name.split(".") if _is_private(part))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            yield from (part for part in parts if _is_private(part))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in defined:
            owner = ast.unparse(node.value)
            # Operators have names of their own, private or not: a plan and a file of torch.export hold them.
            if (
                not re.match(r"(self|cls|super\(.*\)|torch\.ops.*|_ATEN)$", owner.split("[")[0])
                and owner != "torch.ops"
            ):
                yield node.attr


def _defined_names(trees: list[ast.Module]) -> set[str]:
    names: set[str] = set()
    for node in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return names


def _used_private_names() -> set[tuple[str, str]]:
    trees = {
        path.relative_to(CORE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in CORE.rglob("*.py")
    }
    defined = _defined_names(list(trees.values()))
    used = {(file, name) for file, tree in trees.items() if file not in HOMES for name in _private_names(tree, defined)}
    return {(file, name) for file, name in used if name not in PYTHON}


def test_private_names_of_torch_have_one_home() -> None:
    used = _used_private_names()
    strangers = {(file, name) for file, name in used if name not in EVERYWHERE and (file, name) not in BY_FILE}
    assert not strangers, f"move these to {HOMES[0]} or {HOMES[1]}, with the reason: {sorted(strangers)}"
    gone = {place for place in BY_FILE if place not in used}
    gone |= {("", name) for name in EVERYWHERE if name not in {n for _, n in used}}
    assert not gone, f"nobody uses these any more: {sorted(gone)}"


def test_a_new_private_name_is_noticed() -> None:
    tree = ast.parse(
        "import torch._inductor\nfrom torch.utils import _new\nx = t.untyped_storage()._cdata\ntorch.ops.aten._x\n"
    )
    assert sorted(_private_names(tree, set())) == ["_cdata", "_inductor", "_new"]
    assert list(_private_names(ast.parse("plan._mine"), {"_mine"})) == []


@pytest.mark.parametrize("home", HOMES)
def test_every_private_name_says_which_test_fails_without_it(home: str) -> None:
    text = (CORE / home).read_text(encoding="utf-8")
    named = set(re.findall(r"tests/[\w/]+\.py", text))
    assert len(named) > 5 and not [file for file in named if not (ROOT / file).exists()]
    functions = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    missing = [
        n.name for n in functions if "Test: tests/" not in (ast.get_docstring(n) or "") and n.name != "storage_key"
    ]
    assert functions and not missing


def test_a_storage_has_one_number() -> None:
    for device in ("cpu", "meta"):
        x = torch.empty(4, 4, device=device)
        assert (
            torch_private.storage_id(x)
            == torch_private.storage_id(x.t()[1:])
            == torch_private.storage_key(x.untyped_storage())
        )
        assert torch_private.storage_id(x) != torch_private.storage_id(torch.empty(4, 4, device=device))
    sparse = torch.eye(2).to_sparse()
    assert torch_private.storage_id(sparse) == id(sparse)
    inside: list[torch.Tensor] = []

    def look(row: torch.Tensor) -> torch.Tensor:
        inside.append(torch_private.without_transforms(row))
        assert torch_private.storage_id(row) == id(row)
        return row * 2

    whole = torch.ones(3, 2)
    torch.func.vmap(look)(whole)
    assert torch_private.storage_id(inside[0]) == torch_private.storage_id(whole)
