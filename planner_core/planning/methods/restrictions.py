"""The restrictions of baselines and of the papers' methods: the same search, with some states forbidden.

A restriction says which states the tensors and parameters of a block may have on each mesh axis. All else is still chosen best.
So a baseline is never worse than its author's plan under the same rules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner_core.core import Block, DeviceMesh, Graph, Op, P, R, Shard, Value
from planner_core.cost import Bools, Ints, block_of
from planner_core.ops import DISPATCH, WHOLE_LOGITS, Kind, Row, operator
from planner_core.planning.methods.method import Restrict
from planner_core.search.network import (
    NO_STAGE,
    AxisState,
    DimByValue,
    Factor,
    Network,
    Restriction,
    SampleDims,
    WeightState,
    allow_only,
    find_sample_dims,
    input_sample_dims,
    tensor_name,
)

StreamTest = Callable[[Value, AxisState], bool]
"""A test of an activation's state on one mesh axis."""
WeightTest = Callable[[Value, WeightState], bool]
"""A test of a parameter's state on one mesh axis."""
PRODUCTS = frozenset({Kind.PRODUCT, Kind.CONVOLUTION, Kind.ATTENTION, Kind.EXPERTS, Kind.LOOKUP})
"""Kinds of operators whose results may have any state on a tensor axis. The operators between them follow the residual stream."""


@dataclass(frozen=True, slots=True)
class OperatorRows:
    """How the operators of one kind run on an axis: the rows that they may have, by name, and the test of their weights (None: the test
    that the axis has for all parameters)."""

    rows: frozenset[str]
    weights: WeightTest | None = None


BY_HEADS: Mapping[Kind, OperatorRows] = {Kind.ATTENTION: OperatorRows(frozenset({"heads"}))}
"""What a tensor axis does to attention."""


