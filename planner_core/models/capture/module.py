"""Capture: run a model's own forward on fake tensors, and record what it does, with repeated parts once.

capture_module(module, {"x": tensor}, name="mine")         # any nn.Module whose parameters are on meta
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from planner_core.core import Block, CaptureError, Graph, Op, TensorMeta, check, join_name, with_result
from planner_core.models.capture.build.gradients import reached
from planner_core.models.capture.build.graph_builder import Builder
from planner_core.models.capture.build.open_dims import with_open_dims
from planner_core.models.capture.loss import OWN_LOSS, STANDIN_LOSS, named_loss, standin_loss
from planner_core.models.capture.recorder import Recorder
from planner_core.models.capture.recording import uncollected
from planner_core.models.capture.refusals import check_buffers, check_module
from planner_core.models.hooks.callsites import buffer_bytes, buffers_of, parts_of, weights_of
from planner_core.models.hooks.chance import host_drawing
from planner_core.models.hooks.forms import makes_cache
from planner_core.models.hooks.held_values import Noted, Place, UsesOf, kept_tensors

OTHER_DRAWS = 8
"""On so many other seeds a model is run that draws random numbers outside of torch."""
DREW_OUTSIDE = "the model draws random numbers of Python or numpy: all ranks draw the same, and its own code runs operator by operator"


@uncollected()
def capture_module(
    module: nn.Module, inputs: Mapping[str, Any], *, args: tuple[Any, ...] = (), name: str = "model", source: str = "module",
    config: Mapping[str, Any] | None = None, batch: int = 1, seq: int = 1, flat: bool = False, notes: tuple[str, ...] = (),
    replay: bool = True, originals: Mapping[int, str] | None = None,
) -> Graph:  # fmt: skip
    """The graph of one forward pass of `module`, which is moved to meta, with its loss (or a stand-in, named in the graph).

    `notes` are added to the graph's assumptions. `replay=False` runs repeated calls again, and folds them afterwards. `originals` are
    those of `ModelSource`.
    """
    check_module(module)
    to_meta(module)
    if "use_cache" not in inputs and makes_cache(module, module.forward):
        inputs = {**inputs, "use_cache": False}
    trained = {n for n, p in weights_of(module) if p.requires_grad}
    before = Noted.of(parts_of(module))
    try:
        again = partial(_forward_pass, module, inputs, args, flat, replay, originals)
        found = again()
        after = Noted.of(parts_of(module))
        left = before.computed(after)
        if left:
            _check_left(found, again, left, (inputs, args))
        elif name_set := before.changed(after):
            _check_set(found, again, name_set, type(module).__name__)
        before.put_back()
        if found.drew_outside:
            _check_draws(found, again, type(module).__name__)
        if found.picks:
            found = _with_open_dims(found, partial(again, fewer=True), type(module).__name__)
    finally:
        before.put_back()
    workload = {"batch": batch, "seq": seq}
    graph = reached(with_result(Graph(name, source, found.top, found.blocks, workload, found.loss, dict(config or {}))))
    check(graph)
    told = (*notes, *found.told, *_kept(left), *idle_parameters(graph, trained))
    return replace(graph, assumptions=told, buffer_bytes=buffer_bytes(module))


@dataclass(frozen=True, slots=True)
class _Pass:
    """One forward pass. `told`: what to say about it; `drew_outside`: whether it drew random numbers of Python or numpy; `picks`: where
    a mask of the inputs picks elements; `settled`: whether a tensor of it depends on constants and buffers alone."""

    top: Block
    blocks: Mapping[str, Block]
    loss: str
    told: tuple[str, ...]
    drew_outside: bool
    picks: str
    settled: Callable[[torch.Tensor], bool]


def _forward_pass(
    module: nn.Module,
    inputs: Mapping[str, Any],
    args: tuple[Any, ...],
    flat: bool,
    replay: bool,
    originals: Mapping[int, str] | None,
    *,
    fewer: bool = False,
) -> _Pass:
    recorder = Recorder(module, replay=replay and not flat, fewer=fewer, originals=originals)
    loss = OWN_LOSS

    def finish(out: Any) -> torch.Tensor:
        nonlocal loss
        name, own = named_loss(out)
        if own is not None:
            loss = name
            return own
        loss = STANDIN_LOSS
        return standin_loss(out, lambda t: id(t) in recorder.tracked)

    buffers = dict(buffers_of(module))
    final = recorder.run(dict(inputs), finish, args)
    check_buffers(module, buffers, recorder.tracked)
    if id(final) not in recorder.tracked:
        raise CaptureError(
            f"{type(module).__name__} returns nothing that depends on its parameters; there is nothing to train"
        )
    top, blocks = Builder(recorder.recording, fold=not flat).build(recorder.ids[id(final)])
    drew = recorder.drew_outside or bool(recorder.drew_from)
    told = (
        *_opened(recorder.scopes.wrappers, (top, *blocks.values())),
        *_finite(recorder.taken_finite),
        *((DREW_OUTSIDE,) if drew else ()),
    )
    return _Pass(top, blocks, loss, told, drew, next(iter(recorder.picks.where), ""), partial(_settled, recorder))


def _settled(recorder: Recorder, tensor: torch.Tensor) -> bool:
    """Whether a tensor depends on constants and buffers alone: not on weights, inputs or chance."""
    moves = id(tensor) in recorder.tracked or recorder.picks.varies(tensor)
    return not moves and recorder.drawn_by(tensor) is None


def _check_draws(found: _Pass, again: Callable[[], _Pass], model: str) -> None:
    """Refuse a model whose operations depend on random numbers of Python or numpy, which no recorder sees: it is run on some others."""
    for seed in range(OTHER_DRAWS):
        with host_drawing(seed):
            other = again()
        if _operations(other) != _operations(found):
            raise CaptureError(
                f"{model} does other operations for other random numbers of Python or numpy, so each step would be another graph; draw no "
                "number there (set the rate at which layers are left out to 0)"
            )


def _with_open_dims(found: _Pass, again: Callable[[], _Pass], model: str) -> _Pass:
    """The pass, with the dims marked whose size the values of a batch say, as a mask does: another run with fewer tells them."""
    try:
        other = again()
    except CaptureError:  # the model needs just as many: each sample has the same number
        return found
    blocks = with_open_dims({"": found.top, **found.blocks}, {"": other.top, **other.blocks})
    if blocks is None:
        raise CaptureError(
            f"{model} does other operations where the values of a batch say another number of elements{found.picks}, so each batch would "
            "be another graph; multiply by the mask instead"
        )
    told = f"the values of each batch say how many elements there are{found.picks}: they are not split, and counted as in the example"
    return replace(found, top=blocks.pop(""), blocks=blocks, told=(*found.told, told))


def _check_left(found: _Pass, again: Callable[[], _Pass], left: Sequence[Place], inputs: Any) -> None:
    """Refuse a model that reads what an earlier pass has left in an attribute, but for a cache: it depends on constants and buffers alone,
    and later passes leave it as it is. Every pass has the same inputs."""
    given = {id(t) for t in kept_tensors(inputs)}
    held = [(place, t) for place in left for t in kept_tensors(place[0].values[place[1]]) if id(t) not in given]
    versions = [t._version for _, t in held]
    with UsesOf([t for _, t in held]) as uses:
        later = again()
    read = [
        held[i][0] for i in uses.seen if not (found.settled(held[i][1]) and _stays(held[i][0], held[i][1], versions[i]))
    ]
    if read or _operations(found) != _operations(later):
        holder, key = (read or [held[i][0] for i in uses.seen] or left)[0]
        raise CaptureError(
            f"forward reads in each step what the step before has left in {holder.path(key)}, so the first step is "
            "another graph than later ones; give forward the state as an input and let it return the next one, or write it into a buffer"
        )


def _stays(place: Place, tensor: torch.Tensor, version: int) -> bool:
    """Whether a tensor is still there, and as it was."""
    held, key = place[0].held, place[1]
    now = dict(enumerate(held)) if isinstance(held, list) else held
    return any(t is tensor for t in kept_tensors(now.get(key))) and tensor._version == version


def _check_set(found: _Pass, again: Callable[[], _Pass], name: str, model: str) -> None:
    """Refuse a model whose next pass does other operations, since this one has set an attribute, as one that fills a cache does."""
    try:
        later = again()
        if _operations(found) == _operations(later):
            return
        lasts = _operations(again()) == _operations(later)
    except CaptureError:  # that pass tells less than this one
        return
    way = "call the model once before it is planned and applied" if lasts else "let it do the same in each step"
    raise CaptureError(
        f"{model} does other operations at its next call, since forward sets {name}, so the first step is another graph than later ones; "
        + way
    )


def _kept(left: Sequence[Place]) -> tuple[str, ...]:
    """A note on computed tensors that forward keeps for code outside."""
    if not left:
        return ()
    names = list(dict.fromkeys(h.path(k) for h, k in left))
    more = f" and {len(names) - 1} more" if names[1:] else ""
    told = f"forward keeps a computed tensor in {names[0]}{more}: under a plan, code that reads it outside is refused; return it instead"
    return (told,)


def _operations(found: _Pass) -> list[Any]:
    """What is called on which tensors; a number that is drawn may be an argument."""
    blocks = {"": found.top, **found.blocks}
    return [
        (name, [(i.fn if isinstance(i, Op) else i.block, i.inputs, i.outputs) for i in b.items], [v.meta for v in b.values])
        for name, b in blocks.items()
    ]  # fmt: skip


def _opened(wrappers: Collection[str], blocks: Iterable[Block]) -> tuple[str, ...]:
    if not wrappers:
        return ()
    names = " and ".join(sorted(wrappers))
    told = f"the model's own {names} is run as a plain call: --recompute says what is computed again"
    norms = any(op.fn == "batch_norm" for block in blocks for op in block.ops)
    return (told + "; running statistics in it count a step once, where torch counts it twice" * norms,)


def _finite(lines: Sequence[str]) -> tuple[str, ...]:
    if not lines:
        return ()
    return (
        f"the model asks whether its numbers are finite{lines[0]}: they are taken to be, so what it does else is left out",
    )


def to_meta(module: nn.Module) -> None:
    """Move parameters and buffers to meta in place; what was one tensor stays one (`module.to` would part tied weights)."""
    moved: dict[int, torch.Tensor] = {}
    for _, part in parts_of(module):
        tables: tuple[Any, ...] = (part._parameters, part._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or tensor.is_meta:
                    continue
                if id(tensor) not in moved:
                    fake = tensor.detach().to("meta")
                    moved[id(tensor)] = (
                        nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
                    )
                table[name] = moved[id(tensor)]


def idle_parameters(graph: Graph, trained: Collection[str]) -> tuple[str, ...]:
    """Notes about the weights among `trained` that this step does not train: no op uses them (the vision part of a model that gets
    text), or the loss does not depend on them."""
    unused: dict[str, TensorMeta] = {}
    unreached: dict[str, TensorMeta] = {}
    for prefix, block in (("", graph.top), *((c.prefix, graph.blocks[c.block]) for c in graph.calls())):
        used = {*block.inputs, *(v for item in block.items for v in item.inputs)}
        for i, v in enumerate(block.values):
            name = join_name(prefix, v.name)
            if v.kind == "parameter" and not v.grad and i not in block.inputs and name in trained:
                (unreached if i in used else unused)[name] = v.meta
    return (
        *_told(unused, "are not used by this training step"),
        *_told(unreached, "are used, but the loss does not depend on them: they are not trained"),
    )


def _told(idle: Mapping[str, TensorMeta], what: str) -> tuple[str, ...]:
    if not idle:
        return ()
    size = sum(math.prod(meta.shape) for meta in idle.values())
    return (f"{len(idle)} parameters ({size:,} elements, first {next(iter(idle))}) {what}",)
