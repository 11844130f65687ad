"""7. Sequence parallelism: the same bytes, less activation memory. Vocabulary: embedding and loss without gathering."""

from __future__ import annotations

from typing import Any

from explorer.address.settings import MODELS
from explorer.figures.svg_tensors import (
    Drawing,
    arrow,
    column,
    device,
    legend,
    matrix,
    owned,
    replicated,
    row,
    sign,
    text,
    tile,
)
from explorer.jobs.result_cache import remember
from explorer.learn.blocks import arranged
from explorer.learn.learner import STANDARD_MODEL, Learner, with_model
from explorer.learn.lesson import Values
from explorer.learn.lessons.stacks import gathered_bytes, megatron_memory
from explorer.learn.lessons.tensors import draw_piece
from explorer.learn.markdown import Live, Picture, read_lesson
from explorer.learn.pictures.block import draw_block
from explorer.learn.pictures.board import BoardState, board_film
from explorer.learn.pictures.charts import grid
from explorer.learn.pictures.film import Film
from planner_core.cost.communication import wire_bytes

TOKENS, VOCAB, REGION = 4, 8, 8


def divisible_learner(learner: Learner, devices: int) -> tuple[Learner, str]:
    """Return a learner whose model can be split both ways over `devices`, and a sentence if it is another model."""
    layered, note = learner.transformer()
    if megatron_memory(layered, devices) and megatron_memory(layered, devices, sequence=True):
        return layered, note
    why = (
        f"Heads or tokens of {layered.name} do not divide by {devices}, so this lesson shows {MODELS[STANDARD_MODEL]}."
    )
    return with_model(learner), why


def activation_bytes(learner: Learner, devices: int, sequence: bool) -> int:
    """Return the bytes of activations that one of `devices` GPUs keeps, under Megatron-LM with or without sequence parallelism."""
    memory = megatron_memory(learner, devices, sequence)
    assert memory is not None, "call it on what `divisible_learner` gives"
    return memory["activations"]


@remember(16)
def split_loss(devices: int) -> dict[str, Any]:
    """Compute the cross-entropy with classes split over devices, by a maximum and two sums per token, and torch's on the whole."""
    import torch
    from torch.nn.functional import cross_entropy

    gen = torch.Generator().manual_seed(devices)
    logits = torch.randint(-3, 6, (TOKENS, VOCAB), generator=gen).double()
    target = torch.randint(0, VOCAB, (TOKENS,), generator=gen)
    parts = logits.chunk(devices, dim=1)
    width = VOCAB // devices
    # Without the maximum over all classes exp would overflow; it is the first of the three small messages of a token.
    top = torch.stack([p.max(1).values for p in parts]).max(0).values
    total = torch.stack([(p - top[:, None]).exp().sum(1) for p in parts]).sum(0)
    mine = torch.zeros(TOKENS, dtype=torch.float64)
    for rank, part in enumerate(parts):
        here = target // width == rank
        mine[here] += part[here, target[here] - rank * width]
    got = (total.log() + top - mine).mean()
    want = cross_entropy(logits, target)
    return {
        "logits": logits,
        "target": target,
        "parts": parts,
        "loss": float(want),
        "got": float(got),
        "error": float((got - want).abs()),
    }


@remember(16)
def split_embedding(devices: int) -> dict[str, Any]:
    """Look words up in a table of which each device has some rows: zeros for the words of others, and the sum."""
    import torch
    from torch.nn.functional import embedding as look_up

    gen = torch.Generator().manual_seed(10 + devices)
    table = torch.randint(-9, 10, (VOCAB, 3), generator=gen).double()
    words = torch.randint(0, VOCAB, (TOKENS,), generator=gen)
    width, terms = VOCAB // devices, []
    for rank, rows in enumerate(table.chunk(devices, dim=0)):
        is_here = words // width == rank
        # A word of another device looks up any row here, and zero is what it adds.
        terms.append(look_up((words - rank * width).clamp(0, width - 1), rows) * is_here[:, None])
    got = torch.stack(terms).sum(0)
    want = look_up(words, table)
    return {"table": table, "words": words, "terms": terms, "got": got, "error": float((got - want).abs().max())}


