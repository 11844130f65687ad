"""Small random models: blocks of random ops, called in random patterns (runs, alternations, skips, shared inputs)."""

from __future__ import annotations

import random

from planner_core.core.graph import Block, Call, Graph, Op, TensorMeta, Value, check_graph
from planner_core.ops.grouping import coarsen
from planner_core.ops.strategy import block_strategies

B, S, H = 16, 32, 64


class Builder:
    """Values and ops of one block."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.values: list[Value] = []
        self.items: list[Op | Call] = []

    def value(self, shape: tuple[int, ...], kind: str, name: str = "") -> int:
        self.values.append(Value(TensorMeta(shape, "bfloat16"), kind, name, grad=kind != "constant"))
        return len(self.values) - 1

    def op(self, fn: str, *inputs: int, shape: tuple[int, ...] | None = None, saved: tuple[int, ...] = ()) -> int:
        out = self.value(shape or self.values[inputs[0]].meta.shape, "activation")
        self.items.append(Op(f"m{len(self.items)}/{fn}", fn, inputs, (out,), {}, saved=saved))
        return out

    def linear(self, x: int, width: int) -> int:
        shape = self.values[x].meta.shape
        w = self.value((width, shape[-1]), "parameter", f"w{len(self.values)}")
        inputs = (x, w)
        if self.dice.random() < 0.3:
            inputs = (x, w, self.value((width,), "parameter", f"b{len(self.values)}"))
        return self.op("linear", *inputs, shape=(*shape[:-1], width), saved=(x, w))

    def step(self, pool: list[int]) -> int:
        """One more op on some of the tensors there are; all are [B, S, H]."""
        x = self.dice.choice(pool)
        kind = self.dice.choice(("linear", "wide", "norm", "gelu", "add", "mul"))
        if kind == "linear":
            return self.linear(x, H)
        if kind == "wide":
            inner = self.linear(x, 4 * H)
            return self.linear(self.op("gelu", inner, saved=(inner,)), H)
        if kind == "norm":
            w = self.value((H,), "parameter", f"n{len(self.values)}")
            return self.op("layer_norm", x, w, saved=(x, w))
        if kind == "gelu":
            return self.op("gelu", x, saved=(x,))
        y = self.dice.choice(pool)
        return self.op(kind, x, y, saved=(x, y) if kind == "mul" else ())


def random_block(name: str, dice: random.Random, num_inputs: int) -> Block:
    """From `num_inputs` tensors to one."""
    b = Builder(dice)
    pool = [b.value((B, S, H), "activation") for _ in range(num_inputs)]
    inputs = tuple(pool)
    for _ in range(dice.randint(1, 4)):
        pool.append(b.step(pool))
    out = pool[-1]
    for x in inputs:  # everything given is used
        if not any(x in i.inputs for i in b.items):
            out = b.op("add", out, x)
    return Block(name, tuple(b.values), tuple(b.items), inputs, (out,))


def random_graph(seed: int) -> Graph:
    """Return a model of a handful of blocks, with a scalar loss."""
    dice = random.Random(seed)
    blocks = {n: random_block(n, dice, dice.choice((1, 1, 2))) for n in ("A", "C")[: dice.randint(1, 2)]}
    top = Builder(dice)
    x = top.linear(top.value((B, S, H), "constant"), H)
    pool = [x]
    shared = x
    pattern = dice.choice(("run", "alternate", "any", "skips"))
    for i in range(dice.randint(2, 6)):
        name = (
            dice.choice(list(blocks))
            if pattern in ("any", "skips")
            else list(blocks)[i % len(blocks) if pattern == "alternate" else 0]
        )
        more = (shared,) if len(blocks[name].inputs) == 2 else ()
        out = top.value((B, S, H), "activation")
        top.items.append(Call(name, f"layers.{i}", (pool[-1], *more), (out,)))
        pool.append(out)
        if dice.random() < 0.2:
            shared = out
        if pattern == "skips" and dice.random() < 0.5:
            pool.append(top.op("add", pool[-1], dice.choice(pool)))
    loss = top.op("sum", top.linear(pool[-1], H), shape=())
    graph = Graph(
        f"random-{seed}",
        "test",
        Block("", tuple(top.values), tuple(top.items), (), (loss,)),
        blocks,
        {"batch": B, "seq": S},
        "sum",
        {},
    )
    check_graph(graph)
    return graph


def prepared(graph: Graph):  # type: ignore[no-untyped-def]
    """Coarse graph and strategies, as `build_problem` wants them."""
    coarse = coarsen(graph)
    return coarse, {"": block_strategies(coarse.top), **{n: block_strategies(b) for n, b in coarse.blocks.items()}}
