"""From a MODEL argument to its graph: a snapshot of the zoo if there is one, else a capture (which imports torch)."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner_core.core import (
    DTYPES,
    MAX_SAMPLES,
    Block,
    CaptureError,
    Graph,
    InputError,
    NeedsValues,
    Op,
    Plan,
    PlannedModel,
    TensorMeta,
    is_installed,
    named,
    require_packages,
)
from planner_core.models.zoo import SNAPSHOT_TRANSFORMERS, ZOO, config_file, load_snapshot

if TYPE_CHECKING:
    from planner_core.models.sources.resolve import ModelSource

VOCABULARY = "vocab_size"
"""The field of a config with the number of words."""
DEFAULT_BATCH, DEFAULT_SEQ = 16, 2048
"""The default workload of a model that is not in the zoo. A model with fewer positions gets as many tokens as it has positions."""
GPUS_PER_DEFAULT_BATCH = 16
"""A model's default batch is for this many GPUs. On more GPUs it grows as they do, so that each keeps its work."""
SNAPSHOT_DTYPES = ("bfloat16", "float16")
"""The dtypes that the zoo's snapshots serve. They were captured in the first one."""


def capture_graph(
    source: str | Mapping[str, Any],
    *,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str = "bfloat16",
    layers: int | None = None,
    flat: bool = False,
) -> Graph:
    """Capture the graph of a MODEL argument (docs/CONTRACT.md) or of a config dict at one workload; None stands for the default size.

    `layers` overrides the depth; `flat` traces every module call and folds nothing (it judges the folding).
    Raises InputError or CaptureError, each with one sentence.
    """
    from planner_core.models.sandbox.process import capture_in_process

    for name, size in (("batch", batch), ("seq", seq), ("layers", layers)):
        if size is not None and size < 1:
            raise InputError(named(name, size), " must be at least 1")
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    is_file = isinstance(source, str) and brings_inputs(source)
    if isinstance(source, str) and not is_file and source not in ZOO:
        config_file(source)  # report a wrong name before a missing package
    require_packages("torch")
    if isinstance(source, str) and is_file:
        if layers is not None:
            remedy = "export" if source.endswith(".pt2") else "let your callable build"
            raise InputError(named("layers", layers), f" cannot be applied to {source}; {remedy} the depth you want")
        return capture_in_process(source, batch=batch, seq=seq, flat=flat)
    require_packages("transformers")
    return _capture_config(source, batch or DEFAULT_BATCH, seq, dtype, layers, flat)


def capture_file(source: str, *, batch: int | None = None, seq: int | None = None, flat: bool = False) -> Graph:
    """Capture the graph of `path.py:callable` or of a .pt2 file. The code runs in this process.

    If a model cannot be captured without values, it is captured once more with the values of its integer and mask inputs. Raises
    InputError if the sizes of the example inputs are not `batch` and `seq`.
    """
    from planner_core.models.sources.in_memory import infer_workload
    from planner_core.models.sources.resolve import move_to_meta, python_source

    exported = source.endswith(".pt2")

    def graph(model_source: ModelSource) -> Graph:
        size = model_source.workload or infer_workload(model_source)
        _check_sizes(source, size, {"batch": batch, "seq": seq})
        notes = model_source.notes if exported else (*model_source.notes, model_source.describe_inputs())
        return _capture_source(model_source, size, flat=flat, notes=notes, replay=not exported)

    model_source = python_source(source)
    try:
        return graph(model_source)
    except NeedsValues as error:
        # The second try gives values to integers and masks alone. Where none lacks them it would end as the first.
        unknown = any(t.is_meta and not t.is_floating_point() for t in model_source.tensors())
        if exported or not unknown:
            raise
        first = error
    # Built once more, on the CPU: inputs that were made on meta have no values.
    try:
        model_source = move_to_meta(python_source(source, "cpu"))
        model_source.notes += (f"planned for the values of the example inputs, others may run otherwise: {first.what}",)
        return graph(model_source)
    except (CaptureError, MemoryError):
        raise first from None


