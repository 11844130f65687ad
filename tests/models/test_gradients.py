"""What the loss does not reach has no gradient, in graph, plan and run; what no operator uses is kept all the same."""

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from planner_core.core import Graph, join_name  # noqa: E402
from planner_core.models.capture.module import capture_module  # noqa: E402
from planner_core.models.snapshots.compare import graph_difference  # noqa: E402
from planner_core.planning import Request, candidate_meshes, choose_mesh, prepare_planner  # noqa: E402


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.main(x).relu(), self.side(x)


class Tower(nn.Module):
    """Every layer has a side result; the last one's goes nowhere, and `spare` is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.spare = nn.Linear(16, 24)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        sides = []
        for layer in self.layers:
            x, side = layer(x)
            sides.append(side)
        return {"loss": (self.frozen(x) + sum(sides[:-1])).mean(), "last": sides[-1]}


def captured(flat: bool = False) -> Graph:
    return capture_module(Tower(), {"x": torch.zeros(8, 16)}, flat=flat)


def gradients(graph: Graph) -> dict[str, bool]:
    """Whether each parameter gets a gradient."""
    found = {v.name: v.grad for v in graph.top.values if v.kind == "parameter"}
    for call in graph.calls():
        block = graph.blocks[call.block]
        found.update({join_name(call.prefix, v.name): v.grad for v in block.values if v.kind == "parameter"})
    return found


def test_only_what_the_loss_depends_on_has_a_gradient() -> None:
    """Judged by autograd itself."""
    torch.manual_seed(0)
    model = Tower()
    model(torch.randn(8, 16))["loss"].backward()
    wanted = {name: p.grad is not None for name, p in model.named_parameters()}
    graph = captured()
    assert gradients(graph) == wanted
    assert graph.num_repeats == {"Layer": 2, "Layer2": 1}  # the first layer's input has no gradient
    assert graph_difference(graph, captured(flat=True)) is None
    last = graph.blocks["Layer2"]
    (side,) = [op for op in last.ops if op.name.startswith("side/")]
    assert side.saved == () and not last.values[side.outputs[0]].grad


def test_weights_without_a_gradient_are_said() -> None:
    assert captured().assumptions == (
        "2 parameters (408 elements, first spare.weight) are not used by this training step",
        "2 parameters (272 elements, first layers.3.side.weight) are used, but the loss does not depend on them: they are not trained",
    )


def test_every_parameter_is_in_the_plan_and_in_its_memory() -> None:
    graph = captured()
    request = Request(model="tower", cluster="1x4-a100-pcie", mesh="4", dtype="float32")
    planner = prepare_planner(request, graph)
    plan = choose_mesh(planner, candidate_meshes(request, planner.cluster))
    placed = {join_name(p, n): s for b in plan.blocks.values() for p in b.prefixes for n, s in b.params.items()}
    assert placed.keys() == dict(Tower().named_parameters()).keys()
    assert not placed["spare.weight"].reduced_axes and not placed["layers.3.side.weight"].reduced_axes
    local = {n: m.num_bytes // (4 if "S" in str(placed[n].stored) else 1) for n, m in graph.parameters().items()}
    assert plan.cost.memory_bytes["params"] == sum(local.values())
    trained = sum(size for name, size in local.items() if gradients(graph)[name])
    assert plan.cost.memory_bytes["optimizer"] == 2 * trained
