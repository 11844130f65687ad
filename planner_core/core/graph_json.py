"""Graphs as JSON. A shape that depends on the workload is text in b (batch) and s (sequence length)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from planner_core.core.errors import InputError
from planner_core.core.graph import Attr, Block, Call, Graph, GraphSizes, Op, TensorMeta, Value, with_result_as_output

GRAPH_SCHEMA = "shardscope.graph/1"


def eval_dim(text: int | str, batch: int, seq: int) -> int:
    """Return a stored dimension as a number: an int, or `[coef*][b*][s][+const]`."""
    if isinstance(text, int):
        return text
    # A pattern instead of `eval`: a snapshot is outside input. Example: "4*b*s+1" with b = 2, s = 8 is 4 * 16 + 1 = 65.
    match = re.fullmatch(r"(?:(\d+)\*)?(b\*s|b|s)([+-]\d+)?", text)
    if not match:
        raise InputError(f"snapshot dimension {text!r} is not of the form '4*b*s+1'")
    factor = {"b": batch, "s": seq, "b*s": batch * seq}[match.group(2)]
    return int(match.group(1) or 1) * factor + int(match.group(3) or 0)


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """Plain data with integer dims. (`models.snapshots.symbolic` makes the form that serves every workload.)"""
    return {
        "schema": GRAPH_SCHEMA,
        "name": graph.name,
        "source": graph.source,
        "loss": graph.loss,
        "workload": dict(graph.workload),
        "config": dict(graph.config),
        "assumptions": list(graph.assumptions),
        "buffer_bytes": graph.buffer_bytes,
        "top": _block_json(graph.top),
        "blocks": [_block_json(b) for b in graph.blocks.values()],
    }


def graph_from_json(data: Mapping[str, Any], *, batch: int | None = None, seq: int | None = None) -> Graph:
    """Return the graph for the given workload (default: the snapshot's own). Raises InputError for a bad file."""
    if data.get("schema") != GRAPH_SCHEMA:
        raise InputError(f"graph schema {data.get('schema')!r} is not {GRAPH_SCHEMA!r}; capture the model again")
    # A graph whose shapes are plain numbers is of one workload; of a text such as "b*s" any may be asked for.
    workload: GraphSizes = {"batch": batch or data["workload"]["batch"], "seq": seq or data["workload"]["seq"]}
    read = _Reader(workload["batch"], workload["seq"])
    blocks = [read.read_block(b) for b in data["blocks"]]
    graph = Graph(
        name=data["name"],
        source=data["source"],
        top=read.read_block(data["top"]),
        blocks={b.name: b for b in blocks},
        workload=workload,
        loss=data["loss"],
        config=data["config"],
        assumptions=tuple(data.get("assumptions", ())),
        buffer_bytes=data.get("buffer_bytes", 0),
    )
    return with_result_as_output(graph)


def _block_json(block: Block) -> dict[str, Any]:
    return {
        "name": block.name,
        "inputs": list(block.inputs),
        "outputs": list(block.outputs),
        "values": [
            [list(v.meta.shape), v.meta.dtype, v.kind, v.name, v.storage, v.grad, *([True] if v.computed else [])]
            for v in block.values
        ],
        "items": [_item_json(i) for i in block.items],
        **({"recomputed": True} if block.recomputed else {}),
    }


def _item_json(item: Op | Call) -> dict[str, Any]:
    if isinstance(item, Call):
        return {"call": item.block, "prefix": item.prefix, "in": list(item.inputs), "out": list(item.outputs)}
    return {
        "op": item.name,
        "fn": item.fn,
        "in": list(item.inputs),
        "out": list(item.outputs),
        "attrs": dict(item.attrs),
        "module": item.module,
        "saved": list(item.saved),
        "extra": [[list(m.shape), m.dtype] for m in item.saved_extra],
    }


class _Reader:
    """Reads stored blocks for one workload."""

    def __init__(self, batch: int, seq: int) -> None:
        self.batch, self.seq = batch, seq

    def read_dims(self, shape: list[int | str]) -> tuple[int, ...]:
        return tuple(eval_dim(d, self.batch, self.seq) for d in shape)

    def read_attr(self, value: Any) -> Attr:
        if isinstance(value, list):  # JSON has no tuples, and an attribute must be hashable
            return tuple(self.read_attr(v) for v in value)
        if isinstance(value, dict):  # {"dim": "b*s"}: an integer that depends on the workload
            return eval_dim(value["dim"], self.batch, self.seq)
        return value  # type: ignore[no-any-return]

    def read_block(self, data: Mapping[str, Any]) -> Block:
        values = tuple(
            Value(TensorMeta(self.read_dims(shape), dtype), kind, name, storage, grad, computed=bool(computed))
            for shape, dtype, kind, name, storage, grad, *computed in data["values"]
        )
        items = tuple(self.read_item(i) for i in data["items"])
        recomputed = bool(data.get("recomputed", False))
        return Block(data["name"], values, items, tuple(data["inputs"]), tuple(data["outputs"]), recomputed)

    def read_item(self, data: Mapping[str, Any]) -> Op | Call:
        if "call" in data:
            return Call(data["call"], data["prefix"], tuple(data["in"]), tuple(data["out"]))
        return Op(
            name=data["op"],
            fn=data["fn"],
            inputs=tuple(data["in"]),
            outputs=tuple(data["out"]),
            attrs={k: self.read_attr(v) for k, v in data["attrs"].items()},
            module=data["module"],
            saved=tuple(data["saved"]),
            saved_extra=tuple(TensorMeta(self.read_dims(s), d) for s, d in data["extra"]),
        )
