"""Batch, tokens and depth of a config: the model's own limits, what is asked for, and what a config says that is not followed."""

from typing import Any

import pytest

pytest.importorskip("torch")

from planner_core.core import InputError
from planner_core.models import capture_graph

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 64}
ROBERTA = {"model_type": "roberta", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64,
           "vocab_size": 64, "max_position_embeddings": 514}  # fmt: skip
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64,
         "vocab_size": 64, "max_position_embeddings": 64}  # fmt: skip
WHISPER = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "encoder_layers": 1, "decoder_layers": 1,
           "d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
           "vocab_size": 64, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2, "decoder_start_token_id": 3}  # fmt: skip
VIT = {"model_type": "vit", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64,
       "image_size": 32}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "seq"), [(GPT2, 1024), (ROBERTA, 512), (LLAMA, 64), (WHISPER, 448), (VIT, 1)], ids=lambda c: str(c)[:24]
)
def test_nobody_names_a_length_and_the_model_has_one(config: dict[str, Any], seq: int) -> None:
    """RoBERTa's table of 514 rows keeps two for itself."""
    assert capture_graph(config, batch=2).workload == {"batch": 2, "seq": seq}


@pytest.mark.parametrize(("config", "seq", "limit"), [(GPT2, 1025, 1024), (ROBERTA, 514, 512), (WHISPER, 449, 448)])
def test_more_than_a_table_of_positions_holds_is_refused_with_the_limit(
    config: dict[str, Any], seq: int, limit: int
) -> None:
    with pytest.raises(InputError, match=f"has {limit} positions .* give --seq {limit} or less"):
        capture_graph(config, batch=2, seq=seq)
    assert capture_graph(config, batch=2, seq=limit).workload["seq"] == limit


def test_rotary_positions_go_on_and_it_is_said() -> None:
    (note,) = capture_graph(LLAMA, batch=2, seq=65).assumptions
    assert note.startswith("--seq 65 is more than the 64 positions that max_position_embeddings names")
    assert capture_graph(LLAMA, batch=2, seq=64).assumptions == ()


def test_a_length_for_images_is_not_used_and_it_is_said() -> None:
    graph = capture_graph(VIT, batch=2, seq=77)
    assert graph.workload["seq"] == 1 and graph.assumptions[0].startswith("--seq 77 is not used")


@pytest.mark.parametrize("what", ["batch", "seq", "layers"])
def test_none_of_something_is_refused(what: str) -> None:
    with pytest.raises(InputError, match=f"--{what} 0 must be at least 1"):
        capture_graph(LLAMA, **{"batch": 2, "seq": 8, what: 0})  # type: ignore[arg-type]


def test_depth_of_the_text_part_and_lists_of_layers() -> None:
    kinds = ["sliding_attention", "full_attention"]
    gemma = {"model_type": "gemma3_text", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8,
             "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 64, "layer_types": kinds}  # fmt: skip
    deeper = capture_graph(gemma, batch=2, seq=8, layers=5).config
    assert deeper["num_hidden_layers"] == 5 and deeper["layer_types"] == [*kinds, *kinds, kinds[0]]
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForCausalLM"], "text_config": gemma, "vision_config": {}}
    assert capture_graph(whole, batch=2, seq=8, layers=1).config["text_config"]["layer_types"] == kinds[:1]
    with pytest.raises(InputError, match="names no number of layers that --layers 3 could set"):
        capture_graph({"model_type": "resnet"}, batch=2, layers=3)


def test_what_a_config_says_and_a_plan_does_not_follow() -> None:
    odd = {
        **LLAMA,
        "auto_map": {"AutoModel": "modeling_x.X"},
        "quantization_config": {"quant_method": "gptq", "bits": 4},
    }
    first, second = capture_graph(odd, batch=2, seq=8).assumptions
    assert first.startswith("auto_map is not followed") and "LlamaForCausalLM" in first
    assert second == "quantization_config ('gptq') is left out: every weight is planned, and trained, in bfloat16"
