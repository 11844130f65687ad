"""Scripts that are started as users start them: by torchrun, in processes of their own, on gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def command(script: str | Path, *arguments: str, ranks: int = 2, options: tuple[str, ...] = ()) -> list[str]:
    """The command line; `options` are torchrun's own."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launch, *options, str(script), *arguments]


def environment() -> dict[str, str]:
    """This process's own, from which the project can be imported in any folder."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def torchrun(
    script: str | Path, *arguments: str, ranks: int = 2, options: tuple[str, ...] = (), folder: Path = ROOT
) -> str:
    """What the script prints, run in `folder`; it must end well."""
    line = command(script, *arguments, ranks=ranks, options=options)
    done = subprocess.run(line, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
