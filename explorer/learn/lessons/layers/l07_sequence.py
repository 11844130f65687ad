"""7. Sequence parallelism: the same bytes, less activation memory. Vocabulary: embedding and loss without gathering."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from explorer.address.settings import MODELS
from explorer.figures.palette import KIND_COLOURS, MEMORY_COLOURS
from explorer.figures.svg_tensors import (
    Drawing,
    amount,
    arrow,
    column,
    device,
    difference,
    legend,
    matrix,
    owned,
    replicated,
    row,
    sign,
    svg,
    text,
    tile,
)
from explorer.learn import links
from explorer.learn.blocks import arranged
from explorer.learn.blocks.arranged import Arranged
from explorer.learn.learner import STANDARD, Learner, standard
from explorer.learn.lesson import Control, Lesson, Question, Scene, Step, Values, asked
from explorer.learn.lessons.stacks import gathered as gathered_bytes
from explorer.learn.lessons.stacks import megatron
from explorer.learn.pictures.block import block as drawn
from explorer.learn.pictures.board import BoardState, board
from explorer.learn.pictures.charts import BarPiece, StackedBar, bars
from explorer.learn.pictures.film import Film
from explorer.text import units
from planner_core.cost.communication import wire_bytes

TOKENS, VOCAB, REGION = 4, 8, 8
CODE = """\
import torch
import torch.nn.functional as F

