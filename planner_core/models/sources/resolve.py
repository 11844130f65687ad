"""Build the model that a MODEL argument names: a zoo name, a config.json, a Python callable, or an exported program."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner_core.core import (
    CaptureError,
    InputError,
    NeedsValues,
    is_file,
    named,
    read_json,
    shorten_error,
    shorten_value,
)
from planner_core.models.capture.checks.refusals import check_module
from planner_core.models.capture.checks.refusals import format_line as line_of
from planner_core.models.capture.module import to_meta
from planner_core.models.sources.arguments import as_arguments, explain_unsupported, list_inputs_by_samples
from planner_core.models.sources.labels import text_config
from planner_core.models.sources.positions import Positions, read_positions, too_long_message, unused_seq_note
from planner_core.models.zoo import ZOO, config_file, with_depth

MAX_CONFIG_BYTES = 4 << 20
MAX_NESTING = 100
"""The deepest nesting of objects and lists that is read. A composite config has five levels."""


@dataclass(slots=True)
class ModelSource:
    """A module on meta and its inputs.

    config     what builds the model once more
    workload   batch and seq, if the inputs fix them
    originals  the names of the user's tensors by storage, if the module is a copy
    """

    name: str
    source: str
    module: nn.Module
    inputs: dict[str, Any]
    args: tuple[Any, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    positions: Positions = field(default_factory=Positions)
    originals: Mapping[int, str] = field(default_factory=dict)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among the inputs."""
        return [t for t in pytree.tree_leaves((self.inputs, self.args)) if isinstance(t, torch.Tensor)]

    def describe_inputs(self) -> str:
        """Write a note about the shapes and dtypes that are planned."""
        inputs = ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in self.tensors())
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in self.module.parameters()})
        return f"planned as the function gives it: inputs {inputs or 'without tensors'}; parameters {' and '.join(dtypes) or 'none'}"


def resolve(
    source: str | Mapping[str, Any], *, batch: int, seq: int | None, dtype: str, layers: int | None
) -> ModelSource:
    """Build the model that `source` names. `seq` None stands for the default number of tokens, at most the model's positions.

    Raises InputError or CaptureError.
    """
    if not isinstance(source, str):
        return _config_source(str(source.get("model_type", "model")), "config", source, batch, seq, dtype, layers)
    if source in ZOO:
        data = with_depth(ZOO[source], layers)
        return _config_source(source, f"zoo:{source}", data, batch, seq, dtype, None)
    if ".py:" in source or source.endswith(".pt2"):
        return python_source(source)
    path, file = Path(source), config_file(source)
    data = read_config_file(file)
    name = path.name if path.is_dir() else (file.parent.name or file.stem) if file.name == "config.json" else file.stem
    return _config_source(name, str(source), data, batch, seq, dtype, layers)


def read_config_file(file: Path) -> dict[str, Any]:
    """Read a config file in UTF-8 or UTF-16 as plain data. Raises InputError."""
    advice = f"name its function, {file}:build" if file.suffix == ".py" else "give a Hugging Face config.json"
    data = read_json(file, str(file), MAX_CONFIG_BYTES, advice)
    if not isinstance(data, dict):
        raise InputError(f"{file} holds a {type(data).__name__}, not an object with a model_type")
    level: list[Any] = [data]
    for _ in range(MAX_NESTING):
        level = [v for x in level for v in (x.values() if isinstance(x, dict) else x) if isinstance(v, (dict, list))]
        if not level:
            return data
    raise InputError(f"{file} is nested more than {MAX_NESTING} levels deep, which no config.json is")


def _config_source(
    name: str, source: str, data: Mapping[str, Any], batch: int, seq: int | None, dtype: str, layers: int | None
) -> ModelSource:
    from planner_core.models.sources import huggingface as hf
    from planner_core.models.sources import inputs as training_inputs
    from planner_core.models.sources.adapters import adapter_notes

    module, parsed, used = hf.build_from_config(data, dtype, layers)
    limit = read_positions(text_config(parsed))
    tokens = training_inputs.count_tokens(module, parsed, seq or limit.default_seq, dtype)
    notes = (
        *ignored_field_notes(data, type(module).__name__, dtype),
        *hf.missing_kernel_notes(module),
        *adapter_notes(used),
    )
    if seq is not None and tokens != seq:
        if tokens > 1 and limit.field and tokens < seq:
            raise InputError(too_long_message(name, replace(limit, number=tokens), seq))
        if tokens > 1:
            raise InputError(
                f"{name} makes {tokens} tokens of each sample, and ",
                named("seq", seq),
                f" asks for {seq}; leave ",
                named("seq"),
                " out",
            )
        notes += (unused_seq_note(seq),)
    inputs = training_inputs.make_training_inputs(module, parsed, batch, tokens, dtype)
    notes += missing_input_notes(parsed, inputs)
    limit = limit if tokens > 1 else Positions()
    return ModelSource(
        name, source, module, inputs, config=used, workload={"seq": tokens}, notes=notes, positions=limit
    )


