"""Refuse impossible sizes of a config before a model is built from it, and limit how much is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn import init
from torch.nn.modules.module import register_module_module_registration_hook

from planner_core.core import CaptureError, InputError, shorten_value
from planner_core.models.capture.recording import paused_garbage_collection
from planner_core.models.sources.config_fields import default_config

MAX_LAYERS = 2000
MAX_MODULES = 60_000
"""2,000 layers of 30 modules: what takes about ten seconds to build."""
MAX_SIZE = 10**8
# With one of these the width of a head is stated by itself, and the heads need not divide hidden_size.
_HEAD_SIZES = (
    "head_dim",
    "qk_head_dim",
    "qk_rope_head_dim",
    "attention_head_dim",
    "d_kv",
    "kv_channels",
    "partial_rotary_factor",
    "head_size",
    "attention_hidden_size",
    "mamba_headdim",
)
_SIZE_PREFIXES = ("num_", "n_", "d_", "hidden_size", "intermediate_size", "vocab_size", "max_position")
_AT_LEAST_ONE = ("vocab_size", "hidden_size")
_DEPTH_NAMES = ("n_layer", "depth", "depths")


def check_numbers(data: Mapping[str, Any]) -> None:
    """Raise InputError with the name of the field for an impossible size in a config or its parts."""
    for name, key, value in iterate_fields(data):
        if key in _DEPTH_NAMES or key.endswith("layers"):
            _check_depth(name, value)
        sized = key.startswith(_SIZE_PREFIXES) or key.endswith("_size")
        if not sized or key.endswith(("_ids", "_id")) or value is None or isinstance(value, (list, bool)):
            continue
        if not isinstance(value, (int, float)):
            raise InputError(f"{name} is {shorten_value(value)}; a number is needed")
        if not 0 <= value <= MAX_SIZE and value != _default_value(data, name):  # -1 may stand for "no bound"
            raise InputError(f"{name} is {shorten_value(value)}, but must be between 0 and {MAX_SIZE}")
        if value == 0 and key in _AT_LEAST_ONE:
            raise InputError(f"{name} is 0; it must be at least 1")
    _check_ratios(data)


def iterate_fields(data: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield the full name, the key and the value of every field."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from iterate_fields(value, f"{within}{key}.")
        elif isinstance(key, str):  # keys of label tables are numbers
            yield f"{within}{key}", key, value


def _check_depth(name: str, value: Any) -> None:
    """Check a depth, or a list with one for each stage."""
    layers = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, (int, float))]
    one_each = not name.endswith("layers") or not isinstance(value, list)  # a list of layers names them
    if one_each and sum(layers) > MAX_LAYERS:
        raise InputError(f"{name} is {shorten_value(value)}; at most {MAX_LAYERS} layers are planned")


def _check_ratios(data: Mapping[str, Any]) -> None:
    experts = data.get("num_local_experts") or data.get("num_experts") or data.get("n_routed_experts")
    chosen = data.get("num_experts_per_tok")
    if isinstance(experts, int) and isinstance(chosen, int) and chosen > experts:
        raise InputError(f"num_experts_per_tok is {chosen}, more than the {experts} experts there are")
    width, heads = data.get("hidden_size"), data.get("num_attention_heads")
    groups = data.get("num_key_value_heads")
    uneven = isinstance(groups, int) and isinstance(heads, int) and (groups == 0 or heads % groups)
    if uneven and any(_default_value(data, n) != data[n] for n in ("num_attention_heads", "num_key_value_heads")):
        raise InputError(
            f"num_key_value_heads is {groups}, which does not divide the {heads} heads of num_attention_heads; give a divisor"
        )
    if data.get("head_dim") == 0 != _default_value(data, "head_dim"):
        raise InputError("head_dim is 0; it must be at least 1, or left out")
    if not isinstance(width, int) or not isinstance(heads, int) or any(data.get(k) for k in _HEAD_SIZES):
        return
    published = all(_default_value(data, n) == data[n] for n in ("hidden_size", "num_attention_heads"))
    if heads == 0 or (width % heads and not published):
        raise InputError(
            f"hidden_size {width} is not divisible by num_attention_heads {heads}; give head_dim or change one of them"
        )


def _default_value(data: Mapping[str, Any], name: str) -> Any:
    """Return the model type's default of a field (`audio_config.chunk_size`): a default is never refused."""
    value = default_config(data)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


@contextmanager
def building_on_meta(model: str) -> Iterator[None]:
    """Build modules quickly on meta while entered: weights are not filled, garbage is not collected.

    More than MAX_MODULES modules raise CaptureError.
    """
    fillers = [n for n, f in vars(init).items() if n.endswith("_") and not n.startswith("_") and callable(f)]
    originals = {n: getattr(init, n) for n in fillers}
    count = 0

    def one_more(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > MAX_MODULES:
            raise CaptureError(
                f"{model} has more than {MAX_MODULES:,} modules with this config; give fewer layers, stages or experts"
            )

    hook = register_module_module_registration_hook(one_more)
    try:
        for name in fillers:
            setattr(init, name, _keep_tensor)
        with paused_garbage_collection():
            yield
    finally:
        for name, filler in originals.items():
            setattr(init, name, filler)
        hook.remove()


def _keep_tensor(tensor: nn.Parameter, *_: Any, **__: Any) -> nn.Parameter:
    """Replace an initializer of torch.nn.init: weights on meta have no values."""
    return tensor
