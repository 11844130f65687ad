"""Read a user's file, and check its JSON against a published JSON Schema (`assets/*.schema.json`).

    wrong_field(data, "cluster", "cluster file c.json")
        -> "cluster file c.json: levels[0].size is 0, but must be a whole number from 1 to 100000"

The field `expected` of a schema is the end of the sentence about a wrong value. So the schema alone says what a value may be. If a
schema does not have that field, the validator's own message is used. A wrong value is reported before a missing one.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from planner_core.core.errors import InputError
from planner_core.core.files import ASSETS, is_file, is_folder, path_exists

MAX_MESSAGE_END = 100
"""Characters at each end of the validator's own message that are shown."""
MAX_FAULTS = 100
"""The fault to report is chosen among at most this many."""
MIN_SIMILARITY = 0.5
"""One name may be meant by another with this share of letters alike, as "seq" by "sequence"; "nf4" is not meant by "config"."""
MAX_LISTED_NAMES = 12
"""A sentence lists at most this many names, where it does not say another number."""


def read_text(path: str | Path, where: str, most_bytes: int, advice: str) -> str:
    """Return the text of a user's file in UTF-8 or UTF-16.

    `where`: the file as messages name it. `advice`: what to do instead, the end of a message. Raises InputError."""
    file, problem = Path(path), ""
    try:
        if not path_exists(file):
            problem = f"cannot be read (there is no file {shorten_value(str(path))})"
        elif not is_file(file):
            problem = f"cannot be read (it is {'a folder' if is_folder(file) else 'not a regular file'})"
        # Before it is read: a wrong path may name a checkpoint of many GB.
        elif file.stat().st_size > most_bytes:
            problem = f"has {file.stat().st_size} bytes; at most {most_bytes} are read"
        else:
            content = file.read_bytes()
            return content.decode(json.detect_encoding(content))
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        problem = "is not text"
    raise InputError(f"{where} {problem}; {advice}")


def read_json(path: str | Path, where: str, most_bytes: int, advice: str) -> Any:
    """Return the plain data of a user's JSON file. The arguments are those of `read_text`. Raises InputError."""
    try:
        return json.loads(read_text(path, where, most_bytes, advice))
    except (ValueError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)[:100]
        raise InputError(f"{where} is not JSON ({why}); {advice}") from None


def first_schema_fault(
    data: Any, form: str, where: str, expected: Mapping[str, str] | None = None, *, strict: bool = False
) -> str | None:
    """Return a sentence about the first fault of `data`, which begins with `where`; None if `data` has the form.

    `form`: the schema's name (`cluster`, `gpu`, `plan`). `expected`: replaces the schema's own text for fields at the top level.
    `strict`: 8.0 is not an integer.
    """
    if find_spec("jsonschema") is None:
        # an image with a GPU may lack it, where the plan of another machine runs
        warnings.warn(f"{where} was not checked against its schema: install jsonschema", stacklevel=3)
        return None
    # Of a file that is none of ours every field is wrong, and all faults of a large file take long to list.
    faults = islice(_build_validator(form, strict).iter_errors(data), MAX_FAULTS)
    fault = min(faults, key=_report_order, default=None)
    return f"{where}{_describe_fault(fault, expected or {})}" if fault is not None else None


def _report_order(error: Any) -> int:
    """Return the order in which faults are reported: unknown fields first, since a misspelled field is also missing; missing fields
    last."""
    if error.validator == "additionalProperties":
        return 0
    return 2 if error.validator in ("required", "oneOf") else 1


@cache
def _build_validator(form: str, strict: bool) -> Any:
    """Return a validator that takes only whole integers and finite numbers."""
    from jsonschema.validators import Draft202012Validator, extend
    from referencing import Registry, Resource

    # JSON Schema takes 8.0 for an integer and NaN for a number, and Python takes True for 1. A file that is written again must not
    # change its types, and arithmetic must not meet a NaN.
    def whole(_: Any, x: Any) -> bool:
        return number(_, x) and (isinstance(x, int) or (x == int(x) and not strict))

    def number(_: Any, x: Any) -> bool:
        return not isinstance(x, bool) and (isinstance(x, int) or (isinstance(x, float) and math.isfinite(x)))

    schemas = {p.name: json.loads(p.read_text(encoding="utf-8")) for p in ASSETS.glob("*.schema.json")}
    others = Registry().with_resources((n, Resource.from_contents(s)) for n, s in schemas.items())
    exact = Draft202012Validator.TYPE_CHECKER.redefine_many({"integer": whole, "number": number})
    return extend(Draft202012Validator, type_checker=exact)(schemas[f"{form}.schema.json"], registry=others)


