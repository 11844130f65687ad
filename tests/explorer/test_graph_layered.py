"""The drawing: every edge points down, boxes do not overlap, lanes run beside, equal input gives an equal drawing."""

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.graph import scene_json as graph_json
from explorer.graph.layered import Box, assign_ranks, layout_graph
from explorer.graph.loads import node_loads, to_json
from explorer.graph.pyvis_page import folded_page
from explorer.graph.scene import Scene, build_scene, node_choices
from planner_core.core.graph import TensorMeta
from planner_core.cost.compute.roofline import op_work
from planner_core.cost.memory.peak import block_memories
from planner_core.cost.model import cost_model_of
from planner_core.cost.resolved_ops import split_parts
from planner_core.cost.step import block_of
from planner_core.models.zoo import ZOO, load_snapshot
from planner_core.ops.grouping import coarsen
from planner_core.planning.request import Request
from tests.support.plans import planned


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Box], list[tuple[str, str]]]:
    n = draw(st.integers(1, 25))
    boxes = [Box(f"n{i}", draw(st.sampled_from([60.0, 120.0, 200.0])), 34.0) for i in range(n)]
    pairs = draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=2 * n))
    return boxes, list(dict.fromkeys((f"n{a}", f"n{b}") for a, b in pairs if a < b))


@given(graphs())
def test_edges_point_down_and_boxes_stand_apart(graph: tuple[list[Box], list[tuple[str, str]]]) -> None:
    boxes, edges = graph
    drawn = layout_graph(boxes, edges)
    for src, dst in edges:
        assert drawn.centres[src][1] < drawn.centres[dst][1]
    size = {b.id: b for b in boxes}
    for a in boxes:
        for b in boxes:
            (ax, ay), (bx, by) = drawn.centres[a.id], drawn.centres[b.id]
            if a.id < b.id and abs(ay - by) < 1:
                assert abs(ax - bx) >= (size[a.id].width + size[b.id].width) / 2 - 0.2


@given(graphs())
def test_routes_join_their_boxes_and_stay_inside(graph: tuple[list[Box], list[tuple[str, str]]]) -> None:
    boxes, edges = graph
    drawn = layout_graph(boxes, edges)
    size = {b.id: b for b in boxes}
    for (src, dst), route in zip(edges, drawn.routes, strict=True):
        for name, (x, y) in ((src, route[0]), (dst, route[-1])):
            cx, cy = drawn.centres[name]
            assert abs(x - cx) <= size[name].width / 2 + 0.2
            assert abs(y - cy) <= size[name].height / 2 + 0.2
        assert all(-0.2 <= x <= drawn.width + 0.2 for x, _ in route)
        assert all(a[1] <= b[1] + 0.2 for a, b in pairwise(route))


def test_equal_input_gives_an_equal_drawing() -> None:
    boxes = [Box(f"n{i}", 100, 34) for i in range(40)]
    edges = [(f"n{random.Random(i).randrange(i)}", f"n{i}") for i in range(1, 40)]
    assert layout_graph(boxes, edges) == layout_graph(boxes, edges)


def test_an_edge_that_points_up_is_refused() -> None:
    with pytest.raises(ValueError, match="points up"):
        assign_ranks(["a", "b"], [("b", "a")])


def test_three_thousand_nodes_are_laid_out_downwards() -> None:
    """How fast: `bench/pages`."""
    pick = random.Random(1)
    boxes = [Box(f"n{i}", 100, 34) for i in range(3000)]
    edges = [(f"n{max(0, i - pick.randrange(1, 6))}", f"n{i}") for i in range(1, 3000)]
    centres = layout_graph(boxes, edges).centres
    assert all(centres[a][1] < centres[b][1] for a, b in edges)


def drawing(model: str) -> Scene:
    return build_scene(coarsen(load_snapshot(model)))


