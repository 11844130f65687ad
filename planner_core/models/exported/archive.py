"""Read a `torch.export` archive (.pt2) as data: a zip that holds the graph as JSON. Nothing is unpickled, looked up or run.

Schema 8 is what torch 2.5 to 2.13 write. Weights, example inputs (a pickle) and guards stay unread; a symbolic size takes
the hint that was stored with it. `program` turns what is read here into a module that capture can run on meta.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner_core.core import InputError, shorten_error

SCHEMA_MAJOR = 8
MAX_JSON_BYTES = 128 << 20
MAX_STEPS = 200_000
MAX_GRAPH_DEPTH = 32
DTYPES_BY_CODE = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float16",
    7: "float32",
    8: "float64",
    10: "complex64",
    11: "complex128",
    12: "bool",
    13: "bfloat16",
    29: "float8_e4m3fn",
    30: "float8_e5m2",
}
HELP = "give path.py:callable that returns the module that was exported, or a config.json"
Stack = tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class ValueName:
    """A reference by name to a tensor or a computed number."""

    name: str


@dataclass(frozen=True, slots=True)
class TorchConstant:
    """A dtype, device, layout or memory format, by kind and name."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The shape and dtype of a tensor, and whether it needs a gradient."""

    shape: tuple[int, ...]
    dtype: str
    grad: bool


@dataclass(slots=True)
class ExportedOp:
    """One op. `stack`: the module calls around it, outermost first, each (call, path, class). `call`: the call of a torch function that
    it belongs to. `line`: the line of the model's code."""

    target: str
    args: tuple[tuple[str, bool, Any], ...]  # name, whether by keyword, value
    outputs: tuple[Any, ...]  # a ValueName, a list of these, or None
    stack: Stack
    call: str
    line: str
    grad: bool = True


@dataclass(slots=True)
class ExportedProgram:
    """A program: its steps in order, and the values of its parameters, buffers, constants and inputs."""

    name: str
    steps: list[ExportedOp] = field(default_factory=list)
    tensors: dict[str, TensorForm] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)  # full name -> value
    buffers: dict[str, str] = field(default_factory=dict)
    constants: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    # Parameter -> the file with its values: tied parameters share one.
    ties: dict[str, str] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)  # symbolic sizes, at the export's example


def read_exported(path: Path) -> ExportedProgram:
    """Read the program in a .pt2 file. Raises InputError with one sentence."""
    if not path.is_file():
        raise InputError(f"{path} is not a file; {HELP}")
    try:
        with zipfile.ZipFile(path) as archive:
            return _read_archive(path, archive)
    except InputError:
        raise
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, UnicodeError):
        raise InputError(f"{path} is truncated or not an exported program (no complete zip archive); {HELP}") from None
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        RecursionError,
        OverflowError,
        RuntimeError,
    ) as error:
        why = f"{type(error).__name__}: {shorten_error(error, 80)}"
        raise InputError(
            f"{path} is an exported program that cannot be read ({why}); export it again with torch.export.save"
        ) from None


def _read_archive(path: Path, archive: zipfile.ZipFile) -> ExportedProgram:
    names = archive.namelist()
    programs = [n for n in names if re.fullmatch(r"[^/]+/models/[^/]+\.json", n)]
    if not programs:
        if any(n.endswith("serialized_exported_program.json") for n in names):
            raise InputError(
                f"{path} is in the archive format of torch 2.6 and older; export it again with a newer torch"
            )
        if any("aotinductor" in n for n in names):
            raise InputError(f"{path} holds compiled code and no graph; {HELP}")
        raise InputError(f"{path} is an archive, but not an exported program; {HELP}")
    if len(programs) > 1:
        raise InputError(f"{path} holds {len(programs)} programs, and one is needed; save one program to a file")
    data = _read_json(path, archive, programs[0])
    version = data.get("schema_version", {})
    major = version.get("major") if isinstance(version, dict) else None
    if major != SCHEMA_MAJOR:
        by = f", written by torch {data['torch_version']}" if isinstance(data.get("torch_version"), str) else ""
        remedy = f"version {SCHEMA_MAJOR} is read; export it again with torch 2.13"
        raise InputError(f"{path} has schema version {major!r}{by[:60]}, and {remedy}")
    root = programs[0].split("/")[0]
    weights = f"{root}/data/weights/{programs[0].split('/')[-1].removesuffix('.json')}_weights_config.json"
    files = _read_json(path, archive, weights).get("config", {}) if weights in names else {}
    program = ExportedProgram(path.stem, ties={n: str(w.get("path_name", n)) for n, w in files.items()})
    _read_program(program, data["graph_module"])
    return program