@dataclass
class AxisRules(Restriction):
    """For each mesh axis a test of activations and a test of parameters.

    An axis with the test `is_batch_split` is a data axis: every tensor with samples is made and delivered sharded by them (see
    `SampleDims`). On any other axis the test is for the residual stream, which is every tensor of its shape that norms and sums
    make. There a layer that reads the stream is sharded by its output features, as Megatron-LM's ColumnParallelLinear: it has no layer
    that takes a part of each token of the stream. `kinds` say for each axis how operators of some kinds run there. If they are not given,
    attention runs with sharded heads where the axis is not a data axis, and experts without an all_to_all of tokens. No plan deals samples
    out unevenly to `ranks`, those of the data axes together.
    """

    graph: Graph
    activations: tuple[StreamTest, ...]
    parameters: tuple[WeightTest, ...]
    kinds: tuple[Mapping[Kind, OperatorRows], ...] = field(default=(), kw_only=True)
    ranks: int = field(default=1, kw_only=True)
    exempt: frozenset[int] = field(default=frozenset(), kw_only=True)
    """Ids of the parameters that pass in every state."""
    one_optimizer: bool = field(default=False, kw_only=True)
    """Whether the optimizer states of all matrices that can be sharded in ZeRO-1 are, where the network has that stage."""
    _input_dims: dict[str, DimByValue] = field(default_factory=dict, init=False, repr=False)  # by block
    _stream_values: dict[str, frozenset[int]] = field(default_factory=dict, init=False, repr=False)

    def apply(self, block: str, net: Network) -> None:
        """Add a factor that forbids the states that fail a test."""
        where = block_of(self.graph, block)
        if self.graph.workload["batch"] % self.ranks:
            # One variable without a state makes the whole network infeasible, since no plan deals samples out unevenly.
            net.factors += [allow_only(name, np.zeros(size, dtype=bool)) for name, size in list(net.sizes.items())[:1]]
            return
        # Only what a product reads is a weight to shard; tables of positions and the like follow no rule of a tensor axis.
        read_by = {v: operator(op.fn).kind for op in where.ops if operator(op.fn).kind in PRODUCTS for v in op.inputs}
        factors = self._activation_factors(where, net)
        for number, value, states in net.placed_values(where):
            name = tensor_name(number)
            if value.kind == "parameter":
                if id(value) in self.exempt:
                    continue
                tests = [self._of_parameter(axis, read_by.get(number)) for axis in range(len(self.parameters))]
                allowed = [t and [t(value, WeightState(*state)) for state in states.axis_states] for t in tests]
                ok = _passing(states.index, allowed)
                if self.one_optimizer and is_matrix(value):
                    in_stage = np.array([WeightState(*state).stage == 1 for state in states.axis_states])
                    sharded = ok & in_stage[states.index].any(axis=1)
                    ok = sharded if sharded.any() else ok
                if ok.any():  # a bias that cannot be sharded is not restricted
                    net.factors.append(allow_only(name, ok))
            elif name in factors:
                net.factors.append(factors[name])
        net.factors += [factors[name] for name in net.nodes]

    def _activation_factors(self, where: Block, net: Network) -> dict[str, Factor]:
        """Return the factors of tensors with samples and of groups of operators, by variable."""
        # Layouts that differ in ZeRO stages alone share the factors.
        key = self._activation_key()
        if key not in net.rules.factors:
            net.rules.factors[key] = self._make_activation_factors(where, net)
        return net.rules.factors[key]

    def _activation_key(self) -> tuple[object, ...]:
        """Return all on which `_activation_factors` depend but the network: two rules of one model with equal keys have equal factors."""
        kinds = (frozenset(self._kinds_on(axis).items()) for axis in range(len(self.activations)))
        return type(self), self.activations, *kinds

    def _make_activation_factors(self, where: Block, net: Network) -> dict[str, Factor]:
        factors = {}
        delivered = self._samples_of(where, net).delivered
        for number, value, states in net.placed_values(where):
            if value.kind != "parameter" and number in delivered:
                cut = [p[0] == Shard(delivered[number]) for p in states.axis_states]
                batch = [cut if t is is_batch_split else None for t in self.activations]
                factors[tensor_name(number)] = allow_only(tensor_name(number), _passing(states.index, batch))
        for name, node in net.nodes.items():
            s = node.strategy
            passes = [
                [self._row_passes(where, net, s.ops, row, k) for row in s.rows] for k in range(len(self.activations))
            ]
            factors[name] = allow_only(name, _passing(node.index, passes))
        return factors

    def _of_parameter(self, axis: int, reader: Kind | None) -> WeightTest | None:
        """Return the test of a parameter on an axis; None if it may have every state. `reader`: the kind of product that reads it."""
        test, runs = self.parameters[axis], self._kinds_on(axis).get(reader) if reader else None
        # Experts over ranks use their weights where they are, whatever stage the axis has for other weights.
        if runs and runs.weights:
            return runs.weights
        return test if test is not is_used_in_parts or reader else None

    def _kinds_on(self, axis: int) -> Mapping[Kind, OperatorRows]:
        if self.kinds:
            return self.kinds[axis]
        return {} if self.activations[axis] is is_batch_split else BY_HEADS

    def _row_passes(self, where: Block, net: Network, ops: tuple[Op, ...], rows: tuple[Row, ...], axis: int) -> bool:
        test, kinds, samples = self.activations[axis], self._kinds_on(axis), self._samples_of(where, net)
        # What products make may be sharded in any way on a tensor axis. Only what lies between them follows the residual stream.
        holds_product = test is not is_batch_split and any(operator(op.fn).kind in PRODUCTS for op in ops)
        for op, row in zip(ops, rows, strict=True):
            runs = kinds.get(operator(op.fn).kind)
            # A stack whose loss takes whole logits on every tensor rank gathers them, so the loss is not cut on that axis.
            if test is not is_batch_split and WHOLE_LOGITS in op.attrs and row.name != "R":
                return False
            if row.name not in runs.rows if runs else row.name == DISPATCH:
                return False
            if test is not is_batch_split and self._takes_part_of_stream(where, op, row):
                return False
            # Without sequence parallelism a norm or a sum of the stream runs whole on every tensor rank, as Megatron-LM runs it.
            if test is is_unsplit and not holds_product and row.name != "R" and self._meets_stream(where, op):
                return False
            for v, pair in zip(op.outputs, row.outputs, strict=True):
                value = where.values[v]
                if tensor_name(v) not in net.tensors:
                    continue
                if test is is_batch_split and v in samples.produced and pair[0] != Shard(samples.produced[v]):
                    return False
                if (
                    test is not is_batch_split
                    and not holds_product
                    and self._in_stream(value)
                    and not test(value, pair)
                ):
                    return False
        return True

    def _samples_of(self, where: Block, net: Network) -> SampleDims:
        if net.rules.samples is None:
            # For all blocks at once: which dim of a block's inputs the samples have follows from what runs before its call.
            if not self._input_dims:
                self._input_dims.update(input_sample_dims(self.graph))
            net.rules.samples = find_sample_dims(where, net, self._input_dims.get(where.name, {}))
        return net.rules.samples

    def _takes_part_of_stream(self, where: Block, op: Op, row: Row) -> bool:
        """Return whether a layer with a weight reads some features of each token of the residual stream."""
        if operator(op.fn).kind is not Kind.PRODUCT or all(where.values[v].kind != "parameter" for v in op.inputs):
            return False
        if where.name not in self._stream_values:
            self._stream_values[where.name] = self._values_of_stream(where)
        of_stream = self._stream_values[where.name]
        return any(
            v in of_stream and pair[0] == Shard(len(where.values[v].meta.shape) - 1)
            for v, pair in zip(op.inputs, row.inputs, strict=True)
        )

    def _values_of_stream(self, where: Block) -> frozenset[int]:
        """Return the values of a block that are computed of the residual stream without a product between: what norms make of it."""
        # Seeds are what enters the block: a product's result may have the stream's shape too, and its layers may be cut by features.
        results = {v for op in where.ops for v in op.outputs}
        stream = {
            i for i, v in enumerate(where.values) if i not in results and v.kind == "activation" and self._in_stream(v)
        }
        for op in where.ops:
            if operator(op.fn).kind not in PRODUCTS and not stream.isdisjoint(op.inputs):
                stream.update(op.outputs)
        return frozenset(stream)

    def _meets_stream(self, where: Block, op: Op) -> bool:
        return any(self._in_stream(where.values[v]) for v in (*op.inputs, *op.outputs))

    def _in_stream(self, value: Value) -> bool:
        return value.meta.shape in self._stream_shapes

    @functools.cached_property
    def _stream_shapes(self) -> set[tuple[int, ...]]:
        """The shapes of the residual stream."""
        return residual_shapes(self.graph)


