"""Samples by number: step n of a run always reads the same samples, on any number of ranks.

The samples of a step are numbered. Each micro-batch takes a part of them. Each rank takes a part of the micro-batch, by its
position along the plan's data axes. So a run that continues on another machine reads what it would have read here.

Example: a step has 8 samples, 2 micro-batches and 2 data-parallel ranks. In step 3 (samples 24 to 31), micro-batch 0 has 24 to
27; rank 0 takes 24 and 25, rank 1 takes 26 and 27.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from planner_core.core import InputError, Plan
from planner_core.runtime.training.start import Start

Batch = dict[str, Any]


class Samples(Protocol):
    """A source of samples."""

    def __len__(self) -> int: ...

    def read(self, numbers: Sequence[int]) -> Batch:
        """Return these samples, stacked along dim 0."""


class TokenFile:
    """A memory-mapped file of token ids, cut into samples of `seq` tokens. The labels are the tokens themselves."""

    def __init__(self, path: Path, seq: int, vocabulary: int, dtype: str = "uint16") -> None:
        self.path, self.seq, self.vocabulary = path, seq, vocabulary
        # A raw file has no header (nanoGPT writes such ones in uint16), so its type has to be stated.
        self.tokens = np.load(path, mmap_mode="r") if path.suffix == ".npy" else np.memmap(path, np.dtype(dtype), "r")
        if len(self) == 0:
            raise InputError(f"{path} holds {len(self.tokens)} tokens of {self.tokens.dtype}, a sample needs {seq}")

    def __len__(self) -> int:
        return len(self.tokens) // self.seq

    def read(self, numbers: Sequence[int]) -> Batch:
        """Return these samples. Raises InputError for a number that is not a token of the model."""
        rows = np.stack([self.tokens[n * self.seq : (n + 1) * self.seq] for n in numbers]).astype(np.int64)
        if rows.max() >= self.vocabulary or rows.min() < 0:
            raise InputError(
                f"{self.path} holds token {max(rows.max(), rows.min(), key=abs)}, but the model has {self.vocabulary} tokens; read as "
                f"{self.tokens.dtype}: is it another --token-type?"
            )
        ids = torch.from_numpy(rows)
        return {"input_ids": ids, "labels": ids}


class Table:
    """A Hugging Face dataset that `save_to_disk` wrote. Its columns have the names of the model's inputs.

    If the model shifts its labels itself, the column `input_ids` is enough.
    """

    def __init__(self, path: Path, start: Start) -> None:
        from datasets import load_from_disk

        self.path, self.rows = path, load_from_disk(str(path))
        if isinstance(self.rows, dict):
            raise InputError(f"{path} holds {', '.join(self.rows)}; give the folder of one of them")
        self.inputs = start.inputs
        self.tokens_are_labels = start.causal and "labels" not in self.rows.column_names
        missing = [n for n in self.inputs if n not in self.rows.column_names]
        if self.tokens_are_labels:
            missing = [n for n in missing if n != "labels"]
        if missing:
            raise InputError(
                f"{path} has no column {missing[0]}, which the model takes; it has {self.rows.column_names}"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, numbers: Sequence[int]) -> Batch:
        """Return these samples. Raises InputError for a sample of another shape."""
        columns = self.rows[list(numbers)]
        batch: Batch = {}
        for name, example in self.inputs.items():
            column = columns["input_ids" if name == "labels" and self.tokens_are_labels else name]
            batch[name] = torch.stack([self._one(name, row, example) for row in column])
        return batch

    def _one(self, name: str, row: Any, example: torch.Tensor) -> torch.Tensor:
        shape = tuple(example.shape[1:])
        value = torch.as_tensor(np.asarray(row)).to(example.dtype)
        # A longer row is cut. A shorter one is refused below: nothing here says with what to pad it.
        if value.dim() == len(shape) == 1 and len(value) > shape[0]:
            value = value[: shape[0]]
        if tuple(value.shape) != shape:
            raise InputError(
                f"{name} of a sample in {self.path} has shape {tuple(value.shape)}, the plan is for {shape}: pack or pad the samples"
            )
        return value


class Noise:
    """Random samples: a step runs on them, but the model learns nothing."""

    def __init__(self, start: Start, seed: int) -> None:
        self.start, self.seed = start, seed

    def __len__(self) -> int:
        return 1 << 40  # no end: `Reader` takes numbers modulo this

    def read(self, numbers: Sequence[int]) -> Batch:
        """Return these samples. Each one depends on its number only."""
        rows = [self._one(n) for n in numbers]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def _one(self, number: int) -> Batch:
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        sample: Batch = {}
        for name, example in self.start.inputs.items():
            shape = example.shape[1:]
            if example.is_floating_point():
                sample[name] = torch.randn(shape, generator=random).to(example.dtype)
            elif name == "labels" and self.start.causal:
                sample[name] = sample["input_ids"]
            elif name not in self.start.limits:
                sample[name] = example[0].clone()  # a mask or a size: as many places to guess in every sample
            else:
                sample[name] = torch.randint(0, self.start.limits[name], shape, generator=random)
        return sample


class Fixed:
    """The example inputs of a user's own code, the same in every step."""

    def __init__(self, start: Start) -> None:
        self.inputs = start.inputs
        tensors = [x for x in start.inputs.values() if isinstance(x, torch.Tensor) and x.dim()]
        self.size = len(tensors[0]) if tensors else 1

    def __len__(self) -> int:
        return self.size

    def read(self, numbers: Sequence[int]) -> Batch:
        """Return these samples. An input without samples is returned whole."""
        indices = torch.as_tensor(list(numbers))
        return {name: self._select_samples(value, indices) for name, value in self.inputs.items()}

    def _select_samples(self, value: Any, at: torch.Tensor) -> Any:
        of_samples = isinstance(value, torch.Tensor) and value.dim() and len(value) == self.size
        return value[at.to(value.device)] if of_samples else value