def missing_input_notes(config: Any, inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """Write notes about images or sound that a model can take and its planned inputs do not have."""
    kinds = (("vision_config", "images", "pixel"), ("audio_config", "sound", "input_features"))
    return tuple(
        f"the planned step has text alone, and no {what}; for a step that has both give path.py:callable"
        for part, what, name in kinds
        if hasattr(config, part) and "input_ids" in inputs and not any(n.startswith(name) for n in inputs)
    )


def ignored_field_notes(data: Mapping[str, Any], kind: str, dtype: str) -> tuple[str, ...]:
    """Write notes about fields of a config that a plan ignores."""
    notes = []
    if data.get("auto_map"):
        notes.append(
            f"auto_map is not followed: it names code of its own, and {kind} of transformers is planned in its place"
        )
    quantized = data.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else None
        how = f" ({shorten_value(method)})" if method else ""
        notes.append(f"quantization_config{how} is left out: every weight is planned, and trained, in {dtype}")
    return tuple(notes)


def python_source(source: str, device: str = "meta") -> ModelSource:
    """Run `path.py:callable`, which returns a pair (module, example inputs), in this process; or read a .pt2 file.

    On "meta" weights take no memory. A model that cannot be built there, since its code asks a tensor for values, is built on the CPU
    and then moved. (`sandbox.process` runs this in a process of its own.)
    """
    if source.endswith(".pt2"):
        from planner_core.models.exported.program import load_program

        module, args, size, notes = load_program(Path(source))
        return ModelSource(Path(source).stem, source, module.train(), {}, args, {"callable": source}, size, notes)
    try:
        return _run_python(source, device)
    except NeedsValues:
        if device != "meta":
            raise
    return move_to_meta(_run_python(source, "cpu"))


def move_to_meta(source: ModelSource) -> ModelSource:
    """Move parameters, buffers and floating-point inputs to meta. Integers and masks keep their values."""

    def moved(x: Any) -> Any:
        return x.to("meta") if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()) else x

    check_module(source.module)  # first, since a moved parameter loses its hooks
    to_meta(source.module)
    source.inputs, source.args = pytree.tree_map(moved, (source.inputs, source.args))
    return source


def _run_python(source: str, device: str) -> ModelSource:
    text, _, attribute = source.rpartition(":")
    path = Path(text)
    if not is_file(path):
        raise InputError(f"{text} is not a file; give path/to/file.py:callable")
    try:
        # Stdout carries the result of the sandbox; the user's code must not print into it.
        with contextlib.redirect_stdout(io.StringIO()), torch.device(device):
            user = _import_file(path)
            if not hasattr(user, attribute):
                raise CaptureError(f"{text} has nothing named {attribute!r}; give path/to/file.py:callable")
            returned = getattr(user, attribute)()
    except (MemoryError, CaptureError):
        raise
    # SystemExit too: a script may end itself when it is imported.
    except (Exception, SystemExit) as error:
        where = line_of(traceback.extract_tb(error.__traceback__))
        message = f"{source} did not return a model: {type(error).__name__}: {shorten_error(error)}{where}"
        if _asks_for_values(error):
            raise NeedsValues(message, what=f"{source} asks tensors for values while it builds the model") from None
        raise CaptureError(message) from None
    module, inputs = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, ())
    if not isinstance(module, nn.Module):
        raise CaptureError(
            f"{source} returned a {type(module).__name__}; an nn.Module or a (module, example inputs) pair is needed"
        )
    args, kwargs = as_arguments(inputs)
    if not args and not kwargs:
        raise CaptureError(f"{source} returned a module without example inputs; return (module, example inputs)")
    if unread := explain_unsupported(args, kwargs):
        raise CaptureError(f"the example inputs of {source} cannot be planned: {unread}")
    return ModelSource(
        path.stem,
        source,
        module.train(),
        kwargs,
        args,
        {"callable": source, **list_inputs_by_samples(module, args, kwargs)},
    )


def _asks_for_values(error: BaseException) -> bool:
    """Return whether torch raised an error since a tensor on meta has no values. Torch has no class for it, but always names meta."""
    return re.search("meta|fake impl", str(error), re.IGNORECASE) is not None


def _import_file(path: Path) -> ModuleType:
    """Run a file as Python runs a script, with its folder in `sys.path`.

    The module is put into `sys.modules`, where dataclasses and annotations look up its names.
    """
    name = f"shardscope_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = user = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(user)
    return user
