"""Build a Hugging Face model on `meta` from a config dict, and inputs that train it, without network and without weights."""

from __future__ import annotations

import os

# Before transformers is imported, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"

import difflib
import importlib
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from planner_core.core import CaptureError, InputError, is_plan_json, require_packages, shorten_error, shorten_value
from planner_core.models.adapters import LOOPS, register
from planner_core.models.adapters.experts import NAME as EXPERTS
from planner_core.models.hooks.model_parts import list_modules
from planner_core.models.sources.adapters import LORA, add_adapters
from planner_core.models.sources.config_fields import with_layers
from planner_core.models.sources.config_limits import building_on_meta, check_numbers, iterate_fields
from planner_core.models.sources.first_values import parameters_on_meta

_NOT_FIELDS = (
    "model_type",
    "auto_map",
    "quantization_config",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "transformers_version",
    LORA,
)
# In this order: a model type with classes for several tasks is planned for the first of them.
_MAPPINGS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_CLASSIFICATION",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "IMAGE_TEXT_TO_TEXT",
    "AUDIO_CLASSIFICATION",
    "PRETRAINING",
)


def build_from_config(
    config: Mapping[str, Any], dtype: str = "bfloat16", layers: int | None = None, *, to_run: bool = False
) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Build a model on meta, in training mode and without dropout.

    With `to_run` the model will get values, so buffers are on the CPU, with those that constructors give them.
    Returns: the model, its config object, and the config dict with `layers` applied. Raises NotInstalled, InputError, CaptureError.
    """
    require_packages("transformers")
    with _silenced_transformers():
        data = with_layers(config, layers)
        parsed = read_config(data)
        cls = find_model_class(parsed, data)
        parsed = select_config(parsed, cls)
        disable_dropout(parsed)
        register()  # now: `find_model_class` has imported the modeling file of the class
        try:
            with parameters_on_meta() if to_run else torch.device("meta"), building_on_meta(cls.__name__):
                model = _parameters_on_meta(_construct_model(cls, parsed, getattr(torch, dtype)))
        except CaptureError:
            raise
        except ImportError as error:
            raise CaptureError(
                f"{cls.__name__} needs a package that is not installed: {shorten_error(error)}"
            ) from None
        except Exception as error:
            reason = _explain_unknown_value(error, data) or f"{type(error).__name__}: {shorten_error(error)}"
            raise CaptureError(f"{cls.__name__} cannot be built from this config: {reason}") from error
        register()  # once more: parts of the model may have imported further modeling files
    if LORA in data:
        add_adapters(model, data[LORA])
    return model.train(), parsed, data


def _explain_unknown_value(error: Exception, data: Mapping[str, Any]) -> str:
    """Explain which field has a value that transformers does not know (an activation, a kind of rope); empty if none is found."""
    if "Padding_idx" in str(error):
        given = next(
            (f"{name} is {value}" for name, key, value in iterate_fields(data) if key == "pad_token_id"), "pad_token_id"
        )
        return f"{given}, which is not a row of a table of words; give a number below vocab_size"
    word = error.args[0] if isinstance(error, KeyError) and error.args else None
    field = next((name for name, _, value in iterate_fields(data) if isinstance(word, str) and value == word), "")
    return (
        f"{field} is {shorten_value(word)}, which transformers {_transformers_version()} does not have" if field else ""
    )


def _construct_model(cls: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    # A class without SDPA refuses it by name. It is built with the attention that every class has.
    try:
        model: nn.Module = cls._from_config(
            config, dtype=dtype, attn_implementation="sdpa", experts_implementation=EXPERTS
        )
    except (ValueError, TypeError) as error:
        if "sdpa" not in str(error) and "attention" not in str(error) and "experts" not in str(error):
            raise
        model = cls._from_config(config, dtype=dtype, attn_implementation="eager", experts_implementation=EXPERTS)
    for _, part in list_modules(model):
        plain = part.__dict__
        plain.pop("_is_hf_initialized", None)  # its weights are on meta, whatever buffers hold
        for name in [n for n, v in plain.items() if "drop" in n and isinstance(v, float)]:
            plain[name] = 0.0
        if isinstance(part, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)):
            part.p = 0.0
    return model


def _parameters_on_meta(model: nn.Module) -> nn.Module:
    """Move every parameter to meta. `torch.Tensor(n)` ignores the default device and allocates on the CPU (ImageGPT)."""
    for _, part in list_modules(model):
        for name, weight in part._parameters.items():
            if weight is not None and not weight.is_meta:
                part._parameters[name] = nn.Parameter(weight.to("meta"), requires_grad=weight.requires_grad)
    return model


_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _parse_floats(value: Any) -> Any:
    """Parse numbers for which JSON has no literal, as transformers 5 writes them: {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"} and value["__float__"] in _FLOATS:
            return _FLOATS[value["__float__"]]
        return {k: _parse_floats(v) for k, v in value.items()}
    return [_parse_floats(v) for v in value] if isinstance(value, list) else value


def read_config(data: Mapping[str, Any]) -> Any:
    """Make a config object from plain data. Raises InputError with one sentence."""
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = data.get("model_type")
    if not kind and "module" in data:
        raise InputError(
            f"this plan was made from {shorten_value(data['module'])} in memory, which cannot be built again from the plan; run it with "
            "apply(module, plan), or plan it as path/to/file.py:function"
        )
    if is_plan_json(data):
        raise InputError(
            "this file is a plan, and not a model's config; verify and export take a plan, plan takes its model"
        )
    if not kind:
        raise InputError('the config has no "model_type"; a Hugging Face config.json names one, for example "llama"')
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(kind), list(CONFIG_MAPPING.keys()), 1)
        hint = f"did you mean {near[0]!r}? else " if near else ""
        code = "its code comes with it (auto_map), which is not run from a config" if data.get("auto_map") else ""
        code = code or "a newer transformers may know it"
        raise InputError(
            f"model_type {shorten_value(kind)} is not known to transformers {_transformers_version()}: {code}; {hint}give "
            "path.py:function, which builds the model and returns it with example inputs"
        )
    check_numbers(data)
    given = {k: _parse_floats(v) for k, v in data.items() if k not in _NOT_FIELDS}
    try:
        config = AutoConfig.for_model(kind, **given)
    except Exception as error:
        raise InputError(f"the {kind} config is not valid: {shorten_error(error)}") from None
    config.use_cache = False
    return config


