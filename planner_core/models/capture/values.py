"""The tensors of one pass: their numbers, which of them are computed, and when each was made or written.

A graph refers to tensors by number. Python refers to them by identity, so the tables here are keyed by `id(tensor)`. An id is reused
once its tensor is freed: a numbered tensor is kept alive for the whole pass, and an unnumbered constant has a weak reference.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from planner_core.core import TensorMeta, Value, ValueKind
from planner_core.models.capture.recording import Recording
from planner_core.models.hooks.input_values import InputValues
from planner_core.models.hooks.model_parts import list_buffers, list_parameters
from planner_core.models.hooks.torch_private import storage_id

BEFORE_PASS = -1
"""The time of a tensor that is older than the pass."""


class ValueTable:
    """The numbers, ages and origins of the tensors of one pass.

    tracked       ids of *tracked* tensors: parameters, and what is computed from them. Only calls on these are recorded.
    from_inputs   tensors that are computed from the inputs alone
    inputs        numbers of the inputs of the model
    buffers       numbers of the buffers as the pass found them. A buffer that it writes gets another number.
    clock         counts what is made and written. It orders a write and the tensors that would miss it.
    """

    def __init__(self, recording: Recording, model: nn.Module) -> None:
        self.recording = recording
        self.tracked: set[int] = set()
        self.from_inputs = InputValues()
        self.inputs: set[int] = set()
        self.clock = 0
        self.first_in_storage: dict[int, int] = {}  # storage -> first value in it
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []
        self._storages: list[torch.UntypedStorage] = []
        self._births: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # of constants without a number, too
        self._computed_at: dict[int, int] = {}
        self._add_model(model)

    def _add_model(self, model: nn.Module) -> None:
        params = self.recording.params
        for name, param in list_parameters(model):
            params[name] = self.add(param, "parameter", name)
            self.tracked.add(id(param))
        for name, buffer in list_buffers(model):
            # another layout is refused at its first use
            if id(buffer) not in self._numbers and buffer.layout == torch.strided:
                self.recording.name_buffer(self.add(buffer, "constant"), name)
        aliases = model.named_parameters(remove_duplicate=False)
        params.update({n: self._numbers[id(p)] for n, p in aliases if n not in params})

    # --- numbers ------------------------------------------------------------------------------------

    def add(
        self, tensor: torch.Tensor, kind: ValueKind, name: str = "", birth: int = BEFORE_PASS, *, computed: bool = False
    ) -> int:
        """Number a tensor as a new value."""
        key = storage_id(tensor)
        meta = TensorMeta(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        root = self.first_in_storage.get(key, -1)
        if root < 0 and tensor.layout == torch.strided:
            # A module that converts its weights frees the old ones. Keep the storage, so that its address is not reused.
            self._storages.append(tensor.untyped_storage())
        grad, new = tensor.requires_grad and kind != "constant", root < 0
        number = self.recording.add(Value(meta, kind, name, root, grad, computed=computed and new), birth)
        # The first value in a storage stands for its memory. Later ones are views of it.
        self.first_in_storage.setdefault(key, number)
        self._assign_number(tensor, number)
        return number

    def add_input(self, tensor: torch.Tensor, name: str) -> int:
        """Number an input of the model, which may be one that has a number."""
        number = self.find(tensor)
        if number is None:
            number = self.add(tensor, "constant", name)
            self.inputs.add(number)
        return number

    def add_computed(self, tensor: torch.Tensor) -> int:
        """Number a tensor that was computed from tracked tensors."""
        self.tracked.add(id(tensor))
        self._computed_at[id(tensor)] = self.tick()
        return self.add(tensor, "activation")

    def add_version(self, tensor: torch.Tensor) -> int:
        """Give a constant that was written in place a new number, so that what was recorded before reads the old one."""
        number = self.recording.add_version(self._numbers[id(tensor)])
        self._assign_number(tensor, number)
        return number

    def rebind(self, tensor: torch.Tensor, version: int) -> int:
        """Let a tensor that was written in place stand for the value `version` from now on. Returns the time of the write."""
        self.tracked.add(id(tensor))
        self._assign_number(tensor, version)
        self._computed_at[id(tensor)] = self.tick()
        return self.clock

    def _assign_number(self, tensor: torch.Tensor, number: int) -> None:
        self._numbers[id(tensor)] = number
        self._alive.append(tensor)

    def stand_in(self, form: torch.Tensor, constant: torch.Tensor) -> None:
        """Let autograd's references to `form`, a constant's form on meta, count as references to the constant."""
        # The form has a storage of its own. If autograd saves it, the saved tensor must still be matched with the constant.
        self.first_in_storage[storage_id(form)] = self.recording.values[self._numbers[id(constant)]].storage
        self._alive.append(form)

    def find(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor; None if it has none."""
        return self._numbers.get(id(tensor))

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of an operand. A constant gets it at its first use."""
        if (number := self.find(tensor)) is not None:
            return number
        # Masks, positions and labels may have values here, or not where a child process captures: they never count. Real numbers that
        # have no values depend on real inputs, such as frames.
        computed = tensor.is_meta and tensor.is_floating_point() and self.from_inputs.include(tensor)
        return self.add(tensor, "constant", birth=self.birth_of(tensor), computed=computed)

    # --- what a tensor is ---------------------------------------------------------------------------

    def is_tracked(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a parameter, or computed from one."""
        return id(tensor) in self.tracked

    def is_buffer(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a whole buffer of the model, possibly written since, and not a view of one."""
        return self.find(tensor) in self.recording.buffer_names

    def is_stored(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a constant, possibly written since, and neither a weight nor computed."""
        number = self.find(tensor)
        return number is None or self.recording.values[self.recording.storage_root(number)].kind == "constant"

    # --- time ---------------------------------------------------------------------------------------

    def tick(self) -> int:
        """Advance the clock and return its time."""
        self.clock += 1
        return self.clock

    def note_constant(self, tensor: torch.Tensor) -> None:
        """Remember that a constant, which has no number yet, was made now."""
        self._births[id(tensor)] = weakref.ref(tensor), self.tick()

    def birth_of(self, tensor: torch.Tensor) -> int:
        """Return the creation time of a constant; `BEFORE_PASS` if it is older than this pass."""
        reference, when = self._births.get(id(tensor), (None, BEFORE_PASS))
        return when if reference is not None and reference() is tensor else BEFORE_PASS

    def time_of(self, tensor: torch.Tensor) -> int:
        """Return when a tensor was computed, or made as a constant."""
        return self._computed_at.get(id(tensor), self.birth_of(tensor))
