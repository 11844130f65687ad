"""A model whose runs are priced, by its name or with example inputs: what it leaves open of a run, and its graphs.

    layout, options -> Statement with a micro-batch -> GraphSpec -> Graph

Example inputs fix samples, tokens and dtype of a micro-batch. A model by its name has a graph for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from planner_core.core import Cluster, Graph, InputError, Sentence, named
from planner_core.models import VOCABULARY, default_sizes, pad_vocabulary, with_adapters
from planner_core.planning.fitting.micro_batch_numbers import GraphSource
from planner_core.planning.methods import Layout
from planner_core.planning.pricing.statement import Statement
from planner_core.planning.request import Progress, Request

Stated = tuple[Statement, tuple[Sentence, ...]]
"""A run, and a note on its micro-batch if that is assumed."""


class GraphSpec(NamedTuple):
    """All that a graph of one micro-batch depends on. None stands for what the model or its example inputs have."""

    batch: int | None
    seq: int | None
    dtype: str | None
    layers: int | None
    lora: int | None = None
    nf4: bool = False
    vocab_multiple: int = 1


@dataclass
class ModelGraphs:
    """Builds each graph of one model once."""

    model: str
    load: Callable[..., Graph]
    report_progress: Progress
    graphs: dict[GraphSpec, Graph]

    def open(self, spec: GraphSpec) -> Graph:
        """Return the graph of a specification. Raises InputError."""
        if spec not in self.graphs:
            self.graphs[spec] = self._build(spec)
        return self.graphs[spec]

    def _build(self, spec: GraphSpec) -> Graph:
        # A graph with another vocabulary or with adapters is made from the one without.
        if spec.vocab_multiple > 1:
            graph = self.open(spec._replace(vocab_multiple=1))
            # A model without a vocabulary has none to pad.
            return (
                pad_vocabulary(graph, spec.vocab_multiple) if isinstance(graph.config.get(VOCABULARY), int) else graph
            )
        if spec.lora is not None or spec.nf4:
            return with_adapters(self.open(spec._replace(lora=None, nf4=False)), spec.lora, spec.nf4)
        self.report_progress(f"graph of {self.model}")
        return self.load(self.model, batch=spec.batch, seq=spec.seq, dtype=spec.dtype, layers=spec.layers)


@dataclass(frozen=True)
class NamedModel:
    """A model by its name, which has a graph for any samples, tokens and dtype."""

    graphs: ModelGraphs
    cluster: Cluster

    def state_run(self, layout: Layout, options: Mapping[str, Any]) -> Stated:
        """Return the run of a layout. Without `micro_batch` among the options, a step has the default batch of `plan`, so that the two step
        times can be compared; or the number of samples nearest to it that the data-parallel ranks share evenly. Raises InputError."""
        if "micro_batch" in options:
            return Statement(layout, **options), ()
        batch, number = default_sizes(self.graphs.model, self.cluster.num_gpus)[0], options.get("accumulate")
        # 64 samples on fsdp=24 are 3 samples of a rank: 72 in a step, which is nearer than 48.
        samples = max(1, round(batch / (layout.data * max(1, number or 1))))
        # As `Layout.count_micro_batches`: with stages, ranks stand idle less with many micro-batches than with large ones.
        sizes = (1, samples) if layout.pp > 1 and number is None else (samples, 1 if number is None else number)
        stated = Statement(layout, **{**options, "micro_batch": sizes[0], "accumulate": sizes[1]})
        if stated.batch == batch:
            assumed = f"micro-batch {stated.micro_batch} is assumed, as a step has {_count_samples(batch)} in a plan by default; "
            return stated, (Sentence(assumed, named("micro_batch"), " states another"),)
        why = f"a step has {_count_samples(stated.batch)}: {layout.data} data-parallel ranks"
        count = () if number is None else (" with ", named("accumulate", number))
        missed = f" do not share the {batch} that a plan has by default evenly; "
        return stated, (Sentence(why, *count, missed, named("micro_batch"), " states others"),)

    def fixed_micro_batch(self, layout: Layout) -> Mapping[str, int]:
        """Return the option of the micro-batch where the model fixes its samples: none."""
        return {}

    def fixed_accumulate(self, stated: Statement) -> int | None:
        """Return the micro-batches of a step with the samples of a statement: None, as a search may choose them."""
        return None

    def dtype(self, stated: Statement) -> str | None:
        """Return the dtype to ask for: the stated one, or the one in which the cluster's GPU trains."""
        return stated.dtype or self.cluster.gpu.training_dtype

    def graph(self, stated: Statement) -> Graph:
        """Return the graph of one micro-batch, its vocabulary padded so that it divides over the tensor-parallel ranks, as tools pad it."""
        # The least common multiple of what the tool pads to and of the tensor ranks: 128 with tp=6 makes it a multiple of 384.
        multiple = math.lcm(stated.vocab_multiple, stated.layout.tp)
        sizes = stated.graph_batch, stated.seq, self.dtype(stated), stated.layers
        return self.graphs.open(GraphSpec(*sizes, stated.lora, stated.nf4, multiple))

    def source(self, stated: Statement) -> GraphSource:
        """Return the graphs of a search that may choose the micro-batches. Their vocabulary is not padded."""

        def open_graph(request: Request) -> Graph:
            sizes = request.workload().graph_batch, request.seq, request.dtype, request.layers
            return self.graphs.open(GraphSpec(*sizes, stated.lora, stated.nf4))

        return open_graph


