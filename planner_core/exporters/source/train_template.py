"""The training loop of an exported script: `torchrun.py` writes the plan's blocks and constants, then these functions."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import planner_core as shardscope
from planner_core.runtime import training
from planner_core.runtime.program import EditableFunctions
from planner_core.verification import scaled

WRITTEN_FOR: dict[str, Any] = {}
FLOPS = 0.0


def options() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="Train under the plan that stands beside this script.")
    add = parser.add_argument
    add("--data", type=Path, help="file of token ids, or folder of a Hugging Face dataset; default: random samples")
    add("--token-type", default="uint16", help="of a file of tokens without a header: uint16, int32, uint32")
    add("--shuffle", action="store_true", help="read samples in another order than that of the file")
    add("--weights", type=Path, help="folder of safetensors files to start from; default: fresh weights")
    add("--steps", type=int, default=1000)
    add("--lr", type=float, default=3e-4, help="highest learning rate; it falls along a cosine to a tenth of it")
    add("--warmup", type=int, default=100, help="steps in which the rate grows")
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0, help="largest norm of all gradients together; 0: any")
    add("--seed", type=int, default=0)
    add("--save", type=Path, help="folder of checkpoints; the run goes on from the newest that it holds")
    add("--save-every", type=int, default=500, help="steps between checkpoints, written while training goes on")
    add("--keep", type=int, default=2, help="checkpoints that stay; 0: all")
    add("--eval-data", type=Path, help="as --data, held back")
    add("--eval-every", type=int, default=0, help="steps between evaluations; 0: none")
    add("--eval-steps", type=int, default=8, help="batches of an evaluation")
    add("--report", type=Path, help="file to which each report is added as a line of JSON")
    add("--report-every", type=int, default=10, help="steps between reports")
    add("--compile", action="store_true", help="compile each block with torch.compile")
    add("--profile", type=Path, help="folder for a trace of two steps of every rank")
    add("--count", action="store_true", help="print the collectives of one step beside the predicted ones, and end")
    add("--plan", type=Path, help="another plan of this model, for another number of GPUs; its blocks are made anew")
    add("--no-blocks", action="store_true", help="make the blocks anew instead of running those below")
    add("--tiny", action="store_true", help="a small model of this architecture under this plan, on any number of CPUs")
    add("--model", help="path.py:function, where a model of your own has moved")
    add("--stand-in-loss", action="store_true", help="train a model without a loss on its output to the fourth power")
    return parser.parse_args()


def loss_of(model: Any, batch: dict[str, Any], args: argparse.Namespace) -> torch.Tensor:
    """Return the loss of one micro-batch, of which `batch` are this rank's own samples. Put your own here."""
    return training.loss_of(model, batch)


def train_step(model: Any, batches: Any, parts: int, args: argparse.Namespace) -> torch.Tensor:
    """Return the mean loss of all micro-batches; their gradients add up, and are summed over ranks with the last."""
    total = torch.zeros(())
    for number, batch in enumerate(batches):
        with contextlib.nullcontext() if number == parts - 1 else model.no_sync():
            loss = loss_of(model, batch, args) / parts
            torch.autograd.backward(loss)
        total = total.to(loss.device) + loss.detach()
    return total


@torch.no_grad()
def evaluate(model: Any, data: Any, args: argparse.Namespace) -> torch.Tensor:
    """Return the mean loss of the first batches of `data`."""
    model.eval()
    losses = [loss_of(model, batch, args) for step in range(args.eval_steps) for batch in data.micro_batches(step)]
    model.train()
    return torch.stack(losses).mean()


def main() -> None:
    """Train: torchrun runs this once for each GPU, and again after a failure (--max-restarts)."""
    args, device = options(), training.connect()
    plan = shardscope.load_plan(args.plan or Path(__file__).with_suffix(".plan.json"))
    if args.tiny:
        plan = scaled(plan, dist.get_world_size())
    how: dict[str, Any] = {"weights": args.weights, "seed": args.seed, "stand_in": args.stand_in_loss}
    start = training.model_of(plan, source=args.model, **how)
    anew = args.plan or args.tiny or args.no_blocks or args.stand_in_loss or not WRITTEN_FOR
    written = None if anew else EditableFunctions(**WRITTEN_FOR, names=globals())
    how = {"seed": args.seed, "compile": args.compile}
    model: Any = shardscope.apply(start.model, plan, init=start.init, written=written, **how)
    how = {"seed": args.seed, "token_type": args.token_type}
    data = training.open_data(plan, start, args.data, device, shuffle=args.shuffle, **how)
    eval_data = training.open_data(plan, start, args.eval_data, device, **how)
    if args.count:
        counts = training.counted(plan, model, list(data.micro_batches(0)), lambda batch: loss_of(model, batch, args))
        if dist.get_rank() == 0:
            print("collectives " + json.dumps(counts))
        return
    optimizer = training.optimizer_for(plan, model.parameters(), args.lr, weight_decay=args.weight_decay)
    checkpoints = training.Checkpoints(args.save, model, optimizer, every=args.save_every, keep=args.keep)
    report, stop = training.Report(plan, FLOPS, every=args.report_every, file=args.report), training.Stop()
    first = checkpoints.resume()
    with training.profiled(args.profile) as profile:
        for step in range(first, args.steps):
            rate = args.lr * training.warmup_cosine(step, warmup=args.warmup, steps=args.steps)
            training.set_rate(optimizer, rate)
            loss = train_step(model, data.micro_batches(step), data.parts, args)
            norm = shardscope.clip_grad_norm_(model.parameters(), args.clip or float("inf"))
            optimizer.step()
            optimizer.zero_grad()
            report.step(step + 1, loss, norm, rate)
            profile.step()
            if args.eval_every and (step + 1) % args.eval_every == 0:
                report.evaluation(step + 1, evaluate(model, eval_data, args))
            checkpoints.after(step + 1)
            if stop.asked():
                break
    if args.steps > first:
        checkpoints.save(step + 1)
    checkpoints.finish()
    stop.close()


if __name__ == "__main__":
    training.run(main)
