"""A config of the same architecture with small sizes, which verification runs on a few CPU processes.

The names of the fields say which sizes they are. Related fields stay consistent: a list with one entry for each layer keeps one
layer of each kind, ids of tokens stay within the vocabulary and different, parts of a head stay within the head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# HEAD_DIM is not a size: it marks fields in which a head keeps its size or gets that of HEAD.
WIDTH, HEAD, HEAD_DIM = 64, 8, -1
SMALL: tuple[tuple[str, int], ...] = (
    (r"num_key_value_heads|num_kv_heads|n_kv_heads|kv_n_heads|num_query_groups|num_key_value_groups", 4),
    (r"(num_)?(attention_)?heads|n_heads?|num_(attention_)?heads|(encoder|decoder|linear|ssm)_attention_heads", 8),
    (r"(num_)?(encoder|decoder)_(attention_)?heads|linear_num_(key|value)_heads|index_n_heads|num_ssm_heads", 8),
    (r"(global_|swa_|v_|qk_|qk_nope_|qk_rope_|linear_key_|linear_value_|mla_)?head_dim", HEAD_DIM),
    (r"d_kv|kv_channels|rotary_dim|rope_dim|d_head", HEAD_DIM),
    (r"mamba_n_heads|n_groups|mamba_n_groups|mamba_num_heads", 8),
    (r"state_size|mamba_d_state|ssm_state_size|chunk_size|mamba_chunk_size|time_step_rank|mamba_dt_rank", 16),
    (r"(q|kv)_lora_rank|index_head_dim|o_lora_rank", 32),
    (r"(out_|text_|vision_|audio_|projector_|embedding_|attention_|output_|conv_)?hidden_size", WIDTH),
    (
        r"n_embd|d_model|word_embed_proj_dim|dim|embed_dim|emb_dim|projection_dim|hidden_dim|embedding_size|embedding_dim",
        WIDTH,
    ),
    (r"lru_width|d_inner|model_dim|image_token_embed_dim", WIDTH),
    (r"base_channels", 32),
    (r"num_embeddings", 256),
    (r"intermediate_size|d_ff|(encoder_|decoder_)?ffn_dim|n_inner|ffn_hidden_size|mlp_dim|inner_dim", 128),
    (r"((moe|shared|shared_expert|dense|expert|ffn)_)+intermediate_size|intermediate_size_mlp", 128),
    (r"expert_ffn_hidden_size", 128),
    (r"(\w+_)?vocab_size|n_words", 256),
    (r"num_local_experts|(moe_|routed_)?num_(moe_)?experts|n_routed_experts|n_experts|routed_experts", 8),
    (r"n_group|num_expert_group", 2),
    (r"topk_groups?|first_k_dense_replace|num_dense_layers|first_num_dense_layers|n_dense_layers", 1),
    (r"image_size|input_size", 32),
    (r"patch_size|spatial_patch_size", 8),
    (r"num_labels", 16),
)
DEPTHS = (
    r"num_hidden_layers|n_layers?|num_layers|num_decoder_layers|num_encoder_layers|(encoder|decoder|speech_encoder)_layers|depth|"
    r"num_blocks|(text|t2u)_(encoder|decoder)?_?layers|t2u_(encoder|decoder)_layers|num_attention_layers|"
    r"(encoder|decoder)_num_hidden_layers|n_(encoder|decoder)_layers|num_local_decoder_layers"
)
# Expansion, heads and size of a head, as Mamba-2, Bamba, Nemotron-H and Zamba-2 name them.
STATE_SPACE = (
    ("expand", "num_heads", "head_dim"),
    ("mamba_expand", "mamba_n_heads", "mamba_d_head"),
    ("expand", "mamba_num_heads", "mamba_head_dim"),
    ("mamba_expand", "n_mamba_heads", "mamba_headdim"),
)
LISTS = {
    "hidden_sizes": (64, 64, 128, 128),
    "depths": (2,),
    "num_heads": (4,),
    "num_attention_heads": (4,),
    "embed_dim": (32, 64, 128),
    "encoder_stride": (16,),
    "layer_depths": (2,),
}
"""The sizes to which the lists of stages are cut, entry by entry. The last one repeats."""
CONVOLVED_IMAGE = 64
"""Rows and columns of images, if a convolutional network's config does not say them (ResNet, RegNet, BiT): the strides leave 2 x 2.
Else images have 224, and a step of 64 of them takes processes on a CPU ten minutes."""
WINDOWS = r"sliding_window(_shrink_size|_length)?|local_attention|attention_chunk_size"
SMALL_WINDOW = 16
"""Tokens of a window of attention that is shorter than the plan's samples. Samples of a small model are longer, so masks are as there."""
DERIVED = frozenset({"out_features", "out_indices", "stage_names", "hybrid_layer_ids"})
"""Fields that a config computes from its depth. A config of stages keeps its stages, and so the features that are asked for."""


