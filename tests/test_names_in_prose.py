"""Docstrings and comments call things by the names that they have: every name in backticks is somewhere in the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = ("planner_core", "explorer", "bench", "tests")
NAME = re.compile(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`")
ELSEWHERE = {
    "_multi_tensor_adamw": "torch",
    "_scaled_dot_product_attention_math": "torch",
    "_single_tensor_adamw": "torch",
    "ban_recompute_materialized_backward": "torch",
    "gradient_accumulation_fusion": "Megatron-LM",
    "lambda_init": "DiffLlama in transformers",
    "min_cut_rematerialization_partition": "torch",
    "name.overload": "a pattern",
    "numpy.ma": "numpy",
    "partitioners": "torch",
    "quant_storage": "bitsandbytes",
    "rank0.json": "a file",
    "sdp_utils.cpp": "torch",
    "self_attn_q_proj": "an example",
}
"""Names of other projects and examples, with where they are."""


def _names_in(tree: ast.Module) -> set[str]:
    """Return the names that code defines or uses: identifiers, parts of imports, and words of short strings (keys, modes)."""
    names: set[str] = set()
    for node in ast.walk(tree):
        names |= {v for a in ("name", "attr", "id", "arg") if isinstance(v := getattr(node, a, None), str)}
        if isinstance(node, ast.alias):
            names |= {*node.name.split(".")}
        elif isinstance(node, ast.ImportFrom):
            names |= {*(node.module or "").split(".")}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 80:
            names |= {*re.findall(r"\w+", node.value)}
    return names


def _unknown_names(text: str, known: set[str]) -> list[str]:
    mentioned = {name for line in text.splitlines() for name in NAME.findall(line)}
    mentioned = {name for name in mentioned if not any(name.endswith(known_name) for known_name in ELSEWHERE)}
    return sorted(name for name in mentioned if not {*name.split(".")} <= known)


def test_every_name_in_backticks_is_somewhere_in_the_code() -> None:
    texts = {path: path.read_text(encoding="utf-8") for folder in CODE for path in (ROOT / folder).rglob("*.py")}
    known = {part for path in texts for part in path.relative_to(ROOT).with_suffix("").parts}
    known |= {name for path, text in texts.items() if path != Path(__file__) for name in _names_in(ast.parse(text))}
    core = {path: text for path, text in texts.items() if "planner_core" in path.parts}
    gone = {str(path.relative_to(ROOT)): names for path, text in core.items() if (names := _unknown_names(text, known))}
    assert not gone, f"these names are nowhere in the code: {gone}"
    mentioned = {name for text in core.values() for name in NAME.findall(text)}
    assert all(any(name.endswith(other) for name in mentioned) for other in ELSEWHERE)


def test_a_name_that_is_gone_is_noticed() -> None:
    known = _names_in(ast.parse("def price(plan): return plan.cost\nMODE = 'a mode'"))
    assert _unknown_names('"""See `price(plan)`, `plan.cost`, `mode`, and `forward_moments`."""', known) == [
        "forward_moments"
    ]
