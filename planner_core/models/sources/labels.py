"""Labels for models of transformers by the name of the class, and the value ranges of integer inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

NUM_CHOICES = 2
"""Answers of a multiple-choice sample: each sample of the inputs is [choices, tokens]."""
_SPAN_FIELDS = ("start_positions", "end_positions")
_PAIR_FIELDS = ("next_sentence_label", "sentence_order_label")
_LANGUAGE = (
    "LMHead",
    "CausalLM",
    "MaskedLM",
    "ConditionalGeneration",
    "MTModel",
    "VisionEncoderDecoderModel",
    "SpeechEncoderDecoderModel",
)


def has_lm_loss(kind: str) -> bool:
    """Return whether the labels of a class are tokens."""
    return kind == "EncoderDecoderModel" or any(word in kind for word in _LANGUAGE)


def ends_in_eos(kind: str, config: Any) -> bool:
    """Return whether a model looks up the end-of-text token in its input."""
    return "SequenceClassification" in kind and bool(getattr(config, "is_encoder_decoder", False))


def has_pair_loss(kind: str, names: Collection[str]) -> bool:
    """Return whether a model learns masked tokens and a relation of two sentences, as BERT does."""
    return "PreTraining" in kind and "labels" in names and any(name in names for name in _PAIR_FIELDS)


def make_labels(
    kind: str, names: Collection[str], config: Any, ids: torch.Tensor, pixels: torch.Tensor | None, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Make the labels of a model of class `kind` from tokens `ids` [batch, seq] and images `pixels` [batch, ..., height, width]."""
    whole = torch.zeros(ids.shape[0], dtype=torch.long)
    if "QuestionAnswering" in kind and set(_SPAN_FIELDS) <= set(names):  # the first and the last token of the answer
        return {name: whole.clone() for name in _SPAN_FIELDS}
    if "labels" not in names:
        return {}
    if has_pair_loss(kind, names):
        return {"labels": ids.clone(), **{name: whole.clone() for name in _PAIR_FIELDS if name in names}}
    if has_lm_loss(kind):
        return {"labels": ids.clone()}
    if "TokenClassification" in kind or kind == "ElectraForPreTraining":
        return {"labels": torch.zeros_like(ids)}
    if "SemanticSegmentation" in kind and pixels is not None:
        return {"labels": torch.zeros(ids.shape[0], *pixels.shape[-2:], dtype=torch.long)}
    if "Classification" in kind:
        return {"labels": _class_labels(config, whole, dtype)}
    if any(word in kind for word in ("MultipleChoice", "NextSentencePrediction")):
        return {"labels": whole}
    return {}


def _class_labels(config: Any, whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Make one class per sample, or numbers, by the config's `problem_type`."""
    count, problem = getattr(config, "num_labels", 2), getattr(config, "problem_type", None)
    if problem == "multi_label_classification" or (problem == "regression" and count > 1):
        return torch.empty(len(whole), count, dtype=dtype, device="meta")
    if problem == "regression" or (problem is None and count == 1):
        return torch.empty(len(whole), dtype=dtype, device="meta")
    return whole


def value_limits(kind: str, config: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return, for integer inputs with free values, the exclusive upper limit. Other inputs hold values that the model needs."""
    text = text_config(config)
    vocabulary, tokens = int(getattr(text, "vocab_size", None) or 2), inputs.get("input_ids")
    limits = {name: vocabulary for name in ("input_ids", "decoder_input_ids") if name in inputs}
    if ends_in_eos(kind, config):
        limits.pop("input_ids", None)
    limits |= {name: int(tokens.shape[-1]) for name in _SPAN_FIELDS if name in inputs and tokens is not None}
    limits |= {name: 2 for name in _PAIR_FIELDS if name in inputs}
    given = inputs.get("labels")
    if given is None or given.is_floating_point():
        return limits
    if has_lm_loss(kind) or any(name in inputs for name in _PAIR_FIELDS):
        return limits | {"labels": vocabulary}
    two = any(word in kind for word in ("MultipleChoice", "NextSentencePrediction", "PreTraining"))
    return limits | {"labels": NUM_CHOICES if two else max(1, int(getattr(config, "num_labels", None) or 2))}


def text_config(config: Any) -> Any:
    """Return the part of a config that describes text; of an encoder and a decoder, that of the decoder."""
    if not hasattr(config, "get_text_config"):
        return config
    try:
        return config.get_text_config()
    except ValueError:  # MusicGen has a text encoder and a decoder
        return config.get_text_config(decoder=True)
