"""Make inputs on which a model of transformers trains from its config, as the documentation of transformers does."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import nn

from planner_core.core import CaptureError
from planner_core.models.sources.labels import NUM_CHOICES, ends_in_eos, has_lm_loss, make_labels, text_config

_SIGNALS = ("pixel_values", "pixel_values_videos", "input_values", "input_features")
_VIDEO = ("videomae", "vivit", "timesformer", "xclip_vision_model")
"""Types whose `pixel_values` are the frames of a video, [batch, frames, channels, height, width]."""
# Types that take labels of the text, and read an image with it.
_READ_BOTH = ("git", "blip", "blip-2", "instructblip", "clipseg")


def make_training_inputs(model: nn.Module, config: Any, batch: int, seq: int, dtype: str) -> dict[str, torch.Tensor]:
    """Make the inputs of one training step, with labels if the model takes them."""
    names = set(inspect.signature(model.forward).parameters)
    main = getattr(model, "main_input_name", "input_ids")
    text = text_config(config)
    kind = type(model).__name__
    inputs: dict[str, torch.Tensor] = {}
    seq = _fit_seq(config, text, names, seq)
    if "input_ids" in names and main not in _SIGNALS:
        inputs["input_ids"] = _token_inputs(kind, config, text, batch, seq)
    if main in _SIGNALS:
        inputs[main] = _signal_input(main, config, batch, seq, getattr(torch, dtype))
    if "decoder_input_ids" in names and (not has_lm_loss(kind) or "EncoderDecoder" in kind):
        inputs["decoder_input_ids"] = _token_ids(text, batch, seq)
    needs_both = "labels" not in names or getattr(config, "model_type", "") in _READ_BOTH
    if {"input_ids", "pixel_values"} <= names and needs_both:  # contrastive models read a text and an image
        inputs.setdefault("input_ids", _token_ids(text, batch, seq))
        inputs.setdefault("pixel_values", _signal_input("pixel_values", config, batch, seq, getattr(torch, dtype)))
    inputs.update(_type_specific_inputs(model, config, batch, seq, getattr(torch, dtype)))
    if kind.startswith("Musicgen") and "labels" in names:  # one row per codebook and sample
        inputs["input_ids"] = _token_ids(text, batch * text.num_codebooks, seq)
        inputs["labels"] = _token_ids(text, batch, seq)[..., None].repeat(1, 1, text.num_codebooks)
    else:
        ids, pixels = _token_ids(text, batch, seq), inputs.get("pixel_values")
        inputs.update(make_labels(kind, names, config, ids, pixels, getattr(torch, dtype)))
    if not inputs:
        raise CaptureError(
            f"{kind} takes {', '.join(sorted(names))[:120]}: no training input for it is known; give path.py:callable"
        )
    return inputs


def _type_specific_inputs(
    model: nn.Module, config: Any, batch: int, seq: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Make inputs that only one model type takes."""
    kind, model_type = type(model).__name__, getattr(config, "model_type", "")
    inputs: dict[str, torch.Tensor] = {}
    # Without these the model puts bytes together by their values.
    if getattr(config, "patching_mode", None) and getattr(config, "patch_size", None):
        ends = [*range(0, seq, config.patch_size), seq]
        inputs["patch_lengths"] = torch.tensor(ends).diff().repeat(batch, 1)
    if kind.startswith("VoxtralRealtimeText"):  # its layers are told the delay of the speech, embedded
        inputs["t_cond"] = torch.empty(1, 1, text_config(config).hidden_size, dtype=dtype, device="meta")
    if _is_required(model, "bool_masked_pos"):
        inputs["bool_masked_pos"] = _masked_patches(config, batch)
    # Patches in a row, and how many there are in each direction.
    if kind.startswith("Siglip2") and "text_model" not in model_type:
        inputs.update(_patch_inputs(getattr(config, "vision_config", config), batch, dtype))
    return inputs


