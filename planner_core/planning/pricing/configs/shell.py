"""Read the options of a launch script: its variables, defaults and arrays are followed as text. Nothing is run.

    TP=${1:-2}
    ARGS=(--tensor-model-parallel-size $TP --bf16)
    torchrun pretrain.py ${ARGS[@]} "$@"         ->  --tensor-model-parallel-size 2 --bf16

What the text alone does not say stays as it is written: a variable that the file does not set, what a command prints, `$1` without a
default. A variable that several branches of a condition set has no one value either. Options of the commands that start a program count;
if there are none, all options of the text.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from planner_core.core import InputError
from planner_core.planning.pricing.configs.fields import Unknown

OPTION = re.compile(r"--[a-zA-Z][a-zA-Z0-9_-]*")
STARTS = re.compile(r"(^|[\s;&|\"'(/])(torchrun|python3?|deepspeed|srun|mpirun|accelerate|\S+\.py)([\s\"']|$)")
ASSIGN = re.compile(r"^\s*(?:export\s+|local\s+|declare\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*|[0-9@*])(?:\[[@*]\])?(?::?-([^{}]*))?\}|\$([A-Za-z_]\w*|[0-9@*])")
SUM = re.compile(r"\$\(\((.*?)\)\)")
HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?[^\n]*\n.*?\n\s*\1\s*(?=\n|$)", re.DOTALL)
OPENS, CLOSES = frozenset({"if", "for", "while", "until", "case"}), frozenset({"fi", "done", "esac"})
END = ";"
NO_VALUE = re.compile(r"$|\d*[<>|&;)]")
"""What may follow an option that has no value: the end of its command, or where its output goes."""
MOST_ROUNDS, MOST_CHARACTERS = 12, 400_000


@dataclass
class Script:
    """Variables of a script, as far as its text sets them; those that a condition sets to several values; its commands in order."""

    variables: dict[str, str] = field(default_factory=dict)
    doubtful: set[str] = field(default_factory=set)
    commands: list[str] = field(default_factory=list)
    passes_on: bool = False

    def expand(self, text: str) -> str:
        """The text with variables replaced by their values, as often as they hold variables themselves. Raises InputError if that grows
        without end."""
        text = re.sub(r'"(\$\{\w+\[[@*]\]\})"', r"\1", text)  # a quoted array is its words
        for _ in range(MOST_ROUNDS):
            text, before = SUM.sub(self._sum, VARIABLE.sub(self._value, text)), text
            if text == before:
                break
            if len(text) > MOST_CHARACTERS:
                raise InputError("a variable of the script holds itself; write its options out")
        return text

    def _value(self, found: re.Match[str]) -> str:
        name, default = found[1] or found[3], found[2]
        if name in ("@", "*"):
            self.passes_on = True
            return ""
        if name in self.variables and name not in self.doubtful:
            return self.variables[name]
        if default is not None and name not in self.doubtful:
            return default.strip("\"'")
        return found[0]

    def _sum(self, found: re.Match[str]) -> str:
        inner = VARIABLE.sub(self._value, re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"$\1", found[1]))
        number = arithmetic(inner)
        return found[0] if number is None else str(number)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a launch, each with its first value (True if it has none); notes about what the text does not say."""

    values: Mapping[str, object]
    notes: tuple[str, ...] = ()


def options_of(text: str, where: str, flags: Collection[str] = ()) -> Options:
    """Read the options of a script or of a plain list of arguments. `flags` have no value. Raises InputError."""
    script = Script()
    depth = 0
    for line in _statements(text):
        first = line.split(None, 1)[0].rstrip(";") if line.split() else ""
        assigned = ASSIGN.match(line)
        if assigned and not _runs_after(assigned[3]):
            _assign(script, assigned, under_condition=depth > 0)
        elif line.strip():
            script.commands.append(line)
        depth = max(0, depth + (first in OPENS) - (first in CLOSES))
    words = _launch_words(script, where) or _words(script, text, where)
    doubts = {n for value in script.doubtful for n in _option_names(script.variables.get(value, ""))}
    values = dict(_values(words, flags))
    values |= {n: Unknown("given under a condition") for n in doubts if n not in values}
    notes = (
        (f"{where} passes on the arguments of its own call ($@), which the file does not have",)
        if script.passes_on
        else ()
    )
    return Options(values, notes)