def _capture_config(
    source: str | Mapping[str, Any],
    batch: int,
    seq: int | None,
    dtype: str,
    layers: int | None,
    flat: bool,
    asked: bool = True,
) -> Graph:
    """Capture the graph of a model that transformers builds.

    If the user does not give the number of tokens, and a table of positions is shorter than its config says (RoBERTa reserves two
    rows), the model is captured once more with as many tokens as there are positions. `asked`: whether the user gave `seq`.
    """
    from planner_core.models.capture.checks.refusals import TooManyPositions
    from planner_core.models.capture.constants import MAX_COMPUTED_ELEMENTS
    from planner_core.models.capture.recording import paused_garbage_collection
    from planner_core.models.sandbox.memory_limit import limited_memory
    from planner_core.models.snapshots.by_samples import capture_wide_batch
    from planner_core.models.sources.positions import stretched_note, too_long_message
    from planner_core.models.sources.resolve import resolve

    if batch * (seq or DEFAULT_SEQ) > MAX_COMPUTED_ELEMENTS:
        # The token ids are then too large to be computed, and code that asks for their values would fail.
        graph = capture_wide_batch(lambda b, few: _capture_config(source, b, seq, dtype, few or layers, flat), batch)
        if graph is not None:
            return graph
    label = source if isinstance(source, str) else str(source.get("model_type", "the model"))
    # Paused while the model is built too: a thousand layers are a million objects that stay, and each collection would walk all of them.
    with paused_garbage_collection(), limited_memory(label, batch=batch, seq=seq or DEFAULT_SEQ):
        model = resolve(source, batch=batch, seq=seq, dtype=dtype, layers=layers)
        tokens, limit = model.workload["seq"], model.positions
        beyond = limit.beyond(tokens)
        notes = (*model.notes, *([stretched_note(limit, tokens)] if beyond else []))
        try:
            return _capture_source(model, {"batch": batch, "seq": tokens}, flat=flat, notes=notes, library=True)
        except TooManyPositions as error:
            fits = tokens - error.excess
            if fits < 1:
                raise
            longest = _capture_config(source, batch, min(fits, limit.number or fits), dtype, layers, flat, asked=False)
            if seq is not None and asked:
                raise InputError(
                    too_long_message(model.name, replace(limit, number=longest.workload["seq"]), seq)
                ) from None
            return longest
        except CaptureError as error:
            if beyond:
                raise InputError(too_long_message(model.name, limit, tokens)) from error
            raise


def _capture_source(source: ModelSource, size: Mapping[str, int], **options: Any) -> Graph:
    """Capture a source at `size`, its batch and seq. `options` are those of `capture_module`."""
    from planner_core.models.capture.module import capture_module

    return capture_module(
        source.module,
        source.inputs,
        args=source.args,
        name=source.name,
        source=source.source,
        config=source.config,
        batch=size["batch"],
        seq=size["seq"],
        **options,
    )


def has_snapshot(model: str, dtype: str) -> bool:
    """Return whether a model is opened from a snapshot of the zoo: of this dtype, and not if another transformers is installed, whose
    model a run would have."""
    if model not in ZOO or dtype not in SNAPSHOT_DTYPES:
        return False
    installed = package_versions()
    return installed.get("transformers", SNAPSHOT_TRANSFORMERS) == SNAPSHOT_TRANSFORMERS or "torch" not in installed


@functools.cache
def package_versions() -> dict[str, str]:
    """Return the installed versions of torch and transformers, read without importing them."""
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers") if is_installed(name)}


def identify_model(graph: Graph) -> PlannedModel:
    """Return what a plan says of the model of its graph. `versions`: of the packages that name its operators; a zoo model that was
    planned without torch is that of its snapshot."""
    versions = package_versions()
    if graph.source.startswith("zoo:") and "torch" not in versions:
        versions = {**versions, "transformers": SNAPSHOT_TRANSFORMERS}
    return PlannedModel(
        graph.name,
        graph.num_params,
        graph.loss,
        dict(graph.config),
        graph.source,
        graph.num_repeats,
        versions,
        graph.own_shapes,
    )