def _read_json(path: Path, archive: zipfile.ZipFile, name: str) -> dict[str, Any]:
    """Read one JSON file of the archive, at most MAX_JSON_BYTES of it: the size that a zip states may be false."""
    with archive.open(name) as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise InputError(f"{path} holds a graph of more than {MAX_JSON_BYTES >> 20} MB, the most that is read")
    data = json.loads(text)
    if not isinstance(data, dict):
        raise InputError(f"{path} is an archive, but not an exported program ({name} is not a JSON object); {HELP}")
    return data


# --- the program ----------------------------------------------------------------------------------------


def _read_program(program: ExportedProgram, module: Mapping[str, Any]) -> None:
    _bind_inputs(program, module["signature"]["input_specs"])
    _add_graph(program, module["graph"], "", True, 0)
    for value in (*program.parameters.values(), *program.buffers.values(), *program.constants, *program.inputs):
        if value not in program.tensors:
            raise InputError(f"the program gives no form for its input {value[:60]!r}: the file is damaged")
    for spec in module["signature"]["output_specs"]:
        ((kind, what),) = ((k, v) for k, v in spec.items() if v is not None)
        # First, where a training step looks for a loss.
        if kind == "loss_output":
            program.outputs.insert(0, ValueName(str(what["arg"]["name"])))
        elif kind == "user_output":
            program.outputs.append(_read_argument(what["arg"], program, ""))


def _bind_inputs(program: ExportedProgram, specs: list[Mapping[str, Any]]) -> None:
    """Bind each input of the graph to a parameter, a buffer, a constant or an input of the user."""
    for spec in specs:
        ((kind, what),) = ((k, v) for k, v in spec.items() if v is not None)
        if kind == "user_input":
            value = _read_argument(what["arg"], program, "")
            program.inputs += [
                r.name for r in (value if isinstance(value, list) else [value]) if isinstance(r, ValueName)
            ]
        elif kind == "parameter":
            program.parameters[str(what["parameter_name"])] = str(what["arg"]["name"])
        elif kind == "buffer":
            program.buffers[str(what["buffer_name"])] = str(what["arg"]["name"])
        elif kind == "tensor_constant":
            program.constants.append(str(what["arg"]["name"]))
        elif kind != "constant_input":
            raise InputError(
                f"the program takes a {kind.replace('_', ' ')}, which is not a tensor; export the module without it"
            )


def _add_graph(program: ExportedProgram, graph: Mapping[str, Any], prefix: str, grad: bool, depth: int) -> None:
    """Append the steps of a graph. Those of an inner graph (with a `prefix`) come where it is called."""
    if depth > MAX_GRAPH_DEPTH:
        raise InputError(f"the program nests more than {MAX_GRAPH_DEPTH} graphs")
    for name, meta in graph["tensor_values"].items():
        sizes = tuple(_read_size(s, program) for s in meta["sizes"])
        if meta["dtype"] not in DTYPES_BY_CODE or any(s < 0 for s in sizes):
            raise InputError(
                f"tensor {name!r} of the program has dtype {meta['dtype']!r} and sizes {sizes}, which is not a tensor that can be read"
            )
        program.tensors[prefix + name] = TensorForm(sizes, DTYPES_BY_CODE[meta["dtype"]], bool(meta["requires_grad"]))
    for node in graph["nodes"]:
        if len(program.steps) >= MAX_STEPS:
            raise InputError(f"the program has more than {MAX_STEPS:,} steps, the most that is read")
        target = str(node["target"])
        if target.startswith("torch.ops.higher_order."):
            _add_inner_graph(program, node, target.rpartition(".")[2], prefix, grad, depth)
            continue
        args = tuple(
            (str(a["name"]), a.get("kind") == 2, _read_argument(a["arg"], program, prefix)) for a in node["inputs"]
        )
        outputs = tuple(_read_argument(o, program, prefix) for o in node["outputs"])
        program.steps.append(_read_step(node, target, args, outputs, grad))


