"""Ten-line modules, one for each thing that a captured module may do; `# refused` marks the line that is named.

Where it says `# refused with N microbatches` the module runs with one.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

BATCH = 8
Made = tuple[nn.Module, tuple[Tensor, ...]]


class Net(nn.Module):
    """Two layers that the modules below put together in their own ways."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def loss(self, y: Tensor) -> Tensor:
        return y.square().mean()


class Detached(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.loss(self.down(hidden) * hidden.detach().sum(1, keepdim=True))


class DetachedView(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        turned = hidden.view(-1, 2, 4).detach().transpose(1, 2).tanh()
        return self.loss(hidden.view(-1, 2, 4).unsqueeze(-1) * turned.unsqueeze(1))


class DetachedMean(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.loss(hidden * hidden.detach().tanh().mean())  # refused with 2 microbatches


class WithoutGradient(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        with torch.no_grad():
            target = self.down(hidden).tanh()
        return self.loss(self.down(hidden) - target)


class PartWithoutGradient(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        with torch.no_grad():
            target = self.down(hidden).tanh()
            with torch.enable_grad():
                again = self.up(x).square()
            scale = again.mean(1, keepdim=True)
        return self.loss((self.down(hidden) - target) * scale) + again.mean()


class Decorated(Net):
    @torch.no_grad()
    def target(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.up(x).chunk(2, dim=1)
        return first, second

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.target(x)
        return self.loss(self.down(self.up(x)) - first * second)


class DataOfTensor(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.down(self.up(x)) - self.up(x).data[:, :4])


class Running(Net):
    """A mean of what was seen, which has no gradient and which the loss does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        self.seen.mul_(0.9).add_(hidden.mean(0).detach(), alpha=0.1)  # refused
        return self.loss(self.down(hidden))


class RunningRead(Running):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        self.seen.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)  # refused
        return self.loss(self.down(hidden - self.seen))


class FixedBuffer(Running):
    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.down(self.up(x) - (self.seen + 1).detach()))


class Calls(Net):
    """A weight of the loss that grows with the calls of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # refused
        return self.loss(self.down(self.up(x))) * min(1.0, self.calls / 10)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.up(x))  # refused with 2 microbatches
        return self.loss(self.down(hidden))


class NormedEvaluated(Normed):
    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        hidden = functional.batch_norm(self.up(x), norm.running_mean, norm.running_var, norm.weight, norm.bias)
        return self.loss(self.down(hidden))


class Valid(Net):
    """A mean over the tokens that are no padding."""

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        valid = counts > 0
        points = self.down(self.up(x)).square().mean(-1)
        return (points * valid).sum() / valid.sum()  # refused with 2 microbatches


class Ignored(Net):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.down(self.up(x)).flatten(0, 1)
        return functional.cross_entropy(logits, target.flatten())  # refused with 2 microbatches: ignored


class Balanced(Net):
    """A loss of balance between four experts: the share of samples of each times its mean probability."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.down(self.up(x)).softmax(-1)
        share = functional.one_hot(scores.argmax(-1), 4).to(scores.dtype).mean(0)
        balance = 4 * (share * scores.mean(0)).sum()  # refused with 2 microbatches
        return self.loss(scores) + 0.1 * balance


class Sum(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)).square().sum()  # refused with 2 microbatches


class Contrasted(Net):
    """Every sample is told from all others."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.up(x), self.up(x.flip(1))
        scores = left @ right.T  # refused with 2 microbatches
        return functional.cross_entropy(scores, torch.arange(x.shape[0]))


class Matched(Net):
    """Two views of a sample find each other among all of the batch, either way."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = functional.normalize(self.up(x), dim=-1), functional.normalize(self.up(x.flip(1)), dim=-1)
        scores = left @ right.T / 0.1  # refused with 2 microbatches
        return -(scores.log_softmax(0) + scores.log_softmax(1)).diagonal().mean() / 2


class Regularised(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.down(self.up(x))) + 0.1 * self.up.weight.square().sum()


class Dropped(Net):
    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.dropout = nn.Dropout(share)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.up(x))  # refused: dropped
        return self.loss(self.down(hidden))


class Noised(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.down(self.up(x + torch.randn_like(x))))  # refused


class NoisedAside(Net):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.tensor(0.1).uniform_(0, 1)  # refused
        return self.loss(self.down(self.up(x)) * noise)


class InPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden.mul_(2).add_(1)
        hidden = hidden.relu().clone()
        hidden[:, 0] = 1.0
        hidden += 1
        return self.loss(self.down(hidden))


class Spoiled(Net):
    """What backward reads is changed: torch itself does not run it."""

    def forward(self, x: Tensor) -> Tensor:  # refused
        hidden = self.up(x).relu()
        hidden += 1
        return self.loss(self.down(hidden))


class InputInPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)  # refused
        return self.loss(self.down(self.up(x)))


class ParameterInPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)  # refused
        return self.loss(self.down(self.up(x)))


class Branching(Net):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # refused
            return self.loss(self.up(x))
        return self.loss(self.down(self.up(x)))


class Item(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.down(self.up(x))) * x.sum().item()  # refused


class Selected(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.down(self.up(x))[x[:, 0] > 0])  # refused


class Integers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 4)

    def forward(self, tokens: Tensor, kinds: Tensor) -> Tensor:
        return self.loss(self.down(self.up(self.table(tokens) * kinds.remainder(3).unsqueeze(-1))))


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(4, 8)
        self.again.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.again(self.down(self.up(x).tanh())))


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.down(x @ self.up.weight.T)
        return self.loss(self.up(x))


class Views(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).view(x.shape[0], 2, 4)
        hidden = hidden.transpose(1, 2).unsqueeze(1).expand(-1, 3, -1, -1).reshape(x.shape[0], 3, 8)
        return self.loss(self.down(hidden).permute(0, 2, 1).contiguous().flatten(1)[:, ::2])


class Parts(Net):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self.up(x).chunk(2, dim=-1)
        one, two, _ = self.down(torch.cat([first * second, second], dim=-1)).split([1, 2, 1], dim=-1)
        return self.loss(one * two) + torch.stack([first, second]).mean() + first.unbind(1)[0].mean()


class Several(Net):
    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return self.loss(self.down(self.up(x) * self.up(y)) * scale[:, None])


class Halved(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.down(self.up(x))).to(torch.bfloat16)  # refused


class Doubled(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.down(self.up(x))).double()


class HalfWay(Net):
    """Norms in fp32, as those of Llama are, whatever the module is in."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        wide = hidden.to(torch.float32)
        return self.loss(self.down((wide * wide.square().mean(-1, keepdim=True).rsqrt()).to(hidden.dtype)))


class Mixed(Net):
    """Autocast leaves fp64 alone, so that no verification in fp64 would show what it does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):  # refused
            hidden = self.down(self.up(x))
        return self.loss(hidden.float())


class Vector(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.down(self.up(x))).reshape(1)


class Recomputed(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda y: self.up(y).relu(), x, use_reentrant=False)
        return self.loss(self.down(hidden))


class RecomputedByReentry(Net):
    """The export sees a forward without gradients; their recomputation is in a function that it does not see."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(torch.tanh, self.up(x), use_reentrant=True)  # refused
        return self.loss(self.down(hidden))


class Straight(torch.autograd.Function):
    """Rounds forward, and hands gradients through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class StraightThrough(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.down(Straight.apply(self.up(x))))  # refused


class StraightWritten(Net):
    """The same, as most write it."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.loss(self.down(hidden + (hidden.round() - hidden).detach()))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradients[0]


class TrueFunction(Net):
    """A function of one's own whose gradient is that of what it does."""

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.down(Square.apply(self.up(x))))


class Hooked(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden.register_hook(lambda gradient: 2 * gradient)  # refused
        return self.loss(self.down(hidden))


class ParameterHooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.up.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    def forward(self, x: Tensor) -> Tensor:  # refused
        return self.loss(self.down(self.up(x)))


class ForwardHooked(Net):
    """Hooks of forward are part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up.register_forward_hook(lambda module, inputs, result: result.tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.down(self.up(x)))


class Printed(Net):
    def forward(self, x: Tensor) -> Tensor:
        print("a step of a batch of", x.shape[0])
        return self.loss(self.down(self.up(x)))


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.down(self.up(x).tanh()))


class ZeroFirst(Balanced):
    """Gradients at the first step tell nothing of how samples interact: all scores are alike."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.down(self.up(x)).softmax(-1)
        balance = scores.mean(0).square().sum()  # refused with 2 microbatches
        return self.loss(scores) + balance


def _floats(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape)


def _of(kind: type[nn.Module], *inputs: Tensor) -> Made:
    return kind(), inputs or (_floats(4),)


def valid() -> Made:
    counts = (torch.arange(BATCH * 3).reshape(BATCH, 3) % 5).masked_fill(torch.arange(BATCH)[:, None] < 3, 0)
    return Valid(), (_floats(3, 4), counts)


def ignored() -> Made:
    target = torch.randint(0, 4, (BATCH, 3))
    target[:3, 1:] = -100
    return Ignored(), (_floats(3, 4), target)


def nothing_ignored() -> Made:
    return Ignored(), (_floats(3, 4), torch.randint(0, 4, (BATCH, 3)))


def integers() -> Made:
    return Integers(), (torch.randint(0, 16, (BATCH, 3)), torch.randint(0, 9, (BATCH, 3), dtype=torch.int32))


def several() -> Made:
    return Several(), (_floats(4), _floats(4), torch.rand(BATCH))


def dropped_nothing() -> Made:
    return Dropped(0.0), (_floats(4),)


def full_backward_hooked() -> Made:
    module = Net()
    module = Hidden(module.up, module.down)
    module.up.register_full_backward_hook(lambda layer, given, received: tuple(2 * each for each in given))
    return module, (_floats(4),)


class Hidden(Net):
    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.down(torch.relu(x @ self.up.weight.T)))  # refused
        return self.loss(hidden)


def _simple(kind: type[nn.Module]) -> Any:
    return lambda: _of(kind)


detached, detached_view, detached_mean = map(_simple, (Detached, DetachedView, DetachedMean))
without_gradient = _simple(WithoutGradient)
part_without_gradient, decorated, data_of_tensor = map(_simple, (PartWithoutGradient, Decorated, DataOfTensor))
running, running_read, fixed_buffer, calls = map(_simple, (Running, RunningRead, FixedBuffer, Calls))
normed, normed_evaluated, balanced, sums = map(_simple, (Normed, NormedEvaluated, Balanced, Sum))
contrasted, matched, regularised = map(_simple, (Contrasted, Matched, Regularised))
dropped, noised = map(_simple, (Dropped, Noised))
noised_aside, in_place, input_in_place = map(_simple, (NoisedAside, InPlace, InputInPlace))
spoiled = _simple(Spoiled)
parameter_in_place, branching, item, selected = map(_simple, (ParameterInPlace, Branching, Item, Selected))
tied, unused, views, parts, halved = map(_simple, (Tied, Unused, Views, Parts, Halved))
doubled, half_way, mixed, vector, recomputed = map(_simple, (Doubled, HalfWay, Mixed, Vector, Recomputed))
recomputed_by_reentry, straight_through = map(_simple, (RecomputedByReentry, StraightThrough))
straight_written, true_function, hooked = map(_simple, (StraightWritten, TrueFunction, Hooked))
parameter_hooked, forward_hooked, printed = map(_simple, (ParameterHooked, ForwardHooked, Printed))
frozen, zero_first = map(_simple, (Frozen, ZeroFirst))
