"""Read the options of a launch script. Variables, defaults and arrays are followed as text; nothing is run.

    TP=${1:-2}
    ARGS=(--tensor-model-parallel-size $TP --bf16)
    torchrun pretrain.py ${ARGS[@]} "$@"         ->  --tensor-model-parallel-size 2 --bf16

A value that the text alone does not give stays as it is written: a variable that the file does not set, the output of a command, `$1`
without a default. A variable that several branches of a condition set is unknown too. Options count if they belong to a command that
starts a program; without such a command, all options of the text count.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from planner_core.core import InputError
from planner_core.planning.pricing.configs.fields import UnknownValue

OPTION = re.compile(r"--[a-zA-Z][a-zA-Z0-9_.-]*")  # torchtitan's have dots: --training.seq_len
LIST_WORD = re.compile(r"[\w${}]+")  # neither an option nor the end of a command: ; && 2>&1
STARTS_PROGRAM = re.compile(r"(^|[\s;&|\"'(/])(torchrun|python3?|deepspeed|srun|mpirun|accelerate|\S+\.py)([\s\"']|$)")
ASSIGNMENT = re.compile(r"^\s*(?:export\s+|local\s+|declare\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*|[0-9@*])(?:\[[@*]\])?(?::?-([^{}]*))?\}|\$([A-Za-z_]\w*|[0-9@*])")
ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)")
HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?[^\n]*\n.*?\n\s*\1\s*(?=\n|$)", re.DOTALL)
OPENING, CLOSING = frozenset({"if", "for", "while", "until", "case"}), frozenset({"fi", "done", "esac"})
COMMAND_END = ";"
NO_VALUE = re.compile(r"$|\d*[<>|&;)]")
"""Text that may follow an option without a value: the end of its command, or a redirection."""
MAX_ROUNDS, MAX_CHARACTERS = 12, 400_000


@dataclass
class Script:
    """A script as text.

    Attributes:
        variables: The variables that the text sets.
        ambiguous: Variables that a condition sets to several values.
        commands: The commands in order.
        passes_arguments: Whether the script passes on the arguments of its own call.
    """

    variables: dict[str, str] = field(default_factory=dict)
    ambiguous: set[str] = field(default_factory=set)
    commands: list[str] = field(default_factory=list)
    passes_arguments: bool = False

    def expand(self, text: str) -> str:
        """Replace variables by their values, repeatedly, since values may hold variables. Raises InputError if that grows without end."""
        text = re.sub(r'"(\$\{\w+\[[@*]\]\})"', r"\1", text)  # a quoted array is its words
        for _ in range(MAX_ROUNDS):
            text, before = ARITHMETIC.sub(self._expand_arithmetic, VARIABLE.sub(self._expand_variable, text)), text
            if text == before:
                break
            if len(text) > MAX_CHARACTERS:
                raise InputError("a variable of the script holds itself; write its options out")
        return text

    def _expand_variable(self, match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        if name in ("@", "*"):
            self.passes_arguments = True
            return ""
        if name in self.variables and name not in self.ambiguous:
            return self.variables[name]
        if default is not None and name not in self.ambiguous:
            return default.strip("\"'")
        return match[0]

    def _expand_arithmetic(self, match: re.Match[str]) -> str:
        expression = VARIABLE.sub(self._expand_variable, re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"$\1", match[1]))
        number = arithmetic(expression)
        return match[0] if number is None else str(number)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a launch, each with its first value (True without one), and notes about values that the text does not give."""

    values: Mapping[str, object]
    notes: tuple[str, ...] = ()


def options_of(text: str, where: str, flags: Collection[str] = (), lists: Collection[str] = ()) -> Options:
    """Read the options of a script or of a plain list of arguments. `flags` have no value, `lists` have all words up to the next option.
    Raises InputError."""
    script = Script()
    depth = 0
    for line in _list_statements(text):
        first = line.split(None, 1)[0].rstrip(";") if line.split() else ""
        assigned = ASSIGNMENT.match(line)
        if assigned and not _precedes_command(assigned[3]):
            _assign_variable(script, assigned, under_condition=depth > 0)
        elif line.strip():
            script.commands.append(line)
        # Behind the statement: what `if` itself runs is not yet under its condition.
        depth = max(0, depth + (first in OPENING) - (first in CLOSING))
    # A plain list of options is in no command that starts a program.
    words = _launch_words(script, where) or _all_words(script, where)
    conditional = {n for value in script.ambiguous for n in _option_names(script.variables.get(value, ""))}
    # Of an option that is given twice the last counts, as for argparse.
    values = dict(_pair_options(words, flags, lists))
    values |= {n: UnknownValue("given under a condition") for n in conditional if n not in values}
    notes = (
        (f"{where} passes on the arguments of its own call ($@), which the file does not have",)
        if script.passes_arguments
        else ()
    )
    return Options(values, notes)