def _passing(index: Ints, tests: Sequence[Sequence[bool] | None]) -> Bools:
    """[joint state]: whether its state on each axis passes the axis's test (None: every state does). `index` [joint state, axis]."""
    ok = np.ones(len(index), dtype=bool)
    for axis, test in enumerate(tests):
        if test is not None:
            ok &= np.array(test, dtype=bool)[index[:, axis]]
    return ok


def residual_shapes(graph: Graph) -> set[tuple[int, ...]]:
    """Return the shapes of the activations that pass between repeated blocks."""
    return {
        b.values[i].meta.shape
        for b in graph.blocks.values()
        for i in (*b.inputs, *b.outputs)
        if b.values[i].kind == "activation" and b.values[i].meta.shape[:1] == (graph.workload["batch"],)
    }


def is_matrix(v: Value) -> bool:
    """Return whether a parameter is a weight matrix (or a larger tensor) rather than a bias or a norm."""
    return len(v.meta.shape) >= 2


def pass_any(v: Value, state: WeightState) -> bool:
    """Return True: every state passes."""
    return True


def is_batch_split(v: Value, pair: AxisState) -> bool:
    """Return whether the first dim is sharded."""
    return bool(pair[0] == Shard(0))


def is_unsplit(v: Value, pair: AxisState) -> bool:
    """Return whether the tensor is Replicate or Partial."""
    return pair[0] in (R, P)


