"""Tensors that forward computes from its inputs alone: verification tells them from activations, and a plan notes large ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner_core as shardscope
from planner_core.core import graph_from_json, graph_to_json
from planner_core.models import capture_graph, load_model

VIDEO = {
    "model_type": "videomae",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "num_frames": 4,
    "decoder_num_hidden_layers": 1,
    "decoder_hidden_size": 16,
    "decoder_num_attention_heads": 4,
    "decoder_intermediate_size": 32,
}


def test_labels_made_of_frames_are_not_taken_for_activations() -> None:
    """The frames of 16 videos are 786 432 bytes in float32; VideoMAE makes several tensors of them before its first operator."""
    graph = load_model(VIDEO, batch=16, dtype="float32")  # as many tokens as the model makes, which is no 2 048
    plan = shardscope.plan(graph, cluster="1x8-h100:gpus=2").best
    report = shardscope.verify(plan)
    memory = report["memory_bytes"]
    assert report["ok"] and memory["rel_error"] < 1e-3
    assert memory["constants"] > 4 * 786_432


def test_a_target_made_of_frames_is_priced_where_the_loss_keeps_it() -> None:
    """Of each of 16 videos 7 of 8 patches of 1 536 numbers are predicted, and `mse_loss` keeps both sides: 688 128 bytes in float32."""
    graph = load_model(VIDEO, batch=16, dtype="float32")
    plain = tuple(replace(v, computed=False) for v in graph.top.values)
    peaks = [
        shardscope.plan(g, cluster="1x8-h100:gpus=1").best.cost.memory_bytes["peak"]
        for g in (graph, replace(graph, top=replace(graph.top, values=plain)))
    ]
    assert peaks[0] - peaks[1] == 16 * 7 * 1536 * 4
    assert graph_from_json(graph_to_json(graph)).top.values == graph.top.values


@pytest.mark.parametrize(("side", "noted"), [(32, False), (256, True)])
def test_a_plan_notes_large_constants(side: int, noted: bool) -> None:
    graph = capture_graph({**VIDEO, "image_size": side}, batch=16, dtype="float32")
    assert any("from its inputs alone" in note for note in graph.assumptions) is noted
