"""Clusters that visitors uploaded: data under the hash of its content, which is its name in the address. No Streamlit here."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from pathlib import Path

from planner_core.core import Cluster, InputError

FOLDER = Path(tempfile.gettempdir()) / "shardscope-own-clusters"
NAME = re.compile(r"own-[0-9a-f]{16}")
MAX_BYTES = 2**16
KEPT = 50
"""Files that are kept, the latest."""


def keep(content: bytes) -> str:
    """Store a cluster file; returns its name. Raises InputError with the first fault of one that is none."""
    if len(content) > MAX_BYTES:
        raise InputError(f"the file has {len(content)} bytes; a cluster file has at most {MAX_BYTES}")
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"the file is not JSON ({error}); give a file of the form of those in assets/clusters"
        ) from None
    Cluster.from_json(data, where="the file")
    name = f"own-{hashlib.sha256(content).hexdigest()[:16]}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    path(name).write_bytes(content)
    for old in sorted(FOLDER.iterdir(), key=lambda f: f.stat().st_mtime, reverse=True)[KEPT:]:
        old.unlink(missing_ok=True)
    return name


def path(name: str) -> Path:
    """Where the cluster of this name lies."""
    return FOLDER / f"{name}.json"


def is_own(name: str) -> bool:
    """Whether a name is that of an uploaded cluster, there or not."""
    return NAME.fullmatch(name) is not None
