"""What torch does around operators: torch.func, custom autograd functions, checkpointing, compiled parts, hooks, autocast."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.corpus.base import Made, classes, numbers, variants

WIDTH, NUM_CLASSES = 32, 8


class Changed(nn.Module):
    """Two layers; `how` names what happens between them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)
        self.stack = nn.Parameter(numbers(4, WIDTH, WIDTH) * 0.1)
        self.compiled = torch.compile(nn.Linear(WIDTH, WIDTH)) if how == "compiled_part" else nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(getattr(self, self.how)(x)), y)

    def func_vmap(self, x: Tensor) -> Tensor:
        """torch.func.vmap over a stack of weights."""
        return torch.func.vmap(lambda w: torch.tanh(x @ w))(self.stack).mean(0)

    def checkpointed(self, x: Tensor) -> Tensor:
        """torch.utils.checkpoint, reentrant and not."""
        return checkpoint(self._plain, checkpoint(self._plain, x, use_reentrant=False), use_reentrant=True)

    def checkpointed_sequence(self, x: Tensor) -> Tensor:
        """checkpoint_sequential."""
        return checkpoint_sequential(nn.Sequential(self.first, nn.ReLU(), self.compiled), 2, x, use_reentrant=False)

    def _plain(self, x: Tensor) -> Tensor:
        return F.relu(self.first(x))

    def compiled_part(self, x: Tensor) -> Tensor:
        """A part wrapped in torch.compile."""
        return F.gelu(self.compiled(x))

    def scripted_function(self, x: Tensor) -> Tensor:
        """A function of torch.jit.script."""
        return fused_gelu(self.first(x))

    def autocast_region(self, x: Tensor) -> Tensor:
        """torch.autocast inside forward."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.first(x).float()

    def autocast_switched_off(self, x: Tensor) -> Tensor:
        """A region that switches autocast off."""
        with torch.autocast("cpu", enabled=False):
            return self.first(x.float())

    def function_sign(self, x: Tensor) -> Tensor:
        """A custom function: straight-through sign."""
        return Sign.apply(self.first(x))

    def function_row_norm(self, x: Tensor) -> Tensor:
        """A custom function that reduces along rows."""
        return RowNorm.apply(self.first(x))

    def function_across_the_batch(self, x: Tensor) -> Tensor:
        """A custom function that reduces along the batch."""
        return Centre.apply(self.first(x)).relu()

    def function_linear(self, x: Tensor) -> Tensor:
        """A custom function with gradients of weights."""
        return OwnLinear.apply(x, self.first.weight, self.first.bias)

    def function_gradient_reversal(self, x: Tensor) -> Tensor:
        """A custom function with a number beside its tensor."""
        return Reverse.apply(self.first(x), 0.5) + x

    def hook_on_a_tensor(self, x: Tensor) -> Tensor:
        """A hook on a gradient inside forward."""
        h = self.first(x)
        h.register_hook(lambda g: g.clamp(-1, 1))
        return h

    def decides_by_item(self, x: Tensor) -> Tensor:
        """A branch on .item() of a computed tensor."""
        h = self.first(x)
        return h * 2 if h.mean().item() > 0 else h

    def goes_through_numpy(self, x: Tensor) -> Tensor:
        """A value that leaves torch."""
        return self.first(x) + torch.from_numpy(self.first(x).detach().numpy()).mean()

    def nested_tensor(self, x: Tensor) -> Tensor:
        """A nested tensor of two lengths."""
        both = torch.nested.nested_tensor([x[:3], x[3:]])
        return self.first(both).to_padded_tensor(0.0).flatten(0, 1)[: len(x)]

    def writes_a_weight(self, x: Tensor) -> Tensor:
        """A weight is clamped by .data inside forward."""
        self.first.weight.data.clamp_(-1, 1)
        return self.first(x)


@torch.jit.script
def fused_gelu(x: Tensor) -> Tensor:
    """A scripted function."""
    return x * torch.sigmoid(1.702 * x)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class RowNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, scale = ctx.saved_tensors
        return scale * grad - x * scale**3 * (grad * x).mean(-1, keepdim=True)


class Centre(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(0, keepdim=True)


class OwnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, grad.sum(0)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        ctx.rate = rate
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.rate * grad, None


globals().update(variants(Changed, lambda: (numbers(8, WIDTH), classes(NUM_CLASSES))))


def scripted_module() -> Made:
    """A module of torch.jit.script."""
    return torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())), (numbers(8, WIDTH),)


def backward_hook() -> Made:
    """A full backward hook on a module."""
    model = Changed("_plain")
    model.first.register_full_backward_hook(lambda module, into, out: None)
    return model, (numbers(8, WIDTH), classes(NUM_CLASSES))


def gradient_hook_on_a_weight() -> Made:
    """A hook on a parameter's gradient."""
    model = Changed("_plain")
    model.first.weight.register_hook(lambda grad: grad * 0.5)
    return model, (numbers(8, WIDTH), classes(NUM_CLASSES))


class Encoder(nn.Module):
    """torch's own encoder, which joins tokens with the samples inside."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.words, self.body = nn.Embedding(64, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.read, self.head = nn.MultiheadAttention(32, 4, dropout=0.0, batch_first=True), nn.Linear(32, 64)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        h = self.body(self.words(ids), src_key_padding_mask=padding)
        h = h + self.read(h[:, :4].repeat(1, 2, 1), h, h, need_weights=False)[0]
        return F.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())


def encoder_of_torch() -> Made:
    """nn.TransformerEncoder with padding, and cross-attention."""
    padding = torch.zeros(8, 8, dtype=torch.bool)
    padding[1, 6:] = True
    return Encoder(), (classes(64, (8, 8)), padding)


class Adversary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made, self.judge = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = self.made(x)
        fixed = {name: p.detach() for name, p in self.judge.named_parameters()}
        fooled = torch.func.functional_call(self.judge, fixed, (made,))
        return self.judge(made.detach()).square().mean() - 0.1 * fooled.abs().mean()


def detached_judge() -> Made:
    """Both losses of an adversarial pair in one forward; one term has the judge's weights detached."""
    return Adversary(), (numbers(8, 16),)


def hooks_of_the_model_itself() -> Made:
    """Forward hooks of the model and of a layer, each of which changes the result."""
    model = Changed("_plain")
    model.first.register_forward_hook(lambda module, args, out: out.tanh())
    model.register_forward_hook(lambda module, args, loss: loss * 1.5)
    return model, (numbers(8, WIDTH), classes(NUM_CLASSES))


REFUSED = {
    "func_vmap": "runs its operators inside a transform of torch.func",
    "scripted_module": "is a TorchScript module",
    "autocast_region": "opens an autocast region",
    "hook_on_a_tensor": "puts a hook on the gradient of a computed tensor",
    "decides_by_item": "decides by the values of computed tensors",
    "goes_through_numpy": "takes the values of computed tensors out of torch",
    "nested_tensor": "give one padded tensor and a mask",
    "writes_a_weight": "writes into the parameter first.weight",
    "backward_hook": "has a hook on its backward pass",
    "gradient_hook_on_a_weight": "has a hook on its gradient",
}
