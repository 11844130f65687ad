"""The flat capture judges the folded one, on the zoo and on models made to trap it."""

import dataclasses
import itertools
import json
from functools import cache

import networkx as nx
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from planner_core.core import STANDIN_LOSS, VARIES
from planner_core.core.errors import CaptureError, InputError
from planner_core.core.graph import Call, is_within, unfold_graph
from planner_core.core.graph_json import graph_from_json, graph_to_json
from planner_core.models.adapters import experts as moe
from planner_core.models.capture.loss import OWN_LOSS, standin_loss
from planner_core.models.capture.module import capture_module
from planner_core.models.capture.replay import replayer
from planner_core.models.hooks import callsites as sites
from planner_core.models.hooks.model_parts import list_modules, list_parameters
from planner_core.models.loading import capture_graph
from planner_core.models.snapshots.compare import graph_difference
from planner_core.models.snapshots.symbolic import merge_symbolic
from planner_core.models.sources import huggingface as hf
from planner_core.models.sources.config_limits import check_numbers
from planner_core.models.sources.inputs import make_training_inputs
from planner_core.models.zoo import ZOO

LAYERS = {name: 3 if model.depth else None for name, model in ZOO.items()}


@cache
def graph(name, batch=2, seq=24, flat=False):
    return capture_graph(name, batch=batch, seq=seq, layers=LAYERS[name], flat=flat)


# --- the zoo ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.slow(only=("resnet50-100k",))
def test_unfolded_is_flat(name):
    folded, flat = graph(name), graph(name, flat=True)
    assert graph_difference(folded, flat) is None
    assert len(folded.top.items) < len(flat.top.items)
    assert not flat.blocks and folded.num_ops == len(flat.top.items)


def as_networkx(flat, prefix, hoisted):
    """One module call of an unfolded graph, without the operations that are `hoisted` out of it: operations by what they are, tensors by shape and by which result and operand they
    are; what comes from outside is a node of its own. No names stand in it."""
    found, made = nx.MultiDiGraph(), {}
    for op in flat.top.ops:
        if op.name in hoisted or not is_within(op.name, prefix):
            continue
        found.add_node(op.name, what=(op.fn, repr(sorted(op.attrs.items()))))
        for port, value in enumerate(op.inputs):
            meta = flat.top.values[value]
            source, result = made.get(value, (f"outside {value}", 0))
            found.add_node(source, what=found.nodes.get(source, {}).get("what", (meta.kind, "")))
            found.add_edge(source, op.name, how=(result, port, meta.meta.shape, meta.meta.dtype))
        made |= {value: (op.name, k) for k, value in enumerate(op.outputs)}
    return found


def isomorphic(a, b):
    return nx.is_isomorphic(
        a,
        b,
        lambda x, y: x["what"] == y["what"],
        lambda x, y: sorted(repr(e["how"]) for e in x.values()) == sorted(repr(e["how"]) for e in y.values()),
    )


@pytest.mark.parametrize(
    "name",
    [
        "gpt2-xl",
        "t5-large",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ZOO if n not in ("gpt2-xl", "t5-large")),
    ],
)
def test_networkx_finds_the_same_copies(name):
    """An independent judge: of a capture that folds nothing, copies of a block are isomorphic, and different blocks are not."""
    folded, flat = graph(name), graph(name, flat=True)
    first, hoisted = {}, {op.name for op in folded.top.ops}
    for call in folded.calls():
        here = as_networkx(flat, call.prefix, hoisted)
        assert here.number_of_nodes() > len(folded.blocks[call.block].items) // 2
        assert isomorphic(first.setdefault(call.block, here), here), call.prefix
    for a, b in itertools.combinations(first, 2):
        assert not isomorphic(first[a], first[b]), f"{a} and {b} could be one block"


@pytest.mark.parametrize("name", ZOO)
def test_loss_of_the_model_is_in_the_graph(name):
    assert graph(name).loss == OWN_LOSS
    assert any(op.fn == "cross_entropy" for op in graph(name).top.ops)


