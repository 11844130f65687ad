"""The labels on which a model of transformers trains, by the kind of its class, and the numbers that may stand in its inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

CHOICES = 2
"""Answers among which a model for multiple choice picks: each sample of its inputs is [choices, tokens]."""
_PLACES = ("start_positions", "end_positions")
_PAIRS = ("next_sentence_label", "sentence_order_label")
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
    """Whether labels are tokens."""
    return kind == "EncoderDecoderModel" or any(word in kind for word in _LANGUAGE)


def ends_in_eos(kind: str, config: Any) -> bool:
    """Whether a model looks for the end of each text among its tokens."""
    return "SequenceClassification" in kind and bool(getattr(config, "is_encoder_decoder", False))


def tokens_and_pair(kind: str, names: Collection[str]) -> bool:
    """Whether a model learns to fill tokens in, and whether its two sentences belong together, as BERT does."""
    return "PreTraining" in kind and "labels" in names and any(name in names for name in _PAIRS)


def labels(
    kind: str, names: Collection[str], config: Any, ids: torch.Tensor, pixels: torch.Tensor | None, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The labels that a model of class `kind` asks for. `ids`: tokens [batch, seq]. `pixels`: its images [batch, ..., height, width]."""
    whole = torch.zeros(ids.shape[0], dtype=torch.long)
    if "QuestionAnswering" in kind and set(_PLACES) <= set(names):  # the first and the last token of the answer
        return {name: whole.clone() for name in _PLACES}
    if "labels" not in names:
        return {}
    if tokens_and_pair(kind, names):
        return {"labels": ids.clone(), **{name: whole.clone() for name in _PAIRS if name in names}}
    if has_lm_loss(kind):
        return {"labels": ids.clone()}
    if "TokenClassification" in kind or kind == "ElectraForPreTraining":
        return {"labels": torch.zeros_like(ids)}
    if "SemanticSegmentation" in kind and pixels is not None:
        return {"labels": torch.zeros(ids.shape[0], *pixels.shape[-2:], dtype=torch.long)}
    if "Classification" in kind:
        return {"labels": _classes(config, whole, dtype)}
    if any(word in kind for word in ("MultipleChoice", "NextSentencePrediction")):
        return {"labels": whole}
    return {}


def _classes(config: Any, whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One class for each sample, or numbers, as `problem_type` says."""
    count, problem = getattr(config, "num_labels", 2), getattr(config, "problem_type", None)
    if problem == "multi_label_classification" or (problem == "regression" and count > 1):
        return torch.empty(len(whole), count, dtype=dtype, device="meta")
    if problem == "regression" or (problem is None and count == 1):
        return torch.empty(len(whole), dtype=dtype, device="meta")
    return whole


def limits(kind: str, config: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The inputs whose numbers are free, and below which number they are. All others have the values that the model needs."""
    text = text_config(config)
    vocabulary, tokens = int(getattr(text, "vocab_size", None) or 2), inputs.get("input_ids")
    found = {name: vocabulary for name in ("input_ids", "decoder_input_ids") if name in inputs}
    if ends_in_eos(kind, config):
        found.pop("input_ids", None)
    found |= {name: int(tokens.shape[-1]) for name in _PLACES if name in inputs and tokens is not None}
    found |= {name: 2 for name in _PAIRS if name in inputs}
    given = inputs.get("labels")
    if given is None or given.is_floating_point():
        return found
    if has_lm_loss(kind) or any(name in inputs for name in _PAIRS):
        return found | {"labels": vocabulary}
    two = any(word in kind for word in ("MultipleChoice", "NextSentencePrediction", "PreTraining"))
    return found | {"labels": CHOICES if two else max(1, int(getattr(config, "num_labels", None) or 2))}


def text_config(config: Any) -> Any:
    """The part of a config that describes the text; of several, the one that is written."""
    if not hasattr(config, "get_text_config"):
        return config
    try:
        return config.get_text_config()
    except ValueError:  # MusicGen reads with one model, and writes with another
        return config.get_text_config(decoder=True)
