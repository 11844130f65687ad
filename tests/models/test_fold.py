import pytest

from planner_core.models.fold import (
    WeightNode,
    fold_steps,
    list_weight_nodes,
    shared_subgraphs,
    why_not_folded,
)
from planner_core.models.zoo import ZOO, load_snapshot


def nodes(*paths, shape=(4, 4)):
    return [WeightNode(p, "linear", (shape,)) for p in paths]


def result(names):
    return {g.pattern: g.count for g in shared_subgraphs(fold_steps(names))}


@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        ("llama-3-8b", {"model.layers.*": 32}),
        ("gpt2-xl", {"transformer.h.*": 48}),
        ("t5-large", {"encoder.block.*": 24, "decoder.block.*": 24}),
        ("mixtral-8x7b", {"model.layers.*": 32}),
        ("resnet50-100k", {f"resnet.encoder.stages.{i}.layers.*": n for i, n in enumerate((2, 3, 5, 2))}),
    ],
)
def test_zoo(name, patterns):
    assert result(list_weight_nodes(load_snapshot(name))) == patterns


@pytest.mark.parametrize("name", ZOO)
def test_names_and_capture_agree(name):
    graph = load_snapshot(name)
    assert sorted(result(list_weight_nodes(graph)).values()) == sorted(graph.num_repeats.values())


def test_prefixes_are_compared_by_component():
    assert result(nodes("m.layer_1.a", "m.layer_1.b", "m.layer_10.a", "m.layer_10.b")) == {"m.*": 2}


def test_block_zero_counts():
    assert result(nodes("h.0.a", "h.1.a", "h.2.a")) == {"h.*": 3}


def test_same_types_with_other_shapes_are_not_similar():
    wide = nodes("h.0.a", "h.0.b") + nodes("h.1.a", "h.1.b", shape=(8, 4))
    groups = fold_steps(wide)[1].groups
    assert [g.count for g in groups] == [1, 1]
    assert groups[0].reason == "a is linear 4x4, in h.1 linear 8x4"


def test_failure_at_the_deepest_level_goes_on():
    odd = nodes("h.0.a.deep.only", "h.0.b", "h.1.a.deep.other", "h.1.b", "g.0.x", "g.1.x")
    steps = fold_steps(odd)
    assert not steps[0].kept and "g.*" in {g.pattern for g in shared_subgraphs(steps)}


def test_it_stops_after_the_last_level_that_repeats():
    steps = fold_steps(list_weight_nodes(load_snapshot("llama-3-8b")))
    assert [s.depth for s in steps] == [5, 4, 3, 2] and steps[-1].stopped and not steps[-1].kept


def test_every_group_has_a_reason_and_nodes_are_counted():
    names = list_weight_nodes(load_snapshot("bert-large"))
    for step in fold_steps(names):
        assert all(g.reason for g in step.groups)
        deep = [n for n in names if len(n.path.split(".")) >= step.depth]
        assert sum(g.count * g.similar for g in step.groups) == len(deep)


def test_nothing_repeats():
    assert result(nodes("a.b.c", "d.e")) == {} and fold_steps([]) == ()


def test_why_not_folded():
    t5 = load_snapshot("t5-large", layers=3)
    assert why_not_folded(t5, "encoder.block.1", "encoder.block.2") == []
    first = why_not_folded(t5, "encoder.block.0", "encoder.block.1")
    assert any("relative_attention_bias" in reason for reason in first) and len(first) == 3
    assert len(why_not_folded(t5, "encoder.block.1", "decoder.block.1", limit=4)) == 5
    assert why_not_folded(t5, "encoder.block.9", "encoder.block.1") == ["encoder.block.9 does nothing in this graph"]
