"""Find the tool of a settings file by its own signature, and read the file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from planner_core.core import InputError, is_file, list_names, named, shorten_value
from planner_core.core import read_text as read_file_text
from planner_core.planning.pricing.configs.fields import Fields, Setup
from planner_core.planning.pricing.configs.neutral import GENERAL_OPTIONS
from planner_core.planning.pricing.configs.python_text import read_function
from planner_core.planning.pricing.configs.tools import (
    accelerate,
    bridge,
    composer,
    deepspeed,
    megatron,
    nanotron,
    neox,
    torchtitan,
    tp_plan,
    trainers,
)

MAX_BYTES = 1_000_000
MAX_FOLDERS = 4
"""Folders above a settings file in which a path of the file is looked for: one of them is the root of a checkout."""
TOOLS = (
    "torchtitan (TOML, Python, arguments), Megatron-LM (arguments, launch script), Megatron-Bridge (Python, YAML), NeMo (YAML), "
    "DeepSpeed (JSON), accelerate, axolotl, LLaMA-Factory, TrainingArguments, nanotron, OLMo, GPT-NeoX, LLM Foundry (YAML) "
    "or transformers (tp_plan as JSON)"
)
UNSUPPORTED = {
    "verl": ("actor_rollout_ref",),
    "Composer (LLM Foundry)": ("max_duration", "model", "optimizers"),
    "Lightning": ("trainer", "data"),
    "torchtune": ("recipe_checkpoint", "tokenizer", "model"),
    "LitGPT": ("checkpoint_dir", "devices", "train"),
    "marin / levanter": ("trainer", "model", "optimizer"),
}
"""Tools whose files are recognised and not read: a file with all of these keys is refused by the tool's name."""
FORMATS = {".json": "JSON", ".toml": "TOML", ".yaml": "YAML", ".yml": "YAML", ".py": "Python"}
"""The format of a file's text by its suffix."""
OPTION_SIGNATURES = (*megatron.SIGNATURE, *torchtitan.ARGUMENT_SIGNATURE)
"""Text by which the options of Megatron-LM or torchtitan are known in a file of another suffix."""
Recognises = Callable[[Mapping[str, Any]], bool]
Reader = Callable[[Fields, int], Setup]
READERS: tuple[tuple[str, Recognises, Reader], ...] = (
    # The first signature that matches counts. GPT-NeoX's files have DeepSpeed's names too, LLM Foundry's have OLMo's, and
    # LLaMA-Factory's have those of TrainingArguments.
    *((m.TABLE.tool, m.recognises, m.read) for m in (tp_plan, neox, deepspeed, accelerate, nanotron, bridge)),
    (composer.FOUNDRY.tool, composer.recognises_foundry, composer.read_foundry),
    (composer.OLMO.tool, composer.recognises_olmo, composer.read_olmo),
    (trainers.AXOLOTL.table.tool, trainers.recognises_axolotl, trainers.reader_of(trainers.AXOLOTL)),
    (trainers.LLAMA_FACTORY.table.tool, trainers.recognises_factory, trainers.reader_of(trainers.LLAMA_FACTORY)),
    (
        trainers.TRAINING_ARGUMENTS.table.tool,
        trainers.recognises_arguments,
        trainers.reader_of(trainers.TRAINING_ARGUMENTS),
    ),
)
"""The tools of YAML and JSON: name, signature and reader."""


def read_setup(path: str | Path, num_gpus: int) -> Setup:
    """Read the settings file of a tool for a run on `num_gpus` GPUs; of Python, `FILE.py:FUNCTION`. Raises InputError."""
    name, function = str(path), None
    if ".py:" in name:
        name, _, function = name.rpartition(":")
    file = Path(name)
    where = f"config {file.name}"
    text = read_file_text(file, where, MAX_BYTES, f"give a file of {TOOLS}")
    return read_text(text, where, num_gpus, file, function)


def read_text(text: str, where: str, num_gpus: int, file: Path, function: str | None = None) -> Setup:
    """Read the settings of a tool from text that is, or would be, in a file. Raises InputError.

    A suffix of a format decides it; a file of another suffix is known by its content."""
    form = FORMATS.get(file.suffix.lower())
    if form == "Python":
        return _read_python(text, function, where, num_gpus)
    settings = (form, _parse_text(text, form, where)) if form else _find_settings(text)
    if settings is None:
        return _read_options(text, where, num_gpus)
    form, data = settings
    return _read_toml(data, where, num_gpus) if form == "TOML" else _read_mapping(data, where, num_gpus, file.parent)


