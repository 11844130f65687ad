"""autoparallel (meta-pytorch) and this planner on one model, mesh and machine, one after the other.

    python -m bench.search --only peer --peer ../autoparallel

The checkout needs pulp and filecheck, which this project does not.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from bench.support.commands import LIMIT_S, run_python

CHECKOUT: Path | None = None
"""The folder of autoparallel's sources."""
SIZES = ((8, "8"), (32, "8"), (2, "2x8"))
WORDS = (
    "From the model to a placement, batch 16, 4 096 tokens, bfloat16, on a given mesh, in processes one after the other; imports excluded on both "
    "sides. autoparallel (meta-pytorch, commit a54c252) runs its own Llama-3 code as its example does (`repeated_subgraphs=True`, batch sharded "
    "at both ends) on a CPU mesh with a fake process group, and its integer program is general; this planner captures transformers' Llama 3, "
    "and proves its plan in the space of [SEARCH.md](SEARCH.md)."
)
PEER = """import resource, sys, time, torch
torch.get_device_module().get_device_name = lambda device=None: "NVIDIA H100"  # its cost model asks for the name of the device
from autoparallel._testing.models.llama3 import Transformer, TransformerModelArgs
from autoparallel.api import AutoParallel
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.set_num_threads(1)
layers, sizes = int(sys.argv[1]), tuple(map(int, sys.argv[2].split("x")))
world = torch.tensor(sizes).prod().item()
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])
shape = dict(dim=4096, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=1024, rope_theta=500000, vocab_size=128256)
with torch.device("meta"):
    model = Transformer(TransformerModelArgs(n_layers=layers, max_seq_len=4096, **shape))
start = time.process_time()
tokens = lambda: torch.randint(0, 128256, (16, 4096))
precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
with AutoParallel(model, tokens, mesh, precision, repeated_subgraphs=True) as search:
    search.add_parameter_memory_constraint(low=None, high=None)
    batch = (Shard(0),) + (Replicate(),) * (len(sizes) - 1)
    search.add_input_constraints([batch])
    search.add_output_constraints([batch])
    search.optimize_placement(verbose=False)
print("measured", time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
OURS = """import resource, sys, time, torch, transformers
from planner_core.planning import Request, plan_model
import planner_core.models.capture.module, planner_core.models.sources.resolve, transformers.models.llama.modeling_llama
start = time.process_time()
plan_model(Request(sys.argv[1], cluster=sys.argv[3], mesh=sys.argv[2], batch=16, seq=4096), passes={})
print("measured", time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def measure(layers: int, mesh: str) -> list[str]:
    """Return the cells of one size: seconds and bytes of both, and the ratio of seconds."""
    with tempfile.TemporaryDirectory() as where:
        file = Path(where) / "llama.json"
        file.write_text(json.dumps({**LLAMA, "num_hidden_layers": layers}), encoding="utf-8")
        path = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH", ""))))
        theirs = read_measured(run_python("-c", PEER, str(layers), mesh, limit_s=4 * LIMIT_S, PYTHONPATH=path).printed)
        cluster = "2x8-h100" if "x" in mesh else "1x8-h100"
        ours = read_measured(run_python("-c", OURS, str(file), mesh, cluster).printed)
    cells = [
        f"{value:.2f} {unit}" for seconds, size in (theirs, ours) for value, unit in ((seconds, "s"), (size, "GB"))
    ]
    return [*cells, f"{theirs[0] / ours[0]:.0f}"]


def read_measured(printed: str) -> tuple[float, float]:
    """Return the seconds and GB of the line that a script prints at its end. Raises ValueError if it ended before."""
    lines = [line.split() for line in printed.splitlines() if line.startswith("measured ")]
    if not lines:
        raise ValueError(f"the script ended without a figure: {printed[-300:]}")
    return float(lines[-1][1]), float(lines[-1][2]) / 1e9
