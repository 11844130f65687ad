"""Generated code beside the graph: its functions are found, and each line leads to the node of its operator."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from explorer.graph import code_lines
from explorer.graph.scene import scene
from explorer.jobs import code as coding
from explorer.jobs import export as exporting
from explorer.jobs.code import Code, functions_of
from planner_core.planning import Request
from tests.support.plans import planned, searched

Q = "self_attn.q_proj/linear"
ROWS: list[tuple[str, str, list[str]]] = [
    ("gather = move()", "", []),
    ("", "", []),
    ("def constants(buffers):", "", []),
    ("    return 1", "", []),
    ("def llama_decoder_layer(w, x):", "LlamaDecoderLayer#2", []),
    ("    q = F.linear(x, w.q_proj_weight)", "LlamaDecoderLayer#2", [Q]),
    ("    del x", "LlamaDecoderLayer#2", []),
    ("", "", []),
    ("def end(w, x):", "", []),
    ("    return F.linear(x, w.lm_head_weight)", "", ["lm_head/linear", "nowhere/mul"]),
]


def test_functions_that_hold_operators_are_found() -> None:
    layer, end = functions_of(ROWS)
    assert (layer.name, layer.block, len(layer.lines)) == ("llama_decoder_layer", "LlamaDecoderLayer", 3)
    assert layer.lines[1].ops == (Q,)
    assert (end.name, end.block) == ("end", "")


def test_a_line_leads_to_the_nodes_of_its_operators() -> None:
    result = planned(Request("llama-3-8b", layers=4))
    found = code_lines.linked(Code(functions_of(ROWS)), scene(result.coarse))
    by_text = {line["text"].strip(): line["nodes"] for line in found["lines"]}
    assert by_text["q = F.linear(x, w.q_proj_weight)"] == [f"LlamaDecoderLayer:{Q}"]
    assert by_text["return F.linear(x, w.lm_head_weight)"] == ["lm_head/linear"], "an op without a node leads nowhere"
    assert by_text["del x"] == []
    assert found["lines"][found["first"]]["text"].startswith("def llama_decoder_layer(")


def test_why_there_is_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = searched(Request("llama-3-8b", layers=4))

    def fails(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(args, 2, "", "a warning\nthe model cannot be built here\n")

    monkeypatch.setattr(exporting.subprocess, "run", fails)
    assert coding.code(plan) == Code((), "the model cannot be built here")
