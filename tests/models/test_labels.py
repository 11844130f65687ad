"""Models of transformers train on their own loss, on labels of the form that they ask for."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from planner_core.core import InputError, Workload
from planner_core.models.loading import capture_graph
from planner_core.models.sources import build_from_config, value_limits
from planner_core.verification.build_models import build_whole_model, make_example_inputs
from tests.support import tiny_models

TEXT = {**tiny_models.TEXT, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32}
BART = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "eos_token_id": 2,
}
SEGMENTS = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "hidden_sizes": [8, 16],
    "decoder_hidden_size": 16,
    "sr_ratios": [4, 2],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "image_size": 32,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int | None]]]] = {
    "BertForQuestionAnswering": (
        {"model_type": "bert", **TEXT},
        {"start_positions": ((8,), 32), "end_positions": ((8,), 32)},
    ),
    "BertForPreTraining": (
        {"model_type": "bert", **TEXT},
        {"labels": ((8, 32), 64), "next_sentence_label": ((8,), 2)},
    ),
    "BertForNextSentencePrediction": ({"model_type": "bert", **TEXT}, {"labels": ((8,), 2)}),
    "BertForMultipleChoice": ({"model_type": "bert", **TEXT}, {"input_ids": ((8, 2, 32), 64), "labels": ((8,), 2)}),
    "BertForTokenClassification": ({"model_type": "bert", "num_labels": 5, **TEXT}, {"labels": ((8, 32), 5)}),
    "BertForSequenceClassification": (
        {"model_type": "bert", "num_labels": 5, "problem_type": "multi_label_classification", **TEXT},
        {"labels": ((8, 5), None)},
    ),
    "ElectraForSequenceClassification": ({"model_type": "electra", "num_labels": 1, **TEXT}, {"labels": ((8,), None)}),
    "ElectraForPreTraining": ({"model_type": "electra", **TEXT}, {"labels": ((8, 32), 2)}),
    "BartForSequenceClassification": ({"model_type": "bart", "num_labels": 3, **BART}, {"labels": ((8,), 3)}),
    "MarianMTModel": (
        {"model_type": "marian", **BART, "pad_token_id": 63, "decoder_start_token_id": 63},
        {"labels": ((8, 32), 64)},
    ),
    "SegformerForSemanticSegmentation": (
        {"model_type": "segformer", "num_labels": 5, **SEGMENTS},
        {"labels": ((8, 32, 32), 5)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_labels_have_the_form_and_the_range_that_a_model_asks_for(name: str) -> None:
    sizes, wanted = CASES[name]
    config = {**sizes, "architectures": [name]}
    module, parsed = build_whole_model(config, "float32", seed=0)
    drawn = make_example_inputs(module, parsed, Workload(8, 32, "float32"), seed=0)
    below = value_limits(name, parsed, drawn)
    assert {n: (tuple(drawn[n].shape), below.get(n)) for n in wanted} == wanted
    assert all(int(drawn[n].max()) < most for n, most in below.items())
    assert module(**drawn).loss.isfinite()
    assert capture_graph(config, batch=8, seq=32, dtype="float32").loss == "the model's own loss"


def test_a_model_of_two_models_is_told_its_decoders_words() -> None:
    """Without them it would look for padding, and so make a mask of its own for some batches."""
    text = {"model_type": "bert", **TEXT}
    reads = {**text, "is_decoder": True, "add_cross_attention": True}
    config = {
        "model_type": "encoder-decoder",
        "architectures": ["EncoderDecoderModel"],
        "encoder": text,
        "decoder": reads,
    }
    module, parsed, _ = build_from_config(config, "float32")
    drawn = make_example_inputs(module, parsed, Workload(8, 32, "float32"), seed=0, meta_signals=True)
    assert {"input_ids", "decoder_input_ids", "labels"} <= set(drawn)
    assert capture_graph(config, batch=8, seq=32, dtype="float32").loss == "the model's own loss"


def test_a_name_with_other_capitals_is_the_models_own() -> None:
    config = {
        "model_type": "mpt",
        "architectures": ["MPTForCausalLM"],
        "d_model": 32,
        "n_heads": 2,
        "n_layers": 1,
        "vocab_size": 64,
    }
    module, *_ = build_from_config(config, "float32")
    assert isinstance(module, nn.Module) and type(module).__name__ == "MptForCausalLM"
    with pytest.raises(InputError, match="leave it out: then MptForCausalLM is planned"):
        build_from_config({**config, "architectures": ["MPTForPoems"]}, "float32")


def test_a_missing_padding_token_is_named() -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"], **TEXT}
    with pytest.raises(Exception, match="give pad_token_id in the config"):
        capture_graph(config, batch=8, seq=16, dtype="float32")
