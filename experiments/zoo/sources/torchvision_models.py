"""Classifiers of torchvision, with few and narrow layers where their constructors allow it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn
from torchvision.models import (
    convnext,
    densenet,
    efficientnet,
    mnasnet,
    mobilenetv2,
    regnet,
    resnet,
    squeezenet,
    swin_transformer,
    vgg,
    vision_transformer,
)
from torchvision.models import shufflenetv2 as shuffle
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.efficientnet import FusedMBConvConfig, MBConvConfig
from torchvision.models.video import mvit

from experiments.zoo.entry import CLASSES, Entry, normal


class NarrowResNet(resnet.ResNet):
    """A ResNet whose stages have at most 32 channels."""

    def _make_layer(self, block: type[nn.Module], planes: int, blocks: int, **options: object) -> nn.Sequential:
        return super()._make_layer(block, planes // 16, blocks, **options)  # type: ignore[arg-type]

    def __init__(self, block: type, layers: list[int], **options: object) -> None:
        super().__init__(block, layers, num_classes=CLASSES, **options)  # type: ignore[arg-type]
        self.fc = nn.Linear(32 * block.expansion, CLASSES)


def _vgg(norm: bool) -> nn.Module:
    features = vgg.make_layers([8, "M", 16, "M"], batch_norm=norm)
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))


def _convnext() -> nn.Module:
    blocks = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)]
    return convnext.ConvNeXt(blocks, num_classes=CLASSES, layer_scale=0.1)


def _efficientnet(fused: bool) -> nn.Module:
    first = FusedMBConvConfig(2, 3, 1, 8, 8, 1) if fused else MBConvConfig(1, 3, 1, 8, 8, 1)
    blocks = [first, MBConvConfig(2, 3, 2, 8, 16, 1), MBConvConfig(2, 5, 2, 16, 16, 2)]
    return efficientnet.EfficientNet(blocks, 0.0, 0.0, num_classes=CLASSES, last_channel=32)


def _regnet(squeeze: float | None) -> nn.Module:
    widths = regnet.BlockParams.from_init_params(depth=4, w_0=8, w_a=8.0, w_m=2.0, group_width=8, se_ratio=squeeze)
    return regnet.RegNet(widths, num_classes=CLASSES, stem_width=8)


def _swin(block: type[nn.Module], merge: type[nn.Module]) -> nn.Module:
    return swin_transformer.SwinTransformer(
        [4, 4], 8, [2, 2], [1, 2], [4, 4], num_classes=CLASSES, block=block, downsample_layer=merge
    )


_IMAGES: dict[str, Callable[[], nn.Module]] = {
    "resnet18": partial(NarrowResNet, resnet.BasicBlock, [1, 1, 1, 1]),
    "resnet50": partial(NarrowResNet, resnet.Bottleneck, [1, 1, 1, 1], width_per_group=32),
    "vgg": partial(_vgg, False),
    "vgg_bn": partial(_vgg, True),
    "densenet": partial(densenet.DenseNet, 4, (2, 2), 8, 2, num_classes=CLASSES),
    "mobilenet_v2": partial(mobilenetv2.MobileNetV2, CLASSES, 0.1, [[1, 8, 1, 1], [6, 16, 2, 2], [6, 32, 1, 2]]),
    "mnasnet": partial(mnasnet.MNASNet, 0.1, CLASSES),
    "shufflenet_v2": partial(shuffle.ShuffleNetV2, [2, 2, 2], [8, 16, 16, 32, 32], CLASSES),
    "squeezenet": partial(squeezenet.SqueezeNet, "1_1", CLASSES),
    "convnext": _convnext,
    "efficientnet": partial(_efficientnet, False),
    "efficientnet_v2": partial(_efficientnet, True),
    "regnet_x": partial(_regnet, None),
    "regnet_y": partial(_regnet, 0.25),
    "swin": partial(_swin, swin_transformer.SwinTransformerBlock, swin_transformer.PatchMerging),
    "swin_v2": partial(_swin, swin_transformer.SwinTransformerBlockV2, swin_transformer.PatchMergingV2),
    "vit": partial(vision_transformer.VisionTransformer, 32, 8, 2, 2, 16, 32, num_classes=CLASSES),
}

ENTRIES = [
    *(Entry(name, "torchvision", build, normal(3, 32, 32)) for name, build in _IMAGES.items()),
    Entry(
        "mvit_v1",
        "torchvision",
        lambda: mvit.MViT(
            (16, 16),
            4,
            [mvit.MSBlockConfig(1, 16, 16, [3, 3, 3], [], [1, 1, 1], []) for _ in range(2)],
            residual_pool=False,
            residual_with_cls_embed=False,
            rel_pos_embed=False,
            proj_after_attn=False,
            num_classes=CLASSES,
            patch_embed_kernel=(3, 3, 3),
            patch_embed_stride=(2, 4, 4),
            patch_embed_padding=(1, 1, 1),
        ),
        normal(3, 4, 16, 16),
    ),
]