def _list_statements(text: str) -> Iterator[str]:
    """Yield the statements of a script: without comments and here-documents; continued lines, arrays and quoted text are joined."""
    # Here-documents go first: a DeepSpeed file written by the script holds quotes and # that are not the shell's.
    plain = HEREDOC.sub("", text.replace("\r\n", "\n"))
    plain = re.sub(r"(?m)(^|\s)#.*$", r"\1", plain)
    plain = re.sub(r"\\[ \t]*\n", " ", plain)
    statement = ""
    for line in plain.split("\n"):
        statement = f"{statement}\n{line}" if statement else line
        if not _is_open(statement):
            yield from _split_line(statement)
            statement = ""
    if statement:
        yield from _split_line(statement)


def _split_line(line: str) -> Iterator[str]:
    """Split a line at `;`. Text in quotes and arrays stays whole."""
    if any(mark in line for mark in "\"'(") or ";" not in line:
        yield line.replace("; then", "").strip()
    else:
        yield from (part.strip() for part in line.split(";"))


def _is_open(text: str) -> bool:
    """Return whether a quote or an array is not closed."""
    array = re.match(r"\s*(?:export\s+)?\w+\+?=\(", text)
    if array:
        return text.count("(") > text.count(")")
    plain = re.sub(r"\\.", "", text)
    return plain.count('"') % 2 == 1 or re.sub(r'"[^"]*"', "", plain).count("'") % 2 == 1


def _precedes_command(value: str) -> bool:
    """Return whether the value of an assignment is followed by a command, as in `A=1 torchrun …`."""
    stripped = value.strip()
    return bool(stripped) and stripped[0] not in "\"'(`$" and len(stripped.split()) > 1


def _assign_variable(script: Script, match: re.Match[str], *, under_condition: bool) -> None:
    name, appends, value = match[1], match[2], match[3].strip()
    value = value[1:-1] if value[:1] in ("(", '"', "'") and value[-1:] in (")", '"', "'") else value
    if appends:
        # `ARGS+=(--x 1)` under a condition: whether --x is given is not known, so what it adds is kept apart under the name `ARGS+`.
        if under_condition:
            script.ambiguous.add(f"{name}+")
            script.variables[f"{name}+"] = f"{script.variables.get(f'{name}+', '')} {value}"
            return
        value = f"{script.variables.get(name, '')} {value}"
    if re.search(rf"\$\{{?{name}\b", value):  # refers to its former value
        before = script.variables.get(name)
        value = VARIABLE.sub(
            lambda m: (before if before is not None else m[2] or "") if (m[1] or m[3]) == name else m[0], value
        )
    value = script.expand(value)  # as a shell does when it assigns
    if under_condition and script.variables.get(name, value) != value:
        script.ambiguous.add(name)
    script.variables[name] = value


def _launch_words(script: Script, where: str) -> list[str]:
    """Return the words of the commands that start a program with options."""
    words: list[str] = []
    for command in script.commands:
        expanded = script.expand(command)
        if STARTS_PROGRAM.search(expanded) and OPTION.search(expanded):
            words += [*_shell_words(expanded, where), COMMAND_END]
    return words


def _all_words(script: Script, where: str) -> list[str]:
    """Return the words of all arrays and commands, for a text in which no command starts a program."""
    text = " ".join([*script.variables.values(), *script.commands])
    return _shell_words(script.expand(text), where)


def _shell_words(text: str, where: str) -> list[str]:
    try:
        words = shlex.split(text.replace("`", " "), posix=True)
    except ValueError as error:
        raise InputError(f"{where} is not a list of arguments ({error}); give options of Megatron-LM") from None
    separate = []
    for word in words:
        quoted_options = " " in word and " --" in f" {word}"  # a variable in quotes may hold several options
        separate += word.split() if quoted_options else [word]
    return [word for word in separate if word not in ("(", ")")]


def _pair_options(words: list[str], flags: Collection[str], lists: Collection[str]) -> Iterator[tuple[str, object]]:
    for place, (word, after) in enumerate(zip(words, [*words[1:], ""], strict=True)):
        name, given, value = word.partition("=")
        if name in lists and not given:
            after = " ".join(takewhile(LIST_WORD.fullmatch, words[place + 1 :]))
        if OPTION.fullmatch(name):
            alone = name in flags or OPTION.match(after) or NO_VALUE.match(after)
            # The last value of an array stands before its bracket.
            argument = value if given else True if alone else after.rstrip(")")
            yield name, UnknownValue(argument) if isinstance(argument, str) and "$" in argument else argument


def _option_names(text: str) -> list[str]:
    return [w.partition("=")[0] for w in text.split() if OPTION.fullmatch(w.partition("=")[0])]


def arithmetic(text: str) -> int | None:
    """Return the value of an expression of whole numbers; None for anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return _evaluate(tree)


def _evaluate(node: ast.expr) -> int | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if not isinstance(node, ast.BinOp):
        return None
    a, b = _evaluate(node.left), _evaluate(node.right)
    if a is None or b is None:
        return None
    if isinstance(node.op, (ast.Div, ast.FloorDiv)):
        return a // b if b else None
    results = {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b}
    return results.get(type(node.op))
