"""Find the tool of a settings file by its own signature, and read the file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from planner_core.core import InputError, is_file, listed, short
from planner_core.planning.pricing.configs.fields import Fields, Setup
from planner_core.planning.pricing.configs.python_text import read_function
from planner_core.planning.pricing.configs.tools import (
    accelerate,
    axolotl,
    bridge,
    deepspeed,
    huggingface,
    megatron,
    nanotron,
    olmo,
    torchtitan,
    tp_plan,
)

MOST_BYTES = 1_000_000
MOST_FOLDERS = 4
"""A path in a settings file starts at its folder, or at one of so many above it: the root of a checkout."""
TOOLS = (
    "torchtitan (TOML, Python), Megatron-LM (arguments, launch script), Megatron-Bridge (Python, YAML), NeMo (YAML), DeepSpeed (JSON), "
    "accelerate, axolotl, LLaMA-Factory, TrainingArguments, nanotron, OLMo (YAML) or transformers (tp_plan as JSON)"
)
OTHERS = {
    "verl": ("actor_rollout_ref",),
    "Composer (LLM Foundry)": ("max_duration", "model", "optimizers"),
    "Lightning": ("trainer", "data"),
    "torchtune": ("recipe_checkpoint", "tokenizer", "model"),
    "LitGPT": ("checkpoint_dir", "devices", "train"),
    "marin / levanter": ("trainer", "model", "optimizer"),
}
"""Tools that are known by keys that all must be there, and whose files are not read."""


IsOwn = Callable[[Mapping[str, Any]], bool]
ALONE: tuple[tuple[str, IsOwn, Callable[[Fields, int], Setup]], ...] = tuple(
    (tool.NAME, tool.is_own, tool.setup) for tool in (deepspeed, accelerate, olmo, nanotron, bridge)
)
"""Tools whose settings are one file: name, signature and reader."""
TRAINERS: tuple[tuple[str, IsOwn, Callable[[Fields, int, huggingface.Beside], Setup]], ...] = tuple(
    (tool.NAME, tool.is_own, tool.setup) for tool in (axolotl, huggingface)
)
"""Tools whose settings may name a file of DeepSpeed beside them."""


def read_setup(path: str | Path, num_gpus: int) -> Setup:
    """Read the settings file of a tool for a run on `num_gpus` GPUs; of Python, `FILE.py:FUNCTION`. Raises InputError."""
    given, function = str(path), None
    if ".py:" in given:
        given, _, function = given.rpartition(":")
    file = Path(given)
    where = f"config {file.name}"
    text = _text(file, where)
    kind = file.suffix.lower()
    if kind == ".py":
        return _of_python(text, function, where, num_gpus)
    if kind == ".toml":
        return _of_toml(_parsed(tomllib.loads, text, where, "TOML"), where, num_gpus)
    if kind == ".json":
        return _of_mapping(_parsed(json.loads, text, where, "JSON"), where, num_gpus, file.parent)
    if kind in (".yaml", ".yml"):
        return _of_mapping(_parsed(_yaml, text, where, "YAML"), where, num_gpus, file.parent)
    fields, notes = megatron.read(text, where)
    if not any(name in fields.values for name in megatron.OWN):
        raise InputError(f"{where} has no options such as --tensor-model-parallel-size 8; give a file of {TOOLS}")
    return megatron.setup(fields, num_gpus, notes)


def _of_toml(data: Mapping[str, Any], where: str, num_gpus: int) -> Setup:
    if data and not torchtitan.is_own(dict(data)):
        raise _unknown(data, where)
    return torchtitan.setup(Fields.of(data, where, torchtitan.NAME), num_gpus)


def _of_python(text: str, function: str | None, where: str, num_gpus: int) -> Setup:
    """A config of torchtitan or Megatron-Bridge, known by what it imports."""
    data, imported = read_function(text, function, where)
    if any(name.partition(".")[0] == "torchtitan" for name in imported) or str(data.get("()")).startswith("Trainer"):
        return torchtitan.setup(Fields.of(data, where, torchtitan.NAME), num_gpus)
    if any(name.startswith(("megatron.bridge", "nemo")) for name in imported):
        return bridge.setup(Fields.of(data, where, bridge.NAME), num_gpus)
    raise InputError(
        f"{where} imports neither torchtitan nor megatron.bridge, so the tool of this Python is not known; state its layout by --layout"
    )


def _of_mapping(data: Mapping[str, Any], where: str, num_gpus: int, folder: Path) -> Setup:
    """Settings of YAML or JSON, by the first signature that they have. A signature is of names that no other tool has."""

    def beside(name: str, field: str) -> Mapping[str, Any]:
        places = (
            folder / name,
            folder / Path(name).name,
            *(up / name for up in list(folder.resolve().parents)[:MOST_FOLDERS]),
        )
        file = next((f for f in places if is_file(f)), None)
        if file is None:
            raise InputError(
                f"{where}: {field} names {short(name)}, which is neither beside it nor in a folder above; put it there, or give "
                "it as --config"
            )
        return _parsed(json.loads, _text(file, where), f"{where}'s {file.name}", "JSON")

    if any(mark in data for mark in tp_plan.MARKS) or (
        data and all(isinstance(v, str) for v in data.values()) and _is_plan(data)
    ):
        plan = data if any(mark in data for mark in tp_plan.MARKS) else {"tp_plan": data}
        return tp_plan.setup(Fields.of(plan, where, tp_plan.NAME), num_gpus)
    for name, is_own, setup in ALONE:
        if is_own(data):
            return setup(Fields.of(data, where, name), num_gpus)
    for name, is_own, setup_beside in TRAINERS:
        if is_own(data):
            return setup_beside(Fields.of(data, where, name), num_gpus, beside)
    raise _unknown(data, where)


def _is_plan(data: Mapping[str, Any]) -> bool:
    """Whether a mapping of texts is a bare tensor-parallel plan: patterns of modules."""
    return any("." in name or "*" in name for name in data)


def _unknown(data: Mapping[str, Any], where: str) -> InputError:
    other = next((tool for tool, keys in OTHERS.items() if all(k in data for k in keys)), None)
    if other:
        return InputError(
            f"{where} is of {other}, whose files are not read; state its run by --layout, --micro-batch, --seq and --recompute"
        )
    return InputError(
        f"{where} has the keys {listed(list(map(str, data))[:6]) or 'of no settings'}, by which no tool is known; give a file of {TOOLS}, "
        "or --layout"
    )


def _text(path: Path, where: str) -> str:
    if not is_file(path):
        raise InputError(f"{where}: there is no file {short(str(path))}; give a file of {TOOLS}")
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"{where} has {path.stat().st_size} bytes; a settings file has at most {MOST_BYTES}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{where} cannot be read ({error}); give a file of {TOOLS}") from None


def _yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped]  # comes with transformers

    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise ValueError("it repeats parts by aliases, which are not read; write them out")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from None


def _parsed(parse: Callable[[str], Any], text: str, where: str, form: str) -> Mapping[str, Any]:
    """The text as a mapping. Raises InputError if it is not one."""
    try:
        data = parse(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not {form} ({str(error)[:100]}); mend it, or give a file of {TOOLS}") from None
    if not isinstance(data, Mapping):
        raise InputError(f"{where} is {short(data)}, but must be settings by name; give a file of {TOOLS}")
    return data
