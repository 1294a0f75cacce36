"""Networks of experiments, benchmarks and tests: LeNet-5 for 28x28 images, ResNets for 32x32 colour images.

Module names match the keys of published weights.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.datasets import CIFAR10, IMAGENET, Normalisation, data_file
from ifcomp.errors import SettingError

#: Best rate of Monte-Carlo dropout in the paper.
DROPOUT = 0.3


class LeNet(nn.Module):
    """LeNet-5 with ReLU and max-pooling: 61,706 parameters for ten classes and one channel.

    Args:
        num_classes: Number of classes K.
        channels: Channels of the 28x28 input images.
        dropout: Rate of dropout after the ReLUs of the fully connected layers.
    """

    def __init__(self, num_classes: int = 10, channels: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, channels, 28, 28] to logits [B, K]."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout(F.relu(self.fc1(x.flatten(1))))
        logits: Tensor = self.fc3(self.dropout(F.relu(self.fc2(x))))
        return logits


class PadShortcut(nn.Module):
    """Shortcut without parameters: every second pixel, then zero channels on both sides.

    Args:
        padding: Number of zero channels on each side.
    """

    def __init__(self, padding: int) -> None:
        super().__init__()
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, C + 2 * padding, H / 2, W / 2]."""
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, each followed by BatchNorm, around a shortcut.

    Args:
        inputs: Channels of the input.
        outputs: Channels of the output.
        stride: Stride of the first convolution.
        shortcut: Maps the block's input to the shape of its output.
        dropout: Rate of dropout after the ReLU between the convolutions.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, shortcut: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = shortcut
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, H / stride, W / stride]."""
        out = self.bn2(self.conv2(self.dropout(F.relu(self.bn1(self.conv1(x))))))
        return F.relu(out + self.shortcut(x))


class ThreeStageResNet(nn.Module):
    """CIFAR ResNet of 6n + 2 layers: three stages of n blocks with 16, 32, 64 channels, shortcuts without parameters.

    Args:
        blocks: Blocks per stage n.
        num_classes: Number of classes K.
    """

    def __init__(self, blocks: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _padded_stage(16, 16, blocks)
        self.layer2 = _padded_stage(16, 32, blocks)
        self.layer3 = _padded_stage(32, 64, blocks)
        self.linear = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, 3, 32, 32] to logits [B, K]."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


class ResNet18(nn.Module):
    """CIFAR ResNet-18: a 3x3 stem without pooling, eight blocks, projection shortcuts where the shape changes.

    Args:
        num_classes: Number of classes K.
        width: Channels of the first stage; the others have 2, 4 and 8 times as many.
        dropout: Rate of dropout in every block.
    """

    def __init__(self, num_classes: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        channels = [width * factor for factor in (1, 1, 1, 2, 2, 4, 4, 8, 8)]
        self.layers = nn.Sequential(*(_projected_block(*ends, dropout) for ends in pairwise(channels)))
        self.linear = nn.Linear(8 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, 3, 32, 32] to logits [B, K]."""
        x = self.layers(F.relu(self.bn1(self.conv1(x))))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


def resnet20(num_classes: int = 10) -> ThreeStageResNet:
    """CIFAR ResNet-20, 0.27 million parameters."""
    return ThreeStageResNet(3, num_classes)


def resnet56(num_classes: int = 10) -> ThreeStageResNet:
    """CIFAR ResNet-56, 0.85 million parameters."""
    return ThreeStageResNet(9, num_classes)


def resnet18(num_classes: int = 10, width: int = 64, dropout: float = 0.0) -> ResNet18:
    """CIFAR ResNet-18, 11.2 million parameters at width 64 and 2.8 million at width 32."""
    return ResNet18(num_classes, width, dropout)


#: Networks by name, as functions of the number of classes.
MODELS: Mapping[str, Callable[[int], nn.Module]] = {
    "lenet": LeNet,
    "lenet-dropout": partial(LeNet, dropout=DROPOUT),
    "resnet20": resnet20,
    "resnet56": resnet56,
    "resnet18": resnet18,
    "resnet18-width8": partial(resnet18, width=8),
    "resnet18-width32": partial(resnet18, width=32),
    "resnet18-dropout": partial(resnet18, dropout=DROPOUT),
    "resnet18-width32-dropout": partial(resnet18, width=32, dropout=DROPOUT),
}


def build(name: str, num_classes: int = 10) -> nn.Module:
    """Build a network with new weights by its name in `MODELS`.

    Raises:
        SettingError: If there is no such name.
    """
    if name not in MODELS:
        raise SettingError(f"There is no model '{name}'. Choose one of {', '.join(MODELS)}.")
    return MODELS[name](num_classes)


#: File of the weights in the data folder and normalisation of the inputs.
PRETRAINED: Mapping[str, tuple[str, Normalisation]] = {
    "resnet20": ("resnet20-12fca82f.safetensors", IMAGENET),
    "resnet56": ("resnet56-4bfd9763.safetensors", IMAGENET),
    "resnet18-width32": ("resnet18-width32.safetensors", CIFAR10),
    "resnet18": ("resnet18-width64.safetensors", CIFAR10),
}


def pretrained(name: str) -> tuple[nn.Module, Normalisation]:
    """Return a pretrained CIFAR-10 network in eval mode and the normalisation of its inputs.

    Raises:
        SettingError: If there are no weights of that name.
        MissingDataError: If the file of the weights is missing.
    """
    if name not in PRETRAINED:
        raise SettingError(f"There are no weights of '{name}'. Choose one of {', '.join(PRETRAINED)}.")
    file, normalisation = PRETRAINED[name]
    model = build(name)
    model.load_state_dict(load_file(data_file("weights", file)))
    return model.eval(), normalisation


def _padded_stage(inputs: int, outputs: int, blocks: int) -> nn.Sequential:
    if inputs == outputs:
        first = BasicBlock(inputs, outputs, 1, nn.Identity())
    else:
        first = BasicBlock(inputs, outputs, 2, PadShortcut(outputs // 4))
    return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1, nn.Identity()) for _ in range(blocks - 1)))


def _projected_block(inputs: int, outputs: int, dropout: float) -> BasicBlock:
    if inputs == outputs:
        return BasicBlock(inputs, outputs, 1, nn.Identity(), dropout)
    projection = nn.Sequential(nn.Conv2d(inputs, outputs, 1, 2, bias=False), nn.BatchNorm2d(outputs))
    return BasicBlock(inputs, outputs, 2, projection, dropout)
