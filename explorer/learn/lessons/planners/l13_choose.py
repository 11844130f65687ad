"""13. Choose a plan yourself: the seven weights of a Llama block, predicted, then held against every other choice."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from explorer.graph.stripes import split_of
from explorer.jobs.result_cache import remember
from explorer.learn.blocks import arranged, placing
from explorer.learn.blocks.arranged import WEIGHTS, ArrangedBlock, with_llama_block
from explorer.learn.learner import STANDARD_MODEL, Learner
from explorer.learn.lesson import Choice, Values
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.block import CUTS, draw_block
from explorer.learn.pictures.builder import draw_builder
from explorer.learn.pictures.cloud import draw_candidates
from explorer.text import units
from planner_core.core import DeviceMesh
from planner_core.cost import CostModel, cost_model
from planner_core.cost.communication import collective_time
from planner_core.search.candidates import Candidates, score_candidates

LETTERS = tuple(CUTS)


@remember(16)
def score_choices(learner: Learner, block: str, devices: int) -> Candidates:
    """Return all 3^7 choices on `devices` neighbouring GPUs, scored by the planner."""
    planner, mesh = placing.on_neighbours(learner, devices), DeviceMesh(("tensor",), (devices,))
    # At ZeRO stage 0 a letter alone says what a weight keeps: nothing is dealt out beside it.
    model: CostModel = cost_model(planner.cluster, mesh, replace(planner.workload, zero=0))
    candidates = score_candidates(
        planner.coarse.blocks[block], planner.strategies[block], model, planner.graph.num_repeats[block]
    )
    assert candidates is not None
    return candidates


def row_of_choice(values: Values) -> int:
    """Return the row of the learner's choice among the candidates."""
    row = 0
    for name in WEIGHTS:  # the first weight's letter is the slowest to change
        row = len(LETTERS) * row + LETTERS.index(str(values[name]))
    return row


def best_within(candidates: Candidates, mine: int) -> int:
    """Return the candidate that communicates least with no more memory than the learner's; of equal ones the smallest."""
    room = candidates.memory_bytes[mine] if np.isfinite(candidates.memory_bytes[mine]) else np.inf
    comm = np.where(candidates.memory_bytes <= room, candidates.comm_s, np.inf)
    # `lexsort` sorts by its last key first.
    return int(np.lexsort((candidates.memory_bytes, comm))[0])


def arrange_choice(learner: Learner, values: Values) -> ArrangedBlock | None:
    """Return the block as the learner placed it; None if that cannot run."""
    return arranged.arrange_by_hand(learner, int(values["t"]), tuple(str(values[w]) for w in WEIGHTS))


@dataclass(frozen=True)
class _Choice:
    """The learner's choice among all: its row and the optimum's, and both as they run."""

    candidates: Candidates
    row: int
    best_row: int
    block: ArrangedBlock | None
    best: ArrangedBlock

    @property
    def yours(self) -> tuple[placing.BlockMessage, ...]:
        return tuple(m.sent for m in self.block.messages) if self.block else ()

    @property
    def least(self) -> tuple[placing.BlockMessage, ...]:
        return tuple(m.sent for m in self.best.messages)


def _choose_layouts(learner: Learner, block: str, values: Values) -> _Choice:
    devices, row = int(values["t"]), row_of_choice(values)
    candidates = score_choices(learner, block, devices)
    best_row = best_within(candidates, row)
    best = arranged.arrange_by_hand(learner, devices, _letters_of_row(candidates, best_row))
    assert best, "a choice with a time can run"
    chosen = arrange_choice(learner, values) if np.isfinite(candidates.comm_s[row]) else None
    return _Choice(candidates, row, best_row, chosen, best)


def _letters_of_row(candidates: Candidates, row: int) -> tuple[str, ...]:
    return tuple(LETTERS[int(c)] for c in candidates.choice[row])