def test_t5_folds_to_24_and_24():
    t5 = capture_graph("t5-large", batch=2, seq=16)
    assert list(t5.num_repeats.values()) == [24, 24]
    hoisted = [op.name for op in t5.top.ops if "relative_attention_bias" in op.name]
    assert hoisted == [
        f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias/embedding" for side in ("encoder", "decoder")
    ]


def test_tied_embedding_is_one_parameter():
    gpt2 = graph("gpt2-xl")
    assert "lm_head.weight" not in gpt2.parameters() and "transformer.wte.weight" in gpt2.parameters()
    used = [op.fn for op in gpt2.top.ops for v in op.inputs if gpt2.top.values[v].name == "transformer.wte.weight"]
    assert used == ["embedding", "linear"]


def test_attention_is_one_op_that_keeps_its_key_heads():
    block = graph("llama-3-8b").blocks["LlamaDecoderLayer"]
    (op,) = [op for op in block.ops if op.fn == "scaled_dot_product_attention"]
    shapes = [block.values[v].meta.shape for v in op.inputs]
    assert shapes == [(2, 32, 24, 128), (2, 8, 24, 128), (2, 8, 24, 128)]
    assert op.attrs["enable_gqa"] and op.attrs["is_causal"] and op.attrs["scale"] == 128**-0.5
    assert set(op.saved) == {*op.inputs, *op.outputs}
    assert [(m.shape, m.dtype) for m in op.saved_extra] == [((2, 32, 24), "float32")]


def test_experts_are_one_op_with_all_their_weights():
    block = graph("mixtral-8x7b").blocks["MixtralDecoderLayer"]
    (op,) = [op for op in block.ops if op.fn == "moe_experts"]
    shapes = [block.values[v].meta.shape for v in op.inputs]
    assert shapes == [(48, 4096), (48, 2), (48, 2), (8, 28672, 4096), (8, 4096, 14336)]
    assert op.attrs["arg_names"] == ("hidden", "top_k_index", "top_k_weights", "gate_up_proj", "down_proj")
    kept = [m.shape for m in op.saved_extra]
    assert (96, 4096) in kept and (96, 28672) in kept and (96, 14336) in kept


def test_batch_norm_and_pooling_are_single_ops():
    ops = [op.fn for op in unfold_graph(graph("resnet50-100k")).top.ops]
    assert ops.count("batch_norm") == 53 and ops.count("conv2d") == 53 and "max_pool2d" in ops


@pytest.mark.parametrize(
    ("name", "fn", "attrs"),
    [
        ("llama-3-8b", "transpose", {"dims": (0, 2, 1, 3)}),
        ("llama-3-8b", "to", {"dtype": "float32"}),
        ("gpt2-xl", "split", {"dim": 2, "sizes": (1600, 1600, 1600)}),
        ("gpt2-xl", "addmm", {"arg_names": ("input", "mat1", "mat2")}),
        (
            "bert-large",
            "layer_norm",
            {"normalized_shape": (1024,), "arg_names": ("input", "weight", "bias"), "eps": 1e-12},
        ),
        ("llama-3-8b", "embedding", {"arg_names": ("input", "weight")}),
        ("mixtral-8x7b", "topk", {"dim": 1, "k": 2}),
    ],
)
def test_attributes(name, fn, attrs):
    op = next(op for op in unfold_graph(graph(name)).top.ops if op.fn == fn)
    assert {k: op.attrs.get(k) for k in attrs} == attrs


@pytest.mark.parametrize("name", ["llama-3-8b", "t5-large", "mixtral-8x7b", "resnet50-100k"])
def test_json_round_trip(name):
    assert graph_difference(graph_from_json(graph_to_json(graph(name))), graph(name)) is None


def test_saved_tensors_of_a_linear_layer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
            self.a.weight.requires_grad_(False)

        def forward(self, x):
            return self.b(torch.relu(self.a(x))).sum()

    net = capture_module(Net(), {"x": torch.zeros(3, 4)}).top
    by_name = {op.name: op for op in net.ops}
    assert by_name["a/linear"].saved == ()  # neither its input nor its frozen weight has a gradient
    assert by_name["/relu"].saved == by_name["/relu"].outputs
    assert set(by_name["b/linear"].saved) == {by_name["b/linear"].inputs[0], by_name["b/linear"].inputs[1]}


