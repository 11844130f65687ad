"""Inputs of transformers' models are made as the library's own documentation makes them."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.utils.parametrize import ParametrizationList

from planner_core.core import CaptureError, InputError, Op, Workload
from planner_core.models.loading import capture_graph
from planner_core.models.sources import build_from_config, make_training_inputs
from planner_core.verification.build_models import build_whole_model, make_example_inputs
from tests.support import tiny_models

TEXT = {**tiny_models.TEXT, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32}
IMAGE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32}
HEARD = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
MODELS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "blip": (
        {"text_config": TEXT, "vision_config": {**IMAGE, "patch_size": 16}},
        {"input_ids": (2, 16), "labels": (2, 16), "pixel_values": (2, 3, 32, 32)},
    ),
    "videoprism_vision_model": (
        {**IMAGE, "tubelet_size": [1, 16, 16], "num_frames": 4},
        {"pixel_values_videos": (2, 4, 3, 32, 32)},
    ),
    "parakeet_ctc": (
        {"vocab_size": 64, "pad_token_id": 63, "encoder_config": {**HEARD, "num_mel_bins": 16}},
        {"input_features": (2, 128, 16)},
    ),
    "lasr_ctc": (
        {"vocab_size": 64, "pad_token_id": 0, "encoder_config": {**HEARD, "num_mel_bins": 16}},
        {"input_features": (2, 64, 16)},
    ),
    "sew-d": ({**HEARD, "vocab_size": 64, "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 4]}, {}),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_runs_on_the_inputs_that_are_made_for_it(kind: str) -> None:
    sizes, wanted = MODELS[kind]
    config = {"model_type": kind, **sizes}
    module, parsed, _ = build_from_config(config, "float32")
    made = make_training_inputs(module, parsed, 2, 16, "float32")
    assert {name: tuple(made[name].shape) for name in wanted} == wanted
    assert capture_graph(config, batch=2, seq=16, dtype="float32").num_params


UNKNOWN = {
    "bros": ({**TEXT, "hidden_size": 64}, "bbox"),
    "splinter": (TEXT, "SplinterForPreTraining"),
    "clap": ({"text_config": {**TEXT, "max_position_embeddings": 64}}, "ClapModel"),
    "patchtst": ({"context_length": 16, "d_model": 32, "num_hidden_layers": 1}, "past_values"),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_model_whose_inputs_nobody_makes_is_refused_with_a_way_out(kind: str) -> None:
    sizes, named = UNKNOWN[kind]
    with pytest.raises(CaptureError, match=named) as refused:
        capture_graph({"model_type": kind, **sizes}, batch=2, seq=16, dtype="float32")
    assert "give path.py:callable" in str(refused.value)


def test_a_batch_for_verification_has_no_padding() -> None:
    """The plan is for a batch without padding. DPR makes a mask of its own where it sees some."""
    module, parsed, _ = build_from_config({"model_type": "dpr", **TEXT}, "float32")
    drawn = make_example_inputs(module, parsed, Workload(8, 32, "float32"), seed=0)
    assert (drawn["input_ids"] != parsed.pad_token_id).all() and len(drawn["input_ids"].unique()) > 32


def test_no_span_of_sound_is_masked_by_chance() -> None:
    """data2vec-audio masks spans unless its config says no, and its config does not say anything. The plan held one drawn mask."""
    sound = {
        **HEARD,
        "vocab_size": 32,
        "conv_dim": [16, 16],
        "conv_stride": [5, 2],
        "conv_kernel": [10, 3],
        "num_conv_pos_embeddings": 2,
        "num_conv_pos_embedding_groups": 2,
        "conv_pos_kernel_size": 3,
    }
    graph = capture_graph({"model_type": "data2vec-audio", **sound}, batch=2, seq=16, dtype="float32", flat=True)
    assert not [op.name for op in graph.top.items if isinstance(op, Op) and op.fn in ("setitem", "index_put")]


def test_a_model_that_cannot_make_its_own_weights_is_refused_in_a_sentence() -> None:
    parts = {"text_config": TEXT, "vision_config": {**IMAGE, "patch_size": 16}}
    with pytest.raises(InputError, match=r"Aimv2Model cannot give first values .*verify its plan with ranks=None"):
        build_whole_model({"model_type": "aimv2", **parts}, "float32", 0)


@pytest.mark.parametrize("kind", ["wav2vec2", "sew-d"])
def test_a_weight_that_a_module_computes_begins_as_a_usual_one(kind: str) -> None:
    """The weight norm of the convolution that stands for positions: zeros, as once, give no numbers."""
    config = {
        "model_type": kind,
        **MODELS["sew-d"][0],
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
    }
    module, parsed = build_whole_model(config, "float64", seed=0)
    (computed,) = [m for m in module.modules() if isinstance(m, ParametrizationList)]
    assert 0.01 < float(computed().std()) < 0.03
    out = module(**make_example_inputs(module, parsed, Workload(2, 16, "float64"), seed=0))
    assert out.logits.isfinite().all()