class Reader:
    """A rank's own micro-batches of each step.

    `shuffle`: the order of the samples is a walk through all of them with a stride that is coprime to their number, so that
    each comes once. The next pass over the samples has another stride.
    """

    def __init__(
        self, samples: Samples, plan: Plan, device: torch.device, *, shuffle: bool = False, seed: int = 0
    ) -> None:
        self.samples, self.device, self.shuffle, self.seed = samples, device, shuffle, seed
        self.parts = plan.accumulate
        self.batch = plan.workload.batch
        self.part_index, self.num_parts = batch_position(plan, dist.get_rank() if dist.is_initialized() else 0)

    def micro_batches(self, step: int) -> Iterator[Batch]:
        """Yield this rank's part of each micro-batch of a step."""
        rows = self.batch // self.parts
        num_here = rows // self.num_parts
        for part in range(self.parts):
            first = step * self.batch + part * rows + self.part_index * num_here
            batch = self.samples.read([self.dealt(first + i) for i in range(num_here)])
            yield pytree.tree_map_only(torch.Tensor, lambda x: x.to(self.device, non_blocking=True), batch)

    def dealt(self, number: int) -> int:
        """Return the number of the sample at place `number` of the run."""
        size = len(self.samples)
        epoch, at = divmod(number, size)
        if not self.shuffle:
            return at
        # Made at each call from the seed and the pass alone: stride and offset are the same for all places of a pass, also after a restart.
        random = np.random.default_rng((self.seed, epoch))
        stride = int(random.integers(1, size)) if size > 1 else 1
        # Example: 9 samples with stride 4 are read as 0 4 8 3 7 2 6 1 5. A stride of 3 would read 0 3 6 again and again.
        while np.gcd(stride, size) > 1:
            stride += 1
        return (at * stride + int(random.integers(size))) % size


def batch_position(plan: Plan, rank: int) -> tuple[int, int]:
    """Return which part of a batch a rank holds under a plan, and the number of parts."""
    place = plan.pipeline_axis.rank_in_mesh(plan.mesh, rank)
    return position_along(plan.mesh.axis_sizes, plan.data_axes, place)


def position_along(sizes: Sequence[int], data_axes: Sequence[int], rank: int) -> tuple[int, int]:
    """Return which part of a batch a rank holds, and the number of parts: its position along the data axes of a mesh, the first
    axis outermost."""
    place, places = 0, 1
    at = np.unravel_index(rank, sizes)
    for axis in data_axes:
        # Example: on a mesh of 2 x 4 with both axes for data, rank 5 is at (1, 1), so it has part 1 * 4 + 1 = 5 of 8.
        place, places = place * sizes[axis] + int(at[axis]), places * sizes[axis]
    return place, places


def open_data(
    plan: Plan,
    start: Start,
    path: Path | None,
    device: torch.device,
    *,
    token_type: str = "uint16",
    shuffle: bool = False,
    seed: int = 0,
) -> Reader:
    """Open `path`, a folder that `datasets` wrote or a file of tokens. None reads random samples, or the inputs of a user's own
    code.

    Raises InputError.
    """
    samples: Samples
    if path is None:
        samples = Fixed(start) if start.from_user_code else Noise(start, seed)
    elif start.from_user_code:
        raise InputError("--data is for models built from a config; this one's own code gives its inputs")
    elif path.is_dir():
        samples = Table(path, start)
    elif not path.is_file():
        raise InputError(f"--data {path} is neither a file of tokens nor a folder that datasets wrote")
    elif not start.causal:
        raise InputError(
            f"a file of tokens trains a causal language model, and this is {type(start.model).__name__}; give a dataset with the "
            f"columns {', '.join(start.inputs)}"
        )
    else:
        samples = TokenFile(path, start.inputs["input_ids"].shape[1], start.limits["input_ids"], token_type)
    return Reader(samples, plan, device, shuffle=shuffle, seed=seed)