# --- traps -----------------------------------------------------------------------------------------------


class Part(nn.Module):
    def __init__(self, width=8, **flags):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.__dict__.update(flags)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


class Flagged(Part):
    def forward(self, x):
        return super().forward(x) if self.flag else x - self.down(F.relu(self.up(x)))


class Indexed(Part):
    def forward(self, x):
        h = F.relu(self.up(x)) if self.index % 2 else F.gelu(self.up(x))
        return x + self.down(h)


class Attending(nn.Module):
    """Local or global attention: the same shapes, another mask."""

    def __init__(self, window):
        super().__init__()
        self.qkv, self.out, self.window = nn.Linear(8, 24), nn.Linear(8, 8), window

    def forward(self, x):
        q, k, v = (t[None, None] for t in self.qkv(x).split(8, dim=-1))
        far = torch.arange(x.shape[0])[:, None] - torch.arange(x.shape[0])[None, :]
        mask = (far >= 0) & (far < self.window) if self.window else None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return x + self.out(y[0, 0])


class Acting(Part):
    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Training(Part):
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)) if self.training else self.up(x))


class Returning(Part):
    def forward(self, x):
        y = super().forward(x)
        return {"tuple": (y, x), "dict": {"y": y}, "dataclass": Pair(y, 1)}[self.kind]


@dataclasses.dataclass
class Pair:
    y: torch.Tensor
    n: int


class Writing(Part):
    def forward(self, x):
        y = super().forward(x)
        self.seen = y
        return y


class InPlace(Part):
    def forward(self, x):
        x += self.down(F.relu(self.up(x)))
        return x


class Viewing(Part):
    def forward(self, x):
        return super().forward(x).transpose(0, 1)


class Convolving(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.a, self.b, self.dilation = nn.Conv1d(8, 8, 3), nn.Linear(8, 8), dilation

    def forward(self, x):
        return x + F.conv1d(self.b(x).T[None], self.a.weight, padding=self.dilation, dilation=self.dilation)[0].T


class Chain(nn.Module):
    """Layers one after another, and a scalar at the end."""

    def __init__(self, layers, pick=lambda y: y):
        super().__init__()
        self.first, self.layers, self.pick = nn.Linear(8, 8), layers, pick

    def forward(self, x):
        x = self.first(x)  # a layer that is given a constant saves less than one that is given an activation
        for layer in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            x = self.pick(layer(x))
        return x.pow(2).mean()


class Twice(nn.Module):
    """One module called with different shapes, between calls of its like with one shape each."""

    def __init__(self):
        super().__init__()
        self.first, self.parts = nn.Linear(8, 8), parts(Part, 3)

    def forward(self, x):
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        return x.sum() + self.parts[1](x[:2]).sum()


class TwoParents(nn.Module):
    """Two modules hold one and the same part beside one of their own."""

    def __init__(self):
        super().__init__()
        shared = Part()
        self.first, self.left, self.right = (
            nn.Linear(8, 8),
            nn.Sequential(Part(), shared),
            nn.Sequential(Part(), shared),
        )

    def forward(self, x):
        return self.right(self.left(self.first(x))).sum()


class Torchs(nn.Module):
    """Layers of torch itself, whose attention is one function of many ops."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)
        )

    def forward(self, x):
        x = self.first(x)[None]
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Part() for _ in range(4))
        self.layers[2].up.weight = self.layers[1].up.weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum() + (x @ self.layers[3].up.weight.T).sum()


class Loop(nn.Module):
    """One layer called many times, as ALBERT does."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(8, 8), Part()

    def forward(self, x):
        x = self.first(x)
        for _ in range(4):
            x = self.layer(x)
        return x.sum()


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(8, 8)) for _ in range(4))

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x.sum()


