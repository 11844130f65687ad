import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from planner_core.core import CallSite, is_later_call, is_within, module_path, nth_call
from planner_core.models.hooks import normalize_call
from planner_core.models.hooks.callsites import Scopes, canonical_name, recorded_results, tensors


class Recorder(TorchFunctionMode):
    def __init__(self, scopes):
        super().__init__()
        self.scopes, self.sites = scopes, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args, kwargs))
        func, args, kwargs = normalize_call(func, args, kwargs)
        fn = canonical_name(func, kwargs)
        out = func(*args, **kwargs)
        if fn is not None and tensors((args, kwargs)) and recorded_results(fn, args, out):
            self.sites.append(self.scopes.site(fn))
        return out


def sites(model, *args):
    with Scopes(model) as scopes, Recorder(scopes) as mode:
        model(*args)
    return mode.sites


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.inner, self.body = nn.Linear(4, 4), body

    def forward(self, x):
        return self.body(self, x)


def run(body):
    return sites(Net(body), torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda m, x: x + 1, ["/add"]),
        (lambda m, x: 1 + x, ["/add"]),
        (lambda m, x: 1 - x, ["/rsub"]),
        (lambda m, x: x / 2, ["/div"]),
        (lambda m, x: x @ x.T, ["/T", "/matmul"]),
        (lambda m, x: x[0], ["/getitem"]),
        (lambda m, x: -x, ["/neg"]),
        (lambda m, x: x.double(), ["/to"]),
        (lambda m, x: x.float(), []),  # already float32: handed back as it is
        (lambda m, x: x.to(torch.bfloat16).type_as(x), ["/to", "/to.1"]),
        (
            lambda m, x: x.reshape(-1).view_as(x).expand_as(x).reshape_as(other=x),
            ["/reshape", "/view", "/expand", "/reshape.1"],
        ),
        (lambda m, x: x.type(torch.float16).type(torch.float32), ["/to", "/to.1"]),
        (lambda m, x: x.contiguous(), ["/contiguous"]),
        (lambda m, x: F.dropout(x, 0.0, True), []),
        (lambda m, x: (x.shape, x.dim(), x.is_floating_point(), float(x.sum())), ["/sum"]),
        (lambda m, x: x.add_(1), ["/add_"]),
        (lambda m, x: F.relu(x, inplace=True), ["/relu_"]),
        (lambda m, x: x.__setitem__(0, 1.0), ["/setitem"]),
        (lambda m, x: [y * 2 for y in x], ["/unbind", "/mul", "/mul.1", "/mul.2", "/mul.3"]),
        (lambda m, x: Square.apply(x), ["/Square"]),
        (lambda m, x: m.inner(m.inner(x)), ["inner/linear", "inner@1/linear"]),
        (lambda m, x: x.split(2, -1), ["/split"]),
    ],
)
def test_names(body, expected):
    assert run(body) == expected


class Shared(nn.Module):
    """One module under two parents, one in a ModuleDict, and calls of calls."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(4, 4)
        self.a, self.b = nn.Sequential(shared), nn.Sequential(shared)
        self.named = nn.ModuleDict({"x": nn.Sequential(nn.Linear(4, 4))})

    def forward(self, x):
        x = self.b(self.a(x))
        x = self.named["x"](self.named["x"](x))
        return self.a[0](x)


def test_scopes_follow_the_caller():
    expected = ["a.0/linear", "b.0/linear", "named.x.0/linear", "named.x@1.0/linear", "a.0@1/linear"]
    found = sites(Shared(), torch.zeros(2, 4))
    # the last call comes from the root, which has the module as its a.0 too: the second by that name
    assert found == expected


class Handed(nn.Module):
    """A part that its parent calls first, and then another part that gets it as an argument."""

    class Caller(nn.Module):
        def forward(self, x, part):
            return part(part(x))

    def __init__(self):
        super().__init__()
        self.head, self.caller = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), self.Caller()

    def forward(self, x):
        return self.caller(self.head(x), self.head)


def test_a_part_that_is_called_from_elsewhere_has_names_of_its_own():
    names = [f"head{at}{part}" for at in ("", "@1", "@2") for part in (".0/linear", ".1/relu")]
    assert sites(Handed(), torch.zeros(2, 4)) == names


def test_the_text_of_a_site_reads_back():
    later = CallSite("stack@1.layers.0", "linear", 12)
    texts = {
        "stack@1.layers.0/linear.12": later,
        "/add": CallSite("", "add"),
        "norm/pow": CallSite("norm", "pow"),
        "head@2/to.1": CallSite("head@2", "to", 1),
    }
    for text, site in texts.items():
        assert CallSite.parse(text) == site and str(site) == text
    assert later.module == "stack.layers.0" and later.call == "linear.12"
    assert CallSite.parse("mlp.up.weight") == CallSite("", "mlp.up.weight")  # no site, and no failure


def test_a_later_call_of_a_module_is_one_of_the_same_module():
    assert [nth_call("a.b", n) for n in range(3)] == ["a.b", "a.b@1", "a.b@2"]
    assert [is_later_call(s) for s in ("a.b", "a@1.b", "")] == [False, True, False]
    assert module_path("a@1.b@12.0") == "a.b.0"
    inside = ["a.b/linear", "a.b.c/add.1", "a.bc/linear", "a.b@1/linear", "a/linear"]
    assert [is_within(s, "a.b") for s in inside] == [True, True, False, False, False]
    assert all(is_within(s, "") for s in inside)


def test_calls_after_the_model_have_a_scope_and_errors_leave_no_trace():
    model = Net(lambda m, x: m.inner(x).sum())
    plain = nn.Module.__dict__["__call__"]
    with Scopes(model) as scopes, Recorder(scopes) as mode:
        model(torch.zeros(4, 4))
        with scopes.named("loss"):
            torch.zeros(4).sum()
    assert mode.sites == ["inner/linear", "/sum", "loss/sum"]
    with pytest.raises(RuntimeError), Scopes(model):
        model(torch.zeros(3, 3))
    assert nn.Module.__dict__["__call__"] is plain


def test_modules_outside_the_model_belong_to_their_caller():
    stranger = nn.Linear(4, 4)
    assert run(lambda m, x: stranger(x)) == ["/linear"]
