"""Which rows operators that pick and write elements, scans and rare ones have; what they refuse; the scans themselves."""

from __future__ import annotations

import math

import pytest
import torch

from planner_core.models.adapters import scans
from planner_core.ops.operators import Kind
from planner_core.ops.registry import operator, rule_of, work_of
from tests.support.operators.cases import t
from tests.support.operators.judge import Case, all_rows
from tests.support.operators.more_cases import MORE


def test_the_rows_that_matter_are_there() -> None:
    expected = {
        "gather": {"R", "d0", "d2", "P"},
        "gather of a part": {"R", "d1", "P"},
        "scatter": {"R", "d0"},
        "scatter_": {"R", "d0"},
        "new_zeros": {"R", "d0", "d1", "d2", "made d0", "made d1"},
        "setitem": {"R", "d0", "d2"},
        "setitem repeated": {"R", "d0", "d2"},
        "masked_scatter": {"R"},
        "selective_scan": {"R", "batch", "channels"},
        "chunk_scan": {"R", "batch", "heads"},
        "delta_rule": {"R", "batch", "heads"},
        "wkv": {"R", "batch", "channels"},
        "linear_scan": {"R", "batch", "channels"},
        "mlstm": {"R", "batch", "heads"},
        "expert_linear": {"R", "tokens", "out", "in"},
        "setitem by index": {"R", "d0", "d2"},
        "view_as_complex": {"R", "d0", "d1", "P"},
        "linalg_vector_norm": {"R", "d0", "d2"},
        "_weight_norm": {"R", "d2"},
        "_weight_norm of rows": {"R", "d0"},
        "fft_fftn of dims": {"R", "d0", "P"},
        "fft_fftn of sizes": {"R", "d0", "d1", "P"},
        "fft_fft of a dim": {"R", "d0", "d2", "P"},
        "fft_rfftn": {"R", "P"},
        "fft_fft2": {"R", "d0", "P"},
        "patches": {"R", "d0", "d1", "P"},
        "patches of one image": {"R", "d0", "P"},
        "windows": {"R", "d0", "d2", "P"},
        "as_strided": {"R", "d0", "P"},
        "as_strided of some": {"R"},
        "nll_loss": {"R", "tokens"},
        "SqrtBoundDerivative": {"R", "d0", "d1"},
        "einsum of any rank": {"R", "A", "B", "d", "g", "n", "P"},
        "einsum aligned at the last": {"R", "A", "B", "d", "P"},
        "einsum with a weight": {"R", "A", "d", "e", "P"},
        "einsum broadcast": {"R", "b", "d", "P"},
    }
    found = {str(c): {r.name for r in all_rows(c)} - {"G"} for c in MORE}
    assert {k: found[k] for k in expected} == expected


def test_groups_of_heads_bound_the_split() -> None:
    case = next(c for c in MORE if str(c) == "chunk_scan")
    heads = next(r for r in all_rows(case) if r.name == "heads")
    assert heads.divides == (8, 4)


def test_an_index_by_two_tensors_is_not_known() -> None:
    two = (torch.tensor([1, 0]), torch.tensor([1, 0]))
    case = Case("setitem", lambda a, i, v: a, (t(4, 8), two, t(2)), kinds="acca")
    assert not rule_of(*case.op()).is_known


def test_work_of_the_scans_grows_with_the_sequence() -> None:
    for case in (c for c in MORE if operator(c.fn).kind is Kind.SCAN):
        op, values = case.op()
        made, flops = values[op.outputs[0]].meta, work_of(op, values).flops
        if op.fn == "linear_scan":  # a product and a sum
            assert flops == 2 * math.prod(made.shape)
        else:
            assert flops > made.num_bytes


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "qwen3_next", "rwkv", "recurrent_gemma"])
def test_a_real_run_is_the_fallback(kind: str) -> None:
    """With our function in place the model computes what it computed before, on real numbers."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    small = {
        "mamba": {"state_size": 4},
        "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 4},
        "qwen3_next": {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "intermediate_size": 32,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        "rwkv": {"attention_hidden_size": 32, "intermediate_size": 32, "context_length": 32},
        "recurrent_gemma": {"num_attention_heads": 4, "intermediate_size": 64, "lru_width": 32, "head_dim": 8},
    }[kind]
    config = CONFIG_MAPPING[kind](hidden_size=32, num_hidden_layers=2, vocab_size=64, pad_token_id=0, **small)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    ids = torch.randint(1, 64, (2, 9))
    before = model(input_ids=ids, labels=ids, use_cache=False).loss
    scans.register_scans()
    after = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert torch.equal(before, after)