class Remembering(nn.Module):
    """A later layer reads what an earlier one left on itself."""

    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(Writing() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            x = layer(x) + (self.layers[i - 1].seen if i else 0)
        return x.sum()


def parts(cls, count=4, **flags):
    return nn.ModuleList(cls(**{k: v(i) for k, v in flags.items()}) for i in range(count))


TRAPS = {
    "plain": (lambda: Chain(parts(Part)), [4]),
    "flag": (lambda: Chain(parts(Flagged, flag=lambda i: i > 1)), [2, 2]),
    "layer index": (lambda: Chain(parts(Indexed, index=lambda i: i)), [2, 2]),
    "local and global attention": (lambda: Chain(parts(Attending, window=lambda i: 2 if i % 2 else 0)), [2, 2]),
    "windows of two sizes": (lambda: Chain(parts(Attending, window=lambda i: 2 + i % 2)), [4]),
    "activation": (lambda: Chain(parts(Acting, act=lambda i: F.relu if i else torch.tanh)), [3]),
    "same activation": (lambda: Chain(parts(Acting, act=lambda i: F.relu)), [4]),
    "training": (lambda: Chain(parts(Training)), [4]),
    "tuple": (lambda: Chain(parts(Returning, kind=lambda i: "tuple"), lambda y: y[0] + y[1]), [4]),
    "dict": (lambda: Chain(parts(Returning, kind=lambda i: "dict"), lambda y: y["y"]), [4]),
    "dataclass": (lambda: Chain(parts(Returning, kind=lambda i: "dataclass"), lambda y: y.y), [4]),
    "module dict": (lambda: Chain(nn.ModuleDict({f"p{i}": Part() for i in range(4)})), [4]),
    "sequential": (lambda: Chain(nn.ModuleList([nn.Sequential(Part(), Part()) for _ in range(3)])), [3]),
    "write": (lambda: Chain(parts(Writing)), [4]),
    "memory": (Remembering, [3]),
    "in place": (lambda: Chain(parts(InPlace), lambda y: y), [4]),
    "view": (lambda: Chain(parts(Viewing, width=lambda i: 8), lambda y: y.transpose(0, 1)), [4]),
    "dilation": (lambda: Chain(parts(Convolving, dilation=lambda i: 1 + i % 2)), [2, 2]),
    "twice with different shapes": (Twice, [3]),
    "two parents": (TwoParents, None),  # a shared part is traced under either of its names
    "torch's own layers": (Torchs, [3]),
    "tied": (Tied, None),
    "loop": (Loop, [4]),
    "functional": (Functional, []),
}


@pytest.mark.parametrize("of_library", [True, False])
@pytest.mark.parametrize("name", TRAPS)
def test_traps(name, of_library, monkeypatch):
    """Layers are replayed as those of a library, and traced as those of a user."""
    monkeypatch.setattr(replayer, "LIBRARIES", (*replayer.LIBRARIES, *["tests"] * of_library))
    make, repeats = TRAPS[name]
    x = torch.zeros(6, 8)
    folded = capture_module(make().train(), {"x": x})
    flat = capture_module(make().train(), {"x": x}, flat=True)
    assert graph_difference(folded, flat) is None
    assert folded.num_params == sum(p.numel() for p in make().parameters())
    if repeats is not None:
        assert sorted(folded.num_repeats.values()) == sorted(repeats)


def test_attention_as_one_function_is_seen_op_by_op():
    plain = F.multi_head_attention_forward
    block = next(iter(capture_module(Torchs().train(), {"x": torch.zeros(6, 8)}).blocks.values()))
    found = [op.name for op in block.ops]
    assert {
        "self_attn/linear",
        "self_attn/scaled_dot_product_attention",
        "self_attn/linear.1",
        "linear1/linear",
    } <= set(found)
    assert F.multi_head_attention_forward is plain, "as it was afterwards"


def test_training_flag_is_read(monkeypatch):
    monkeypatch.setattr(replayer, "LIBRARIES", (*replayer.LIBRARIES, "tests"))
    model = Chain(parts(Training)).train()
    model.layers[2].training = False
    folded = capture_module(model, {"x": torch.zeros(6, 8)})
    assert sum(op.fn == "tanh" for op in unfold_graph(folded).top.ops) == 3


def test_calls_in_a_loop_pass_the_shared_weights():
    loop = capture_module(Loop(), {"x": torch.zeros(6, 8)})
    calls = [i for i in loop.top.items if isinstance(i, Call)]
    assert [c.prefix for c in calls] == ["layer", "layer@1", "layer@2", "layer@3"]
    assert set(loop.parameters()) == {f"layer.{n}.{w}" for n in ("up", "down") for w in ("weight", "bias")} | {
        "first.weight",
        "first.bias",
    }


class Casting(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x).float()
        return (y * (y.detach() > 0).half()).double()


def test_a_cast_has_the_same_name_in_every_dtype():
    """A plan is made in bfloat16 and verified in float32, where one of the casts changes nothing."""
    names = {}
    for dtype in (torch.bfloat16, torch.float32):
        net = capture_module(Casting().to(dtype), {}, args=(torch.zeros(2, 4, dtype=dtype),))
        names[dtype] = [op.name for op in net.top.ops if op.name.startswith("/to")]
    assert names[torch.bfloat16] == ["/to", "/to.1", "/to.2"] and names[torch.float32] == ["/to.1", "/to.2"]


# --- loss, bad models ------------------------------------------------------------------------------------


def test_standin_loss_is_named_and_recorded():
    net = capture_module(nn.Sequential(nn.Linear(4, 4)), {}, args=(torch.zeros(2, 4),))
    assert net.loss == STANDIN_LOSS
    assert [op.name for op in net.top.ops] == ["0/linear", "loss/pow", "loss/mean"]


def test_an_input_that_nobody_knows_is_named():
    class Both(nn.Linear):
        def forward(self, x, y):
            return super().forward(x) + y

    with pytest.raises(CaptureError, match="Both needs 'y', for which no example input is known"):
        capture_module(Both(4, 4), {"x": torch.zeros(2, 4)})


def test_constant_control_flow_runs():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x, mask):
            y = self.a(x)
            return y if mask.to(y.device).all() else y * 2

    ones = torch.ones(2, dtype=torch.bool)
    assert len(capture_module(Masked(), {"x": torch.zeros(2, 4), "mask": ones}).top.ops) == 3
    assert len(capture_module(Masked(), {"x": torch.zeros(2, 4), "mask": ~ones}).top.ops) == 4


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, 'no "model_type"'),
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"model_type": "llama", "hidden_size": -4}, "hidden_size is -4"),
        ({"model_type": "llama", "hidden_size": "big"}, 'hidden_size is "big"'),
        ({"model_type": "llama", "num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        (
            {"model_type": "llama", "hidden_size": 100, "num_attention_heads": 3},
            "100 is not divisible by num_attention_heads 3",
        ),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 4}, "more than the 2 experts"),
        ({"model_type": "gpt2", "n_layer": 100_000}, "n_layer is 100000; at most 2000"),
        ({"model_type": "bart", "encoder_layers": 100_000}, "encoder_layers is 100000; at most 2000"),
        ({"model_type": "resnet", "depths": [3, 4000, 6, 3]}, "depths is .*; at most 2000"),
        (
            {"model_type": "llava", "text_config": {"model_type": "llama", "num_hidden_layers": 9999}},
            "text_config.num_hidden_layers is 9999",
        ),
        ({"model_type": "funnel", "block_sizes": [100_000]}, "FunnelForMaskedLM has more than 400 modules"),
        ({"model_type": "llama", "architectures": ["NoSuchModel"]}, "NoSuchModel"),
        (
            {"model_type": "llama", "architectures": ["LlamaAttention"]},
            '"LlamaAttention", which transformers .* does not have for llama',
        ),
        (
            {"model_type": "llama", "architectures": ["OPTDecoder"]},
            '"OPTDecoder", which transformers .* does not have for llama',
        ),
        ({"model_type": "llama", "architectures": ["PreTrainedModel"]}, "does not have for llama"),
        ({"model_type": "llama", "architectures": ["AutoModel"]}, "does not have for llama"),
        ({"model_type": "llama", "architectures": ["os"]}, "does not have for llama"),
    ],
)
def test_bad_configs_in_one_sentence(config, words, monkeypatch):
    # So that it takes no time to get there.
    monkeypatch.setattr("planner_core.models.sources.config_limits.MAX_MODULES", 400)
    with pytest.raises((InputError, CaptureError), match=words) as caught:
        capture_graph(config, batch=1, seq=8)
    assert "\n" not in str(caught.value)


