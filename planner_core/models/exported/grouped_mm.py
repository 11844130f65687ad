"""Expert layers of an exported program: the steps of one call of an experts module become the one op that capture records.

An experts module of transformers has a stack of weights for each projection, [experts, out, in]. Its inputs are tokens, the experts
chosen for each token, and their weights. Its steps (grouped matmuls over sorted tokens) are not read: these inputs decide the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from planner_core.models.adapters import experts as moe
from planner_core.models.exported.archive import ExportedOp, ExportedProgram, ValueName


def run_experts(
    exported: ExportedProgram, steps: list[ExportedOp], end: int, module: nn.Module, env: dict[str, Any]
) -> tuple[str, torch.Tensor] | None:
    """Run a module call of `steps`, the program's before number `end`, as one op of experts.

    Returns the name and value of its result; None if it is not a call of experts.
    """
    tables = {n: p for n, p in module._parameters.items() if p is not None}
    gated = "gate_up_proj" in tables
    up, down = tables.get("gate_up_proj" if gated else "up_proj"), tables.get("down_proj")
    known = {"gate_up_proj" if gated else "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"}
    if up is None or down is None or up.dim() != 3 or down.dim() != 3 or not set(tables) <= known:
        return None
    made = {r.name for s in steps for r in find_references(s.outputs)}
    taken = dict.fromkeys(r.name for s in steps for r in find_references([a for *_, a in s.args]) if r.name not in made)
    given = [env[n] for n in taken if isinstance(env.get(n), torch.Tensor) and not isinstance(env[n], nn.Parameter)]
    later = {r.name for s in exported.steps[end:] for r in find_references([a for *_, a in s.args])} | {
        r.name for r in find_references(exported.outputs)
    }
    results = [n for n in dict.fromkeys(r.name for s in steps for r in find_references(s.outputs)) if n in later]
    chosen = [t for t in given if t.dim() == 2 and not t.is_floating_point()]
    weights = [t for t in given if chosen and t.is_floating_point() and t.shape == chosen[0].shape]
    tokens = [t for t in given if t.is_floating_point() and t.dim() == 2 and not any(t is w for w in weights)]
    if not len(chosen) == len(weights) == len(tokens) == len(results) == 1 or len(given) != 3:
        return None
    width = tokens[0].shape[-1]
    transposed = not (up.shape[-1] == width == down.shape[-2])
    if exported.tensors[results[0]].shape != tokens[0].shape:
        return None
    act = next(
        (
            s.target.split(".")[3]
            for s in steps
            if s.target.split(".")[-2:-1] and s.target.split(".")[-2] in _ACTIVATIONS
        ),
        "",
    )
    out = moe.moe_experts(
        tokens[0],
        chosen[0],
        weights[0],
        up,
        down,
        tables.get("gate_up_proj_bias" if gated else "up_proj_bias"),
        tables.get("down_proj_bias"),
        apply_gate=_apply_gate,
        act=_ACTIVATIONS.get(act, ""),
        gated=gated,
        transposed=transposed,
    )
    return results[0], out


_ACTIVATIONS = {
    "silu": "SiLUActivation",
    "gelu": "GELUActivation",
    "relu": "ReLU",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
}


def _apply_gate(both: torch.Tensor) -> torch.Tensor:
    """Stand for the program's gate, which never runs: on meta only shapes matter."""
    raise NotImplementedError("an exported program's experts have no code of their own")


def find_references(tree: Any) -> list[ValueName]:
    """List all references in nested lists and tuples, in order."""
    if isinstance(tree, ValueName):
        return [tree]
    return [r for t in tree for r in find_references(t)] if isinstance(tree, (list, tuple)) else []