def live(learner: Learner, values: Values) -> Live:
    """Return the block to build, the messages it causes, all candidates, the optimum as a block, why it is better, and the best plan of the
    model."""
    learner, block, note = with_llama_block(learner)
    devices = int(values["t"])
    c, usual = _choose_layouts(learner, block, values), arranged.arrange_megatron(learner, devices, False)
    comm, memory = c.candidates.comm_s, c.candidates.memory_bytes
    exact = arranged.arrange_best(learner, devices)
    only_yours, only_least = placing.compare_messages(c.yours, c.least)
    numbers = {
        "mine_s": float(comm[c.row]),
        "mine_bytes": float(memory[c.row]),
        "best_s": float(comm[c.best_row]),
        "best_bytes": float(memory[c.best_row]),
        "better": int(_find_dominating(comm, memory, c.row).sum()),
        "space": c.candidates.space,
        "scored": c.candidates.scored,
        "mine_sent_s": sum(x.seconds for x in c.yours),
        "best_sent_s": c.best.seconds,
        "mine_messages": len(c.yours),
        "best_messages": len(c.least),
    }
    facts = numbers | {
        "own": c.block,
        "sent": c.yours,
        "best": c.best,
        "differs": [f"{w} {CUTS[x]}" for w, x in c.best.weights.items() if x != values[w]],
        "kinds": Counter(x.kind for x in c.least),
        "only_yours": only_yours,
        "only_least": only_least,
        "exact": exact,
        "dealt": _is_dealt_out(exact),
        "layers": learner.planner.graph.num_repeats[exact.block],
        "usual": usual.seconds if usual else None,
        "one_sum": _all_reduce_s(learner, devices),
        "stream_bytes": _stream_bytes(learner),
    }
    pictures: dict[str, Picture] = {
        "builder": _draw_builder(learner, values, c, numbers["mine_sent_s"]),
        "cloud": draw_candidates(c.candidates, c.row, c.best_row),
        "optimum": draw_block(c.best),
        "exact": draw_block(exact),
    }
    return Live(facts, pictures, {k: v for k, v in numbers.items() if np.isfinite(v)}, learner, note)


def _is_dealt_out(case: ArrangedBlock) -> bool:
    """Return whether the optimizer's parts of weights that are whole in use are dealt out."""
    assert case.plan, "only a case that runs"
    return any(split_of(p, case.plan.mesh).stored > 1 for p in case.plan.blocks[case.block].params.values())


def _find_dominating(comm: Any, memory: Any, row: int) -> Any:
    """Return which choices send no longer and keep no more, and one of both less."""
    no_worse = (comm <= comm[row]) & (memory <= memory[row])
    return no_worse & ((comm < comm[row]) | (memory < memory[row]))


def _draw_builder(learner: Learner, values: Values, c: _Choice, mine_s: float) -> str:
    devices = int(values["t"])
    case = c.block or arranged.arrange_unrunnable(learner, devices, tuple(str(values[w]) for w in WEIGHTS))
    cost_words = (
        f"{len(c.yours)} collectives in a layer take {units.seconds(mine_s)}, and {units.memory(float(c.candidates.memory_bytes[c.row]))} "
        "are kept per layer and GPU."
        if c.block
        else "This cannot run: a cut would not be even."
    )
    return draw_builder(case, cost_words, c.candidates.comm_s, c.candidates.memory_bytes)


def _stream_bytes(learner: Learner) -> int:
    """Return the bytes of the residual stream of all samples."""
    load = learner.planner.workload
    return load.batch * load.seq * learner.layer().hidden * 2


def _all_reduce_s(learner: Learner, devices: int) -> float:
    """Return the seconds of one all_reduce of a layer's activations."""
    load = learner.planner.workload
    model = cost_model(placing.on_neighbours(learner, devices).cluster, DeviceMesh(("tensor",), (devices,)), load)
    return collective_time("all_reduce", _stream_bytes(learner), model.links[0])[0]


def focus(learner: Learner, values: Values) -> dict[str, str]:
    """Return the block whose candidates are meant."""
    shown, block, _ = with_llama_block(learner)
    return {**({} if shown is learner else {"model": STANDARD_MODEL}), "block": block}


def cases(learner: Learner, values: Values) -> list[tuple[str, dict[str, Choice]]]:
    """Return the cases of a file: the learner's own choice and three that are worth knowing."""
    shown, block, _ = with_llama_block(learner)
    best = score_choices(shown, block, int(values["t"])).choice[
        best_within(score_choices(shown, block, int(values["t"])), row_of_choice(values))
    ]
    letters = {
        "your own placement": [str(values[w]) for w in WEIGHTS],
        "columns, then rows (Megatron-LM)": ["S(0)", "S(0)", "S(0)", "S(1)", "S(0)", "S(0)", "S(1)"],
        "everything whole": ["R"] * len(WEIGHTS),
        "the optimum with no more memory than yours": [LETTERS[int(c)] for c in best],
    }
    return [(name, {**values, **dict(zip(WEIGHTS, chosen, strict=True))}) for name, chosen in letters.items()]


LESSON = read_lesson("13-choose", live, focus=focus, cases=cases)
