"""Scripts that torchrun starts: as users start them, or in ranks that are forked from one server, which costs a fifth."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from unittest import mock

import torch.distributed as dist

from planner_core.core import VerificationFailed
from tests.support.ports import free_port
from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def command(script: str | Path, *arguments: str, ranks: int = 2, options: tuple[str, ...] = ()) -> list[str]:
    """Return the command line; `options` are torchrun's own."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launch, *options, str(script), *arguments]


def environment() -> dict[str, str]:
    """This process's own, from which the project can be imported in any folder."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def torchrun(
    script: str | Path, *arguments: str, ranks: int = 2, options: tuple[str, ...] = (), folder: Path = ROOT
) -> str:
    """Return what the script prints, run in `folder`; it must end well."""
    line = command(script, *arguments, ranks=ranks, options=options)
    done = subprocess.run(line, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_script(script: str | Path, *arguments: str, ranks: int = 2, folder: Path = ROOT) -> str:
    """As `torchrun`, in ranks that have imported torch and are in one group already."""
    with NamedTemporaryFile() as printed:
        job = (str(script), arguments, str(folder), printed.name, free_port())
        try:
            run_ranks(_as_torchrun_would, ranks, job)
        except VerificationFailed as error:
            raise AssertionError(str(error)) from None
        return Path(printed.name).read_text()


def script_losses(script: str | Path, steps: int, *arguments: str, ranks: int = 2) -> list[float]:
    """Return the losses of the first steps of an exported script."""
    said = run_script(script, "--steps", str(steps), "--report-every", "1", *arguments, ranks=ranks)
    losses = [float(x) for x in re.findall(r"^step \d+  loss (\S+)", said, re.MULTILINE)]
    assert len(losses) == steps, said
    return losses


def _as_torchrun_would(script: str, arguments: Sequence[str], folder: str, printed: str, port: int) -> None:
    """One rank."""
    names = {
        "RANK": dist.get_rank(),
        "LOCAL_RANK": dist.get_rank(),
        "WORLD_SIZE": dist.get_world_size(),
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    os.dup2(os.open(printed, os.O_WRONLY | os.O_APPEND), 1)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = [script, *arguments]
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            assert not end.code, end.code
    sys.stdout.flush()
