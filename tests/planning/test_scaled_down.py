"""A plan on a smaller model of the same architecture: which layer of the plan stands for which layer of the small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner_core.core import InputError, Shard, load_cluster
from planner_core.models import capture_graph, load_plan_graph
from planner_core.models.sources import with_defaults
from planner_core.planning.derived.scaled_down import _other_layers
from planner_core.planning.derived.small_config import shrink_config, shrunk_configs
from planner_core.planning.methods import parse_layout
from planner_core.planning.pricing import Pricer, Statement
from planner_core.planning.request import Request
from planner_core.verification import api
from planner_core.verification.api import scaled
from planner_core.verification.fake.group import verify_fake
from planner_core.verification.numerics import verify_all
from planner_core.verification.static import check_rules
from tests.support.plans import planned, search_alone

MIXED = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 1024,
}


def test_a_list_is_cut_also_where_its_last_layer_stays() -> None:
    small = shrink_config(MIXED)
    assert small["num_hidden_layers"] == 2 and small["layer_types"] == ["linear_attention", "full_attention"]


def test_a_model_of_two_kinds_of_layers_runs_as_planned(tmp_path: Path) -> None:
    """The small model's second layer is the plan's fourth. Its scan returns a tensor and None, and a convolution gets a view of its weight."""
    (tmp_path / "config.json").write_text(json.dumps(MIXED))
    plan = search_alone(Request(str(tmp_path), cluster="1x4-a100-pcie", batch=8, seq=64))
    report = verify_fake(plan, graph=load_plan_graph(plan))
    assert report["ok"] and report["order"]["ok"], report
    (numbers,) = verify_all([scaled(plan, 2)])
    assert numbers["ok"], numbers["grad"]


def test_sizes_that_a_config_leaves_to_its_model_type_are_small_too() -> None:
    assert shrink_config({"model_type": "llama"}) == {"model_type": "llama"}
    small = shrink_config(with_defaults({"model_type": "llama", "num_hidden_layers": 3}))
    assert (small["num_hidden_layers"], small["hidden_size"], small["vocab_size"]) == (2, 64, 256)
    parts = with_defaults({"model_type": "clip", "text_config": {"hidden_size": 256}})
    assert parts["text_config"]["hidden_size"] == 256 and parts["text_config"]["num_hidden_layers"] == 12
    assert shrink_config(parts)["vision_config"]["hidden_size"] == 64
    assert "id2label" not in parts["vision_config"]
    assert with_defaults({"model_type": "unheard_of"}) == {"model_type": "unheard_of"}


def test_a_staged_backbone_gives_the_features_that_its_head_asks_for() -> None:
    asked = {"out_features": ["stage2", "stage4"], "out_indices": [2, 4], "stage_names": ["stem"]}
    staged = shrink_config({"backbone_config": {"depths": [3, 4, 6, 3], **asked}})["backbone_config"]
    assert staged == {"depths": [2, 2, 2, 2], "out_features": ["stage2", "stage4"], "out_indices": [2, 4]}
    assert shrink_config({"backbone_config": {"num_hidden_layers": 12, **asked}})["backbone_config"] == {
        "num_hidden_layers": 2
    }


def test_a_plan_of_a_config_without_sizes_is_scaled_down(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    plan = search_alone(Request(str(tmp_path), cluster="1x4-a100-pcie", batch=8, seq=64, layers=2))
    assert scaled(plan, 2).model.params < 1_000_000


@pytest.mark.parametrize("kind", ["zamba2", "efficientnet", "xlstm"])
def test_sizes_that_depend_on_each_other_stay_consistent(kind: str) -> None:
    small = shrink_config(with_defaults({"model_type": kind}))
    assert capture_graph(small, batch=2, seq=32, dtype="float32").num_params < 1_000_000


def test_a_weight_that_is_cut_elsewhere_when_small_is_scaled_down(tmp_path: Path) -> None:
    """A table of 49 rows for 3 heads has no equal parts on 8 GPUs; the small one, for 2 heads, has two along its other dim."""
    sizes = {
        "depths": [1, 1],
        "num_heads": [3, 6],
        "embed_dim": 48,
        "image_size": 64,
        "window_size": 4,
        "num_labels": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "swin", **sizes}))
    found = planned(Request(str(tmp_path), cluster="1x8-h100"), "baselines")
    (plan,) = (p for p in found.plans if p.name == "FSDP")
    stored = [
        {name: param.stored for block in p.blocks.values() for name, param in block.params.items()}
        for p in (plan, scaled(plan, 2))
    ]
    tables = [name for name in stored[0] if name.endswith("bias_table")]
    assert tables and all(stored[0][name] == (Shard(0),) and stored[1][name] == (Shard(1),) for name in tables)


def test_windows_stay_shorter_than_samples(tmp_path: Path) -> None:
    """Two layers see all tokens before theirs, two a window of 40. These have a mask as a further operand, also when they are small."""
    config = {
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 40,
        "layer_types": [*["full_attention"] * 2, *["sliding_attention"] * 2],
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 512,
        "vocab_size": 1024,
    }
    windows = [next(shrunk_configs(config, seq=seq))["sliding_window"] for seq in (0, 40, 64)]
    assert windows == [40, 40, 16]
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = search_alone(Request(str(tmp_path), cluster="1x4-a100-pcie", batch=8, seq=64))
    small = scaled(plan, 2)
    assert small.model.config["layer_types"] == ["full_attention", "sliding_attention"]
    (numbers,) = verify_all([small])
    assert numbers["ok"], numbers["grad"]


def test_groups_of_heads_divide_the_heads_of_each_small_form() -> None:
    """The form of four heads kept eight groups, and Mamba-2 shares each group's B and C among its heads."""
    sizes = {"hidden_size": 64, "expand": 2, "state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 8}
    forms = [(small["num_heads"], small["n_groups"]) for small in shrunk_configs({"model_type": "mamba2", **sizes})]
    assert forms == [(8, 8), (4, 4), (8, 8)]


def test_a_layer_is_matched_by_operands_and_gradients() -> None:
    split, none = (True,), (False,)
    plan = [
        ("layers.1.attn/sdpa", (3, split)),
        ("layers.1.gate/linear", (2, split)),
        ("layers.4.attn/sdpa", (4, split)),
        ("layers.4.gate/linear", (2, split)),
        ("layers.9.attn/sdpa", (4, split)),
        ("layers.9.gate/linear", (2, none)),
    ]
    assert _other_layers([("layers.1.attn/sdpa", (4, split)), ("layers.1.gate/linear", (2, split))], plan) == {
        "layers.1": "layers.4"
    }
    assert _other_layers([("layers.1.attn/sdpa", (3, split))], plan) == {}
    assert _other_layers([("layers.1.gate/linear", (2, none))], plan) == {"layers.1": "layers.9"}
    assert _other_layers([("layers.1.attn/sdpa", (2, split))], plan) == {}  # no layer has it: its own number says why


def test_too_few_ranks_for_a_plan_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one sample a rank, samples and tokens may be merged where tokens are split. Four ranks leave one to the samples' axis."""
    # The smallest form alone: every other fails in the same way, and each is captured at ten sizes of the batch.
    monkeypatch.setattr(api, "_small_configs", lambda config, seq, layers: [next(shrunk_configs(config, layers, seq))])
    pricer = Pricer("bert-large", load_cluster("2x8-h100"))
    plan = pricer.plan(Statement(parse_layout("fsdp=4,cp=2,tp=2"), layers=2, seq=512))
    assert plan is not None
    with pytest.raises(InputError, match=r"cannot be scaled to 4 ranks .* use ranks=8"):
        scaled(plan, 4)
    small = scaled(plan, 8)
    assert not check_rules(small, load_plan_graph(small))
