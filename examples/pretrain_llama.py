"""Pretrain a small Llama in a loop of your own, under a plan: accumulation, clipping, a schedule, checkpoints, evaluation.

    torchrun --standalone --nproc-per-node 2 examples/pretrain_llama.py plan.json --tokens tokens.bin --folder run --steps 100

The plan is made before, for as many GPUs as there are ranks: `make_plan(2, "plan.json")` below does it for this model. The token
file holds 16-bit integers. Start again with another plan or number of ranks: training goes on from the last checkpoint.
"""

import argparse
import contextlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import planner_core as shardscope

SEQ, BATCH, MICRO_BATCHES, EVERY = 64, 8, 2, 10
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": SEQ,
    "use_cache": False,
}


def make_plan(gpus: int, file: str, name: str = "best") -> None:
    """Plan this model for a number of GPUs of one node."""
    config = {**LlamaConfig(**CONFIG).to_dict(), "architectures": ["LlamaForCausalLM"]}
    result = shardscope.plan(config, cluster=f"1x8-h100:gpus={gpus}", batch=BATCH, seq=SEQ, dtype="float32")
    shardscope.save_plan(next(p for p in result.plans if p.name == name), file)


def batches(tokens: np.ndarray, step: int) -> list[torch.Tensor]:
    """The micro-batches of a step, whole; every rank reads the same file at the same place."""
    places = np.random.default_rng(step).integers(0, len(tokens) - SEQ, (MICRO_BATCHES, BATCH))
    rows = [[tokens[at : at + SEQ] for at in micro] for micro in places]
    return [torch.from_numpy(np.stack(micro).astype(np.int64)) for micro in rows]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    for name, kind in {"plan": str, "--tokens": str, "--folder": str, "--steps": int}.items():
        parser.add_argument(name, type=kind)
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    model = shardscope.apply(LlamaForCausalLM(LlamaConfig(**CONFIG)), shardscope.load_plan(args.plan))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    tokens, first = np.memmap(args.tokens, np.uint16, "r"), 0
    if saved := sorted(Path(args.folder).glob("*/.metadata")):  # torch writes it last: the checkpoint is whole
        first = shardscope.load(model, optimizer, saved[-1].parent, extra={"step": 0})["step"]
        schedule.last_epoch = first
    for step in range(first, args.steps):
        total = 0.0
        for number, ids in enumerate(batches(tokens, step)):
            last = number == MICRO_BATCHES - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(input_ids=ids, labels=ids, global_batch=True).loss / MICRO_BATCHES
                loss.backward()
            total += loss.detach()
        norm = shardscope.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {float(total):.6f}  norm {float(norm):.4f}", flush=True)
        if (step + 1) % EVERY == 0:
            shardscope.save(model, optimizer, f"{args.folder}/{step + 1:06}", extra={"step": step + 1})
    with torch.no_grad():
        ids = batches(tokens, 1 << 20)[0]
        held = model.eval()(input_ids=ids, labels=ids, global_batch=True).loss
    if dist.get_rank() == 0:
        print(f"evaluation  loss {float(held):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
