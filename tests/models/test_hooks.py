"""What hooks see is in the graph: of every layer, also of those that are equal, and of hooks that are registered while a model runs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner_core as shardscope
from planner_core.core import CaptureError
from planner_core.models.capture.module import capture_module
from planner_core.models.hooks import replace_tensors
from planner_core.models.hooks.wrappers import batch_first_attention
from planner_core.models.loading import capture_graph

LAYERS, WIDTH = 4, 16
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "vocab_size": 64,
    "num_hidden_layers": LAYERS,
    "output_router_logits": True,
}


def test_a_balancing_loss_has_the_scores_of_every_layer() -> None:
    """transformers collects them by hooks, which it registers at the first call. Replayed layers would be missing."""
    graph = capture_graph(MIXTRAL, batch=2, seq=16, dtype="float32", flat=True)
    assert Counter(op.fn for op in graph.top.ops)["histc"] == LAYERS


def test_a_weighted_sum_of_layers_has_all_of_them() -> None:
    sound = {
        "hidden_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "conv_dim": [16, 16],
        "conv_stride": [5, 4],
        "conv_kernel": [10, 4],
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "use_weighted_layer_sum": True,
        "classifier_proj_size": 16,
    }
    config = {"model_type": "hubert", "architectures": ["HubertForSequenceClassification"], **sound}
    graph = capture_graph(config, batch=2, seq=16, dtype="float32", flat=True)
    assert [len(op.inputs) for op in graph.top.ops if op.fn == "stack"] == [LAYERS + 1]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).relu()


class Collects(nn.Module):
    """Registers a hook on each layer when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.ready = nn.ModuleList(Layer() for _ in range(LAYERS)), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        handles = [layer.register_forward_hook(lambda m, i, out: seen.append(out)) for layer in self.layers]
        for layer in self.layers:
            x = layer(x)
        for handle in handles:
            handle.remove()
        return torch.stack(seen).square().mean()


def test_layers_that_get_hooks_while_the_model_runs_are_traced() -> None:
    graph = capture_module(Collects(), {"x": torch.zeros(4, WIDTH)}, flat=True)
    assert [len(op.inputs) for op in graph.top.ops if op.fn == "stack"] == [LAYERS]


class Logs(nn.Module):
    """Hooks that its constructor makes keep an input, and pairs of a number and a tensor, which forward reads at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.log = nn.ModuleList(Layer() for _ in range(LAYERS)), list[tuple[int, torch.Tensor]]()
        self.layers[0].register_forward_pre_hook(lambda m, given: setattr(m, "given", given[0]))
        for i in (0, 2):
            self.layers[i].register_forward_hook(lambda m, given, out, i=i: self.log.append((i, out)))  # type: ignore[misc]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log = []
        for layer in self.layers:
            x = layer(x)
        loss = x.square().mean() + self.layers[0].given.square().mean()  # type: ignore[operator, union-attr]
        return loss + sum((i + 1) * out.abs().mean() for i, out in self.log)


def test_what_hooks_keep_for_the_same_pass_is_no_state() -> None:
    graph = capture_module(Logs(), {"x": torch.zeros(4, WIDTH)}, flat=True)
    assert Counter(op.fn for op in graph.top.ops)["abs"] == 2


def test_hooks_on_gradients_are_refused_before_a_copy_would_lose_them() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(CaptureError, match=r"0\.weight has a hook on its gradient.*after apply"):
        shardscope.plan(model, inputs=(torch.zeros(4, WIDTH),), cluster="1x2-h100")


class Attends(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x, x)[0].square().mean()  # type: ignore[no-any-return]


MASKS = {
    "none": {},
    "padding": {"key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 5])},
    "causal": {"attn_mask": torch.ones(4, 5).triu(1).bool()},
    "both": {
        "attn_mask": torch.randn(4, 5),
        "key_padding_mask": torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 5]).float() * -10,
    },
    "each head's": {"attn_mask": torch.randn(3 * 2, 4, 5)},
}


def _never(*args: object, **kwargs: object) -> None:
    raise AssertionError("this is not rare")


@pytest.mark.parametrize("weights", ["none", "mean", "each"])
@pytest.mark.parametrize("widths", [{}, {"kdim": 8, "vdim": 12}], ids=["one width", "other widths"])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_by_samples_gives_the_same(
    mask: str, widths: dict[str, int], weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, 2, **widths)
    given = (
        torch.randn(4, 3, WIDTH),
        torch.randn(5, 3, widths.get("kdim", WIDTH)),
        torch.randn(5, 3, widths.get("vdim", WIDTH)),
    )
    options = {**MASKS[mask], "need_weights": weights != "none", "average_attn_weights": weights == "mean"}
    wanted, scores = layer(*given, **options)
    monkeypatch.setattr(F, "multi_head_attention_forward", batch_first_attention(_never))
    got, own = layer(*given, **options)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(own, scores)


def test_causal_attention_of_torch_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.MultiheadAttention(WIDTH, 2, batch_first=True), torch.randn(3, 5, WIDTH)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    wanted = layer(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    monkeypatch.setattr(F, "multi_head_attention_forward", batch_first_attention(_never))
    got = layer(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    with pytest.raises(RuntimeError, match="is_causal is a hint"):
        layer(x, x, x, is_causal=True, need_weights=False)
    torch.testing.assert_close(got, wanted)


def test_torch_is_as_it_was_after_a_capture() -> None:
    plain, layer = F.multi_head_attention_forward, nn.MultiheadAttention(WIDTH, 2, add_zero_attn=True)
    graph = capture_module(Attends(layer), {"x": torch.zeros(4, 3, WIDTH)}, flat=True)
    assert F.multi_head_attention_forward is plain
    assert "cat" in [op.fn for op in graph.top.ops]  # the zeros that are added are a rare wish


def test_other_tensors_are_put_wherever_a_module_holds_them() -> None:
    """However deep: in a chain that is longer than calls of Python may be nested."""
    old, new, module = torch.ones(1), torch.zeros(1), nn.Identity()
    chain: object = {"last": (1, [old])}
    for _ in range(2000):
        chain = [chain]
    module.kept, module.beside = chain, old
    replace_tensors(module, {id(old): new})
    while isinstance(chain, list):
        (chain,) = chain
    assert isinstance(chain, dict) and chain["last"][1][0] is new and module.beside is new