def _add_inner_graph(
    program: ExportedProgram, node: Mapping[str, Any], name: str, prefix: str, grad: bool, depth: int
) -> None:
    """Append the steps of a higher-order op that runs one graph once. Steps "same" rename its arguments and results."""
    given = [_read_argument(a["arg"], program, prefix) for a in node["inputs"] if "as_graph" not in a["arg"]]
    graphs = [a["arg"]["as_graph"] for a in node["inputs"] if "as_graph" in a["arg"]]
    if (
        name not in ("wrap_with_set_grad_enabled", "wrap_with_autocast", "tag_activation_checkpoint", "invoke_subgraph")
        or len(graphs) != 1
    ):
        raise InputError(
            f"the program uses torch.ops.higher_order.{name}{_source_line(node)}, which decides or repeats by computed values or holds "
            "code; export a form of the model without it"
        )
    if name == "wrap_with_autocast" and given[2] is not False:
        raise InputError(
            f"the program runs under autocast{_source_line(node)}; export the model in the type it computes in"
        )
    inner = graphs[0]["graph"]
    under = f"{prefix}{graphs[0]['name']}/"
    names = [a["as_tensor"]["name"] if "as_tensor" in a else a["as_sym_int"]["as_name"] for a in inner["inputs"]]
    # Options come first: whether gradients are on, or the device and the dtype of autocast.
    handed = given[len(given) - len(names) :]
    for inside, ref in zip(names, handed, strict=True):
        program.steps.append(_read_step(node, "same", (("self", False, ref),), (ValueName(under + inside),), True))
    _add_graph(program, inner, under, bool(given[0]) if name == "wrap_with_set_grad_enabled" else grad, depth + 1)
    results = [r for o in node["outputs"] for r in _as_list(_read_argument(o, program, prefix))]
    for out, ref in zip(inner["outputs"], results, strict=True):
        program.steps.append(
            _read_step(node, "same", (("self", False, _read_argument(out, program, under)),), (ref,), True)
        )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _read_step(node: Mapping[str, Any], target: str, args: Any, outputs: tuple[Any, ...], grad: bool) -> ExportedOp:
    meta = node.get("metadata", {})
    stack = []
    for entry in filter(None, str(meta.get("nn_module_stack", "")).split(";")):
        key, path, kind = [*entry.split(","), "", ""][:3]
        if path == key:  # no stack is known
            break
        call = path + (key[key.rindex("@") :] if re.search(r"@\d+$", key) else "")
        stack.append((call, path, re.sub(r"\W", "_", kind.rpartition(".")[2])[:100]))
    return ExportedOp(
        target, args, outputs, tuple(stack[:100]), str(meta.get("torch_fn", "")).split(";")[0], _source_line(node), grad
    )


def _source_line(node: Mapping[str, Any]) -> str:
    """Return ` at file:line (code)` of the model's code, if the export kept it."""
    places = re.findall(
        r'File "([^"]+)", line (\d+), in \w+\n\s*(.*)', str(node.get("metadata", {}).get("stack_trace", ""))
    )
    # The innermost line of the model: a call of F.linear ends in a file of torch, which says nothing about the model.
    of_model = [p for p in places if "/torch/" not in p[0]] or places
    if not of_model:
        return ""
    return f" at {of_model[-1][0].rpartition('site-packages/')[2]}:{of_model[-1][1]} ({of_model[-1][2][:100]})"


# --- arguments ------------------------------------------------------------------------------------------