def test_a_minus_one_is_a_number_where_the_type_starts_from_it():
    check_numbers({"model_type": "phi4_multimodal", "audio_config": {"chunk_size": -1}})
    with pytest.raises(InputError, match=r"audio_config\.chunk_size is -2"):
        check_numbers({"model_type": "phi4_multimodal", "audio_config": {"chunk_size": -2}})


@pytest.mark.slow
def test_no_types_own_default_is_refused_for_its_numbers():
    """A -1 for "no bound" is no mistake where the model type itself starts from it."""
    from transformers import CONFIG_MAPPING

    for kind, made in CONFIG_MAPPING.items():
        try:
            data = made().to_dict()
        except Exception:  # a type without a default
            continue
        check_numbers({**json.loads(json.dumps(data, default=str)), "model_type": kind})


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}


@pytest.mark.parametrize(
    ("config", "block"),
    [
        ({"model_type": "voxtral_realtime_text", **SMALL}, "VoxtralRealtimeTextModel"),
        ({"model_type": "t5gemma2_text", "dropout_rate": 0.0, **SMALL}, "T5Gemma2TextEncoder"),
        ({"model_type": "opt", "num_hidden_layers": 2}, "OPTDecoder"),
        (
            {"model_type": "t5gemma2", "encoder": {"text_config": SMALL}, "decoder": SMALL},
            "T5Gemma2TextEncoder",
        ),  # a part of a part
    ],
)
def test_architectures_may_name_a_class_that_only_the_types_own_file_has(config, block):
    import transformers

    assert not hasattr(transformers, block)
    net = capture_graph({**config, "architectures": [block]}, batch=2, seq=8)
    assert sum(net.num_repeats.values()) == 2


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "{", "is not JSON"),
        ("config.json", "[1]", "holds a list"),
        ("m.py", "import torch\ndef make(): return torch.nn.Linear(2, 2)", "without example inputs"),
        ("m.pt2", "not a program", "exported program"),
    ],
)
@pytest.mark.slow(only=("m.pt2-not a program-exported program",))
def test_bad_files_in_one_sentence(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises((InputError, CaptureError), match=words):
        capture_graph(f"{path}:make" if name.endswith(".py") else str(path), batch=1, seq=8)


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(InputError, match="did you mean 'llama-3-8b'"):
        capture_graph("llama3-8b", batch=1, seq=8)


@pytest.mark.parametrize("rebound", [True, False])
def test_a_constant_that_terms_are_added_to_is_tracked_from_there_on(rebound):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(4, 4)

        def forward(self, x):
            loss = torch.zeros([])
            if rebound:
                loss += self.proj(x).mean()
            else:
                loss.add_(self.proj(x).mean())
            return loss * 2

    graph = capture_module(Model(), {"x": torch.zeros(2, 4)})
    assert [op.fn for op in graph.top.ops] == ["linear", "mean", "add_", "mul"]


class Scaled(nn.Module):
    def __init__(self, factor, slope):
        super().__init__()
        self.up, self.down, self.factor, self.slope = nn.Linear(4, 8), nn.Linear(8, 4), factor, slope

    def forward(self, x):
        return x + self.down(F.leaky_relu(self.up(x) * self.factor, self.slope))


@pytest.mark.parametrize("factors", [(0.25, 0.5, 0.75), (0.5, 0.5, 0.5), (1, 0.5, 0.5), (1, 2, 2)])
def test_layers_that_differ_in_a_float_are_one_block(factors):
    def made(flat):
        model = nn.Sequential(nn.Linear(4, 4), *(Scaled(f, 0.1 + 0.1 * (f > 1)) for f in factors))
        return capture_module(model, {"input": torch.zeros(2, 4)}, flat=flat)

    folded, flat = made(False), made(True)
    assert graph_difference(folded, flat) is None
    floats = {type(f) for f in factors} == {float}
    assert (list(folded.num_repeats.values()) == [3]) == floats, "an integer is part of what a layer does"
    assert graph_difference(graph_from_json(json.loads(json.dumps(graph_to_json(folded)))), flat) is None
    scalars = {op.attrs["scalar"] for b in folded.blocks.values() for op in b.ops if op.fn == "mul"}
    assert not floats or scalars == ({VARIES} if len(set(factors)) > 1 else {factors[0]})


def test_diffllama_folds():
    config = {
        "model_type": "diffllama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 128,
    }
    folded = capture_graph(config, batch=2, seq=16)
    assert list(folded.num_repeats.values()) == [4]
    assert graph_difference(folded, capture_graph(config, batch=2, seq=16, flat=True)) is None


def test_unused_weights_are_said():
    model = Chain(parts(Part))
    model.spare = nn.Linear(8, 8)
    graph = capture_module(model, {"x": torch.zeros(6, 8)})
    assert graph.assumptions == ("2 parameters (72 elements, first spare.weight) are not used by this training step",)
    assert graph.num_params == sum(p.numel() for p in model.parameters())


def test_the_top_block_gives_the_loss():
    for name in ("llama-3-8b", "t5-large"):
        top = graph(name).top
        (loss,) = top.outputs
        assert top.values[loss].meta.shape == () and top.items[-1].outputs == (loss,)


@pytest.mark.slow
def test_python_source(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\nfrom torch import nn\nprint('hello')\n"
        "def make():\n    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (torch.zeros(3, 4),)\n"
    )
    mine = capture_graph(f"{path}:make", batch=3, seq=1)
    assert [op.fn for op in mine.top.ops] == ["linear", "relu", "linear", "pow", "mean"]
    assert capsys.readouterr().out == ""


# --- every workload --------------------------------------------------------------------------------------


def test_symbolic_refuses_what_fits_no_form():
    class Squared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x)
            return (y[:, :, None] + y[:, None]).flatten(1, 2).sum()

    graphs = [
        capture_module(Squared(), {"x": torch.zeros(b, s, 4)}, batch=b, seq=s) for b, s in ((2, 3), (4, 3), (2, 6))
    ]
    with pytest.raises(CaptureError, match="not of the form"):
        merge_symbolic(graphs)