def _statements(text: str) -> Iterator[str]:
    """The lines of a script without comments and documents, with continued lines, arrays and quoted text joined."""
    plain = HEREDOC.sub("", text.replace("\r\n", "\n"))
    plain = re.sub(r"(?m)(^|\s)#.*$", r"\1", plain)
    plain = re.sub(r"\\[ \t]*\n", " ", plain)
    held = ""
    for line in plain.split("\n"):
        held = f"{held}\n{line}" if held else line
        if not _is_open(held):
            yield from _split(held)
            held = ""
    if held:
        yield from _split(held)


def _split(line: str) -> Iterator[str]:
    """Statements of one line, which `;` parts. Text in quotes and arrays stays whole."""
    if any(mark in line for mark in "\"'(") or ";" not in line:
        yield line.replace("; then", "").strip()
    else:
        yield from (part.strip() for part in line.split(";"))


def _is_open(text: str) -> bool:
    """Whether a quote or an array is not closed."""
    found = re.match(r"\s*(?:export\s+)?\w+\+?=\(", text)
    if found:
        return text.count("(") > text.count(")")
    plain = re.sub(r"\\.", "", text)
    return plain.count('"') % 2 == 1 or re.sub(r'"[^"]*"', "", plain).count("'") % 2 == 1


def _runs_after(value: str) -> bool:
    """Whether an assignment stands before a command, as in `A=1 torchrun …`."""
    stripped = value.strip()
    return bool(stripped) and stripped[0] not in "\"'(`$" and len(stripped.split()) > 1


def _assign(script: Script, found: re.Match[str], *, under_condition: bool) -> None:
    name, more, value = found[1], found[2], found[3].strip()
    value = value[1:-1] if value[:1] in ("(", '"', "'") and value[-1:] in (")", '"', "'") else value
    if more:
        if under_condition:
            script.doubtful.add(f"{name}+")
            script.variables[f"{name}+"] = f"{script.variables.get(f'{name}+', '')} {value}"
            return
        value = f"{script.variables.get(name, '')} {value}"
    if re.search(rf"\$\{{?{name}\b", value):  # holds its own value before
        before = script.variables.get(name)
        own = VARIABLE.sub(
            lambda m: (before if before is not None else m[2] or "") if (m[1] or m[3]) == name else m[0], value
        )
        value = own
    value = script.expand(value)  # as a shell does when it assigns
    if under_condition and script.variables.get(name, value) != value:
        script.doubtful.add(name)
    script.variables[name] = value


def _launch_words(script: Script, where: str) -> list[str]:
    """The words of the commands that start a program with options."""
    found: list[str] = []
    for command in script.commands:
        whole = script.expand(command)
        if STARTS.search(whole) and OPTION.search(whole):
            found += [*_shell_words(whole, where), END]
    return found


def _words(script: Script, text: str, where: str) -> list[str]:
    """The words of all arrays and commands, where no command starts a program."""
    whole = " ".join([*script.variables.values(), *script.commands])
    return _shell_words(script.expand(whole), where)


def _shell_words(text: str, where: str) -> list[str]:
    try:
        words = shlex.split(text.replace("`", " "), posix=True)
    except ValueError as error:
        raise InputError(f"{where} is not a list of arguments ({error}); give options of Megatron-LM") from None
    found = []
    for word in words:
        inner = " " in word and " --" in f" {word}"
        found += word.split() if inner else [word]
    return [word for word in found if word not in ("(", ")")]


def _values(words: list[str], flags: Collection[str]) -> Iterator[tuple[str, object]]:
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, given, value = word.partition("=")
        if OPTION.fullmatch(name):
            alone = name in flags or OPTION.match(after) or NO_VALUE.match(after)
            told = value if given else True if alone else after.rstrip(")")
            yield name, Unknown(told) if isinstance(told, str) and "$" in told else told


def _option_names(text: str) -> list[str]:
    return [w.partition("=")[0] for w in text.split() if OPTION.fullmatch(w.partition("=")[0])]


def arithmetic(text: str) -> int | None:
    """The value of a sum of whole numbers; None if it is anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return _number(tree)


def _number(node: ast.expr) -> int | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if not isinstance(node, ast.BinOp):
        return None
    a, b = _number(node.left), _number(node.right)
    if a is None or b is None:
        return None
    if isinstance(node.op, (ast.Div, ast.FloorDiv)):
        return a // b if b else None
    known = {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b}
    return known.get(type(node.op))