def default_sizes(model: str, num_gpus: int = 1) -> tuple[int, int]:
    """Return (samples of a step, tokens of a sample) of a model without example inputs, where nobody states them.

    Example: Llama-3-8B has 16 samples a step on 8 and on 16 GPUs, 14 on 7, 24 on 24, and 64 on 64.
    """
    batch, seq = (ZOO[model].batch, ZOO[model].seq) if model in ZOO else (DEFAULT_BATCH, DEFAULT_SEQ)
    batch *= max(1, min(num_gpus // GPUS_PER_DEFAULT_BATCH, MAX_SAMPLES // batch))
    if batch % num_gpus == 0 or num_gpus % batch == 0:
        return batch, seq
    # Neither number divides the other, so GPUs would stand idle or repeat work for a batch that nobody asked for: 16 samples
    # on 7 H100 took Llama-3-8B four times as long as 14.
    even = max(1, round(batch / num_gpus)) * num_gpus
    return even if even <= MAX_SAMPLES else batch, seq


def open_model(
    model: str, *, batch: int | None = None, seq: int | None = None, dtype: str | None = None, layers: int | None = None
) -> Graph:
    """Return the graph of a MODEL argument: a snapshot of the zoo if one serves, otherwise a capture, which imports torch."""
    dtype = dtype or SNAPSHOT_DTYPES[0]
    if has_snapshot(model, dtype):
        from planner_core.models.sources.positions import check_positions, unused_seq_note

        has_tokens = ZOO[model].seq > 1
        graph = check_positions(load_snapshot(model, batch=batch, seq=seq if has_tokens else None, layers=layers))
        if seq is not None and seq > 1 and not has_tokens:
            graph = replace(graph, assumptions=(*graph.assumptions, unused_seq_note(seq)))
        return graph if dtype == SNAPSHOT_DTYPES[0] else with_dtype(graph, dtype)
    if model in ZOO:
        batch, seq = batch or default_sizes(model)[0], seq or default_sizes(model)[1]
    return capture_graph(model, batch=batch, seq=seq, dtype=dtype, layers=layers)


def with_config(graph: Graph, **fields: Any) -> Graph:
    """Capture a model from a config once more, at the same workload, with other fields in its config.

    `fields` are such as `vocab_size` or `lora` (see `sources.adapters`). Imports torch. Raises InputError.
    """
    workload, dtypes = graph.workload, {m.dtype for m in graph.parameters().values()}
    captured = capture_graph(
        {**graph.config, **fields},
        batch=workload["batch"],
        seq=workload["seq"],
        dtype=next((d for d in DTYPES if d in dtypes), DTYPES[0]),
    )
    return replace(captured, name=graph.name, source=graph.source)


def pad_vocabulary(graph: Graph, multiple: int) -> Graph:
    """Return the graph of the model with its vocabulary padded to a multiple, as tools pad theirs; unchanged if it divides already.

    `own_shapes` of the result has the shapes without the padded rows, which checkpoints keep.

    Raises InputError if the model does not come from a config with a vocabulary.
    """
    words = graph.config.get(VOCABULARY)
    if multiple == 1 or (isinstance(words, int) and words % multiple == 0):
        return graph
    if not isinstance(words, int):
        raise InputError(
            named("vocab_multiple", multiple),
            f" pads the vocab_size of a config, and {graph.name} has none; pad it in the model, or leave ",
            named("vocab_multiple"),
            " out",
        )
    padded = -(-words // multiple) * multiple
    note = (
        f"the vocabulary of {words} words is padded to {padded}, a multiple of {multiple}, so that tensor-parallel ranks hold "
        f"equal parts; a checkpoint keeps {words}"
    )
    captured = with_config(graph, **{VOCABULARY: padded})
    metas = captured.parameters()
    own_shapes = {n: m.shape for n, m in graph.parameters().items() if n in metas and m.shape != metas[n].shape}
    return replace(captured, assumptions=(*graph.assumptions, note), own_shapes=own_shapes)


def with_adapters(graph: Graph, rank: int | None, nf4: bool) -> Graph:
    """Return the graph with LoRA adapters of a rank, and with frozen weights in 4 bits if `nf4`; unchanged if `rank` is None.

    Raises InputError if the model does not come from a config.
    """
    if rank is None and not nf4:
        return graph
    if rank is None:
        raise InputError(
            named("nf4"),
            " keeps frozen weights beside adapters in 4 bits; give the rank of adapters too, as in ",
            named("lora", 16),
        )
    if "model_type" not in graph.config:
        raise InputError(
            named("lora", rank),
            f" puts adapters into a model from a config, and {graph.name} is code; build them there, as peft does, or leave ",
            named("lora"),
            " out",
        )
    return with_config(graph, lora={"rank": rank, **({"weights": "nf4"} if nf4 else {})})


def brings_inputs(model: Any) -> bool:
    """Return whether a model has example inputs, which fix its batch, tokens and dtype: code, an exported program, a module, a graph."""
    if isinstance(model, (str, Path)):
        return ".py:" in str(model) or str(model).endswith(".pt2")
    return isinstance(model, Graph) or hasattr(model, "named_parameters")


def load_model(
    model: Any,
    *,
    inputs: Any = None,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    layers: int | None = None,
) -> Graph:
    """Read a model as a graph: every operation of one training step, on global tensors, with repeated blocks once.

    Args:
        model: A zoo name, the path of a Hugging Face `config.json` (or its folder), a config as a mapping,
            `"path/to/file.py:function"` (its code runs in a process of its own), a `.pt2` file, or an `nn.Module`, which is
            copied onto meta and not changed.
        inputs: Example inputs of an `nn.Module`, in the form in which it is called: a tuple of positional arguments, a mapping of
            named ones, or one tensor. Values of floating-point inputs do not matter.
        batch: Samples of the graph, which holds one global micro-batch. Default: the model's own; for a module, the first dim of
            its inputs.
        seq: Tokens of a sample. Default: the model's own; for a module, the second dim of token ids, else 1.
        dtype: `"bfloat16"`, `"float16"` or `"float32"`. Default: bfloat16; for a module, its own dtypes.
        layers: Another depth, for models that are built from a config.

    Returns:
        The graph. `plan`, `compare`, `front` and `fold` take it in place of the model, so that a model is captured once.

    Raises:
        InputError: The name, file, option or input cannot be used.
        CaptureError: The model's code cannot be recorded.

    Example:
        >>> graph = shardscope.load_model("llama-3-8b", batch=8, seq=4096)
        >>> graph.num_params, graph.num_repeats
        (8030261248, {'LlamaDecoderLayer': 32})
    """
    if isinstance(model, Graph):
        return model
    if isinstance(model, (str, Path)):
        return open_model(str(model), batch=batch, seq=seq, dtype=dtype, layers=layers)
    if isinstance(model, Mapping):
        return capture_graph(model, batch=batch, seq=seq, dtype=dtype or SNAPSHOT_DTYPES[0], layers=layers)
    if hasattr(model, "named_parameters"):
        return _capture_in_memory(model, inputs, {"batch": batch, "seq": seq}, dtype, layers)
    raise InputError(
        f"a value of type {type(model).__name__} is not a model; give a zoo name, a config.json, a config as a dict, "
        "or an nn.Module with inputs"
    )


def _capture_in_memory(
    module: Any, inputs: Any, asked: Mapping[str, int | None], dtype: str | None, layers: int | None
) -> Graph:
    """Capture the graph of an `nn.Module`. Raises InputError if an option cannot be applied to it."""
    from planner_core.models.sources.in_memory import module_source

    name = type(module).__name__
    if layers is not None:
        raise InputError(
            f"layers={layers} cannot be applied to a {name} that is built already; build the depth you want"
        )
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    source = module_source(module, inputs, dtype)
    _check_sizes(name, source.workload, asked)
    return _capture_source(source, source.workload, originals=source.originals)


def _check_sizes(name: str, size: Mapping[str, int], asked: Mapping[str, int | None]) -> None:
    """Raise InputError if a size is asked for that the example inputs do not have."""
    for what, number in asked.items():
        if number is not None and number != size[what]:
            why = ", since they are not token ids of several tokens" if (what, size[what]) == ("seq", 1) else ""
            raise InputError(
                f"the inputs of {name} have {what} {size[what]}, not {number}{why}; leave it out, or give other inputs"
            )


def trains_on_tokens(model_class: str) -> bool:
    """Return whether the labels of a class of transformers are the tokens, which the model shifts: a file of tokens trains it."""
    return model_class.endswith(("ForCausalLM", "LMHeadModel"))


def load_plan_graph(plan: Plan) -> Graph:
    """Return the graph of a plan's model at the plan's workload: a zoo model's snapshot at the plan's depth, otherwise a capture of its
    config."""
    config, workload = plan.model.config, plan.workload
    given: dict[str, Any] = {"batch": plan.graph_batch, "seq": workload.seq, "dtype": workload.dtype}
    name = plan.model.source.removeprefix("zoo:")
    if name in ZOO:
        # A T5 has two depths, and a snapshot opens with one for both.
        depth = {int(config[field]) for field in ZOO[name].depth if field in config}
        graph = open_model(name, **given, layers=depth.pop() if len(depth) == 1 else None)
        # Of another width or vocabulary there is no snapshot.
        if dict(graph.config) == config:
            return graph
    graph = capture_graph(config["callable"]) if "callable" in config else capture_graph(config, **given)
    return replace(graph, own_shapes=plan.model.own_shapes)


def with_dtype(graph: Graph, dtype: str) -> Graph:
    """Return the same graph with the other 16-bit type."""

    def meta(m: TensorMeta) -> TensorMeta:
        return replace(m, dtype=dtype) if m.dtype == SNAPSHOT_DTYPES[0] else m

    def block(b: Block) -> Block:
        values = tuple(replace(v, meta=meta(v.meta)) for v in b.values)
        items = tuple(
            replace(i, saved_extra=tuple(map(meta, i.saved_extra))) if isinstance(i, Op) else i for i in b.items
        )
        return replace(b, values=values, items=items)

    return replace(graph, top=block(graph.top), blocks={n: block(b) for n, b in graph.blocks.items()})
