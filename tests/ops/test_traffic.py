"""Passes over memory against counts made by hand, in bytes per token: H hidden, F the inner width of a Llama layer."""

from __future__ import annotations

import pytest

from planner_core.core import Block, Op, TensorMeta, Value
from planner_core.models import load_model
from planner_core.ops import memory_passes

TOKENS, H, F = 4096, 4096, 14336
EAGER, COMPILED = 0.0, 1.0


@pytest.fixture(scope="module")
def layer() -> Block:
    return next(iter(load_model("llama-3-8b", batch=1, seq=TOKENS).blocks.values()))


def moved(block: Block, fused: float, *sites: str) -> tuple[float, float]:
    """Bytes per token, forward and backward, of the ops whose site starts so; constants (rotary tables) left out."""
    there = back = 0.0
    found = memory_passes(block, fused)
    for op in block.ops:
        if op.name.startswith(sites):
            one = found[op.name]
            for v, forward, backward in zip((*op.inputs, *op.outputs), one.forward, one.backward, strict=True):
                size = block.values[v].meta.num_bytes / TOKENS if block.values[v].kind == "activation" else 0.0
                there, back = there + forward * size, back + backward * size
    return there, back


def test_a_norm_written_out_moves_what_its_ops_move_and_compiled_one_read_and_one_write(layer: Block) -> None:
    """To float32 6 H, its square 8 H, the mean 4 H, the product 8 H, back 6 H, the weight's product 4 H."""
    assert moved(layer, EAGER, "input_layernorm")[0] == pytest.approx(36 * H, rel=0.001)
    forward, backward = moved(layer, COMPILED, "input_layernorm")
    assert forward == pytest.approx(4 * H, rel=0.001)
    assert backward == pytest.approx((3 * 2 + 2) * H + 2 * H, rel=0.001), (
        "three gradients and x are read, one is written"
    )


def test_the_gate_moves_the_counted_bytes(layer: Block) -> None:
    """silu reads and writes 4 F, the product 6 F; backward 6 F and 12 F. Fused: 6 F, and 10 F backward."""
    mlp = ("mlp.act_fn", "mlp/mul")
    assert moved(layer, EAGER, *mlp) == pytest.approx((10 * F, 18 * F), rel=0.001)
    assert moved(layer, COMPILED, *mlp) == pytest.approx((6 * F, 10 * F), rel=0.001)


def test_a_sum_hands_its_gradient_on_and_two_readers_sum_theirs(layer: Block) -> None:
    forward, backward = moved(layer, EAGER, "/add.1")
    assert forward == 6 * H
    assert backward == 3 * H, "half of the passes that sum the gradients of the residual stream's two readers"


def test_products_count_only_sums_of_gradients(layer: Block) -> None:
    """q, k and v read one tensor: two sums of three passes, shared among them."""
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    assert moved(layer, EAGER, *names) == pytest.approx((0, 2 * 3 * 2 * H))
    assert moved(layer, COMPILED, *names) == (0, 0)
    assert moved(layer, EAGER, "self_attn.o_proj", "self_attn/scaled_dot_product_attention") == (0, 0)


def test_fusing_never_moves_more_and_a_share_lies_between(layer: Block) -> None:
    eager, half, fused = (moved(layer, share, "") for share in (EAGER, 0.5, COMPILED))
    assert fused[0] < eager[0] / 2
    assert fused[1] < eager[1] / 2
    assert half == pytest.approx(tuple((a + b) / 2 for a, b in zip(eager, fused, strict=True)))


def test_a_lookup_reads_its_rows_and_not_its_table(layer: Block) -> None:
    graph = load_model("llama-3-8b", batch=1, seq=TOKENS)
    lookup = next(op for op in graph.top.ops if op.fn == "embedding")
    one = memory_passes(graph.top, EAGER)[lookup.name]
    assert one.forward[: len(lookup.inputs)] == (0.0, 0.0)
    assert one.forward[-1] > 0
    assert one.backward[-1] > 0


def squares(depth: int) -> Block:
    """x, then `depth` squares: each op reads the result before twice, so 2^depth ways lead to x."""
    meta = TensorMeta((TOKENS, 8), "bfloat16")
    values = tuple(Value(meta, "activation", storage=i, grad=True) for i in range(depth + 1))
    ops = tuple(Op(f"/mul.{i}", "mul", (i, i), (i + 1,), {}, saved=(i,)) for i in range(depth))
    return Block("Squares", values, ops, (0,), (depth,))


@pytest.mark.parametrize("depth", [3, 400])
def test_a_value_that_many_ways_lead_to_is_looked_at_once(depth: int) -> None:
    """Fused, x is read once forward and once backward, and only the last result is written, however many ways lead to x."""
    found = memory_passes(squares(depth), COMPILED)
    ends = [found[f"/mul.{i}"] for i in range(depth)]
    assert sum(sum(one.forward) for one in ends) == 2
    assert ends[0].forward[:2] == (1.0, 0.0) and ends[-1].forward[2] == 1.0
    assert all(sum(one.forward) == 0 for one in ends[1:-1])