@dataclass(frozen=True)
class ExampleInputs:
    """A model with example inputs, which are one micro-batch."""

    graphs: ModelGraphs

    def state_run(self, layout: Layout, options: Mapping[str, Any]) -> Stated:
        """Return the run of a layout on the inputs; with stages a step has as few micro-batches as their schedule runs. Raises
        InputError."""
        if "micro_batch" in options:
            return Statement(layout, **options), ()
        stated = Statement(layout, self.fixed_micro_batch(layout)["micro_batch"], **options)
        if layout.pp == 1 or "accumulate" in options:
            return stated, ()
        stated = stated.but(accumulate=layout.pp)
        assumed = f"the example inputs are one micro-batch, and {layout.pp} of them are assumed for {layout.pp} stages, so a step has "
        return stated, (Sentence(assumed, f"{_count_samples(stated.batch)}; ", named("accumulate"), " states another"),)

    def fixed_micro_batch(self, layout: Layout) -> Mapping[str, int]:
        """Return the samples of the inputs that each data-parallel rank has. Raises InputError."""
        graph = self._open(None)
        batch: int = graph.workload["batch"]
        if batch % layout.data:
            raise InputError(
                f"the example inputs of {graph.name} have {_count_samples(batch)}, which cannot be dealt to the {layout.data} "
                f"data-parallel ranks of {layout}; give inputs of {layout.data} samples or a multiple"
            )
        return {"micro_batch": batch // layout.data}

    def fixed_accumulate(self, stated: Statement) -> int | None:
        """Return the stated number: a step may have several micro-batches, but none of another size."""
        return stated.accumulate

    def dtype(self, stated: Statement) -> str | None:
        """Return the dtype to ask for: the stated one, which has to be the model's own; None for that."""
        return stated.dtype

    def graph(self, stated: Statement) -> Graph:
        """Return the graph of the inputs. Raises InputError for samples or tokens that they do not have."""
        graph = self._open(stated.layers)
        batch, seq = graph.workload["batch"], graph.workload["seq"]
        sizes = ("batch", batch, stated.graph_batch, "micro_batch"), ("seq", seq, stated.seq, "seq")
        for name, size, number, option in sizes:
            if number not in (None, size):
                raise InputError(
                    f"the example inputs of {graph.name} have {name} {size}, and ",
                    named(option),
                    f" makes it {number}; leave ",
                    named(option),
                    " out, or give other inputs",
                )
        # Raises for adapters, which are put into a model from a config alone.
        return with_adapters(graph, stated.lora, stated.nf4)

    def source(self, stated: Statement) -> GraphSource:
        """Return the graph of the inputs."""
        return self._open(stated.layers)

    def _open(self, layers: int | None) -> Graph:
        return self.graphs.open(GraphSpec(None, None, None, layers))


StatedModel = NamedModel | ExampleInputs


def _count_samples(number: int) -> str:
    return "1 sample" if number == 1 else f"{number} samples"
