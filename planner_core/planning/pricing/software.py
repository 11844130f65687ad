"""What sets an answer and was perhaps not asked for: the kernels, the loss, the dtype of gradients, and the memory that a plan may take."""

from __future__ import annotations

from planner_core.core import ITEM_BYTES, Cluster, Graph, Workload
from planner_core.cost import MATH, attentions_by_kernel, why_math


def describe_software(graph: Graph, cluster: Cluster, workload: Workload, budget: float) -> tuple[str, ...]:
    """Sentences about the software of a workload on a cluster. `budget`: bytes per GPU that a plan may take."""
    software, ops_by_kernel = workload.resolved(), attentions_by_kernel(graph, cluster.gpu, workload)
    item, memory = ITEM_BYTES[workload.dtype], cluster.gpu.memory_bytes
    gradients = "float32" if workload.gradient_item(item) > item else workload.dtype
    share = f", {budget / memory:.0%} of the GPU's" if budget < memory else ""
    loss = _describe_loss(workload)
    attention = f"attention {' and '.join(ops_by_kernel)}, " if ops_by_kernel else ""
    mode = "compiled" if workload.compiled else "eager"
    lines = [
        f"{attention}optimizer {software.optimizer_kernels}, {mode}, {loss}, gradients in {gradients}; a plan may take "
        f"{budget / 2**30:.1f} GiB{share}"
    ]
    for block, op in ops_by_kernel.get(MATH, [])[:1]:
        where = block.name or "the model"
        lines.append(
            f"attention of {where} runs torch's math kernel in float32, which keeps its scores: {why_math(op, block)}"
        )
    return (*lines, *(_describe_own_attention(graph) if not ops_by_kernel else ()))


def _describe_own_attention(graph: Graph) -> tuple[str, ...]:
    """Return a sentence about attention that the model's code computes by products and a softmax, as GPT-OSS with its sinks: such operators
    keep the scores, and no kernel of attention takes their place."""
    seq = graph.workload["seq"]
    for name, block in graph.blocks.items():
        for op in block.ops:
            # Scores have the dims sample, head, query and key, with a key more where there are sinks; a router's softmax has fewer dims.
            scores = block.values[op.outputs[0]].meta if op.fn == "softmax" else None
            if scores is not None and len(scores.shape) == 4 and min(scores.shape[-2:]) >= seq:
                size = " x ".join(f"{n:,}" for n in scores.shape[1:])
                return (
                    f"attention of {name} is made of products and a softmax in the model's own code, which keep scores of {size} for each "
                    "sample and layer; no stated kernel takes their place, and a program that has one takes less time and memory",
                )
    return ()


def _describe_loss(workload: Workload) -> str:
    """Return how the loss of logits runs."""
    loss = workload.resolved().loss
    if loss != "eager":
        return f"loss {loss}"
    if workload.compiled:
        return "loss compiled" if workload.loss is None else "loss not compiled"
    return "loss as the model's code has it"