# --- experts ---------------------------------------------------------------------------------------------


def tiny_mixtral(implementation):
    from transformers import MixtralConfig, MixtralForCausalLM

    moe.register_experts()
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=5,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return MixtralForCausalLM._from_config(config, experts_implementation=implementation, dtype=torch.float32).train()


def test_experts_equal_transformers_eager():
    ours, eager = tiny_mixtral(moe.NAME), tiny_mixtral("eager")
    ours.load_state_dict(eager.state_dict())
    ids = torch.randint(64, (3, 7))
    for model in (ours, eager):
        model(input_ids=ids, labels=ids).loss.backward()
    assert torch.allclose(ours(input_ids=ids).logits, eager(input_ids=ids).logits, atol=1e-6)
    for (name, p), (_, q) in zip(ours.named_parameters(), eager.named_parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=1e-6), name


def test_experts_in_parts_sum_to_the_whole():
    torch.manual_seed(1)
    hidden, up, down = torch.randn(9, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    index, weights = torch.randint(4, (9, 2)), torch.rand(9, 2)

    def gate(x):
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    whole = moe.moe_experts(hidden, index, weights, up, down, apply_gate=gate)
    terms = [
        moe.moe_experts(hidden, index, weights, up[i : i + 2], down[i : i + 2], apply_gate=gate, first_expert=i)
        for i in (0, 2)
    ]
    assert torch.allclose(whole, sum(terms), atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("first", [0, 2])
def test_experts_give_what_one_after_the_other_gives(transposed: bool, biased: bool, first: int) -> None:
    """Also where an expert gets no token, and tokens go to experts of others. Each weight's gradient is made once, not once an expert."""
    torch.manual_seed(1)
    index = torch.stack([torch.randperm(6)[:2] for _ in range(9)])
    index[index == first + 1] = 5
    up, down = torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    up, down = (up.mT.contiguous(), down.mT.contiguous()) if transposed else (up, down)
    biases = (torch.randn(4, 12), torch.randn(4, 8)) if biased else (None, None)

    def gate(x):
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    def one_by_one(hidden, index, weights, up, down, up_bias, down_bias, **_):
        total = torch.zeros_like(hidden)
        for e in range(4):
            token, slot = torch.where(index - first == e)
            inner = F.linear(hidden[token], up[e].T if transposed else up[e], None if up_bias is None else up_bias[e])
            outer = F.linear(
                gate(inner), down[e].T if transposed else down[e], None if down_bias is None else down_bias[e]
            )
            total = total.index_add(0, token, outer * weights[token, slot, None])
        return total

    found = []
    for run in (one_by_one, moe.moe_experts):
        given = [
            None if x is None else x.clone().requires_grad_()
            for x in (torch.ones(9, 8), torch.rand(9, 2), up, down, *biases)
        ]
        torch.manual_seed(2)
        given[0].data.normal_()
        given[1].data.uniform_()
        out = run(given[0], index, *given[1:], apply_gate=gate, transposed=transposed, first_expert=first)
        with Shapes() as made:
            (out * torch.arange(8)).sum().backward()
        found.append([out, *(x.grad for x in given if x is not None)])
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*found, strict=True))
    assert made.shapes.count(tuple(up.shape)) == made.shapes.count(tuple(down.shape)) == 1