def _describe_fault(error: Any, expected: Mapping[str, str]) -> str:
    path, schema = list(error.absolute_path), error.schema
    if error.validator == "additionalProperties":
        return _path_prefix(path) + _unknown_field(error.instance, schema["properties"])
    if error.validator == "required":
        name = next(n for n in error.validator_value if n not in error.instance)
        return _missing_field(
            [*path, name], _expected_words([*path, name], schema.get("properties", {}).get(name, {}), expected)
        )
    if error.validator == "oneOf" and "expected" in schema:
        return _path_prefix(path) + _one_of_fields(error, schema["expected"])
    words = _expected_words(path, schema, expected)
    if not words:
        from jsonschema.exceptions import best_match

        best = best_match(iter([error]))
        at = f", at {_shorten_message(_path_text(list(best.absolute_path)))}" if best.absolute_path else ""
        return f": {_shorten_message(' '.join(best.message.split()))}{at}"
    if error.instance is None and path:
        return _missing_field(path, words)
    return f"{': ' + _path_text(path) if path else ''} is {shorten_value(error.instance)}, but must be {words}"


def _expected_words(path: list[Any], schema: Mapping[str, Any], expected: Mapping[str, str]) -> str:
    # Which GPUs there are is not in the schema, so the caller may say it of a field at the top.
    words = expected.get(path[0]) if len(path) == 1 else None
    return words or str(schema.get("expected", ""))


def _missing_field(path: list[Any], words: str) -> str:
    return f": {_path_text(path)} is missing" + (f"; give {words}" if words else "")


def _unknown_field(instance: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    key = next(k for k in instance if k not in known)
    return f"{shorten_value(key)} is not a field; {suggest_names(str(key), tuple(known))}"


def _one_of_fields(error: Any, what: str) -> str:
    """Return the sentence if exactly one of several fields is needed."""
    names = [branch["required"][0] for branch in error.validator_value]
    present = [n for n in names if n in error.instance]
    problem = f"{' and '.join(present)} are both given" if present else f"{names[0]} is missing"
    return f"{problem}; give {what}, as one of {', '.join(names)}"


def _path_text(path: list[Any]) -> str:
    """`levels[0].size`."""
    parts = [f"[{p}]" if isinstance(p, int) else f".{p}" for p in path]
    return "".join(parts).removeprefix(".")


def _path_prefix(path: list[Any]) -> str:
    return f": {_path_text(path)}: " if path else ": "


def _shorten_message(text: str) -> str:
    return text if len(text) <= 2 * MAX_MESSAGE_END else f"{text[:MAX_MESSAGE_END]} ... {text[-MAX_MESSAGE_END:]}"


def shorten_value(value: Any) -> str:
    """Return a value as text, without its middle if it is long."""
    text = json.dumps(value) if isinstance(value, str | list | dict) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def shorten_error(error: BaseException, most: int = 200) -> str:
    """Return an error's message in one line, cut after `most` characters; the name of its class if it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else f"{text[:most]}..."


def suggest_names(text: str, names: Sequence[str]) -> str:
    """Return the end of a sentence about an unknown name: the names that may be meant."""
    # A beginning is meant before letters alike: h200 is h200-sxm, although b200 has more of its letters in proportion.
    begins = [name for name in names if text and name.startswith(text.lower())]
    close = begins or get_close_matches(text.lower(), names, n=1, cutoff=MIN_SIMILARITY)
    return f"did you mean {close[0]}?" if close else f"there are {list_names(names)}"


def list_names(names: Sequence[str], most: int = MAX_LISTED_NAMES) -> str:
    """Return names as text for a sentence, at most `most` of them. Example: "a, b, c and 2 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
