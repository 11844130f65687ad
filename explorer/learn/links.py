"""Links from a lesson to the same thing in the explorer: the settings of the address that each link carries."""

from __future__ import annotations

from collections.abc import Callable

from explorer.learn.learner import EXPERT_MODEL, Learner, with_model
from explorer.learn.lesson import Values
from planner_core.core import Block, Op
from planner_core.ops import Kind, operator
from planner_core.search.candidates import weight_matrices

MEGATRON, SEQUENCE, DATA, FSDP = "megatron-lm", "megatron-lm-sequence-parallel", "data-parallel", "fsdp"


def select_op(learner: Learner, wanted: Callable[[Op, Block], bool], show: str = "graph") -> dict[str, str]:
    """The first operation of a repeated block (else of the whole graph) for which `wanted`, selected in the folded graph."""
    found = {"show": show} if show != "graph" else {}
    coarse = learner.planner.coarse
    for scope, content in (*coarse.blocks.items(), ("", coarse.top)):
        for group in content.groups:
            ops = [op for i in group.items if isinstance(op := content.block.items[i], Op)]
            if any(wanted(op, content.block) for op in ops):
                return {**found, "node": f"{scope}:{group.name}" if scope else group.name}
    return found


def is_feed_forward(op: Op, block: Block) -> bool:
    """The first weight of an MLP: the first matrix after attention."""
    own = set(weight_matrices(block))
    kinds = [operator(o.fn).kind for o in block.ops]
    if Kind.ATTENTION not in kinds:
        return False
    after = kinds.index(Kind.ATTENTION)
    place = block.ops.index(op)
    # the first matrix behind attention is its output projection
    later = [i for i, o in enumerate(block.ops) if i > after and own & set(o.inputs)]
    return len(later) > 1 and place == later[1]


def is_weight(op: Op, block: Block) -> bool:
    """An operation with a weight matrix."""
    return bool(set(weight_matrices(block)) & set(op.inputs))


def is_attention(op: Op, block: Block) -> bool:
    """Attention itself."""
    return operator(op.fn).kind is Kind.ATTENTION


def is_experts(op: Op, block: Block) -> bool:
    """All experts of a layer."""
    return operator(op.fn).kind is Kind.EXPERTS


def first_weight(learner: Learner, values: Values) -> dict[str, str]:
    """A weight of the repeated block, with its choices."""
    return select_op(learner, is_weight)


def placements(learner: Learner, values: Values) -> dict[str, str]:
    """The graph with the plan's placements and messages."""
    return {"show": "placement"}


def feed_forward(learner: Learner, values: Values) -> dict[str, str]:
    """The MLP under Megatron-LM's plan."""
    return {"plan": MEGATRON, **select_op(learner, is_feed_forward, "placement")}


def attention(learner: Learner, values: Values) -> dict[str, str]:
    """Attention under Megatron-LM's plan."""
    found, _ = learner.transformer()
    return {**model_setting(learner, found), "plan": MEGATRON, **select_op(found, is_attention, "placement")}


def lesson_batch(learner: Learner, values: Values) -> dict[str, str]:
    """The lesson's own batch."""
    return {"batch": str(values["batch"])}


def lesson_batch_of_layers(learner: Learner, values: Values) -> dict[str, str]:
    """The lesson's batch, for a model with transformer layers."""
    return {**model_setting(learner, learner.transformer()[0]), "batch": str(values["batch"])}


def layers(learner: Learner, values: Values) -> dict[str, str]:
    """A model with transformer layers."""
    return model_setting(learner, learner.transformer()[0])


def sequence(learner: Learner, values: Values) -> dict[str, str]:
    """Megatron-LM's two plans side by side."""
    return {**layers(learner, values), "compare": f"{MEGATRON},{SEQUENCE}"}


def usual_plans(learner: Learner, values: Values) -> dict[str, str]:
    """The usual plans side by side."""
    return {"compare": f"{DATA},{FSDP},{MEGATRON}"}


def experts(learner: Learner, values: Values) -> dict[str, str]:
    """The learner's experts, else those of a model that has some, on the learner's cluster."""
    here = select_op(learner, is_experts, "placement")
    if "node" in here:
        return here
    other = with_model(learner, EXPERT_MODEL)
    return {**model_setting(learner, other), **select_op(other, is_experts, "placement")}


def model_setting(learner: Learner, shown: Learner) -> dict[str, str]:
    """The model of a lesson, where it is not the learner's."""
    return {} if shown.request.model == learner.request.model else {"model": shown.request.model}