def shrink_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of the same architecture that is small enough for a few CPU processes: width 64, 8 heads, 2 layers, or more if it has
    more kinds of layers."""
    return next(shrunk_configs(config))


def shrunk_configs(config: Mapping[str, Any], layers: int = 2, seq: int = 0) -> Iterator[dict[str, Any]]:
    """Small configs, each less small than the one before. They are for architectures whose sizes depend on each other in ways that
    names do not show. First heads keep their size; at last every width stays the same. `seq`: tokens of a sample of the whole model."""
    yield _SmallForm(seq=seq).of(config, layers)
    yield _SmallForm(heads=4, whole_heads=True, seq=seq).of(config, layers)
    yield _SmallForm(wide=True, seq=seq).of(config, layers)


@dataclass(frozen=True, slots=True)
class _SmallForm:
    """How small a config becomes: at most `heads` heads; with `whole_heads` they keep their size; with `wide` all widths stay. Windows
    of attention that are shorter than `seq` tokens become short."""

    heads: int = 8
    whole_heads: bool = False
    wide: bool = False
    seq: int = 0

    def of(self, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
        """Return the small config."""
        kept_layers = _layers_to_keep(config, layers)
        width = self.heads * _head_fields(config) if self.whole_heads and _head_fields(config) else WIDTH
        left_out = DERIVED if "depths" not in config else {"stage_names"}
        small = {
            k: self._shrink_value(k, v, kept_layers, layers, width) for k, v in config.items() if k not in left_out
        }
        # The pattern of grouped heads would give plain attention 4 groups for its 8 heads: another model.
        if config.get("num_key_value_heads") == config.get("num_attention_heads") is not None:
            small["num_key_value_heads"] = small["num_attention_heads"]
        if not self.wide:
            _fit_heads(config, small)
            _fit_coefficients(config, small)
        _fit_ids(config, small)
        if "layer_type" in config and "num_channels" in config and "image_size" not in config:
            small["image_size"] = CONVOLVED_IMAGE
        return small

    def _shrink_value(self, key: str, value: Any, kept_layers: list[int] | None, layers: int, width: int) -> Any:
        if isinstance(value, Mapping):
            return self._shrink_part(key, value, kept_layers, layers)
        if isinstance(value, (list, tuple)):
            return self._shrink_list(key, value, kept_layers, width)
        # A bool is an int to Python.
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if re.fullmatch(DEPTHS, key):
            return min(value, len(kept_layers) if kept_layers is not None else layers)
        if re.fullmatch(WINDOWS, key):
            return min(value, SMALL_WINDOW) if value < self.seq else value
        # Of the 8 experts that stay at most half are chosen, so that the router still leaves some out.
        return min(value, 4) if key == "num_experts_per_tok" else self._shrink_size(key, value, width)

    def _shrink_part(
        self, key: str, value: Mapping[str, Any], kept_layers: list[int] | None, layers: int
    ) -> Mapping[str, Any]:
        """Return a config within the config, or a mapping from the numbers of layers."""
        if key.endswith("config") and all(str(k).isdecimal() for k in value) and kept_layers is not None:
            return {type(k)(kept_layers.index(int(k))): v for k, v in value.items() if int(k) in kept_layers}
        return self.of(value, layers) if key.endswith("config") or "model_type" in value else value

    def _shrink_list(self, key: str, value: Any, kept_layers: list[int] | None, width: int) -> Any:
        if kept_layers is not None and len(value) > max(kept_layers) and _is_by_layer(key, value):
            value = [value[i] for i in kept_layers]
        if key in LISTS and not self.wide:
            sizes = LISTS[key]
            value = [min(v, sizes[min(i, len(sizes) - 1)]) if isinstance(v, int) else v for i, v in enumerate(value)]
            return [_power_of_two_below(v) if "heads" in key and isinstance(v, int) else v for v in value]
        sized = all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        return [self._shrink_size(key, v, width) for v in value] if sized else value

    def _shrink_size(self, key: str, value: int, width: int) -> int:
        size = next((size for pattern, size in SMALL if re.fullmatch(pattern, key)), None)
        if size is None or (self.wide and "vocab" not in key and "experts" not in key):
            return value
        if size == HEAD_DIM:
            return value if self.whole_heads else min(value, HEAD)
        if "heads" in key or "groups" in key:  # groups of heads must divide the heads
            return _power_of_two_below(min(value, size, self.heads)) if value > 0 else value
        return min(value, width if size == WIDTH else size)


def _power_of_two_below(value: int) -> int:
    """Return the largest power of two that is at most `value`, so that a few ranks can share it."""
    return 2 ** int(math.log2(value)) if value > 0 else value


def _is_by_layer(key: str, value: Any) -> bool:
    return "layer" in key or "block" in key or len(value) > 8


def _layers_to_keep(config: Mapping[str, Any], layers: int) -> list[int] | None:
    """Return the layers that stay, if lists tell the kind of each layer: the first of every kind, and as many as are asked for."""
    depths = {
        v for k, v in config.items() if re.fullmatch(DEPTHS, k) and isinstance(v, int) and not isinstance(v, bool)
    }
    several = {n for n in depths if n > 1}
    lists = [v for k, v in config.items() if isinstance(v, (list, tuple)) and len(v) in several and _is_by_layer(k, v)]
    numbered = next((v for k, v in config.items() if k == "per_layer_config" and isinstance(v, Mapping)), None)
    if numbered is not None and depths:
        lists.append([i in {int(k) for k in numbered} for i in range(max(depths))])
    if not lists:
        return None
    # Lists of an encoder and of its decoder may differ in length, and then their entries do not belong together.
    kinds = list(zip(*(map(repr, v) for v in lists if len(v) == len(lists[0])), strict=True))
    # Gemma's five local layers and a global one, asked for 2 layers: 0 (local) and 5 (global). Of one kind: 0 and 1.
    first = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    more = [i for i in range(len(kinds)) if i not in first]
    return sorted(first + more[: max(0, layers - len(first))])


def _fit_heads(config: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Fit the inner width of a state-space layer, and the lists with a number for each pair of a head's elements."""
    for expand, heads, size in STATE_SPACE:  # heads times head size is the inner width
        if expand in config and heads in small and isinstance(small.get(size), int):
            small[size] = int(small["hidden_size"] * small[expand]) // small[heads]
    attention, width = config.get("attention_hidden_size"), config.get("hidden_size")
    if isinstance(attention, int) and isinstance(width, int):  # as many times the model's width as before (Zamba)
        small["attention_hidden_size"] = attention // width * small["hidden_size"]
        if "num_attention_heads" in small:
            small["attention_head_dim"] = small["attention_hidden_size"] // small["num_attention_heads"]
    before, after = _head_fields(config), _head_fields(small)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(small.get(name), Mapping) and before and after:
            small[name] = _fit_rope(small[name], before, after)


