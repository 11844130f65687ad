"""Files of visitors, named by their content, in folders that all sessions of a server read."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def store_whole(file: Path, content: bytes) -> None:
    """Write a file in one move, in a folder that is made where it is missing.

    Another session may read the file of the same name meanwhile: it finds all of it or none.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder: whoever lists its files must not meet one that is about to go.
    number, part = tempfile.mkstemp(dir=file.parent.parent, prefix=".")
    with os.fdopen(number, "wb") as out:
        out.write(content)
    Path(part).replace(file)