class Shapes(TorchDispatchMode):
    """The shapes of the tensors that calls make; views and what writes into another tensor are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and all(r.alias_info is None for r in func._schema.returns):
            self.shapes.append(tuple(out.shape))
        return out


# --- a running model has the captured names ---------------------------------------------------------------

SMALL = {
    "llama": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 64,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64},
    "bert": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 64,
        "architectures": ["BertForMaskedLM"],
    },
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64},
    "vit": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "image_size": 32,
    },
    "mixtral": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 64,
        "num_local_experts": 4,
    },
    "resnet": {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "num_labels": 10},
    "gemma2": {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 64,
        "sliding_window": 8,
    },
}


class Tracker(TorchFunctionMode):
    """What a runtime sees: sites of the calls on parameters and what was computed from them."""

    def __init__(self, model, scopes):
        super().__init__()
        self.scopes, self.sites, self.keep = scopes, [], list(model.parameters())
        self.tracked = {id(p) for p in self.keep}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args, kwargs))
        fn = sites.canonical_name(func, kwargs)
        out = func(*args, **kwargs)
        if fn is None or not any(id(t) in self.tracked for t in sites.tensors((args, kwargs))):
            return out
        results = sites.recorded_results(fn, args, out)
        if results:
            self.sites.append(self.scopes.site(fn))
            self.keep += results
            self.tracked.update(map(id, results))
        return out


@pytest.mark.parametrize("kind", SMALL)
def test_a_real_run_has_the_captured_sites(kind):
    data = {"model_type": kind, **SMALL[kind]}
    captured = capture_graph(data, batch=2, seq=16, dtype="float32", flat=True)
    moe.register_experts()
    config = hf.read_config(data)
    hf.disable_dropout(config)
    model = hf._construct_model(hf.find_model_class(config, data), config, torch.float32).train()
    inputs = make_training_inputs(model, config, 2, 16, "float32")
    inputs = {k: torch.randn(v.shape) if v.is_meta else v for k, v in inputs.items()}
    with sites.Scopes(model) as scopes, Tracker(model, scopes) as mode:
        model(**inputs)
    assert mode.sites == [op.name for op in captured.top.ops]


def test_a_stand_in_loss_sends_gradients_through_a_last_norm():
    """The mean square of a normalised output is 1 whatever the weights: they would get rounding errors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).double()
    x = torch.randn(8, 16, dtype=torch.float64)
    standin_loss(model(x)).backward()
    new = model[0].weight.grad.abs().max()
    model.zero_grad()
    model(x).pow(2).mean().backward()
    assert new > 1e-3 and model[0].weight.grad.abs().max() < 1e-4 * new


def test_parts_and_weights_are_those_that_torch_names() -> None:
    """Also of a module that stands in two places, and of a weight that two modules hold."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = nn.ModuleDict({"a": inner, "b": nn.ModuleList([inner, nn.Linear(2, 2)]), "c": nn.Sequential()})
    model["b"][1].weight = inner[0].weight
    model["b"].register_module("gone", None)
    assert list_modules(model) == list(model.named_modules())
    for (name, weight), (wanted, same) in zip(list_parameters(model), model.named_parameters(), strict=True):
        assert name == wanted and weight is same
