"""Every option of a plan and of a price, once: the command line, the library, the page and the checks read this table.

    OPTIONS["chunks"]    chunks=2 in Python, --chunks 2 on the command line, "products in chunks" on the page

To add an option, add an entry here, and a field of this name where it acts: `Workload` if it changes what a step does, `Request` if
`plan` takes it, `Statement` if `price` does. Its flag, its type, its values and its words in messages follow from the entry; a function's
list of options in `planning/library.py` is for type checkers.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from planner_core.core.errors import InputError, Sentence, Term
from planner_core.core.forms import shorten_value
from planner_core.core.workload.amounts import Unreadable, parse_tokens

OPTIMIZERS = {"adamw": 2, "adamw-fp32": 2, "sgd": 0, "sgd-momentum": 1}
"""Number of moments that each optimizer keeps per parameter. With `adamw-fp32` all that is kept is in float32, as in mixed precision."""
PRECISIONS = ("mixed", "pure")
"""mixed: weights, moments and gradients are kept in float32, and gradients are reduced in it; operators run in compute dtype. pure:
all is in compute dtype."""
DTYPES = ("bfloat16", "float16", "float32")
ZERO = (0, 1, 2, 3)
RECOMPUTE = ("auto", "none", "keep-matmuls", "selective", "keep-attention", "full")
"""What is recomputed in backward, from least to most (`ops.recomputation` says what each policy keeps). auto: the search chooses for
each copy of each repeated block."""
CHUNKS = (1, 2, 4, 8)
MAX_IMBALANCE = 1000
OPTIMIZER_KERNELS = ("fused", "foreach", "for-loop")
"""How an optimizer updates weights: one kernel that reads and writes each state once; or an operator of the formula after the other, over
lists of tensors (`foreach`, PyTorch's default) or tensor by tensor (`for-loop`). The names are those of torchtitan."""
ATTENTION = ("flash1", "flash2", "cudnn", "flash3", "efficient", "softmax", "math")
"""Kernels of attention. `softmax`: two products in the dtype that computes with a softmax kernel between, as Megatron-LM had before flash
attention; `math`: torch's products and softmax in float32."""
TORCH_ATTENTION = "sdpa"
"""The kernel that `scaled_dot_product_attention` takes: it depends on the GPU and on the operands (`cost.compute.sdpa`)."""
TORCH_RELEASE = re.compile(r"sdpa:(\d{1,2})\.(\d{1,3})(?:\.\d{1,3})?(?:\+cu(\d{3}))?")
"""The same for a release of torch, as `torch.__version__` writes it: "sdpa:2.9" or "sdpa:2.11.0+cu128". Without one: a new one."""
LOSSES = ("eager", "fused", "whole", "gathered")
CHUNKED_LOSS = re.compile(r"chunked:[1-9][0-9]{0,5}")
GRADIENTS = ("bfloat16", "float32")
MAX_COUNT, MAX_SAMPLES = 10**9, 10**6
"""Of anything that is counted; and of the samples and micro-batches of a step, which some searches go through one by one."""
MAX_SHOWN = 60
"""Characters of a value that a sentence shows."""
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Option:
    """One option: how each user names it, and which values it takes.

    `name`: the keyword of the library, and the field of `Request`, `Workload` or `Statement`. `kind`: int, float, str or bool. `words`:
    what `--help` says. `control`: what the page calls it. `hover`: what the page says of it where a pointer rests. `flag`: its flag, where
    that is not the name with hyphens. `choices`, or `least` and `most`, bound its values; a text that matches `pattern` is allowed too;
    `allowed` says the bounds in words. `example`: a value that would do. `automatic`: on the command line and on the page "auto" leaves
    the value to the search; in Python that is None. `read`: reads a text, where people write more than what `kind` reads.
    """

    name: str
    kind: type
    words: str
    control: str
    flag: str = ""
    choices: tuple[Any, ...] = ()
    pattern: re.Pattern[str] | None = None
    least: float | None = None
    most: float | None = None
    allowed: str = ""
    example: Any = None
    metavar: str | None = None
    automatic: bool = False
    hover: str = ""
    read: Callable[[str], Any] | None = None

    @property
    def switch(self) -> str:
        """Its flag on the command line: `--memory-gb`."""
        return f"--{self.flag or self.name.replace('_', '-')}"

    def parse(self, text: str) -> Any:
        """Return the value that a text on the command line gives. Raises InputError, and ValueError for what is not a number."""
        # A shell cannot give None, so the word stands for it.
        if self.automatic and text == AUTO:
            return None
        # Before `kind` reads it, since int() knows neither "auto" nor the choices.
        if self.automatic and text not in map(str, self.choices):
            raise InputError(named(self.name, text), f" is not one of {AUTO}, {', '.join(map(str, self.choices))}")
        try:
            return (self.read or self.kind)(text)
        except Unreadable as error:
            raise InputError(named(self.name, text), f" {error}") from None

    def check(self, value: Any) -> None:
        """Raise InputError for a value outside of its bounds. None, the default, is always allowed."""
        if value is None or (self.pattern and isinstance(value, str) and self.pattern.fullmatch(value)):
            return
        # As `--dtype=$UNSET` in a shell script gives it.
        if value == "":
            raise InputError(named(self.name), " is given without a value; give one, or leave it out")
        if self.choices and value not in self.choices:
            known = self.allowed or ", ".join(map(str, self.choices))
            hint = Sentence("; give e.g. ", named(self.name, self.example)) if self.pattern else ""
            raise InputError(named(self.name, value), f" is not one of {known}", hint)
        if self.least is not None and self.most is not None and not self.least <= value <= self.most:
            raise InputError(
                named(self.name, value), f" is not {self.allowed}; give e.g. ", named(self.name, self.example)
            )


def _count(
    name: str,
    words: str,
    control: str,
    *,
    flag: str = "",
    example: int = 16,
    hover: str = "",
    most: int = MAX_COUNT,
    metavar: str | None = None,
) -> Option:
    """Return an option that counts something."""
    # 10^9 is read at once, and 1000000000 is not.
    power = len(str(most)) - 1
    allowed = f"a positive number up to {f'10^{power}' if most == 10**power and power > 3 else most}"
    return Option(
        name,
        int,
        words,
        control,
        flag,
        least=1,
        most=most,
        allowed=allowed,
        example=example,
        hover=hover,
        metavar=metavar,
    )


_ENTRIES = (
    Option("cluster", str, "name (with changes: NAME:nodes=4,gpu=h200-sxm), or a JSON file", "cluster"),
    Option(
        "mesh",
        str,
        "e.g. 8 or 2x8; default: every factorisation of the cluster",
        "mesh",
        hover="GPUs as a grid; neighbours on the last axis are neighbours in a node",
    ),
    _count("batch", "samples per step, over all GPUs", "batch", most=MAX_SAMPLES),
    _count("seq", "tokens per sample", "sequence length"),
    _count("layers", "override the depth", "layers", example=2, hover="Copies of the repeated block", most=1000),
    Option(
        "dtype",
        str,
        "bfloat16 | float16 | float32; default: the 16-bit type the GPU is fast in",
        "number format",
        choices=DTYPES,
    ),
    Option("optimizer", str, f"{' | '.join(OPTIMIZERS)}; default adamw", "optimizer", choices=tuple(OPTIMIZERS)),
    Option(
        "zero",
        int,
        "0 | 1 | 2 | 3: the ZeRO stage that weights may have instead of 0; default auto: the best for each weight",
        "ZeRO stage",
        choices=ZERO,
        automatic=True,
        hover="How far ZeRO may go: 1 shards the optimizer’s states, 2 also the gradients, 3 also the weights, as FSDP does",
    ),
    _count(
        "accumulate",
        "micro-batches of a step",
        "number of micro-batches",
        most=MAX_SAMPLES,
        hover="A step may run in parts, which takes less memory and more time; empty: as many as are best",
    ),
    _count("micro_batch", "samples of one data-parallel rank at once; default: what is best", "micro-batch", example=2),
    Option("recompute", str, " | ".join(RECOMPUTE), "recomputation", choices=RECOMPUTE),
    Option(
        "precision",
        str,
        "mixed (weights, moments and gradients in float32; the default) | pure (all in the dtype)",
        "precision",
        choices=PRECISIONS,
        hover="Mixed keeps weights, moments and gradients in fp32",
    ),
    Option(
        "method",
        str,
        "how the search is restricted, as in a paper",
        "method",
        hover="TAP, TAPS and ATP: as their papers search, without a choice of micro-batches or a tool",
    ),
    Option("objective", str, "time | communication", "goal"),
    Option(
        "tool",
        str,
        "only plans that this tool can be told",
        "tool",
        flag="for",
        metavar="TOOL",
        hover="Only what this tool can be told is searched, and it is exported to it",
    ),
    Option(
        "memory_gb",
        float,
        "memory per GPU that a plan may take (10^9 bytes)",
        "memory per GPU",
        least=1e-6,
        most=1e6,
        allowed="between 10^-6 and 10^6",
        example=40,
    ),
    Option("layout", str, "what runs now: it stands among the baselines", "layout"),
    Option(
        "chunks",
        int,
        "cut products into so many parts where the sum of one part over GPUs then hides behind the next; default 1",
        "products in chunks",
        choices=CHUNKS,
        hover="In chunks, the sum of one part of a product runs beside the next part (ATP)",
    ),
    Option(
        "expert_imbalance",
        float,
        "where experts are dealt out: load of the fullest GPU over the mean; default 1, balanced routing",
        "load of the fullest GPU’s experts",
        least=1,
        most=MAX_IMBALANCE,
        allowed=f"between 1 and {MAX_IMBALANCE}: the fullest GPU gets the mean or more",
        example=1.5,
    ),
    Option(
        "rank_by_rank",
        bool,
        "ZeRO-1 and -2 hand out updated weights tensor by tensor and rank by rank, as nanotron and InternEvo do; the default is buckets, "
        "as in Megatron-LM and DeepSpeed",
        "weights handed out rank by rank",
    ),
    Option(
        "offload",
        bool,
        "keep the optimizer's moments in the host's memory; they come to the GPU weight by weight in each step",
        "moments in the host’s memory",
        hover="In the host’s memory they take none of the GPU’s, and come over its link in each step",
    ),
    _count(
        "lora",
        "adapters of this rank beside every linear layer but the head, and all else frozen (a config may have them too)",
        "rank of adapters",
        most=4096,
        metavar="RANK",
    ),
    Option(
        "nf4",
        bool,
        "with adapters (lora): the frozen weights are kept in 4 bits, as QLoRA does",
        "frozen weights in 4 bits",
    ),
    _count(
        "vocab_multiple",
        "make the vocabulary a multiple of this, as Megatron-LM does of 128 times tp; the default is tp",
        "multiple of the vocabulary",
        flag="pad-vocab",
        example=2,
        most=10**6,
    ),
    Option("stack", str, "the program that trains; default torch, as plans and exported scripts run", "program"),
    Option(
        "attention",
        str,
        f"{' | '.join((*ATTENTION, TORCH_ATTENTION))}: the attention kernel; default the stack's: {TORCH_ATTENTION}, "
        "which is what scaled_dot_product_attention takes on this GPU; sdpa:2.9 is what it takes in that release of torch",
        "attention kernel",
        choices=(*ATTENTION, TORCH_ATTENTION),
        pattern=TORCH_RELEASE,
        allowed=f"{', '.join((*ATTENTION, TORCH_ATTENTION))} and sdpa:RELEASE of torch",
        example="sdpa:2.9",
    ),
    Option(
        "optimizer_kernels",
        str,
        f"{' | '.join(OPTIMIZER_KERNELS)}: how weights are updated; default the stack's: fused",
        "optimizer’s kernels",
        choices=OPTIMIZER_KERNELS,
    ),
    Option(
        "loss",
        str,
        f"{' | '.join(LOSSES)} | chunked:N: how the loss of logits is computed; default as the model's code does",
        "loss",
        choices=LOSSES,
        pattern=CHUNKED_LOSS,
        allowed=f"{', '.join(LOSSES)} and chunked:N",
        example="chunked:8",
    ),
    Option(
        "gradients",
        str,
        f"{' | '.join(GRADIENTS)}: the dtype in which gradients are summed; default that of the weights",
        "dtype of gradients",
        choices=GRADIENTS,
    ),
    Option("compiled", bool, "torch.compile fuses what is bound by memory", "torch.compile", flag="compile"),
    Option(
        "tokens",
        float,
        "tokens to train on in all, e.g. 15T, 300B or 1e12: days are said",
        "tokens of the training",
        example=1e12,
        read=parse_tokens,
    ),
    Option(
        "price_per_gpu_hour", float, "with --tokens: money is said too", "price of a GPU hour", example=2, metavar="P"
    ),
    Option(
        "prove",
        bool,
        "wait until the gap between the plan and its bound is closed, as far as it can be",
        "proof",
    ),
    Option("nearest", bool, "where the form cannot hold the plan, the nearest plan that it can", "the nearest plan"),
)
OPTIONS: Mapping[str, Option] = {option.name: option for option in _ENTRIES}
"""The options by name."""


def named(name: str, *value: Any) -> Term:
    """Return an option for a sentence of an error or a note, with a value if one is given; each user reads it in words of their own.

    Example: `named("memory_gb", 40)` reads `memory_gb=40` in Python, `--memory-gb 40` on the command line, and on the page "memory per
    GPU of 37.3 GiB".
    """
    # A sentence that names no option is our own fault, and not a user's.
    assert name in OPTIONS, name
    text = f"{name}={shorten_value(value[0])}" if value else name
    return Term("option", name, value[0] if value else None, text)


CHECKS = {"rules": "planner_core.verification.verify_rules", "fake": "ranks=None"}
"""In Python: the checks of a plan beside the training of a small model on real ranks (`ranks=4`). In a command each is a flag."""


def named_check(check: str, ranks: int | None = None) -> Term:
    """Return a check of a plan for a sentence: "ranks" (with their number), "fake" or "rules".

    Example: `named_check("ranks", 4)` reads `ranks=4` in Python and `--ranks 4` in a command; `named_check("fake")` reads `ranks=None`
    and `--fake`.
    """
    text = CHECKS.get(check, "ranks" if ranks is None else f"ranks={ranks}")
    return Term("check", check, ranks, text)


def named_form(form: str) -> Term:
    """A form of an export for a sentence: `named_form("json")` reads `target="json"` in Python, `--to json` on the command line, and on
    the page "plan file"."""
    return Term("form", form, None, f"target={shorten_value(form)}")


def memory_amount(num_bytes: float, digits: str = ".1f") -> Term:
    """Return the bytes of memory for a sentence: in Python in GiB, as all memory is written; the page has digits of its own."""
    return Term("bytes", "", num_bytes, f"{num_bytes / 2**30:{digits}} GiB")


def time_amount(seconds: float) -> Term:
    """Return a time for a sentence: in Python milliseconds, or seconds from one on, as in the table; the page writes it as all times."""
    text = f"{seconds:.4g} s" if seconds >= 1 else f"{1e3 * seconds:.4g} ms"
    return Term("seconds", "", seconds, text)


def check_options(values: object, names: Iterable[str]) -> None:
    """Check the fields of these names by the table. Raises InputError for the first that is impossible."""
    for name in names:
        OPTIONS[name].check(getattr(values, name))


def option_switch(term: Term) -> str:
    """Return a term of a sentence in the words of the command line."""
    if term.kind == "check":
        return f"--{term.name}" if term.value is None else f"--{term.name} {term.value}"
    if term.kind == "form":
        return f"--to {term.name}"
    if term.kind == "price file":
        return "price --config FILE"
    if term.kind != "option":
        return term.text
    option = OPTIONS[term.name]
    if term.value is None or isinstance(term.value, bool):
        return option.switch
    value = term.value if len(str(term.value)) <= MAX_SHOWN else str(term.value)[:MAX_SHOWN] + "..."
    return f"{option.switch} {shlex.quote(str(value))}"
