"""Names in comments and docstrings exist: a rename leaves no old name behind.

A name between backticks is one of the module's own code, one that the project defines or reads somewhere, or one of another program.
`A.b` is looked up in the class `A`, and `a.B` in the module `a`. A word in capitals with an underscore is a constant.
"""

from __future__ import annotations

import ast
import builtins
import io
import keyword
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLACES = (ROOT / "planner_core", ROOT / "explorer")
WORD = re.compile(r"[A-Za-z_]\w*")
NAME = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?`")
CONSTANT = re.compile(r"(?<!docs/)\b[A-Z][A-Z\d]*_[A-Z\d_]+\b")

FOREIGN_ROOTS = {"torch", "nn", "F", "Tensor", "numpy", "cfg"}
"""`torch.x` is a name of torch, of which no test of ours knows whether it exists."""
FOREIGN = {
    *(
        "ColumnParallelLinear",
        "as_strided",
        "c10d",
        "context_fn",
        "load_state_dict",
        "save_to_disk",
        "set_model_state_dict",
        "TorchFunctionMode",
    ),
    *(
        "_multi_tensor_adamw",
        "_scaled_dot_product_attention_math",
        "_single_tensor_adamw",
        "size_based_auto_wrap_policy",
    ),
    *("ban_recompute_materialized_backward", "min_cut_rematerialization_partition", "sdp_utils", "__getattr__"),
    # of models and their configs
    *(
        "LlamaDecoderLayer",
        "T5Block",
        "T5Block2",
        "audio_config",
        "c_proj",
        "chunk_size",
        "gradient_accumulation_fusion",
    ),
    *("lambda_init", "layer_1", "layer_10", "llama_decoder_layer", "parallelism", "self_attn", "self_attn_q_proj"),
    "quant_storage",
    # of files, and of the JSON that docs/CONTRACT.md describes
    *("bench", "cpp", "js", "json", "py", "rank0", "PLAN_SUMMARY", "OPTIONS_JSON"),
    # made of two words
    *("shard_outer", "shard_inner", "_inner"),
}


class Module:
    """A file of the project: `words` of its code, names `defined` or read of objects, `values` that are texts, and the `texts` of its
    comments and docstrings by line."""

    def __init__(self, path: Path) -> None:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        prose = {
            id(n.value): n for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
        }
        self.words, self.defined, self.values = set[str](), set[str](), set[str]()
        self.texts = [(n.lineno, str(n.value.value)) for n in prose.values() if isinstance(n.value, ast.Constant)]
        for node in ast.walk(tree):
            self._read(node, id(node) in prose)
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                self.texts.append((token.start[0], token.string))

    def _read(self, node: ast.AST, is_prose: bool) -> None:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                self.defined.add(name)
            case ast.Attribute(attr=name) | ast.AnnAssign(target=ast.Name(id=name)):
                self.defined.add(name)
            case ast.Name(id=name) if name.isupper():
                self.defined.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                self.words.add(name)
            case ast.alias(name=name, asname=other):
                self.words.update(WORD.findall(f"{name} {other or ''}"))
            case ast.ImportFrom(module=str(name)):
                self.words.update(name.split("."))
            case ast.Constant(value=str(text)) if not is_prose:
                self.words.update(WORD.findall(text))
                self.values.add(text)


@cache
def modules() -> dict[Path, Module]:
    return {path: Module(path) for place in PLACES for path in sorted(place.rglob("*.py"))}


@cache
def homes() -> dict[str, list[Path]]:
    """Where to look `b` of `a.b` up, by `a`: the modules and the packages of this name, and the modules with a class of it."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path, module in modules().items():
        found[path.parent.name if path.name == "__init__.py" else path.stem].append(path)
        for name in module.defined:
            if name[:1].isupper() and not name.isupper():
                found[name].append(path)
    return found


@cache
def known() -> set[str]:
    """What exists somewhere: definitions, fields, files, and texts of one word, such as the name of an operator or of an option."""
    files = {part for path in modules() for part in path.with_suffix("").relative_to(ROOT).parts}
    values = {value for module in modules().values() for value in module.values if WORD.fullmatch(value)}
    return (
        files
        | values
        | set(dir(builtins))
        | set(keyword.kwlist)
        | set().union(*(module.defined for module in modules().values()))
    )


def is_in(part: str, home: Path) -> bool:
    folder = home.parent if home.name == "__init__.py" else None
    return part in modules()[home].words | modules()[home].defined or (
        folder is not None and any(entry.stem == part for entry in folder.iterdir())
    )


def missing_names(module: Module) -> Iterator[str]:
    own = module.words | module.defined
    for line, text in module.texts:
        for name in (m[1] for m in NAME.finditer(text)):
            parts = name.split(".")
            if parts[0] in FOREIGN_ROOTS:
                continue
            lost = [p for p in parts if p not in own and p not in known() and p not in FOREIGN]
            # `cost.x` may be of a value, which is named like the module `cost`; its classes and constants are its own.
            pairs = [(a, b) for a, b in pairwise(parts) if homes().get(a) and (a[:1].isupper() or b.isupper())]
            lost += [b for a, b in pairs if b not in FOREIGN and not any(is_in(b, home) for home in homes()[a])]
            if lost:
                yield f"{line}: {name}"
        for name in CONSTANT.findall(text):
            if name not in own | known() | FOREIGN:
                yield f"{line}: {name}"


@pytest.mark.parametrize("place", PLACES, ids=lambda place: str(place.name))
def test_names_in_comments_and_docstrings_exist(place: Path) -> None:
    found = {str(p.relative_to(ROOT)): list(missing_names(m)) for p, m in modules().items() if place in p.parents}
    assert not {path: names for path, names in found.items() if names}


def test_no_foreign_name_is_listed_in_vain() -> None:
    texts = "\n".join(text for module in modules().values() for _, text in module.texts)
    assert not {name for name in FOREIGN if not re.search(rf"\b{name}\b", texts)}


def test_an_old_name_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "old.py"
    file.write_text(
        '"""`gone_name` and `Plan.gone` of `Plan.cost`, with `dict`, `torch.gone` and OLD_LIMIT."""\n'
        "limit = 1  # `limit` is below `other_limit`\n"
    )
    found = list(missing_names(Module(file)))
    assert found == ["1: gone_name", "1: Plan.gone", "1: OLD_LIMIT", "2: other_limit"]
