"""Random modules from bytes: arbitrary trees for the inventory, and small runnable networks for the influence."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fuzz.drawing import Draw

WIDTH, CLASSES = 4, 3


class Scaled(nn.Module):
    """Multiplication by a parameter that belongs to no supported layer."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled inputs."""
        return x * self.scale


class Attending(nn.Module):
    """Self-attention over three copies of the features."""

    def __init__(self, heads: int, bias: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, heads, bias=bias, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, WIDTH] to [B, WIDTH]."""
        tokens = x.unsqueeze(1).expand(-1, 3, -1)
        return self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1)


class Residual(nn.Module):
    """``x + f(x)``, or ``x + f(f(x))`` with ``twice``."""

    def __init__(self, inner: nn.Module, twice: bool) -> None:
        super().__init__()
        self.inner, self.twice = inner, twice

    def forward(self, x: Tensor) -> Tensor:
        """Map any shape to itself."""
        return x + self.inner(self.inner(x) if self.twice else x)


class Shaped(nn.Module):
    """A layer on reshaped inputs, followed by a linear layer."""

    def __init__(self, inner: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.inner, self.shape, self.out = inner, shape, nn.LazyLinear(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, WIDTH] to [B, WIDTH]."""
        return self.out(self.inner(x.reshape(len(x), *self.shape)).flatten(1))


def layer(draw: Draw, depth: int = 2) -> nn.Module:
    """Return a random layer that maps [B, WIDTH] to [B, WIDTH]."""
    makers: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(WIDTH, WIDTH, bias=bool(draw.number(0, 1))),
        nn.ReLU,
        nn.Tanh,
        lambda: nn.Dropout(0.5),
        lambda: nn.LayerNorm(WIDTH, elementwise_affine=bool(draw.number(0, 1))),
        lambda: nn.BatchNorm1d(WIDTH, affine=bool(draw.number(0, 1)), track_running_stats=draw.number(0, 3) > 0),
        lambda: nn.GroupNorm(draw.choice((1, 2, 4)), WIDTH),
        lambda: Scaled(draw.choice(((1,), (WIDTH,), ()))),
        lambda: Attending(draw.choice((1, 2)), bool(draw.number(0, 1))),
        lambda: Shaped(_convolution(draw, nn.Conv1d), (2, 2)),
        lambda: Shaped(_convolution(draw, nn.Conv2d), (2, 2, 1)),
        lambda: nn.PReLU(draw.choice((1, WIDTH))),
        lambda: nn.RMSNorm(WIDTH),
    ]
    if depth:
        makers += [
            lambda: Residual(layer(draw, depth - 1), bool(draw.number(0, 1))),
            lambda: nn.Sequential(layer(draw, depth - 1), layer(draw, depth - 1)),
        ]
    return draw.choice(makers)()


def network(data: bytes) -> nn.Sequential | None:
    """Return a classifier of [B, WIDTH] with frozen, tied, huge or NaN parameters; None if it does not run."""
    draw = Draw(data)
    torch.manual_seed(draw.number(0, 255))
    parts = [layer(draw) for _ in range(draw.number(0, 4))]
    built = nn.Sequential(*parts, nn.Linear(WIDTH, draw.choice((CLASSES, 2, 1)), bias=bool(draw.number(0, 1))))
    try:
        with torch.no_grad():
            built.eval()(torch.zeros(1, WIDTH))  # initialises lazy layers
    except (RuntimeError, ValueError):
        return None
    _disturb(built, draw)
    return built.to(draw.choice((torch.float32, torch.float64, torch.float32, torch.bfloat16)))


def tree(data: bytes) -> nn.Module:
    """Return a tree of arbitrary modules that need not run."""
    draw = Draw(data)
    makers: list[Callable[[], nn.Module]] = [
        lambda: layer(draw),
        lambda: nn.LSTM(2, 3),
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        lambda: nn.Embedding(5, 4, padding_idx=draw.choice((None, 0)), sparse=bool(draw.number(0, 1))),
        lambda: nn.EmbeddingBag(5, 4),
        lambda: nn.LazyLinear(3),
        lambda: nn.ParameterList([nn.Parameter(torch.zeros(draw.number(0, 3), 2)) for _ in range(draw.number(0, 3))]),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        lambda: nn.Linear(0, 3) if draw.number(0, 1) else nn.Linear(3, 0),
        lambda: nn.Conv2d(2, 4, 3, groups=2, padding_mode=draw.choice(("zeros", "circular", "reflect"))),
        lambda: nn.ConvTranspose2d(2, 2, 2),
        lambda: nn.Linear(4, 4, device="meta"),
        lambda: nn.Linear(4, 4).to(draw.choice((torch.float16, torch.complex64, torch.bfloat16))),
        nn.Identity,
        lambda: nn.ModuleDict({draw.choice(("a", "inner", " ", "weight", "*", "[x]")): nn.Linear(2, 2)}),
        lambda: nn.InstanceNorm2d(3, affine=True),
        lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 8, [2, 4]),
    ]
    built = nn.Sequential(*(draw.choice(makers)() for _ in range(draw.number(0, 5))))
    _disturb(built, draw)
    return built


def _convolution(draw: Draw, kind: type[nn.Conv1d] | type[nn.Conv2d]) -> nn.Module:
    groups = draw.choice((1, 2))
    mode = draw.choice(("zeros", "circular", "replicate"))
    settings = {"stride": draw.number(1, 2), "padding": draw.number(0, 1), "dilation": draw.number(1, 2)}
    return kind(2, 2 * draw.number(1, 2), draw.number(1, 2), groups=groups, padding_mode=mode, **settings)


def _disturb(model: nn.Module, draw: Draw) -> None:
    """Freeze, scale or tie up to two parameters, or give them gradients."""
    for _ in range(draw.number(0, 2)):
        named = [(name, value) for name, value in model.named_parameters() if not nn.parameter.is_lazy(value)]
        if not named:
            return
        name, value = draw.choice(named)
        match draw.number(0, 5):
            case 0:
                value.requires_grad_(False)
            case 1 | 2 if value.device.type != "meta":
                factor = draw.choice((0.0, 1e-20, 1e20, float("inf"), float("nan")))
                value.data.mul_(factor)
            case 3:
                _tie(model, name, [other for other in named if other[1].shape == value.shape], draw)
            case 4:
                value.grad = torch.ones_like(value)


def _tie(model: nn.Module, name: str, candidates: list[tuple[str, nn.Parameter]], draw: Draw) -> None:
    path, _, attribute = name.rpartition(".")
    owner = model.get_submodule(path)
    if attribute in owner._parameters:
        owner.register_parameter(attribute, draw.choice(candidates)[1])