devices, known, each = 4, 8, 2  # each of 4 devices has 2 of 8 words
gen = torch.Generator().manual_seed(14)
table = torch.randint(-9, 10, (known, 3), generator=gen).double()
words = torch.randint(0, known, (4,), generator=gen)
terms = [F.embedding((words - r * each).clamp(0, each - 1), rows) * (words // each == r)[:, None]  # zeros for others' words
         for r, rows in enumerate(table.chunk(devices, dim=0))]
print("embedding: difference", (sum(terms) - F.embedding(words, table)).abs().max().item())  # an all_reduce of the terms

gen = torch.Generator().manual_seed(devices)
logits = torch.randint(-3, 6, (4, known), generator=gen).double()
target = torch.randint(0, known, (4,), generator=gen)
parts = logits.chunk(devices, dim=1)
top = torch.stack([p.max(1).values for p in parts]).max(0).values  # all_reduce of a number per token that takes the largest
total = sum((p - top[:, None]).exp().sum(1) for p in parts)  # one that adds
mine = sum(p.gather(1, (target - r * each).clamp(0, each - 1)[:, None])[:, 0] * (target // each == r) for r, p in enumerate(parts))
loss = (total.log() + top - mine).mean()  # and `mine` was another one that adds
print(f"loss {loss:.4f}, on one GPU {F.cross_entropy(logits, target):.4f}, difference", (loss - F.cross_entropy(logits, target)).abs().item())
tokens = 16 * 4096  # of the learner's batch, as the lesson begins; Llama-3-8B knows 128 256 words
print(f"sent {3 * 2 * 3 / 4 * tokens * 4 / 1e6:.2f} MB instead of {3 / 4 * tokens * 128256 * 2 / 1e9:.1f} GB")
"""


def suited(learner: Learner, devices: int) -> tuple[Learner, str]:
    """A learner whose model can be split both ways over `devices`, and a sentence if it is another model."""
    found, note = learner.transformer()
    if megatron(found, devices) and megatron(found, devices, sequence=True):
        return found, note
    why = f"Heads or tokens of {found.name} do not divide by {devices}, so this lesson shows {MODELS[STANDARD]}."
    return standard(learner), why


def kept(learner: Learner, devices: int, sequence: bool) -> int:
    """Bytes of activations that one of `devices` GPUs keeps, under Megatron-LM with or without sequence parallelism."""
    found = megatron(learner, devices, sequence)
    assert found is not None, "call it on what `suited` gives"
    return found["activations"]


@lru_cache(maxsize=16)
def loss(devices: int) -> dict[str, Any]:
    """Cross-entropy with the classes split over devices, by a maximum and two sums per token, against torch's on the whole."""
    import torch
    from torch.nn.functional import cross_entropy

    gen = torch.Generator().manual_seed(devices)
    logits = torch.randint(-3, 6, (TOKENS, VOCAB), generator=gen).double()
    target = torch.randint(0, VOCAB, (TOKENS,), generator=gen)
    parts = logits.chunk(devices, dim=1)
    width = VOCAB // devices
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


@lru_cache(maxsize=16)
def embedding(devices: int) -> dict[str, Any]:
    """Looking up words in a table of which each device has some rows: zeros for the words of others, and the sum."""
    import torch
    from torch.nn.functional import embedding as look_up

    gen = torch.Generator().manual_seed(10 + devices)
    table = torch.randint(-9, 10, (VOCAB, 3), generator=gen).double()
    words = torch.randint(0, VOCAB, (TOKENS,), generator=gen)
    width, terms = VOCAB // devices, []
    for rank, rows in enumerate(table.chunk(devices, dim=0)):
        own = words // width == rank
        terms.append(look_up((words - rank * width).clamp(0, width - 1), rows) * own[:, None])
    got = torch.stack(terms).sum(0)
    want = look_up(words, table)
    return {"table": table, "words": words, "terms": terms, "got": got, "error": float((got - want).abs().max())}


def scene(learner: Learner, values: Values) -> Scene:
    """The whole region, the split one, bytes, memory, the embedding, and the loss."""
    learner, note = suited(learner, int(values["n"]))
    n, layer, load = int(values["n"]), learner.layer(), learner.planner.workload
    num_bytes = load.batch * load.seq * layer.hidden * 2
    reduce, scatter, gather = (wire_bytes(k, num_bytes, n) for k in ("all_reduce", "reduce_scatter", "all_gather"))
    plain, split, again = kept(learner, n, False), kept(learner, n, True), gathered_bytes(learner, n)
    table_bytes = _vocab(learner) * layer.hidden * 2
    whole_logits = load.batch * load.seq * _vocab(learner)
    gathered, small = (
        wire_bytes("all_gather", whole_logits * 2, n),
        3 * wire_bytes("all_reduce", load.batch * load.seq * 4, n),
    )
    steps = (
        Step("Between the products",
            f"After each all_reduce every device holds all tokens. All {n} do the same norm, which rescales each token's numbers, and the same "
            f"dropout, which sets some to zero where a model has it (Llama has none), and keep the same activations. Grey means copies: {n} times the same.", svg(_region(n), "All devices hold all tokens")),
        Step("Give each some tokens",
            "Norm and dropout treat every token alone. So let each device do its share of the tokens. This tensor has three dimensions, [batch, tokens, hidden], counted "
            "from 0: cut by tokens it is S(1), and S(0) would be by samples. Before the next product they are gathered.", in_motion(n).markup("Tokens are summed in slices, normalised, and gathered")),
        Step("The bytes",
            f"Each all_reduce of {amount(num_bytes)} ({load.batch} × {units.whole(load.seq)} tokens × {units.whole(layer.hidden)} numbers × 2 bytes) becomes a reduce_scatter and an all_gather: "
            f"{amount(scatter)} + {amount(gather)} against {amount(reduce)}. A ring all_reduce was these two all "
            "along (lesson 4). Megatron-LM does one more thing: it gathers each product's input a second time in the "
            "backward pass instead of keeping it, which sends a quarter more, and hides that behind a product.", svg(_bytes(reduce, scatter, gather), "Wire bytes of both ways")),
        Step("The memory",
            f"Kept activations per GPU: {units.memory(plain)} before, **{units.memory(split)}** now, for this "
            f"model at batch {load.batch} on {n} GPUs. {units.memory(again)} of that are the tokens of others in gathered "
            f"inputs: with them gathered again in the backward pass, as in Megatron-LM, **{units.memory(split - again)}** "
            f"are left.{_too_much(split - again, learner)}", svg(_memory(plain, split, again), "Activation memory without and with sequence parallelism, and with inputs gathered again")),
        *_whole_block(learner, n),
        *_vocabulary_steps(n, f"{units.whole(_vocab(learner))} words × {units.whole(layer.hidden)} numbers × 2 bytes", table_bytes, gathered, small),
    )  # fmt: skip
    numbers = {
        "all_reduce": reduce,
        "reduce_scatter": scatter,
        "all_gather": gather,
        "plain": plain,
        "split": split,
        "regathered": split - again,
        "error": loss(n)["error"],
        "loss": loss(n)["loss"],
        "bytes": num_bytes,
        "logits": gathered,
        "small": small,
        "embedding_error": embedding(n)["error"],
        "table": table_bytes,
    }
    return Scene(steps, numbers, reveal=2, note=note)


def shown(learner: Learner, values: Values) -> Arranged | None:
    """The block with its tokens split between the products."""
    return arranged.megatron(suited(learner, int(values["n"]))[0], int(values["n"]), True)


def _whole_block(learner: Learner, n: int) -> list[Step]:
    """The block of lesson 6 with the tokens split between the products."""
    case = arranged.megatron(learner, n, True)
    if case is None:
        return []
    says = (
        "The block of lesson 6 again. Where f stood, tokens are gathered before the first products; where g stood, the terms are "
        "summed in slices of tokens. Going back, each does what the other does forward. Norms, additions and what is kept between are "
        f"cut by tokens now; the norms' own weights are whole, so their small gradients are summed over the {n} GPUs."
    )
    return [
        Step("The whole block", says, svg(drawn(case), "A block under Megatron-LM's plan with sequence parallelism"))
    ]


def _too_much(activations: int, learner: Learner) -> str:
    """Said where even the smaller number is too large."""
    room = learner.cluster.gpu.memory_bytes
    more = f" A GPU has {units.memory(room)}, so the batch must be split as well (lesson 8), or taken in parts (lesson 18)."
    return more if activations > room else ""


def _vocabulary_steps(n: int, sizes: str, table_bytes: int, gathered: int, small: int) -> list[Step]:
    """The embedding cut by rows, and the loss over split words; bytes are those of the learner's model, whose table has `sizes`."""
    c, e = loss(n), embedding(n)
    return [
        Step("Vocabulary: the embedding",
            f"The embedding is a table with a row per word, here {TOKENS} tokens and {VOCAB} words. Cut it by rows, S(0): each "
            f"device looks up the words it owns and puts zeros for the others, so the result is P, one all_reduce away "
            f"from the whole. Difference: **{e['error']:.0f}**. No device needs the whole table of {amount(table_bytes)} ({sizes}); each "
            f"keeps {amount(table_bytes / n)}.", svg(_lookup(e, n), "Each device looks up its own words")),
        Step("Vocabulary: the loss",
            "The last product makes one number per token and word. Cut it by words, and each device finds its "
            "largest number, its sum of exponentials and, if it owns it, the right word's number. Three small "
            f"all_reduces put them together: the first takes the maximum, the other two add. Loss here {c['got']:.4f}, on one GPU {c['loss']:.4f}, difference **{difference(c['error'])}**. For "
            f"this model: {amount(small)} sent per GPU instead of {amount(gathered)} to gather the logits.", svg(_vocabulary(c, n), "Cross-entropy over split classes")),
    ]  # fmt: skip


def terms_of_tokens(n: int) -> list[list[int]]:
    """A small whole number per device and token: the terms that a cut product leaves."""
    return [[(3 * r + 5 * t) % 7 - 3 for t in range(REGION)] for r in range(n)]


def in_motion(n: int) -> Film:
    """What becomes of 8 tokens between two products: reduce_scatter, each its own, all_gather."""
    terms = terms_of_tokens(n)
    sums = [sum(t) for t in zip(*terms, strict=True)]
    own = [t * n // REGION for t in range(REGION)]

    def shown(value: int) -> str:
        return str(value).replace("-", "−")

    partial = [[(("P", r), shown(x)) for x in term] for r, term in enumerate(terms)]
    sliced = [[(("S", r), shown(s)) if own[t] == r else None for t, s in enumerate(sums)] for r in range(n)]
    doubled = [[(("S", r), shown(2 * s)) if own[t] == r else None for t, s in enumerate(sums)] for r in range(n)]
    whole = [[(("R", None), shown(2 * s)) for s in sums] for _ in range(n)]
    scatter = [(r, t, own[t], t) for r in range(n) for t in range(REGION) if own[t] != r]
    gather = [(own[t], t, r, t) for r in range(n) for t in range(REGION) if own[t] != r]
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
    return board(stops, REGION, cell=36, note="one place for each of 8 tokens")


def _vocab(learner: Learner) -> int:
    found = learner.graph.config.get("vocab_size") or learner.graph.config.get("num_labels") or 1000
    return int(found)


def _region(n: int) -> Drawing:
    frames = []
    for r in range(n):
        tiles = row(*(tile(24, 40, ("R", None), str(i), 12) for i in range(REGION)), gap=2)
        frames.append(device(r, column(text("tokens", 12.5, muted=True), tiles, gap=3)))
    per = max(1, int(640 // (frames[0].width + 10)))
    grid = column(*(row(*frames[i : i + per], gap=10) for i in range(0, n, per)), gap=10)
    flow = [sign("product", 15), arrow(60, "all_reduce"), sign("norm, dropout", 15)]
    flow += [arrow(60), sign("product", 15)]
    return column(row(*flow, gap=8), grid, gap=14)


def _bytes(reduce: int, scatter: int, gather: int) -> Drawing:
    one = StackedBar("tensor parallel", (BarPiece("all_reduce", reduce, KIND_COLOURS["all_reduce"]),))
    two = StackedBar(
        "+ sequence",
        (
            BarPiece("reduce_scatter", scatter, KIND_COLOURS["reduce_scatter"]),
            BarPiece("all_gather", gather, KIND_COLOURS["all_gather"], True),
        ),
    )
    return bars([one, two], amount)


def _memory(plain: int, split: int, again: int) -> Drawing:
    rows = (("tensor parallel", plain), ("+ sequence", split), ("+ gathered again", split - again))
    colour = MEMORY_COLOURS["activations"]
    return bars(
        [StackedBar(name, (BarPiece("activations", float(size), colour),), strong=size < plain) for name, size in rows],
        units.memory,
    )


def _lookup(e: dict[str, Any], n: int) -> Drawing:
    words = column(text("word", 13, 600), *(tile(48, 30, ("", None), str(int(t)), 13) for t in e["words"]), gap=0)
    width = VOCAB // n
    owns = [f"owns {r * width}" + (f" to {(r + 1) * width - 1}" if width > 1 else "") for r in range(n)]
    terms = [matrix(t, owned(r, "P"), f"GPU {r}", owns[r], 36) for r, t in enumerate(e["terms"])]
    got = matrix(e["got"], replicated, "sum", "R", 36)
    per = 4
    lines = [row(*([words] if i == 0 else []), *terms[i : i + per], gap=10, align=1) for i in range(0, n, per)]
    return column(*lines, row(arrow(44, "all_reduce"), got, gap=10), legend("P", "R"), gap=12)


def _vocabulary(c: dict[str, Any], n: int) -> Drawing:
    parts = [matrix(p, owned(r), f"GPU {r}", "S(1)", 36) for r, p in enumerate(c["parts"])]
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


def question(learner: Learner, values: Values) -> Question:
    """Does splitting the tokens send more?"""
    numbers = scene(learner, values).numbers
    t = amount
    both = numbers["reduce_scatter"] + numbers["all_gather"]
    return asked(
        "Each all_reduce is replaced by a reduce_scatter and, later, an all_gather. How many bytes does that send?",
        ("As many as before",
            f"{t(numbers['reduce_scatter'])} + {t(numbers['all_gather'])} = {t(both)}, and the all_reduce sent "
            f"{t(numbers['all_reduce'])}: the same bytes, and fewer activations are kept."),
        (
            ("Twice as many, there are two messages",
                "Two messages, but neither does what an all_reduce does: think of lesson 4, where a ring first makes each sum once and "
                "then hands it round. Which of the two does which half?"),
            ("Half as many", "The reduce_scatter alone would be half. What must come before the next product, which wants all tokens?"),
        ), 1,
    )  # fmt: skip


LESSON = Lesson(
    7, "sequence", "Sequence and vocabulary", "Tensor parallelism leaves some work that every device does: norms, the embedding, the loss. Here that is split too.",
    (
        "Tensor parallelism as in lesson 5 leaves some work uncut. This is how Megatron-LM cuts it, and how a "
        "loss over many words is taken without bringing them together.",),
    (
        ("Sequence parallelism", "between the products each device keeps only its share of the tokens"),
        ("Vocabulary", "the words (tokens) a model knows; the embedding has a row for each, the logits a number for each"),
        ("Logits", "the numbers, one per token and word, from which the loss is computed"),
    ),
    (Control("n", "Devices", (2, 4, 8), 4, kind="slider"),),
    scene, question, CODE, ("compare", "Megatron-LM with and without sequence parallelism"), uses_model=True,
    prefetch=True,
    focus=links.sequence, block=shown,
)  # fmt: skip
