"""What one edit does to the other settings: they stay where they can; what cannot stay is dropped and said. No Streamlit here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from explorer.address import settings
from explorer.address.pins import EDITED_ID
from explorer.text import units
from explorer.text.words import join_words
from planner_core.core import InputError, load_cluster
from planner_core.planning import TRADE_OFF

MODEL_SETTINGS: Mapping[str, Any] = {
    "layers": None,
    "node": "",
    "open": None,
    "block": "",
    "plan": "",
    "compare": (),
    "candidate": None,
    "whatif": (),
    "edit": (),
}
"""Settings that name parts of one model, with their defaults: a new model resets them."""


def apply_edit(current: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the settings after an edit, and a sentence for each other setting that could not stay.

    Sizes stay with another model or cluster: batch and tokens where the model has the positions, a mesh where it has as many GPUs,
    and a limit of memory where the GPU has more. Changes of the cluster before do not stay with a cluster taken by name.
    """
    after = {**current, **new}
    notes: list[str] = []
    if after["model"] != current["model"]:
        after.update({k: v for k, v in MODEL_SETTINGS.items() if k not in new})
        if not {"batch", "seq"} <= new.keys():  # a row of a sweep states both
            _carry_batch_and_tokens(current, after, notes)
    if after["cluster"] != current["cluster"]:
        after.update({k: None for k in settings.CLUSTER_KEYS if k not in new})
    if any(after[k] != current[k] for k in ("cluster", "nodes", "gpus", "gpu")):
        _drop_unfit_mesh_and_limit(after, notes)
        _report_scaled_batch(current, after, notes)
    if any(after[k] != current[k] for k in settings.REQUEST_KEYS):
        _drop_trade_offs(new, after, notes)
        after["methods"] = new.get("methods", "")  # else each edit would search all of them again
    return after, tuple(notes)


def _carry_batch_and_tokens(current: Mapping[str, Any], after: dict[str, Any], notes: list[str]) -> None:
    """Set batch and tokens of the new model so that a step has as many tokens where it can."""
    (batch, seq), limit = settings.batch_and_tokens(current), settings.max_tokens(after["model"])
    is_set = current["batch"] is not None or current["seq"] is not None
    work = settings.batch_and_tokens(after)
    if not is_set:
        if work != (batch, seq):
            name, before = settings.model_title(after["model"]), units.batch_of(batch, seq)
            notes.append(f"{name} starts at its own {units.batch_of(*work)}; it was {before}.")
        return
    if (seq == 1) != (work[1] == 1):  # pictures have no tokens
        after.update(batch=None, seq=None)
        usual_work = units.batch_of(*settings.batch_and_tokens(after))
        notes.append(f"{settings.model_title(after['model'])} starts at its own {usual_work}: samples are not alike.")
        return
    after.update(batch=batch, seq=seq)
    if limit is not None and seq > limit:
        after.update(batch=min(settings.MOST["batch"], max(1, batch * seq // limit)), seq=limit)
        name, new_size = settings.model_title(after["model"]), units.batch_of(*settings.batch_and_tokens(after))
        notes.append(f"{name} has {units.whole(limit)} positions: {new_size}, it was {units.batch_of(batch, seq)}.")


def _drop_unfit_mesh_and_limit(after: dict[str, Any], notes: list[str]) -> None:
    """Drop the mesh and the limit of memory where the cluster has no room for them."""
    try:
        cluster = load_cluster(settings.cluster_spec(after))
    except InputError:
        return
    if after["mesh"] and settings.count_mesh_gpus(after["mesh"]) != cluster.num_gpus:
        notes.append(f"The mesh {after['mesh']} is left open: there are {cluster.num_gpus} GPUs now.")
        after["mesh"] = None
    if after["memory"] and after["memory"] * 1e9 > cluster.gpu.memory_bytes:
        notes.append(f"The limit of memory is left out: a GPU has {units.memory(cluster.gpu.memory_bytes)} now.")
        after["memory"] = None


def _report_scaled_batch(current: Mapping[str, Any], after: Mapping[str, Any], notes: list[str]) -> None:
    """Say that a batch that nobody set grew with the cluster."""
    (before, _), (now, _) = settings.batch_and_tokens(current), settings.batch_and_tokens(after)
    if after["model"] == current["model"] and after["batch"] is None and now != before:
        notes.append(f"The batch goes with the GPUs: {units.whole(now)} samples, it was {units.whole(before)}.")


def _drop_trade_offs(new: Mapping[str, Any], after: dict[str, Any], notes: list[str]) -> None:
    """Drop trade-offs that were chosen, compared or edited: a number is a position, which other settings give to another plan."""
    if _is_trade_off(after["plan"]) and "plan" not in new:
        notes.append(f"The plan “{after['plan']}” is of the settings before; showing the recommended one.")
        after["plan"] = ""
    if gone := [plan for plan in after["compare"] if _is_trade_off(plan) and "compare" not in new]:
        notes.append(f"Compare leaves out {join_words([f'“{plan}”' for plan in gone])} of the settings before.")
        after["compare"] = tuple(plan for plan in after["compare"] if plan not in gone)
    base = after["edit"][0].rpartition(":")[0] if after["edit"] else ""
    if _is_trade_off(base) and "edit" not in new:
        notes.append(f"The plan “{base}” that was edited is of the settings before; the edits are taken back.")
        after["edit"] = ()
        after["compare"] = tuple(plan for plan in after["compare"] if plan != EDITED_ID)
        after["plan"] = "" if after["plan"] == EDITED_ID else after["plan"]


def _is_trade_off(plan_id: str) -> bool:
    return re.fullmatch(rf"{TRADE_OFF}-[a-z-]*\d+", plan_id) is not None
