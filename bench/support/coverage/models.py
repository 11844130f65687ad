"""The models of the coverage benchmark: every causal type, and a spread of the other kinds."""

from __future__ import annotations

import json
from typing import Any

from planner_core.models.sources.config_fields import DEPTH_FIELDS

KEPT_LAYERS = 4
DEPTHS = (
    *DEPTH_FIELDS,
    "depth",
    "num_blocks",
    "speech_encoder_layers",
    "t2u_encoder_layers",
    "t2u_decoder_layers",
    "text_encoder_layers",
    "num_attention_layers",
    "encoder_num_hidden_layers",
    "decoder_num_hidden_layers",
    "n_encoder_layers",
    "n_decoder_layers",
    "num_local_decoder_layers",
)
LISTS = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "block_types",
    "attention_layers",
    "hybrid_override_pattern",
)

GAPS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000.0}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "wav2vec2-conformer": {"vocab_size": 32},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
}
"""Fields that a default config leaves open (None) or lacks, so that transformers alone cannot make or run it; filled as in
the models that were published."""

OTHERS = tuple(
    (kind, model_type, cls)
    for kind, text in {
        "masked": "bert:BertForMaskedLM roberta:RobertaForMaskedLM albert:AlbertForMaskedLM distilbert:DistilBertForMaskedLM "
        "electra:ElectraForMaskedLM deberta-v2:DebertaV2ForMaskedLM mpnet:MPNetForMaskedLM modernbert:ModernBertForMaskedLM "
        "esm:EsmForMaskedLM camembert:CamembertForMaskedLM funnel:FunnelForMaskedLM fnet:FNetForMaskedLM "
        "longformer:LongformerForMaskedLM perceiver:PerceiverForMaskedLM convbert:ConvBertForMaskedLM layoutlm:LayoutLMForMaskedLM",
        "seq2seq": "t5:T5ForConditionalGeneration mt5:MT5ForConditionalGeneration bart:BartForConditionalGeneration "
        "mbart:MBartForConditionalGeneration pegasus:PegasusForConditionalGeneration marian:MarianMTModel "
        "m2m_100:M2M100ForConditionalGeneration led:LEDForConditionalGeneration longt5:LongT5ForConditionalGeneration "
        "switch_transformers:SwitchTransformersForConditionalGeneration prophetnet:ProphetNetForConditionalGeneration "
        "umt5:UMT5ForConditionalGeneration t5gemma:T5GemmaForConditionalGeneration nllb-moe:NllbMoeForConditionalGeneration",
        "vision": "vit:ViTForImageClassification deit:DeiTForImageClassification swin:SwinForImageClassification "
        "convnext:ConvNextForImageClassification resnet:ResNetForImageClassification beit:BeitForImageClassification "
        "segformer:SegformerForImageClassification mobilenet_v2:MobileNetV2ForImageClassification "
        "regnet:RegNetForImageClassification poolformer:PoolFormerForImageClassification pvt:PvtForImageClassification "
        "efficientnet:EfficientNetForImageClassification dinov2:Dinov2ForImageClassification cvt:CvtForImageClassification "
        "swinv2:Swinv2ForImageClassification levit:LevitForImageClassification vit_mae:ViTMAEForPreTraining",
        "speech": "whisper:WhisperForConditionalGeneration wav2vec2:Wav2Vec2ForCTC hubert:HubertForCTC wavlm:WavLMForCTC "
        "speech_to_text:Speech2TextForConditionalGeneration audio-spectrogram-transformer:ASTForAudioClassification "
        "wav2vec2-conformer:Wav2Vec2ConformerForCTC sew:SEWForCTC unispeech:UniSpeechForCTC",
        "multimodal": "clip:CLIPModel siglip:SiglipModel llava:LlavaForConditionalGeneration blip-2:Blip2ForConditionalGeneration "
        "qwen2_vl:Qwen2VLForConditionalGeneration idefics3:Idefics3ForConditionalGeneration paligemma:PaliGemmaForConditionalGeneration "
        "align:AlignModel altclip:AltCLIPModel gemma3:Gemma3ForConditionalGeneration flava:FlavaForPreTraining",
    }.items()
    for model_type, _, cls in (entry.partition(":") for entry in text.split())
)


def causal_models() -> list[tuple[str, str]]:
    """(model type, class) for every type in transformers' causal mapping that has a config class."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    known = set(CONFIG_MAPPING.keys())
    return [(t, c if isinstance(c, str) else c[0]) for t, c in NAMES.items() if t in known]


def default_config(model_type: str, cls: str, whole_depth: bool = False) -> dict[str, Any]:
    """Return the default config as plain data, cut to `KEPT_LAYERS` of each kind unless `whole_depth`."""
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[model_type](**GAPS.get(model_type, {}))
    whole: dict[str, Any] = json.loads(json.dumps(made.to_dict(), default=str))
    data: dict[str, Any] = json.loads(json.dumps(whole))
    if not whole_depth:
        cut(data)
    try:  # some configs say something of each layer
        CONFIG_MAPPING[model_type](**{k: v for k, v in data.items() if k != "model_type"})
    except Exception:
        data = whole
    return {**data, "model_type": model_type, "architectures": [cls]}


def cut(data: dict[str, Any]) -> None:
    """Shorten every depth field, and lists that hold one entry per layer, here and in nested configs."""
    depths = {
        v for k, v in data.items() if k in DEPTHS and isinstance(v, int) and not isinstance(v, bool) and v > KEPT_LAYERS
    }
    for key, value in data.items():
        if isinstance(value, dict):
            cut(value)
        elif (
            isinstance(value, list)
            and len(value) in depths
            and len(value) > KEPT_LAYERS
            and "layer" in key + "block" * (key in LISTS)
        ):
            data[key] = value[:KEPT_LAYERS]
        elif key in DEPTHS and isinstance(value, int) and not isinstance(value, bool) and value > KEPT_LAYERS:
            data[key] = KEPT_LAYERS
