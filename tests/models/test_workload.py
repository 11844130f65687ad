"""Batch, tokens and depth of a config: the model's own limits, what is asked for, and what a config says that is not followed."""

from typing import Any

import pytest

pytest.importorskip("torch")

from planner_core.core import Graph, InputError, NotRunnable
from planner_core.models import capture_graph
from planner_core.models.snapshots.by_samples import capture_wide_batch
from planner_core.models.snapshots.compare import graph_difference
from tests.support.tiny_models import TEXT

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 64}
ROBERTA = {"model_type": "roberta", **TEXT, "max_position_embeddings": 514}
LLAMA = {"model_type": "llama", **TEXT}
WHISPER = {
    "model_type": "whisper",
    "architectures": ["WhisperForConditionalGeneration"],
    "encoder_layers": 1,
    "decoder_layers": 1,
    "d_model": 32,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 64,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
PROPHET = {
    "model_type": "prophetnet",
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "hidden_size": 32,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
IMAGE = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32}
VIT = {"model_type": "vit", **IMAGE}


@pytest.mark.parametrize(
    ("config", "seq"),
    [(GPT2, 1024), (ROBERTA, 512), (LLAMA, 64), (WHISPER, 448), (PROPHET, 62), (VIT, 1)],
    ids=lambda c: str(c)[:24],
)
def test_nobody_names_a_length_and_the_model_has_one(config: dict[str, Any], seq: int) -> None:
    """RoBERTa's table of 514 rows keeps two for itself. ProphetNet's second row more shows only when the first is left out."""
    assert capture_graph(config, batch=2).workload == {"batch": 2, "seq": seq}


@pytest.mark.parametrize(
    ("config", "seq", "limit"), [(GPT2, 1025, 1024), (ROBERTA, 514, 512), (WHISPER, 449, 448), (PROPHET, 80, 62)]
)
def test_more_than_a_table_of_positions_holds_is_refused_with_the_limit(
    config: dict[str, Any], seq: int, limit: int
) -> None:
    with pytest.raises(InputError, match=f"has {limit} positions .* give seq={limit} or less"):
        capture_graph(config, batch=2, seq=seq)
    assert capture_graph(config, batch=2, seq=limit).workload["seq"] == limit


def test_rotary_positions_go_on_and_it_is_said() -> None:
    (note,) = capture_graph(LLAMA, batch=2, seq=65).assumptions
    assert note.startswith("seq=65 is more than the 64 positions that max_position_embeddings names")
    assert capture_graph(LLAMA, batch=2, seq=64).assumptions == ()


def test_a_length_for_images_is_not_used_and_it_is_said() -> None:
    graph = capture_graph(VIT, batch=2, seq=77)
    assert graph.workload["seq"] == 1 and graph.assumptions[0].startswith("seq=77 is not used")


@pytest.mark.parametrize("what", ["batch", "seq", "layers"])
def test_none_of_something_is_refused(what: str) -> None:
    with pytest.raises(InputError, match=f"{what}=0 must be at least 1"):
        capture_graph(LLAMA, **{"batch": 2, "seq": 8, what: 0})  # type: ignore[arg-type]


def test_depth_of_the_text_part_and_lists_of_layers() -> None:
    kinds = ["sliding_attention", "full_attention"]
    gemma = {"model_type": "gemma3_text", **TEXT, "head_dim": 8, "num_key_value_heads": 2, "layer_types": kinds}
    deeper = capture_graph(gemma, batch=2, seq=8, layers=5).config
    assert deeper["num_hidden_layers"] == 5 and deeper["layer_types"] == [*kinds, *kinds, kinds[0]]
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForCausalLM"], "text_config": gemma, "vision_config": {}}
    assert capture_graph(whole, batch=2, seq=8, layers=1).config["text_config"]["layer_types"] == kinds[:1]
    with pytest.raises(InputError, match="names no number of layers that layers=3 could set"):
        capture_graph({"model_type": "resnet"}, batch=2, layers=3)


def test_what_a_config_says_and_a_plan_does_not_follow() -> None:
    odd = {
        **LLAMA,
        "auto_map": {"AutoModel": "modeling_x.X"},
        "quantization_config": {"quant_method": "gptq", "bits": 4},
    }
    first, second = capture_graph(odd, batch=2, seq=8).assumptions
    assert first.startswith("auto_map is not followed") and "LlamaForCausalLM" in first
    assert second == 'quantization_config ("gptq") is left out: every weight is planned, and trained, in bfloat16'


T5 = {
    "model_type": "t5",
    "num_layers": 2,
    "num_decoder_layers": 2,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_heads": 4,
    "vocab_size": 64,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}


DEEP = {**LLAMA, "num_hidden_layers": 7}


@pytest.mark.parametrize("config", [GPT2, LLAMA, DEEP, T5, MIXTRAL, VIT], ids=lambda c: c["model_type"])
@pytest.mark.slow(only=("gpt2", "llama0"))
def test_a_batch_that_is_read_off_small_ones_is_the_one_that_is_captured(config: dict[str, Any]) -> None:
    seq = None if config is VIT else 8
    all_layers: list[int] = []

    def capture(batch: int, layers: int | None) -> Graph:
        all_layers.extend([batch] * (layers is None))
        return capture_graph(config, batch=batch, seq=seq, layers=layers)

    found = capture_wide_batch(capture, 24)
    assert all_layers == ([2] if config is DEEP else [2, 4, 3])
    straight = capture_graph(config, batch=24, seq=seq)
    assert found is not None and graph_difference(found, straight) is None
    assert (found.workload, found.assumptions) == (straight.workload, straight.assumptions)


def test_more_tokens_than_a_table_of_constants_holds() -> None:
    """2 048 sequences of 8 192 tokens, and 100 000: the model asks its masks for their values, and gets an answer."""
    config = {**LLAMA, "max_position_embeddings": 8192}
    for batch in (2048, 100_000):
        graph = capture_graph(config, batch=batch, seq=8192)
        assert graph.workload == {"batch": batch, "seq": 8192} and graph.assumptions == ()
        hidden = [v.meta.shape for v in graph.top.values if v.kind == "activation" and v.grad]
        assert (batch, 8192, 32) in hidden and not any(2 in shape[:1] for shape in hidden)


def test_dbrx_as_published() -> None:
    config = {
        "model_type": "dbrx",
        "architectures": ["DbrxForCausalLM"],
        "d_model": 6144,
        "n_heads": 48,
        "n_layers": 40,
        "max_seq_len": 32768,
        "vocab_size": 100352,
        "output_router_logits": False,
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000},
        "ffn_config": {"ffn_hidden_size": 10752, "model_type": "", "moe_num_experts": 16, "moe_top_k": 4},
    }
    graph = capture_graph(config, batch=8)
    assert graph.num_params == 131_596_523_520 and graph.num_repeats == {"DbrxBlock": 40}