@pytest.mark.parametrize("model", ZOO)
def test_every_model_of_the_zoo_is_drawn(model: str) -> None:
    graph = load_snapshot(model)
    drawn = build_scene(coarsen(graph))
    assert set(drawn.scopes) == {"", *graph.blocks}
    ids = [p.node.id for s in drawn.scopes.values() for p in s.nodes]
    assert len(ids) == len(set(ids))
    for scope in drawn.scopes.values():
        assert all(0 <= p.x <= scope.width and 0 <= p.y <= scope.height for p in scope.nodes)
        linked = {w.src for w in scope.wires} | {w.dst for w in scope.wires}
        assert len(scope.nodes) == 1 or all(p.node.id in linked for p in scope.nodes)


@pytest.mark.parametrize("model", ZOO)
def test_a_drawing_holds_every_operation_and_copy_once(model: str) -> None:
    graph = load_snapshot(model)
    drawn = build_scene(coarsen(graph))
    for name, block in {"": graph.top, **graph.blocks}.items():
        ops = [op.name for p in drawn.scopes[name].nodes for op in p.node.ops]
        assert sorted(ops) == sorted(op.name for op in block.ops)
    assert sum(len(r.calls) for r in drawn.runs) == sum(graph.num_repeats.values())


def test_residuals_of_a_decoder_run_in_lanes() -> None:
    scope = drawing("llama-3-8b").scopes["LlamaDecoderLayer"]
    joins = [w for w in scope.wires if len(w.points) == 4 and w.points[0][1] == w.points[1][1]]
    assert len(joins) == 2


def test_a_node_tells_its_shapes_work_and_choices() -> None:
    coarse = coarsen(load_snapshot("llama-3-8b", batch=2, seq=64))
    node = build_scene(coarse).node("LlamaDecoderLayer:self_attn.q_proj/linear")
    assert node is not None
    assert node.weights == (("self_attn.q_proj.weight", TensorMeta((4096, 4096), "bfloat16")),)
    assert node.flops == 2 * 2 * 64 * 4096 * 4096
    assert node.num_params == 4096 * 4096
    names = [c[0] for c in node_choices(node, coarse)]
    assert names == ["replicate", "split batch", "split tokens", "split output features", "split input features"]


def test_the_component_gets_plain_data_of_modest_size() -> None:
    for model in ZOO:
        text = json.dumps(graph_json.to_json(drawing(model)))
        assert len(text) < 200_000


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.slow
def test_memory_and_work_of_the_nodes_add_up_to_one_gpu(recompute: str) -> None:
    found = planned(Request("llama-3-8b", recompute=recompute, layers=4))
    drawn = build_scene(found.coarse)
    for plan in found.plans:
        nodes = node_loads(plan, drawn, found.graph)
        assert set(nodes) == {p.node.id for s in drawn.scopes.values() for p in s.nodes if p.node.kind != "port"}
        top = [nodes[p.node.id] for p in drawn.scopes[""].nodes]
        made = block_memories(plan.blocks, found.graph, cost_model_of(plan))[""]
        kept = sum(map(made.saved_bytes, range(len(found.graph.top.items))))
        weights = plan.cost.memory_bytes["params"] - found.graph.buffer_bytes  # no node has a buffer
        assert sum(memory for memory, _ in top) == weights + kept
        work = sum(
            len(bp.prefixes)
            * op_work(op, block.values).flops
            / split_parts(block, op, bp.sites[op.name], cost_model_of(plan))
            for label, bp in plan.blocks.items()
            for block in [block_of(found.graph, label)]
            for op in block.ops
        )
        assert sum(flops for _, flops in top) == pytest.approx(work)
        for shown in to_json(nodes).values():
            assert all(0 <= shade <= 1 for _, shade in shown["nodes"].values())
            assert max(shade for node, (_, shade) in shown["nodes"].items() if ":" not in node[:4]) == 1


@pytest.mark.parametrize("model", ["llama-3-8b", "t5-large", "resnet50-100k"])
def test_stand_alone_page_asks_no_other_host(model: str) -> None:
    page = folded_page(coarsen(load_snapshot(model)), "<script>alert(1)</script>")
    head = page[: page.index("<body")] if "<body" in page else page
    assert "cdn.jsdelivr" not in page
    assert "cdnjs.cloudflare.com/ajax" not in head or 'src="https://cdnjs' not in page
    assert 'src="http' not in page
    assert 'href="http' not in page
    assert "<title>&lt;script&gt;" in page
    assert '"enabled": false' in page
