"""The head applied to the features gives the logits of the model, for classifiers of every kind."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cases import LAYER_CASES, MODEL_CASES
from experiments.baselines.features import find_stages, split_classifier
from experiments.models import LeNet, resnet18, resnet20
from ifcomp.errors import ModelError

CASES = {case.name: case for case in (*LAYER_CASES, *MODEL_CASES)}


@pytest.mark.parametrize("name", ["linear", "linear_tokens", "lenet", "class_token", "tied", "embedding", "bert"])
def test_head_of_features_is_the_model(name: str) -> None:
    case = CASES[name]
    model, inputs = case.make(), case.sample(5)
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    features, head = split_classifier(model, inputs)
    assert_close(head(features(inputs)), output if isinstance(output, Tensor) else output.logits)
    assert features(inputs).shape == (5, head.in_features)


def test_features_are_the_input_of_the_last_linear() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3))
    x = torch.randn(5, 4, requires_grad=True)
    features, head = split_classifier(model, x)
    values = features(x)
    assert head is model[3]
    assert_close(values, model[0](x).relu())
    (gradient,) = torch.autograd.grad(values.sum(), x)
    assert gradient.abs().sum() > 0
    assert model.training
    assert model[1].training


class Twice(nn.Module):
    """The same Linear for features and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x).relu())


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)),
        nn.Sequential(nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 3, 1), nn.Flatten()),
        Twice(),
    ],
    ids=["scaled", "convolution", "twice"],
)
def test_models_without_a_head_are_refused(model: nn.Module) -> None:
    with pytest.raises(ModelError, match="not the output of a Linear that is called once"):
        split_classifier(model, torch.randn(2, 4))
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("model", "shape", "names"),
    [
        (resnet20(), (3, 32, 32), ["layer1", "layer2", "layer3"]),
        (resnet18(width=4), (3, 32, 32), ["layers.1", "layers.3", "layers.5", "layers"]),
        (LeNet(), (1, 28, 28), ["conv1", "conv2"]),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), (1, 4, 4), []),
    ],
    ids=["resnet20", "resnet18", "lenet", "perceptron"],
)
def test_stages_are_the_last_modules_of_every_resolution(
    model: nn.Module, shape: tuple[int, ...], names: list[str]
) -> None:
    stages = find_stages(model, torch.randn(2, *shape))
    by_module = {module: name for name, module in model.named_modules()}
    assert [by_module[module] for module in stages] == names
