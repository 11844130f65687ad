"""Run under torchrun: a saved model trained one step by an export's real consumer, against the same model in one process.

    torchrun --nproc-per-node 2 tests/support/export_consumer.py {parallelize_module,hf,deepspeed} FOLDER

FOLDER holds `model/` (save_pretrained), `spec.json` (class and input shapes) and the export. Rank 0 prints one JSON line.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from planner_core.runtime.program.collectives.counter import CountCollectives
from tests.support.export_spec import DEEPSPEED

FLOOR = 1e-3


def main(target: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    spec = json.loads((folder / "spec.json").read_text())
    cls = getattr(transformers, spec["class"])
    inputs = {k: make(*v) for k, v in spec["inputs"].items()}
    whole = cls.from_pretrained(folder / "model")
    single = whole(**inputs).loss
    single.backward()
    if target == "parallelize_module":
        model = load(folder / "plan.py").parallelize(cls.from_pretrained(folder / "model"), mesh)
    elif target == "hf":
        config = DistributedConfig(**json.loads((folder / "plan.json").read_text()))
        model = cls.from_pretrained(folder / "model", distributed_config=config)
    else:
        print_row(**deepspeed_step(cls.from_pretrained(folder / "model"), folder, inputs, whole, float(single)))
        return
    with CountCollectives(mesh) as counted:
        loss = model(**inputs).loss
        counted.phase = "backward"
        loss.backward()
    collectives = counted.table()
    grads = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    error, worst = compare(grads, {n: p.grad for n, p in whole.named_parameters() if p.grad is not None})
    split = sorted({n for n, p in model.named_parameters() if isinstance(p, DTensor)})
    torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-2, foreach=False).step()
    torch.optim.AdamW(whole.parameters(), lr=1e-3, eps=1e-2).step()
    after = float(model(**inputs).loss), float(whole(**inputs).loss)
    print_row(
        single=float(single),
        parallel=float(loss),
        grad_error=error,
        worst=worst,
        collectives=collectives,
        split=split,
        after=after,
    )


def deepspeed_step(
    model: nn.Module, folder: Path, inputs: dict[str, Any], whole: nn.Module, single: float
) -> dict[str, Any]:
    """Losses before and after a step; DeepSpeed's layers are its own, so gradients are judged by the step they make."""
    sys.path.insert(0, str(DEEPSPEED))
    import deepspeed  # type: ignore[import-not-found, unused-ignore]

    config = {
        **json.loads((folder / "plan.json").read_text()),
        "gradient_clipping": 0.0,
    }  # DeepSpeed clips to 1.0 unless told
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    loss = engine(**inputs).loss
    engine.backward(loss)
    engine.step()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    kinds = sorted({type(m).__name__ for m in engine.module.modules()})
    return {
        "single": single,
        "parallel": float(loss),
        "kinds": kinds,
        "after": (float(engine(**inputs).loss), float(whole(**inputs).loss)),
    }


def make(shape: list[int], kind: str, high: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind == "float":
        return torch.randn(shape, generator=generator)
    return torch.randint(0, high, shape, generator=generator)


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("exported", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def full(grad: torch.Tensor) -> torch.Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def compare(gradients: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest error relative to a gradient's own largest entry (or `FLOOR` of the largest of all); a missing one is infinite."""
    top, worst = max(float(g.abs().max()) for g in wanted.values()), (0.0, "")
    for name, g in wanted.items():
        if name not in gradients or gradients[name].shape != g.shape:
            return float("inf"), name
        error = float((gradients[name] - g).abs().max()) / max(float(g.abs().max()), FLOOR * top)
        worst = worst if error <= worst[0] else (error, name)
    return worst


def print_row(**row: Any) -> None:
    if dist.get_rank() == 0:
        print("ROW " + json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
