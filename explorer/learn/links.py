"""Links from a lesson to the same thing in the explorer: the settings of the address that each link carries."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from explorer.learn.learner import Learner
from explorer.learn.lesson import Values
from planner_core.core import Block, Op
from planner_core.ops import Kind, operator
from planner_core.search.candidates import weight_matrices


def make_settings(focus: Mapping[str, str], learner: Learner, values: Values) -> dict[str, str]:
    """Return the settings that a lesson's front states: their texts, with the lesson's controls put in.

    `needs` ("layers", "experts") names what another model stands in for where the learner's has none, and `op` (of `OPERATIONS`) what is
    selected in the folded graph.
    """
    shown = learner
    if "needs" in focus:
        shown, _ = learner.transformer() if focus["needs"] == "layers" else learner.routed()
    settings = model_setting(learner, shown)
    settings |= {key: text.format(**values) for key, text in focus.items() if key not in ("needs", "op")}
    return {**settings, **select_op(shown, OPERATIONS[focus["op"]])} if "op" in focus else settings


def select_op(learner: Learner, wanted: Callable[[Op, Block], bool]) -> dict[str, str]:
    """Return the first operation of a repeated block (else of the whole graph) for which `wanted`, selected in the folded graph."""
    coarse = learner.planner.coarse
    for scope, content in (*coarse.blocks.items(), ("", coarse.top)):
        for group in content.groups:
            ops = content.block.ops_at(group.items)
            if any(wanted(op, content.block) for op in ops):
                return {"node": f"{scope}:{group.name}" if scope else group.name}
    return {}


def is_feed_forward(op: Op, block: Block) -> bool:
    """Tell whether an operation is the first weight of an MLP: the first matrix after attention."""
    weights = set(weight_matrices(block))
    kinds = [operator(o.fn).kind for o in block.ops]
    if Kind.ATTENTION not in kinds:
        return False
    after = kinds.index(Kind.ATTENTION)
    place = block.ops.index(op)
    # the first matrix behind attention is its output projection
    later = [i for i, o in enumerate(block.ops) if i > after and weights & set(o.inputs)]
    return len(later) > 1 and place == later[1]


def is_weight(op: Op, block: Block) -> bool:
    """Tell whether an operation has a weight matrix."""
    return bool(set(weight_matrices(block)) & set(op.inputs))


def is_attention(op: Op, block: Block) -> bool:
    """Tell whether an operation is attention itself."""
    return operator(op.fn).kind is Kind.ATTENTION


def is_experts(op: Op, block: Block) -> bool:
    """Tell whether an operation is all experts of a layer."""
    return operator(op.fn).kind is Kind.EXPERTS


OPERATIONS = {"weight": is_weight, "feed-forward": is_feed_forward, "attention": is_attention, "experts": is_experts}
"""What a link selects, by its name in a lesson's front."""


def model_setting(learner: Learner, shown: Learner) -> dict[str, str]:
    """Return the model of a lesson, where it is not the learner's."""
    return {} if shown.request.model == learner.request.model else {"model": shown.request.model}