def find_model_class(config: Any, data: Mapping[str, Any]) -> Any:
    """Return the class that `architectures` names, otherwise the training class of the model type."""
    named = data.get("architectures")
    if named:
        return _find_class(config, named[0] if isinstance(named, list) else named)
    cls = _default_class(config)
    if cls is None:
        raise InputError(
            f"transformers has no model class for model_type {config.model_type!r}; name one in architectures"
        )
    return cls


def _default_class(config: Any) -> Any:
    """Return the training class of the model type; None if transformers has none."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    for mapping in _MAPPINGS:
        name = getattr(auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {}).get(config.model_type)
        if name:
            return getattr(transformers, name if isinstance(name, str) else name[0])
    name = auto.MODEL_MAPPING_NAMES.get(config.model_type)
    # its tables name classes that some versions do not have
    return getattr(transformers, name if isinstance(name, str) else name[0], None) if name else None


def _find_class(config: Any, name: Any) -> Any:
    """Find a model class of transformers by its name: an exported one, or one in the modeling file of the config's type.

    In that file case is ignored: older configs say MPTForCausalLM for the class MptForCausalLM.
    """
    import transformers

    for place in ("transformers", type(config).__module__.replace(".configuration_", ".modeling_")):
        try:
            module = importlib.import_module(place)
        except ImportError:
            continue
        names = [str(name)]
        if place != "transformers":
            names += [other for other in vars(module) if other.lower() == str(name).lower()]
        for cls in (getattr(module, n, None) for n in names):
            if not inspect.isclass(cls) or not issubclass(cls, transformers.PreTrainedModel):
                continue
            if cls.__module__.startswith("transformers.models."):  # a model, and not a base class of models
                return cls
    usual = _default_class(config)
    raise InputError(
        f"architectures names {shorten_value(name)}, which transformers {_transformers_version()} does not have for {config.model_type}; "
        f"correct it, or leave it out{f': then {usual.__name__} is planned' if usual else ''}"
    )


def disable_dropout(config: Any) -> None:
    """Set every dropout probability of a config and its parts to 0."""
    # By a part of the name: each type has fields of its own (attn_pdrop, hidden_dropout_prob, classifier_dropout).
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            disable_dropout(value)
    # Spans of sound that are masked by chance, also where a config does not say so.
    if hasattr(config, "apply_spec_augment") or hasattr(config, "mask_time_prob"):
        config.apply_spec_augment = False
    if hasattr(config, "use_cache"):
        config.use_cache = False
    # Where the text names no place for images.
    if getattr(config, "image_token_id", 0) is None and hasattr(config, "text_config"):
        config.image_token_id = config.text_config.vocab_size - 1
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0


def select_config(config: Any, cls: Any) -> Any:
    """Return the part of a composite config, at any depth, that belongs to a class, as AutoModelForCausalLM does."""
    wanted = getattr(cls, "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    for name in getattr(config, "sub_configs", None) or {}:
        part = getattr(config, name, None)
        if part is not None and isinstance(inner := select_config(part, cls), wanted):
            return inner
    return config


def missing_kernel_notes(model: nn.Module) -> tuple[str, ...]:
    """Write notes about recurrences that transformers runs token by token on every device."""
    kinds = {type(part).__name__ for _, part in list_modules(model)} & {kind for kind, _ in LOOPS}
    return tuple(
        f"{kind} is planned, and timed, as one kernel over all tokens; transformers has none, and runs its tokens one by one"
        for kind in sorted(kinds)
    )


@contextmanager
def _silenced_transformers() -> Iterator[None]:
    """Silence warnings of transformers while entered: they are advice for training."""
    # transformers' own module, since its first import sets the level that an environment variable asks for: that one is given back.
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


def _transformers_version() -> str:
    import transformers

    return str(transformers.__version__)