def live(learner: Learner, values: Values) -> Live:
    """Return the whole region, the split one, bytes, memory, the embedding, and the loss."""
    n = int(values["n"])
    learner, note = divisible_learner(learner, n)
    layer, load = learner.layer(), learner.planner.workload
    num_bytes = load.batch * load.seq * layer.hidden * 2
    reduce, scatter, gather = (wire_bytes(k, num_bytes, n) for k in ("all_reduce", "reduce_scatter", "all_gather"))
    plain, split = (activation_bytes(learner, n, sequence) for sequence in (False, True))
    gathered = gathered_bytes(learner, n)
    words, c, e = _vocabulary_size(learner), split_loss(n), split_embedding(n)
    block = arranged.arrange_megatron(learner, n, True)
    # Logits in 16 bits for every word of the vocabulary, against three numbers of a token in fp32: the maximum and the two sums.
    logits = wire_bytes("all_gather", load.batch * load.seq * words * 2, n)
    small = 3 * wire_bytes("all_reduce", load.batch * load.seq * 4, n)
    numbers = {
        "all_reduce": reduce,
        "reduce_scatter": scatter,
        "all_gather": gather,
        "plain": plain,
        "split": split,
        "regathered": split - gathered,
        "error": c["error"],
        "loss": c["loss"],
        "bytes": num_bytes,
        "logits": logits,
        "small": small,
        "embedding_error": e["error"],
        "table": words * layer.hidden * 2,
    }
    facts = {
        "gathered": gathered,
        "words": words,
        "tokens": TOKENS,
        "shown_words": VOCAB,
        "split_loss": c["got"],
        "has_block": block is not None,
    }
    pictures: dict[str, Picture] = {
        "region": _draw_region(n),
        "motion": tokens_film(n),
        "lookup": _draw_lookup(e, n),
        "vocabulary": _draw_loss(c),
        **({"block": draw_block(block)} if block else {}),
    }
    return Live(facts, pictures, numbers, learner, note)


def token_terms(n: int) -> list[list[int]]:
    """Return a small whole number per device and token: the terms that a cut product leaves."""
    return [[(3 * r + 5 * t) % 7 - 3 for t in range(REGION)] for r in range(n)]


def tokens_film(n: int) -> Film:
    """Return what becomes of 8 tokens between two products: reduce_scatter, each its own, all_gather."""
    terms = token_terms(n)
    sums = [sum(t) for t in zip(*terms, strict=True)]
    owner = [t * n // REGION for t in range(REGION)]

    def shown(value: int) -> str:
        return str(value).replace("-", "−")

    partial = [[(("P", r), shown(x)) for x in term] for r, term in enumerate(terms)]
    sliced = [[(("S", r), shown(s)) if owner[t] == r else None for t, s in enumerate(sums)] for r in range(n)]
    doubled = [[(("S", r), shown(2 * s)) if owner[t] == r else None for t, s in enumerate(sums)] for r in range(n)]
    whole = [[(("R", None), shown(2 * s)) for s in sums] for _ in range(n)]
    scatter = [(r, t, owner[t], t) for r in range(n) for t in range(REGION) if owner[t] != r]
    gather = [(owner[t], t, r, t) for r in range(n) for t in range(REGION) if owner[t] != r]
    stops = [
        BoardState(
            partial,
            f"Behind a cut product each GPU has a term of all {REGION} tokens: hatched, not summed yet.",
            scatter,
        ),
        BoardState(sliced, "reduce_scatter: every token is summed on the one GPU that owns it."),
        BoardState(
            doubled,
            "Norm and dropout, each GPU on its own tokens. (Here they double a number.) Only these are kept.",
            gather,
        ),
        BoardState(whole, "all_gather: the next product has all tokens again."),
    ]
    return board_film(stops, REGION, cell=36, note="one place for each of 8 tokens")


def _vocabulary_size(learner: Learner) -> int:
    size = learner.graph.config.get("vocab_size") or learner.graph.config.get("num_labels") or 1000
    return int(size)


def _draw_region(n: int) -> Drawing:
    frames = []
    for r in range(n):
        tiles = row(*(tile(24, 40, ("R", None), str(i), 12) for i in range(REGION)), gap=2)
        frames.append(device(r, column(text("tokens", 12.5, muted=True), tiles, gap=3)))
    per = max(1, int(640 // (frames[0].width + 10)))
    flow = [sign("product", 15), arrow(60, "all_reduce"), sign("norm, dropout", 15)]
    flow += [arrow(60), sign("product", 15)]
    return column(row(*flow, gap=8), grid(frames, per), gap=14)


def _draw_lookup(e: dict[str, Any], n: int) -> Drawing:
    words = column(text("word", 13, 600), *(tile(48, 30, ("", None), str(int(t)), 13) for t in e["words"]), gap=0)
    width = VOCAB // n
    owns = [f"owns {r * width}" + (f" to {(r + 1) * width - 1}" if width > 1 else "") for r in range(n)]
    terms = [matrix(t, owned(r, "P"), f"GPU {r}", owns[r], 36) for r, t in enumerate(e["terms"])]
    got = matrix(e["got"], replicated, "sum", "R", 36)
    per = 4
    lines = [row(*([words] if i == 0 else []), *terms[i : i + per], gap=10, align=1) for i in range(0, n, per)]
    return column(*lines, row(arrow(44, "all_reduce"), got, gap=10), legend("P", "R"), gap=12)


def _draw_loss(c: dict[str, Any]) -> Drawing:
    parts = [draw_piece(p, r, "S(1)", f"GPU {r}", 36) for r, p in enumerate(c["parts"])]
    right = column(
        text("right word", 13, 600),
        column(*(tile(80, 30, ("", None), str(int(t)), 13) for t in c["target"]), gap=0),
        gap=5,
    )
    return column(
        row(*parts, right, gap=10, align=1),
        row(
            text(f"loss {c['got']:.4f}", 15, 600), sign("="), text("mean of log(sum of exp) − right word's number", 14)
        ),
        gap=14,
    )


LESSON = read_lesson("07-sequence", live)