VIDEO = {**IMAGE, "num_frames": 4}


def test_videos_and_the_patches_that_a_masked_autoencoder_guesses() -> None:
    sizes = {
        "decoder_num_hidden_layers": 1,
        "decoder_hidden_size": 16,
        "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 32,
    }
    graph = capture_graph({"model_type": "videomae", **VIDEO, **sizes}, batch=10)
    shapes = {v.meta.shape for v in graph.top.values}
    assert graph.loss == "the model's own loss" and (10, 3, 4, 32, 32) in shapes
    assert (10, 1, 32) in shapes  # of 2 x 2 x 2 patches a tenth is seen, at least one
    with pytest.raises(
        InputError, match=r"^videomae makes 8 tokens of each sample, and seq=4 asks for 4; leave seq out$"
    ):
        capture_graph({"model_type": "videomae", **VIDEO, **sizes}, batch=10, seq=4)


@pytest.mark.parametrize("kind", ["videomae", "vivit", "timesformer"])
def test_classifiers_of_videos(kind: str) -> None:
    name = {"videomae": "VideoMAE", "vivit": "Vivit", "timesformer": "Timesformer"}[kind]
    graph = capture_graph({"model_type": kind, "architectures": [f"{name}ForVideoClassification"], **VIDEO}, batch=6)
    assert {(6, 3, 4, 32, 32), (24, 3, 32, 32)} & {v.meta.shape for v in graph.top.values} and graph.num_params > 0


def test_a_recurrence_of_nine_billion_parameters() -> None:
    """RecurrentGemma-9B's sizes at 2 048 tokens, which its own loop would run one by one."""
    config = {
        "model_type": "recurrent_gemma",
        "architectures": ["RecurrentGemmaForCausalLM"],
        "hidden_size": 4096,
        "head_dim": 256,
        "intermediate_size": 24576,
        "num_hidden_layers": 38,
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "lru_width": 4096,
        "vocab_size": 256000,
    }
    graph = capture_graph(config, batch=16, seq=2048)
    assert graph.num_params == 8_579_977_216 and sum(graph.num_repeats.values()) == 38
    assert graph.assumptions[0].startswith("RecurrentGemmaRglru is planned, and timed, as one kernel over all tokens")
    scans = [op for block in graph.blocks.values() for op in block.items if getattr(op, "fn", "") == "linear_scan"]
    assert len(scans) == 1


def test_a_class_that_only_the_tables_of_transformers_name_is_refused_in_a_sentence() -> None:
    with pytest.raises(InputError, match="has no model class for model_type 'voxtral_realtime_text'"):
        capture_graph({"model_type": "voxtral_realtime_text"})


def test_groups_that_do_not_divide_the_heads_of_a_scan_are_refused() -> None:
    """One call stands for the scan in a capture, and took heads and groups that the model's own code refuses at its first step."""
    sizes = {"hidden_size": 64, "expand": 2, "state_size": 8, "num_heads": 4, "head_dim": 32, "n_groups": 8}
    with pytest.raises(NotRunnable, match="8 groups do not divide 4 heads"):
        capture_graph({"model_type": "mamba2", "num_hidden_layers": 2, "vocab_size": 64, **sizes}, batch=2, seq=16)