def _patch_inputs(vision: Any, batch: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Make square images as SigLIP 2's processor does: patches [batch, patches, numbers], their mask, and patches per side [batch, 2]."""
    side = math.isqrt(vision.num_patches)
    numbers = vision.num_channels * vision.patch_size**2
    return {
        "pixel_values": torch.empty(batch, side * side, numbers, dtype=dtype, device="meta"),
        "pixel_attention_mask": torch.ones(batch, side * side, dtype=torch.long),
        "spatial_shapes": torch.full((batch, 2), side),
    }


def count_tokens(model: nn.Module, config: Any, seq: int, dtype: str) -> int:
    """Return the tokens of a sample in inputs made for `seq`; 1 if the inputs have no sequence (images)."""
    # Two lengths show whether the inputs have a sequence at all: images have the same shapes for both.
    inputs, other = (make_training_inputs(model, config, 1, n, dtype) for n in (seq, seq - 1 if seq > 1 else 2))
    if any(v.shape != other[k].shape for k, v in inputs.items()):
        return seq
    ids = [v for v in inputs.values() if not v.is_floating_point() and v.dim() == 2]
    return ids[0].shape[1] if ids else 1


def _fit_seq(config: Any, text: Any, names: set[str], seq: int) -> int:
    """Bound the number of tokens of models with a short text: captions of CLIP, transcripts of Whisper."""
    limit = getattr(config, "max_target_positions", None)
    if {"input_ids", "pixel_values"} <= names and "labels" not in names:
        limit = getattr(getattr(config, "text_config", None) or text, "max_position_embeddings", None)
    if getattr(config, "model_type", "") == "perceiver":  # decodes as many tokens as it has positions
        return int(config.max_position_embeddings)
    return min(seq, limit) if isinstance(limit, int) and limit > 0 else seq


def _token_inputs(kind: str, config: Any, text: Any, batch: int, seq: int) -> torch.Tensor:
    """Make tokens [batch, seq], for multiple choice [batch, choices, seq].

    A classifier of an encoder-decoder reads the hidden state at the end-of-text token, so the last token is that one.
    """
    ids = _token_ids(text, batch, seq)
    end = getattr(text, "eos_token_id", None)
    if ends_in_eos(kind, config) and isinstance(end, int):
        ids[:, -1] = end
    return ids[:, None].repeat(1, NUM_CHOICES, 1) if "MultipleChoice" in kind else ids


def _token_ids(config: Any, batch: int, seq: int) -> torch.Tensor:
    special: set[Any] = set()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        value = getattr(config, name, None)
        special.update(v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, int))
    size = getattr(config, "vocab_size", None) or 2
    # An ordinary word: padding would be masked out of the loss, and the end of a text ends attention in some models.
    token = next((i for i in range(min(size, 16)) if i not in special), 0)
    return torch.full((batch, seq), token, dtype=torch.long)


def _signal_input(name: str, config: Any, batch: int, seq: int, dtype: torch.dtype) -> torch.Tensor:
    encoder = getattr(config, "encoder", None)
    vision = getattr(config, "vision_config", None) or (encoder if hasattr(encoder, "image_size") else config)
    if name == "pixel_values_videos" and hasattr(config, "frames_per_clip"):
        shape: tuple[int, ...] = (batch, config.frames_per_clip, config.in_chans, config.crop_size, config.crop_size)
    elif name.startswith("pixel_values"):
        size = getattr(vision, "image_size", None) or getattr(
            getattr(vision, "backbone_config", None), "image_size", 224
        )
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        moves = name == "pixel_values_videos" or getattr(vision, "model_type", "") in _VIDEO
        frames = (getattr(vision, "num_frames", 1),) if moves else ()
        shape = (batch, *frames, getattr(vision, "num_channels", 3), height, width)
    elif name == "input_features" and hasattr(config, "input_feat_per_channel"):
        # Speech2Text's two convolutions of stride 2 make one position of four frames.
        shape = (batch, max(seq, 1) * 4, config.input_feat_per_channel)
    elif name == "input_features" and hasattr(getattr(config, "encoder_config", None), "num_mel_bins"):
        heard = config.encoder_config  # Parakeet, LASR: frames before bins
        shape = (batch, max(seq, 1) * getattr(heard, "subsampling_factor", 4), heard.num_mel_bins)
    elif name == "input_features":
        # Whisper has a convolution of stride 2, so a recording of 30 s is 3000 frames for 1500 positions.
        shape = (batch, getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500))
    elif hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):  # spectrograms
        shape = (batch, config.max_length, config.num_mel_bins)
    else:
        # The strides of wav2vec 2.0's convolutions are 5, 2, 2, 2, 2, 2 and 2: one position of 320 numbers.
        shape = (batch, max(seq, 1) * 320)
    return torch.empty(shape, dtype=dtype, device="meta")


def _is_required(model: nn.Module, name: str) -> bool:
    parameter = inspect.signature(model.forward).parameters.get(name)
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _masked_patches(config: Any, batch: int) -> torch.Tensor:
    """Make the mask of patches that an autoencoder predicts, [batch, patches]: all but the first tenth of each sample (VideoMAE masks
    90 %), and at least one patch is visible."""
    size, patch = (v if isinstance(v, (tuple, list)) else (v, v) for v in (config.image_size, config.patch_size))
    patches = (size[0] // patch[0]) * (size[1] // patch[1])
    patches *= getattr(config, "num_frames", 1) // getattr(config, "tubelet_size", 1)
    seen = max(1, patches // 10)
    return torch.stack([torch.arange(int(patches)) >= seen] * batch)