def _read_argument(arg: Mapping[str, Any], program: ExportedProgram, prefix: str) -> Any:
    # The schema writes a union as an object with a field for each kind, of which one is set.
    ((kind, value),) = ((k, v) for k, v in arg.items() if v is not None or k == "as_none")
    if kind == "as_none":
        return None
    read = _READERS.get(kind)
    if read is None:
        raise InputError(
            f"the program passes {kind.removeprefix('as_').replace('_', ' ')} to an op, which is neither a tensor nor a number"
        )
    return read(value, program, prefix)


def _read_size(size: Mapping[str, Any], program: ExportedProgram) -> int:
    if "as_int" in size:
        return int(size["as_int"])
    hint = size["as_expr"].get("hint") or {}
    if not isinstance(hint.get("as_int"), int):
        text = str(size["as_expr"].get("expr_str"))[:60]
        raise InputError(
            f"the program has a size ({text}) that depends on computed values, which no graph can hold; export a form without it"
        )
    symbol = re.fullmatch(r"(?:Symbol\(')?(s\d+)\b.*", str(size["as_expr"].get("expr_str")), re.DOTALL)
    # A size such as 2*s0 says nothing about s0 alone.
    if symbol and "*" not in size["as_expr"]["expr_str"] and "+" not in size["as_expr"]["expr_str"]:
        program.symbols[symbol[1]] = hint["as_int"]
    return int(hint["as_int"])


def _number_reader(cast: Callable[[Any], Any]) -> Callable[[Any, ExportedProgram, str], Any]:
    """Return a reader of a number or of a reference to a computed one."""
    return lambda v, _, p: (
        ValueName(p + str(v["as_name"])) if v.get("as_name") is not None else cast(next(iter(v.values())))
    )


def _list_reader(one: Callable[[Any, ExportedProgram, str], Any]) -> Callable[[Any, ExportedProgram, str], Any]:
    return lambda v, e, p: [one(x, e, p) for x in v]


def _plain_reader(cast: Callable[[Any], Any]) -> Callable[[Any, ExportedProgram, str], Any]:
    return lambda v, _, __: cast(v)


def _read_tensor(value: Any, _: ExportedProgram, prefix: str) -> ValueName:
    return ValueName(prefix + str(value["name"]))


def _read_optional(value: Any, _: ExportedProgram, prefix: str) -> ValueName | None:
    return ValueName(prefix + str(value["as_tensor"]["name"])) if value.get("as_tensor") else None


_MEMORY_FORMATS = {1: "contiguous_format", 2: "channels_last", 3: "channels_last_3d", 4: "preserve_format"}
_READERS: dict[str, Callable[[Any, ExportedProgram, str], Any]] = {
    "as_tensor": _read_tensor,
    "as_tensors": _list_reader(_read_tensor),
    "as_optional_tensor": _read_optional,
    "as_optional_tensors": _list_reader(_read_optional),
    "as_int": _plain_reader(int),
    "as_ints": _list_reader(_plain_reader(int)),
    "as_float": _plain_reader(float),
    "as_floats": _list_reader(_plain_reader(float)),
    "as_bool": _plain_reader(bool),
    "as_bools": _list_reader(_plain_reader(bool)),
    "as_string": _plain_reader(str),
    "as_sym_int": _number_reader(int),
    "as_sym_ints": _list_reader(_number_reader(int)),
    "as_sym_float": _number_reader(float),
    "as_sym_floats": _list_reader(_number_reader(float)),
    "as_sym_bool": _number_reader(bool),
    "as_sym_bools": _list_reader(_number_reader(bool)),
    "as_scalar_type": lambda v, _, __: TorchConstant("dtype", DTYPES_BY_CODE[v]),
    "as_device": lambda v, _, __: TorchConstant("device", str(v["type"])),
    "as_layout": lambda v, _, __: TorchConstant("layout", "strided"),
    "as_memory_format": lambda v, _, __: TorchConstant("memory_format", _MEMORY_FORMATS[v]),
}
