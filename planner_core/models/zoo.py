"""The zoo: well-known models by name, with their published configs and a snapshot of each one's graph.

Opens without torch. `load_snapshot` reads `assets/models/NAME.json` at any batch, sequence length and depth.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from planner_core.core import (
    ASSETS,
    Block,
    Call,
    Graph,
    InputError,
    Op,
    Value,
    graph_from_json,
    is_folder,
    named,
    path_exists,
    shorten_value,
)

SNAPSHOTS = ASSETS / "models"
SNAPSHOT_TRANSFORMERS = "5.23.0"
"""The transformers whose models the snapshots are. Other releases may call other operators: since 5.23 attention ends with one more
reshape, so that a plan of the snapshot does not run with 5.17."""


@dataclass(frozen=True, slots=True)
class ZooModel:
    """One model of the zoo. `depth`: the config fields that hold its number of layers. All else is in its snapshot."""

    name: str
    description: str
    depth: tuple[str, ...] = ("num_hidden_layers",)

    @property
    def config(self) -> Mapping[str, Any]:
        """The published config, from which the snapshot was captured."""
        config: Mapping[str, Any] = _read_snapshot(self.name)["config"]
        return config

    @property
    def batch(self) -> int:
        """Samples of a step, where nobody states them."""
        return int(_read_snapshot(self.name)["workload"]["batch"])

    @property
    def seq(self) -> int:
        """Tokens of a sample, where nobody states them; 1 for images."""
        return int(_read_snapshot(self.name)["workload"]["seq"])


ZOO: dict[str, ZooModel] = {
    model.name: model
    for model in (
        ZooModel("llama-3-8b", "decoder, 32 layers, grouped-query attention, gated feed-forward"),
        ZooModel("llama-3-70b", "decoder, 80 layers, grouped-query attention, gated feed-forward"),
        ZooModel("gpt2-xl", "decoder, 48 layers, fused q, k, v, tied embeddings", ("n_layer",)),
        ZooModel("bert-large", "encoder, 24 layers, masked-language loss"),
        ZooModel(
            "t5-large",
            "encoder and decoder, 24 layers each, tied embeddings, relative positions",
            ("num_layers", "num_decoder_layers"),
        ),
        ZooModel("vit-large", "vision transformer, 24 layers, 1000 classes, 224x224 images"),
        ZooModel("mixtral-8x7b", "decoder, 32 layers, 8 experts of which each token uses 2"),
        ZooModel("resnet50-100k", "convolutions, 16 bottlenecks, 100 000 classes, 224x224 images", ()),
    )
}


def with_depth(model: ZooModel, layers: int | None) -> dict[str, Any]:
    """Return the config with another number of layers. Raises InputError if the model has no such number."""
    if layers is None:
        return dict(model.config)
    if not model.depth:
        raise InputError(
            f"{model.name} has stages of different widths, not {layers} equal layers; leave ", named("layers"), " out"
        )
    if not 1 <= layers <= 1000:
        raise InputError(f"{layers} layers is not between 1 and 1000")
    return {**model.config, **dict.fromkeys(model.depth, layers)}


@cache
def _read_snapshot(name: str) -> dict[str, Any]:
    path = SNAPSHOTS / f"{name}.json"
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"no snapshot of {name}: {error.strerror} ({path}); make it with python -m planner_core.models.snapshots.write"
        ) from None
    return data


def config_file(source: str) -> Path:
    """Return the config file that `source` names: itself, or the config.json of a folder. Raises InputError if neither exists."""
    path = Path(source)
    file = path / "config.json" if is_folder(path) else path
    if path_exists(file):
        return file
    if source.strip() and is_folder(path):
        raise InputError(f"the folder {source} holds no config.json; give a folder that does, or the file itself")
    near = get_close_matches(source, list(ZOO), 1)
    hint = f"did you mean {near[0]!r}?" if near else f"the zoo has {', '.join(ZOO)}"
    if not near and "/" in source and not source.endswith(".json"):
        hint = "nothing is downloaded: give the config.json of the model, or its folder, on this machine"
    raise InputError(f"{shorten_value(source)} is neither a model of the zoo nor a file; {hint}")


def load_snapshot(name: str, *, batch: int | None = None, seq: int | None = None, layers: int | None = None) -> Graph:
    """Load the graph of a zoo model at a workload (by default the zoo's own) and depth. Raises InputError."""
    if name not in ZOO:
        raise InputError(f"{name!r} is not a model of the zoo; choose one of {', '.join(ZOO)}")
    graph = graph_from_json(_read_snapshot(name), batch=batch, seq=seq)
    return graph if layers is None else set_depth(graph, layers, with_depth(ZOO[name], layers))


def set_depth(graph: Graph, layers: int, config: Mapping[str, Any]) -> Graph:
    """Set the length of every chain of repeated calls to `layers`.

    A chain is a run of calls of one block, in which each call takes the result of the call before. Values that all calls share
    (masks, positions, an encoder's result) are passed to the new calls too.
    """
    calls = list(graph.calls())
    values, items = list(graph.top.values), []
    swap: dict[int, int] = {}
    for item in graph.top.items:
        if isinstance(item, Op):
            items.append(_renumber_values(item, swap, "inputs"))
            continue
        run = [c for c in calls if c.block == item.block]
        # The whole chain comes in the place of its first call, so the other calls are skipped.
        if item is not run[0]:
            continue
        chain, outs = _chain_calls(item, run, layers, values)
        items += [_renumber_values(c, swap, "inputs") for c in chain]
        # What read the last layer of the snapshot (a final norm, a decoder) reads the last one of the new chain.
        swap.update(zip(run[-1].outputs, outs, strict=True))
    outputs = tuple(swap.get(v, v) for v in graph.top.outputs)
    top = _drop_unused_values(replace(graph.top, values=tuple(values), items=tuple(items), outputs=outputs))
    return replace(graph, top=top, config={**config}, blocks=graph.blocks)


def _renumber_values(item: Any, numbers: Mapping[int, int], *fields: str) -> Any:
    """Return an item with other numbers of the values in some fields, and of those that it saves."""
    fields += ("saved",) * isinstance(item, Op)
    return replace(item, **{name: tuple(numbers.get(v, v) for v in getattr(item, name)) for name in fields})


def _chain_calls(first: Call, run: list[Call], layers: int, values: list[Value]) -> tuple[list[Call], tuple[int, ...]]:
    """Make `layers` calls in place of `run`: inputs of call k+1 are outputs of call k where they are so in the snapshot."""
    # Which operand of a call is the result of the call before: the first two calls of the snapshot show it.
    links = (
        {i: run[0].outputs.index(v) for i, v in enumerate(run[1].inputs) if v in run[0].outputs} if len(run) > 1 else {}
    )
    head, _, _ = first.prefix.rpartition(".")
    chain: list[Call] = []
    for k in range(layers):
        inputs = list(first.inputs)
        for i, out in links.items():
            if k:
                inputs[i] = chain[-1].outputs[out]
        outputs = first.outputs if k == 0 else _add_values(first.outputs, values)
        chain.append(Call(first.block, f"{head}.{k}" if head else str(k), tuple(inputs), outputs))
    return chain, chain[-1].outputs


def _add_values(outputs: tuple[int, ...], values: list[Value]) -> tuple[int, ...]:
    numbers = []
    for v in outputs:
        numbers.append(len(values))
        # Memory of its own: the result of a block is no view of what the block before returned.
        values.append(replace(values[v], storage=len(values)))
    return tuple(numbers)


def _drop_unused_values(top: Block) -> Block:
    """Drop unused values, and number the others in order of use."""
    order: dict[int, int] = {}
    for item in top.items:
        for v in (*item.inputs, *item.outputs, *(item.saved if isinstance(item, Op) else ())):
            order.setdefault(v, len(order))
    # A parameter that nothing uses stays: it takes memory, and reports count it.
    for v, value in enumerate(top.values):
        if value.kind == "parameter":
            order.setdefault(v, len(order))
    values = tuple(replace(top.values[v], storage=order.get(top.values[v].storage, i)) for v, i in order.items())
    items = tuple(_renumber_values(item, order, "inputs", "outputs") for item in top.items)
    return replace(top, values=values, items=items, outputs=tuple(order[v] for v in top.outputs))