def _fit_coefficients(config: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Make a net narrow and shallow that scales all widths and depths by a number each (EfficientNet)."""
    wide = config.get("width_coefficient")
    if isinstance(wide, float) and isinstance(config.get("hidden_dim"), int) and "depth_coefficient" in config:
        small |= {
            "width_coefficient": 0.25,
            "depth_coefficient": 0.25,
            "hidden_dim": int(config["hidden_dim"] * 0.25 / wide),
        }


def _fit_rope(rope: Mapping[str, Any], before: int, after: int) -> dict[str, Any]:
    """Fit rotary embeddings: the factors of a head's pairs (long rope) are cut, the sections of a head (images and text) are scaled."""
    fitted = dict(rope)
    for key, value in rope.items():
        if isinstance(value, Mapping):
            fitted[key] = _fit_rope(value, before, after)
        elif isinstance(value, (list, tuple)) and key.endswith("factor"):
            fitted[key] = list(value)[: max(1, len(value) * after // before)]
        elif isinstance(value, (list, tuple)) and key == "mrope_section":
            parts = [max(1, v * after // before) for v in value]
            # Sections are rounded one by one, and must still add up to half of a head.
            parts[0] += sum(value) * after // before - sum(parts)
            fitted[key] = parts
    return fitted


def _head_fields(config: Mapping[str, Any]) -> int:
    size, width, heads = (config.get(k) for k in ("head_dim", "hidden_size", "num_attention_heads"))
    if isinstance(size, int):
        return size
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else 0


def _fit_ids(config: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Give new ids to special tokens that the smaller vocabulary does not have: its last ids, one for each."""
    size = small.get("vocab_size")
    if not isinstance(size, int) or size == config.get("vocab_size"):
        return
    ids = [k for k, v in small.items() if re.search(r"(token|pad|bos|eos)_(id|index)s?$|_token_id$", k)]
    # From the last word on, one each: ids stay different, and inputs take the lowest id that is none of them.
    unused_ids = iter(range(size - 1, 0, -1))
    new: dict[int, int] = {}

    def within(value: Any) -> Any:
        if isinstance(value, list):
            return [within(v) for v in value]
        if not isinstance(value, int) or isinstance(value, bool) or value < size:
            return value
        if value not in new:
            new[value] = next(unused_ids)
        return new[value]

    small.update({k: within(small[k]) for k in ids})