def is_sequence_split(v: Value, pair: AxisState) -> bool:
    """Return whether the second dim (tokens) is sharded."""
    return bool(pair[0] == Shard(1))


def sums_gradient_whole(v: Value, state: WeightState) -> bool:
    """Return whether a parameter is Replicate, with a gradient that is summed once a step and states that are whole."""
    return (state.working == R and not v.grad) or (state.working, state.gradient, state.stored) == (R, P, R)


def sums_gradient_once(v: Value, state: WeightState) -> bool:
    """Return whether a parameter is Replicate, with a gradient that is summed once a step. Its states are whole or, in ZeRO-1, sharded."""
    return sums_gradient_whole(v, state) or state.stage == 1


def is_sharded_matrix(v: Value, state: WeightState) -> bool:
    """Return whether a matrix is sharded on this axis. Small parameters pass in every state."""
    return isinstance(state.working, Shard) or not is_matrix(v)


def zero_stage_test(stage: int) -> WeightTest:
    """Return the test of parameters on a data axis on which matrices have a ZeRO stage. In stages 1 to 3 small ones pass in every state."""
    if stage in (0, 3):
        return is_sharded_matrix if stage else sums_gradient_whole
    return lambda v, state: state.stage == stage or not is_matrix(v)


def is_expert_parallel(v: Value, state: WeightState) -> bool:
    """Return whether each rank has some of the experts, and uses their weights where they are."""
    return state.working == Shard(0) and state.stage == NO_STAGE


def is_used_in_parts(v: Value, state: WeightState) -> bool:
    """Return whether the weight of a product (see PRODUCTS) is sharded on this axis, and not gathered at use. All other parameters
    pass."""
    if is_matrix(v):
        return isinstance(state.working, Shard) and state.stage == NO_STAGE
    return state.stage in (NO_STAGE, 0)


@dataclass
class DataAxis(Restriction):
    """The first of two axes is a data axis: every tensor with a batch dim is sharded by it, and weights are Replicate on it."""

    graph: Graph

    def apply(self, block: str, net: Network) -> None:
        """Add a factor that forbids the other states."""
        batch, seq = self.graph.workload["batch"], self.graph.workload["seq"]
        for number, value, states in net.placed_values(block_of(self.graph, block)):
            # Experts and losses take the tokens of all samples in one row: dim 0 of batch x seq is cut by samples too.
            if value.kind != "parameter" and value.meta.shape[:1] not in ((batch,), (batch * seq,)):
                continue
            wanted = R if value.kind == "parameter" else Shard(0)
            ok = np.array([pair[0] == wanted for pair in states.axis_states])[states.index[:, 0]]
            net.factors.append(allow_only(tensor_name(number), ok))


# --- baselines ----------------------------------------------------------------------------------------------


def data_parallel_rules(weights: WeightTest) -> Restrict:
    """Return the rules of data parallelism: on a mesh of one axis, over which samples are dealt out, parameters pass the test `weights`."""

    def restrict(graph: Graph, mesh: DeviceMesh) -> Restriction | None:
        if len(mesh.axis_sizes) > 1:
            return None
        return AxisRules(graph, (is_batch_split,), (weights,), ranks=mesh.num_devices)

    return restrict


def megatron_rules(stream: StreamTest) -> Restrict:
    """Return the rules of Megatron-LM.

    Products are sharded over the last mesh axis, where the residual stream passes the test `stream`. The first of two axes shards the
    batch. On it the optimizer states are sharded where the request's space holds that, as Megatron-LM's distributed optimizer does
    (ZeRO-1): those of all matrices, since one switch of the run does it."""

    def restrict(graph: Graph, mesh: DeviceMesh) -> Restriction | None:
        if len(mesh.axis_sizes) == 1:
            return AxisRules(graph, (stream,), (is_used_in_parts,))
        if len(mesh.axis_sizes) == 2:
            tests = (sums_gradient_once, is_used_in_parts)
            return AxisRules(graph, (is_batch_split, stream), tests, ranks=mesh.axis_sizes[0], one_optimizer=True)
        return None

    return restrict