def _find_settings(text: str) -> tuple[str, Mapping[str, Any]] | None:
    """Return the format in which a text is settings by name, and the settings; None: options. JSON comes first, since YAML reads it too."""
    for form, parse in PARSERS.items():
        # A script may read as YAML where one of its lines has a colon.
        if form == "YAML" and any(option in text for option in OPTION_SIGNATURES):
            return None
        try:
            data = parse(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(data, Mapping) and data:
            return form, data
    return None


def _read_options(text: str, where: str, num_gpus: int) -> Setup:
    """Read arguments or a launch script of torchtitan or Megatron-LM. Raises InputError."""
    fields, notes = megatron.read_arguments(text, where)
    if any(option.startswith(torchtitan.ARGUMENT_SIGNATURE) for option in fields.values):
        fields, notes = torchtitan.read_arguments(text, where)
        return torchtitan.read(fields, num_gpus, notes)
    if not any(option in fields.values for option in megatron.SIGNATURE):
        raise InputError(f"{where} has no options such as --tensor-model-parallel-size 8; give a file of {TOOLS}")
    return megatron.read(fields, num_gpus, notes)


def _read_toml(data: Mapping[str, Any], where: str, num_gpus: int) -> Setup:
    if data and not torchtitan.recognises(data):
        raise _unknown_tool(data, where)
    return torchtitan.read(Fields.from_nested(data, where, torchtitan.TABLE.tool), num_gpus)


def _read_python(text: str, function: str | None, where: str, num_gpus: int) -> Setup:
    """Read a config of torchtitan or Megatron-Bridge, recognised by its imports."""
    data, imported = read_function(text, function, where)
    if any(name.partition(".")[0] == "torchtitan" for name in imported) or str(data.get("()")).startswith("Trainer"):
        return torchtitan.read(Fields.from_nested(data, where, torchtitan.TABLE.tool), num_gpus)
    if any(name.startswith(("megatron.bridge", "nemo")) for name in imported):
        return bridge.read(Fields.from_nested(data, where, bridge.TABLE.tool), num_gpus)
    raise InputError(
        f"{where} imports neither torchtitan nor megatron.bridge, so the tool of this Python is not known; state its layout by ",
        named("layout"),
    )


def _read_mapping(data: Mapping[str, Any], where: str, num_gpus: int, folder: Path) -> Setup:
    """Read settings of YAML or JSON with the reader of their tool. Raises InputError."""

    def read_json(path: str, field: str) -> Mapping[str, Any]:
        """Read a file that a field of the settings names, from the settings' folder or one above it."""
        parents = list(folder.resolve().parents)[:MAX_FOLDERS]
        candidates = (folder / path, folder / Path(path).name, *(parent / path for parent in parents))
        file = next((f for f in candidates if is_file(f)), None)
        if file is None:
            raise InputError(
                f"{where}: {field} names {shorten_value(path)}, which is neither beside it nor in a folder above; put it there, or give "
                "that file itself"
            )
        text = read_file_text(file, where, MAX_BYTES, "give that file itself")
        return _parse_text(text, "JSON", f"{where}'s {file.name}")

    for tool, recognises, read in READERS:
        if recognises(data):
            fields = Fields.from_nested(data, where, tool)
            fields.read_json = read_json
            return read(fields, num_gpus)
    raise _unknown_tool(data, where)


def _unknown_tool(data: Mapping[str, Any], where: str) -> InputError:
    tool = next((tool for tool, keys in UNSUPPORTED.items() if all(k in data for k in keys)), None)
    if tool:
        return InputError(f"{where} is of {tool}, whose files are not read; ", GENERAL_OPTIONS)
    if str(data.get("schema")).startswith("shardscope."):
        return InputError(
            f"{where} is a file of Shardscope, {shorten_value(str(data['schema']))}, and no tool's settings; give a file of {TOOLS}, or ",
            named("layout"),
        )
    return InputError(
        f"{where} has the keys {list_names(list(map(str, data))[:6]) or 'of no settings'}, by which no tool is known; give a file of "
        f"{TOOLS}, or ",
        named("layout"),
    )


def _load_yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped]  # comes with transformers

    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise ValueError("it repeats parts by aliases, which are not read; write them out")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from None


PARSERS: Mapping[str, Callable[[str], Any]] = {"JSON": json.loads, "TOML": tomllib.loads, "YAML": _load_yaml}


def _parse_text(text: str, form: str, where: str) -> Mapping[str, Any]:
    """Return the text as a mapping. Raises InputError if it is not one."""
    try:
        data = PARSERS[form](text)
    except (ValueError, RecursionError) as error:
        why = f"{where} is not {form} ({str(error)[:100]})"
        if any(option in text for option in OPTION_SIGNATURES):
            raise InputError(f"{why}, but has options of a launch script; name it .sh or .txt") from None
        settings = _find_settings(text)
        other = next((suffix for suffix, name in FORMATS.items() if settings and name == settings[0]), None)
        change = f"it is {FORMATS[other]}; name it {other}" if other else "mend it"
        raise InputError(f"{why}; {change}, or give a file of {TOOLS}") from None
    if not isinstance(data, Mapping):
        raise InputError(f"{where} is {shorten_value(data)}, but must be settings by name; give a file of {TOOLS}")
    return data
