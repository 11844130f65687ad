"""Expert loops of transformers against what takes their place, on real numbers; and that they are captured as calls."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
from torch import nn

from planner_core.core.errors import CaptureError
from planner_core.models import adapters
from planner_core.models.capture.module import capture_module
from planner_core.models.loading import capture_graph
from planner_core.models.snapshots.compare import graph_difference


def unpatched(kind: str) -> Any:
    """The model file of transformers as it is, under a name that `register` does not look at."""
    spec = importlib.util.find_spec(f"transformers.models.{kind}.modeling_{kind}")
    assert spec is not None and spec.origin is not None
    name = f"transformers.models.{kind}.plain"
    if name not in sys.modules:
        copy = importlib.util.spec_from_file_location(name, spec.origin)
        assert copy is not None and copy.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(copy)
        copy.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def config(kind: str, **sizes: Any) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[kind](**sizes)


def filled(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    return module.double()


def same(module: nn.Module, method: str, *args: Any) -> None:
    """The method as it is, and ours: results and gradients of the weights."""
    module.train()
    ours = adapters.METHODS[type(module).__name__, method]
    found = []
    for run in (getattr(type(module), method), ours):
        module.zero_grad()
        out = run(module, *args)
        out.pow(2).sum().backward()
        found.append(
            (out.detach(), [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()])
        )
    (theirs, grads), (mine, more) = found
    torch.testing.assert_close(mine, theirs)
    for a, b in zip(grads, more, strict=True):
        torch.testing.assert_close(b, a)


def routing(tokens: int, experts: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    index = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)])
    return index, torch.rand(tokens, k, dtype=torch.float64)


def test_longcat_with_experts_that_hand_back() -> None:
    made = config(
        "longcat_flash", hidden_size=8, expert_ffn_hidden_size=6, n_routed_experts=4, zero_expert_num=2, num_layers=1
    )
    experts = filled(unpatched("longcat_flash").LongcatFlashExperts(made))
    index, weights = routing(10, 6, 3)
    assert (index >= 4).any()
    same(experts, "forward", torch.randn(10, 8, dtype=torch.float64), index, weights)


def test_step_with_a_clamp() -> None:
    sizes = config("step3p5", hidden_size=8, moe_intermediate_size=6, n_routed_experts=4, num_experts_per_tok=2)
    experts = filled(unpatched("step3p7").Step3p7Experts(sizes, swiglu_limit=0.1))
    index, weights = routing(10, 4, 2)
    same(experts, "forward", torch.randn(10, 8, dtype=torch.float64), index, weights)


def test_switch_with_tokens_beyond_capacity() -> None:
    experts = filled(
        unpatched("switch_transformers").SwitchTransformersExperts(
            config("switch_transformers", d_model=8, d_ff=6, num_experts=4, dropout_rate=0.0)
        )
    )
    mask = nn.functional.one_hot(torch.randint(4, (10,)), 4)
    mask[::3] = 0  # dropped
    same(
        experts,
        "forward",
        torch.randn(10, 8, dtype=torch.float64),
        mask[:, None],
        torch.rand(10, 1, dtype=torch.float64),
    )


def test_nllb_as_transformers_runs_it() -> None:
    experts = filled(
        unpatched("nllb_moe").NllbMoeExperts(
            config("nllb-moe", d_model=8, num_experts=4, moe_token_dropout=0.0, activation_dropout=0.0), 6
        )
    )
    mask = nn.functional.one_hot(torch.randint(4, (10,)), 4)
    same(experts, "forward", torch.randn(10, 8, dtype=torch.float64), mask, torch.rand(10, 4, dtype=torch.float64))


def test_dbrx() -> None:
    ffn = config("dbrx", d_model=8, n_heads=2, ffn_config={"ffn_hidden_size": 6, "moe_num_experts": 4}).ffn_config
    experts = filled(unpatched("dbrx").DbrxExperts(ffn))
    index, weights = routing(10, 4, 2)
    same(experts, "forward", torch.randn(2, 5, 8, dtype=torch.float64), index, weights)


def test_jetmoe_attention_and_feed_forward_experts() -> None:
    made = config(
        "jetmoe",
        hidden_size=8,
        intermediate_size=6,
        num_local_experts=4,
        num_experts_per_tok=2,
        kv_channels=4,
        num_key_value_heads=2,
    )
    plain = unpatched("jetmoe")
    hidden = torch.randn(2, 5, 8, dtype=torch.float64)
    moe, moa = filled(plain.JetMoeMoE(made)), filled(plain.JetMoeMoA(made))
    results = []
    for patched in (False, True):
        owners = {
            "JetMoeTopKGating": plain.JetMoeTopKGating,
            "JetMoeMoE": plain.JetMoeMoE,
            "JetMoeMoA": plain.JetMoeMoA,
        }
        if patched:
            for (kind, method), ours in adapters.METHODS.items():
                if kind in owners:
                    setattr(owners[kind], method, ours)
        queries, logits, routed = moa.map(hidden)
        results.append((moe(hidden), queries, logits, moa.reduce(queries, routed)))
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


SMALL: dict[str, dict[str, Any]] = {
    "jetmoe": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "kv_channels": 8,
        "intermediate_size": 16,
        "num_local_experts": 4,
    },
    "switch_transformers": {
        "d_model": 32,
        "d_ff": 16,
        "d_kv": 8,
        "num_heads": 4,
        "num_layers": 4,
        "num_decoder_layers": 4,
        "num_experts": 4,
    },
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "num_heads": 2, "num_blocks": 2, "num_hidden_layers": 2},
}


@pytest.mark.parametrize(
    ("kind", "fn"), [("jetmoe", "expert_linear"), ("switch_transformers", "moe_experts"), ("xlstm", "mlstm")]
)
def test_they_are_captured_and_folded(kind: str, fn: str) -> None:
    made = {"model_type": kind, "vocab_size": 64, **SMALL[kind]}
    folded, flat = (capture_graph(made, batch=2, seq=64, flat=f) for f in (False, True))
    assert graph_difference(folded, flat) is None
    assert any(op.fn == fn for part in (folded.top, *folded.blocks.values()) for op in part.ops)


def test_a_child_called_by_its_parent_and_by_its_grandparent_has_two_names() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.l = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.l(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner.norm(self.inner(x)) + self.inner(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(Outer(), Outer())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).sum()

    folded, flat = (capture_module(Net(), {"x": torch.randn(2, 4)}, flat=f) for f in (False, True))
    assert graph_difference(folded, flat) is None  # which also asserts that no two ops have one name


def test_a_module_that_converts_its_weights_lends_their_memory_to_nobody() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier, self.out = nn.Linear(4, 8, dtype=torch.bfloat16), nn.Linear(8, 4, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.classifier = self.classifier.to(torch.float32)
            made = [self.classifier(x.float()).softmax(-1).to(torch.bfloat16) for _ in range(20)]
            return x + self.out(sum(made[1:], made[0]))

    net = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), Router(), Router())
    top = capture_module(net, {}, args=(torch.randn(2, 4, dtype=torch.bfloat16),), flat=True).top
    weights = {i for i, v in enumerate(top.values) if v.kind == "parameter"}
    assert not [v for v in top.values if v.kind == "activation" and v.storage in weights]


def test_layers_inside_an_autograd_function_are_refused() -> None:
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
            return layer(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad, None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return Hidden.apply(self.first(x), self.second)

    with pytest.raises(CaptureError, match="a function to run to the autograd function Hidden"):
        capture_module(Net(), {"x": torch.randn(2, 4)})


def test_a_known_mask_picks_a_known_number() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen = torch.arange(x.shape[0]) % 3 == 0
            return self.l(x)[chosen].sum()

    graph = capture_module(Net(), {"x": torch.randn(7, 4)})
    picked = next(op for op in graph.top.ops if op.fn == "getitem")
    assert graph.top.values[picked.outputs[0]].meta.shape == (3, 4)


def test_a_mask_of_the_inputs_may_pick_all() -> None:
    """How many it picks otherwise depends on values, which is refused."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return self.l(x)[places > 2].sum()

    graph = capture_module(Net(), {"x": torch.randn(2, 3, 4), "places": torch.full((2, 3), 3)})
    picked = next(op for op in graph.top.ops if op.fn == "getitem")
    assert graph.top.values[picked.outputs[0]].meta.shape == (6, 4)
    with pytest.raises(
        CaptureError, match=r"as many elements as the values of its inputs say .*; multiply by the mask"
    ):
        capture_module(Net(), {"x": torch.randn(2, 3, 4), "places": torch.arange(6).view(2, 3)})
