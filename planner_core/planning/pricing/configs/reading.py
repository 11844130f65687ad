"""Find the tool of a settings file, and read the file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from planner_core.core import InputError, is_file, short
from planner_core.planning.pricing.configs import accelerate, deepspeed, megatron, torchtitan, tp_plan
from planner_core.planning.pricing.configs.fields import Fields, Setup

MOST_BYTES = 1_000_000
TOOLS = (
    "torchtitan (TOML), Megatron-LM (arguments), DeepSpeed (JSON), accelerate (YAML) or transformers (tp_plan as JSON)"
)


def read_setup(path: str | Path, num_gpus: int) -> Setup:
    """Read the settings file of a tool for a run on `num_gpus` GPUs. Raises InputError."""
    where = f"config {Path(path).name}"
    text = _text(Path(path), where)
    kind = Path(path).suffix.lower()
    if kind == ".toml":
        return torchtitan.setup(Fields.of(_parsed(tomllib.loads, text, where, "TOML"), where), num_gpus)
    if kind == ".json":
        return _of_json(_parsed(json.loads, text, where, "JSON"), where, num_gpus)
    if kind in (".yaml", ".yml"):
        return _of_yaml(_parsed(_yaml, text, where, "YAML"), where, num_gpus)
    fields = megatron.read(text, where)
    if not fields.values:
        raise InputError(f"{where} has no options such as --tensor-model-parallel-size 8; give a file of {TOOLS}")
    return megatron.setup(fields, num_gpus)


def _of_json(data: Mapping[str, Any], where: str, num_gpus: int) -> Setup:
    if any(mark in data for mark in tp_plan.MARKS):
        return tp_plan.setup(Fields.of(data, where), num_gpus)
    if any(mark in data for mark in deepspeed.MARKS):
        return deepspeed.setup(Fields.of(data, where), num_gpus)
    if data and all(isinstance(v, str) for v in data.values()):  # the bare plan
        return tp_plan.setup(Fields.of({"tp_plan": data}, where), num_gpus)
    raise InputError(f"{where} has none of {', '.join((*deepspeed.MARKS, *tp_plan.MARKS))}; give a file of {TOOLS}")


def _of_yaml(data: Mapping[str, Any], where: str, num_gpus: int) -> Setup:
    if not any(mark in data for mark in accelerate.MARKS):
        raise InputError(f"{where} has none of {', '.join(accelerate.MARKS)}; give a file of {TOOLS}")
    return accelerate.setup(Fields.of(data, where), num_gpus)


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
