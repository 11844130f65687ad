"""Depth is free, for every model of the coverage list: the folded capture, written out, is the flat one, op for op."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from bench.coverage import BATCH, tokens
from bench.support.coverage.children import in_child, warm
from bench.support.coverage.models import OTHERS, causal_models, default_config

SAMPLE = (
    ("gemma2", "Gemma2ForCausalLM"),
    ("bart", "BartForConditionalGeneration"),
    ("wav2vec2", "Wav2Vec2ForCTC"),
    ("qwen2_moe", "Qwen2MoeForCausalLM"),
    ("blt", "BltForCausalLM"),
)
NUM_PARTS = 8


def _compare(model_type: str, cls: str, tell: Any) -> None:
    """Both captures in this process; what transformers cannot make or we refuse is no difference."""
    from planner_core.core.errors import PlannerError
    from planner_core.models.loading import capture_graph
    from planner_core.models.snapshots.compare import graph_difference

    for dtype in ("bfloat16", "float32"):
        try:
            config = default_config(model_type, cls)
            seq = min(
                tokens(config), 64 if model_type not in ("longformer", "led", "bigbird_pegasus", "big_bird") else 512
            )
            folded = capture_graph(config, batch=BATCH, seq=seq, dtype=dtype)
        except PlannerError as error:
            if 'dtype="float32"' in str(error):
                continue
            tell(outcome="plan", found=f"refused: {error}")
            return
        except MemoryError:
            raise
        except Exception as error:  # a default that transformers cannot make
            tell(outcome="plan", found=f"refused: {error}"[:200])
            return
        tell(
            outcome="plan",
            found=graph_difference(folded, capture_graph(config, batch=BATCH, seq=seq, dtype=dtype, flat=True)) or "",
        )
        return


def _check(models: list[tuple[str, str]]) -> tuple[dict[str, str], int]:
    """What differs, by model, and how many were compared."""
    warm()
    rows = {f"{kind} {cls}": in_child(partial(_compare, kind, cls)) for kind, cls in models}
    wrong = {
        name: str(row.get("found", row.get("reason"))) for name, row in rows.items() if row.get("found", "?") != ""
    }
    wrong = {name: what for name, what in wrong.items() if not what.startswith("refused")}
    return wrong, sum(row.get("found") == "" for row in rows.values())


def test_a_sample_folds_as_it_runs() -> None:
    wrong, compared = _check(list(SAMPLE))
    assert not wrong and compared == len(SAMPLE)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_covered_model_folds_as_it_runs(part: int) -> None:
    models = [*causal_models(), *((t, c) for _, t, c in OTHERS)][part::NUM_PARTS]
    wrong, compared = _check(models)
    assert not wrong
    assert compared > 0.9 * len(models)
