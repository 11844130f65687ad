"""What `bench.hf_tp_plans` needs beyond a default config: fields that it leaves open, filled as published, and parts of composite models
(vision towers, decoders, draft models) that take no tokens, with the inputs that the whole model would hand them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.coverage import BATCH, SEQ
from bench.support.coverage.models import cut

IMAGE = 16
"""Patches along each side of an image."""
_MROPE = {
    "rope_parameters": {
        "rope_theta": 10000.0,
        "rope_type": "default",
        "partial_rotary_factor": 0.5,
        "mrope_section": [8, 12, 12],
    }
}
_LINEAR = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 4}


def _floats(*shape: int) -> Any:
    import torch

    return torch.empty(BATCH, *shape, dtype=torch.bfloat16, device="meta")


def _tokens(config: Any) -> Any:
    import torch

    return torch.ones(BATCH, SEQ, dtype=torch.long)


def _embedded(config: Any) -> dict[str, Any]:
    return {"inputs_embeds": _floats(SEQ, config.hidden_size)}


def _patches(name: str, depth: int = 1) -> Callable[[Any], dict[str, Any]]:
    """Images as rows of patches, and how many there are along time, height and width of each."""

    def made(config: Any) -> dict[str, Any]:
        import torch

        width = 3 * config.patch_size**2 * depth
        return {
            name: _floats(IMAGE * IMAGE, width).flatten(0, 1),
            "grid_thw": torch.tensor([[1, IMAGE, IMAGE]] * BATCH),
        }

    return made


def _placed(config: Any) -> dict[str, Any]:
    """Patches of an image whose pooling is even, with the place of each."""
    import torch

    side = 4 * config.pooling_kernel_size
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    return {
        "pixel_values": _floats(side * side, 3 * config.patch_size**2),
        "pixel_position_ids": places.repeat(BATCH, 1, 1),
    }


@dataclass(frozen=True)
class Part:
    """A class by name, fields that its default config leaves open, its inputs where they are not tokens, and what of it is
    not judged."""

    cls: str
    fields: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[Any], dict[str, Any]] | None = None
    left_out: str = ""


MODEL_PARTS: dict[str, Part] = {
    "deepseek_ocr2_encoder": Part("DeepseekOcr2VisionEncoder", {}, lambda c: {**_embedded(c), "num_patches": SEQ // 2}),
    "deepseek_ocr2_text": Part(
        "DeepseekOcr2TextModel",
        {
            "hidden_size": 1280,
            "intermediate_size": 6848,
            "num_attention_heads": 10,
            "num_key_value_heads": 10,
            "moe_intermediate_size": 896,
            "num_experts_per_tok": 6,
            "n_group": 1,
            "topk_group": 1,
            "num_hidden_layers": 4,
            "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        },
    ),
    "diffusion_gemma_text": Part(
        "DiffusionGemmaEncoderTextModel", {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
    ),
    "dots3_note_vision_encoder": Part(
        "Dots3NoteVisionModel",
        {"num_hidden_layers": 4, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2},
        _patches("pixel_values"),
    ),
    "ernie4_5_vl_moe_vision": Part("Ernie4_5_VLMoeVisionTransformerPretrainedModel", {}, _patches("hidden_states")),
    "gemma4_vision": Part("Gemma4VisionModel", {}, _placed),
    "glm4v_moe_text": Part("Glm4vMoeTextModel", {"head_dim": 128, **_MROPE}),
    "glm4v_text": Part("Glm4vTextModel", _MROPE),
    "glm_image_text": Part("GlmImageTextModel", _MROPE),
    "glm5_next_text": Part(
        "Glm5NextTextModel",
        _LINEAR,
        None,
        "its linear-attention layers only: the indexer of every fourth layer "
        "keeps the pools that computed values name (modeling_glm5_next.py, get_pooled_states), which no graph can hold",
    ),
    "llama4_vision_model": Part(
        "Llama4VisionModel",
        {"hidden_size": 1408, "image_size": 336, "vision_output_dim": 4096},
        lambda c: {"pixel_values": _floats(3, c.image_size, c.image_size)},
    ),
    "muse_glimmer_assistant": Part(
        "MuseGlimmerAssistantModel",
        {},
        lambda c: {
            "noise_embeds": _floats(c.block_size, c.hidden_size),
            "context_hidden_states": _floats(SEQ - c.block_size, c.hidden_size * len(c.target_layer_ids)),
        },
    ),
    "muse_glimmer_vision": Part("MuseGlimmerVisionModel", {}, _patches("pixel_values", depth=2)),
    "qwen3_omni_moe_talker_code_predictor": Part("Qwen3OmniMoeTalkerCodePredictorModel", {}, _embedded),
    "qwen3_omni_moe_talker_text": Part("Qwen3OmniMoeTalkerModel", {"shared_expert_intermediate_size": 768}, _embedded),
    "qwen3_omni_moe_text": Part("Qwen3OmniMoeThinkerTextModel", {"head_dim": 128, "num_attention_heads": 32}),
    "qwen4_exp_text": Part(
        "Qwen4ExpTextModel",
        _LINEAR,
        None,
        "its linear-attention layers only: the indexer of every fourth layer loops "
        "over every token in Python and sizes tensors by computed values (Qwen4ExpTextQSAIndexer), which no graph can hold",
    ),
    "step3p5": Part("Step3p7TextModel", {"sliding_window": 512}),
    "t5_gemma_module": Part("T5GemmaEncoder", {"dropout_rate": 0.0}),
    "t5gemma2_decoder": Part(
        "T5Gemma2Decoder",
        {"dropout_rate": 0.0},
        lambda c: {"input_ids": _tokens(c), "encoder_hidden_states": _floats(SEQ, c.hidden_size)},
    ),
    "t5gemma2_text": Part("T5Gemma2TextEncoder", {"dropout_rate": 0.0}),
    "voxtral_realtime_text": Part("VoxtralRealtimeTextModel"),
}


def part_graph(kind: str) -> Any:
    """Return the graph of a part on its own, at most four layers deep where its config can be cut."""
    from transformers import CONFIG_MAPPING

    from planner_core.core import PlannerError
    from planner_core.models.capture import capture_module
    from planner_core.models.sources import huggingface as hf
    from planner_core.models.sources import make_training_inputs

    part = MODEL_PARTS[kind]
    whole = json.loads(json.dumps(CONFIG_MAPPING[kind](**part.fields).to_dict(), default=str))
    whole.update(model_type=kind, architectures=[part.cls])
    data = json.loads(json.dumps(whole))
    cut(data)
    try:
        model, config, _ = hf.build_from_config(data)
    except PlannerError:  # a config that says something of each layer
        model, config, _ = hf.build_from_config(whole)
    inputs = part.inputs(config) if part.inputs else make_training_inputs(model, config, BATCH, SEQ, "bfloat16")
    return capture_module(model, inputs, name=kind, config={"model_type": kind}, batch=BATCH, seq=SEQ)
