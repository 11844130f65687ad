"""A training script that needs PyTorch and transformers, and nothing of ours: the runtime's own files as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import planner_core
from planner_core.core import InputError, Plan, placements_by_pattern, plan_to_json
from planner_core.exporters.source.inline import inline
from planner_core.models.sources import build, training_inputs
from planner_core.ops import Kind, operator
from planner_core.planning import shrink

ROOT = Path(planner_core.__path__[0])
MODULES = (
    "models/hooks/wrappers", "models/hooks/callsites", "models/hooks/moe", "models/hooks/moe_loops", "models/hooks/scans",
    "runtime/plan_reader", "runtime/initialize", "runtime/program/functions", "runtime/dispatch/redistribute",
    "runtime/dispatch/local_ops", "runtime/dispatch/parameters", "runtime/dispatch/dispatch_mode",
    "runtime/dispatch/parallelize", "runtime/collective_counter", "runtime/training/optimizers", "runtime/training/train",
)  # fmt: skip
BATCH, SEQ = 5, 19  # sizes that no config has, to see where batch and sequence length stand in the inputs


def torchrun_script(plan: Plan) -> str:
    """The script's source; raises InputError for a model that it could not build by itself."""
    config = plan.model.get("config") or {}
    own = str(config.get("callable", ""))
    if own.endswith(".pt2"):
        raise InputError(
            f"{plan.model['name']} comes from {own}, an exported program, which a script of its own cannot hold; plan the code "
            "that it was exported from, as path.py:callable"
        )
    fns = {site.rpartition("/")[2].partition(".")[0] for b in plan.blocks.values() for site in b.sites}
    kinds = {operator(fn).kind for fn in fns}
    experts = Kind.EXPERTS in kinds
    loaded = ["register_scans"] * (Kind.SCAN in kinds) + ["register_loops"] * experts
    left_out = {"moe": not experts, "moe_loops": not experts, "scans": "register_scans" not in loaded}
    files = [ROOT / f"{name}.py" for name in MODULES if not left_out.get(name.rpartition("/")[2])]
    start = "    register_experts()  # a layer of experts runs as one call\n" if experts else ""
    call = f"train(PLAN, MODEL, [{', '.join(loaded)}])" if loaded else "train(PLAN, MODEL)"
    model = (
        {"callable": f"{Path(own.rpartition(':')[0]).resolve()}:{own.rpartition(':')[2]}"}
        if own
        else model_spec(config, experts)
    )
    parts = [
        _head(plan), "from __future__ import annotations\n\n", inline(files, "planner_core"), "\n\n",
        _data("MODEL", model), _data("PLAN", plan_to_json(plan)),
        f'if __name__ == "__main__":\n{start}    {call}\n',
    ]  # fmt: skip
    return "".join(parts)


def model_spec(config: Mapping[str, Any], experts: bool = False) -> dict[str, Any]:
    """What builds the model: its class, config and inputs, at full size and tiny."""
    scales = {"full": dict(config), "tiny": shrink(config)}
    found: dict[str, Any] = {}
    for scale, data in scales.items():
        module, parsed, used = build(data, "float32")
        text = parsed.get_text_config() if hasattr(parsed, "get_text_config") else parsed
        inputs = {}
        for name, value in training_inputs(module, parsed, BATCH, SEQ, "float32").items():
            shape = [{BATCH: "batch", SEQ: "seq"}.get(d, d) for d in value.shape]
            high = getattr(text, "vocab_size", None) if value.dim() > 1 else getattr(parsed, "num_labels", None)
            inputs[name] = [shape, "float" if value.is_floating_point() else "int", int(high or 2)]
        found[scale] = {"config": used, "inputs": inputs}
        found["class"] = type(module).__name__
        attention = getattr(parsed, "_attn_implementation", None) or "eager"
        found["options"] = {
            "attn_implementation": attention,
            **({"experts_implementation": "shardscope"} if experts else {}),
        }
    return found


def _data(name: str, value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"))
    assert '"""' not in text
    rows = text.replace('},"', '},\n"').replace('],"', '],\n"').replace("\\", "\\\\")
    return f'{name} = json.loads("""{rows}""")\n\n'


def _head(plan: Plan) -> str:
    n = plan.mesh.num_devices
    rows = [f"    {name:60} {', '.join(p)}" for name, p in placements_by_pattern(plan).items()]
    traffic = [
        f"    {phase:10} {kind:15} {row['count']:6} x {row['bytes']:>18,} bytes"
        for phase, kinds in plan.cost.collectives().items() for kind, row in kinds.items() if row["count"]
    ]  # fmt: skip
    peak = plan.cost.memory_bytes.get("peak", 0) / 2**30
    lines = [
        f'"""Train {plan.model["name"]} under the plan "{plan.name}" on a mesh of {plan.mesh}. Written by Shardscope.', "",
        f"    torchrun --nproc-per-node {min(n, 8)} --nnodes {max(1, n // 8)} FILE --steps 100",
        *(["    torchrun --nproc-per-node 4 FILE --scale tiny --batch 8 --seq 32 --dtype float32     # no GPU needed"]
          if "callable" not in plan.model["config"] else []), "",
        _needs(plan) + "Weights are split (S) or replicated (R) on each mesh axis:", "", *rows, "",
        f"Predicted for one step of one GPU: {peak:.2f} GiB at the peak, and these collectives (print them with --count):", "",
        *traffic, '"""', "", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _needs(plan: Plan) -> str:
    if "callable" in plan.model["config"]:
        return (
            f"Needs torch 2.13 or later, and {plan.model['config']['callable']}, which builds the model whole on every rank and gives "
            "example inputs: put your data loader in place of them. "
        )
    return "Needs torch 2.13 or later and transformers. "
