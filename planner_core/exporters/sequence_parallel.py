"""Sequence parallelism in stock styles: the residual stream is sharded by tokens, as DTensors of full length.

Norms run on their own tokens (`SequenceParallel`), an embedding returns its own part, and every pair of column and row layers gathers
tokens before and scatters them after. Some models have code that fails on such tensors, so the export first runs a tiny model.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from planner_core.core import CallSite, Plan, Shard, VerificationFailed, join_name
from planner_core.models.sources import build_from_config, make_training_inputs
from planner_core.planning import shrink_config
from planner_core.planning.methods import TpLayout, star_numbers
from planner_core.runtime import initializer
from planner_core.runtime.program import fake_store
from planner_core.verification import RankFailed, materialise, run_ranks

STYLES = {
    "colwise": "ColwiseParallel()",
    "gathered": "ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())",
    "rowwise": "RowwiseParallel(output_layouts=Shard(1), use_local_output=False)",
    "vocabulary": "RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False)",
    "features": "ColwiseParallel(output_layouts=Shard(1), use_local_output=False)",
    "norm": "SequenceParallel()",
    "embedding": "PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=False)",
}
"""torch's styles with a residual stream that is sharded by tokens."""
TRIAL_S = 120.0
RANKS = 2


def token_styles(plan: Plan, layout: TpLayout) -> dict[str, str]:
    """Return the styles, by pattern, of modules with weights that run on a part of the tokens, and of Replicate embeddings."""
    styles: dict[str, str] = {}
    for block in plan.blocks.values():
        for name, site in block.sites.items():
            called = CallSite.parse(name)
            full = join_name(block.prefixes[0], called.module)
            if full in layout.styles:
                continue
            if called.fn == "embedding" and site.outputs[0].dst.forward[layout.axis] == Shard(1):
                styles[star_numbers(full)] = "embedding"
            has_weights = any(p.rpartition(".")[0] == called.module for p in block.params)
            if (
                has_weights
                and called.fn not in ("linear", "embedding")
                and any(e.dst.forward[layout.axis] == Shard(1) for e in site.inputs)
            ):
                styles[star_numbers(full)] = "norm"
    return styles


def why_not_runnable(text: str, config: Mapping[str, Any]) -> str:
    """Return the reason why the exported module cannot run a tiny model of this config on two ranks; "" if it can."""
    try:
        (reason,) = run_ranks(_run_trial_step, 1, (text, config), timeout_s=TRIAL_S, backend=None)
    except RankFailed as error:
        return error.failure.text
    except VerificationFailed as error:
        return str(error)
    return str(reason)


def _run_trial_step(text: str, config: Mapping[str, Any]) -> str:
    """Run a step of rank 0 on a fake group, whose collectives return arbitrary values in the right shapes and placements."""
    logging.disable(logging.WARNING)  # a CPU group warns about each collective that it emulates
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=RANKS)
    model, parsed, _ = build_from_config(shrink_config(config), "float32")
    inputs = make_training_inputs(model, parsed, 2, 8, "float32")
    materialise(model, initializer(model, 0))
    scope: dict[str, Any] = {}
    exec(compile(text, "exported", "exec"), scope)  # our own text
    model = scope["parallelize"](model, init_device_mesh("cpu", (RANKS,)))
    model(**inputs).loss.backward()
    dist.destroy_process_group()
    return ""
