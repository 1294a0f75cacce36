"""Convolutional networks and mixers of timm, with few and narrow layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import timm
from timm.layers import LayerNorm2d
from timm.models import byobnet, cspnet, efficientnet, metaformer, mlp_mixer, mobilenetv3, nfnet, regnet
from timm.models._efficientnet_builder import decode_arch_def
from torch import nn

from experiments.zoo.entry import CLASSES, Entry, each, normal

_FOUR: dict[str, Any] = {"layers": (1, 1, 1, 1), "channels": (8, 16, 16, 32)}
_BOTTLENECK: dict[str, Any] = {"layers": (1, 1, 1, 1), "channels": (8, 8, 8, 8)}
_STAGES: dict[str, Any] = {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32)}

#: Arguments of ``timm.create_model`` by name.
CREATED: dict[str, dict[str, Any]] = {
    **each(("test_byobnet", "test_convnext", "test_convnext2", "test_convnext3", "test_mambaout"), {}),
    **each(("test_efficientnet", "test_efficientnet_evos", "test_efficientnet_gn"), {}),
    **each(("test_efficientnet_ln", "test_nfnet", "test_resnet"), {}),
    "resnet10t": {"channels": (8, 16, 16, 32), "stem_width": 8},
    **each(("resnet18", "seresnet18", "skresnet18", "resnetblur18", "resnet18d"), _FOUR),
    **each(("resnet26", "ecaresnet26t", "res2net50_26w_4s", "resnest14d"), _BOTTLENECK),
    "resnext50_32x4d": {"layers": (1, 1, 1, 1), "channels": (8, 8, 8, 8), "cardinality": 2, "base_width": 32},
    "resnetv2_18": _FOUR | {"stem_chs": 8},
    "densenet121": {"growth_rate": 4, "block_config": (2, 2, 2, 2)},
    "dla34": {"channels": [8, 8, 8, 16, 16, 32]},
    "dpn48b": {"k_sec": (1, 1, 1, 1), "inc_sec": (4, 4, 4, 4), "k_r": 8, "groups": 2, "num_init_features": 8},
    **each(("convnext_atto", "convnextv2_atto", "convnext_atto_ols", "inception_next_atto"), _STAGES),
    "mambaout_femto": _STAGES,
    "tf_efficientnetv2_b0": {"channel_multiplier": 0.1, "depth_multiplier": 0.1},
    "tf_efficientnetv2_s": {"channel_multiplier": 0.1, "depth_multiplier": 0.1},
    "starnet_s050": {"base_dim": 8, "depths": (1, 1, 1, 1)},
    "fasternet_t0": {"embed_dim": 8, "depths": (1, 1, 1, 1)},
    "fastvit_t8": {"layers": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 32)},
    "repvit_m0_9": {"embed_dim": (8, 16, 16, 32), "depth": (1, 1, 1, 1)},
    "rexnet_100": {"width_mult": 0.1},
    "edgenext_xx_small": {"dims": (8, 16, 24, 32), "depths": (1, 1, 2, 1)},
    "swiftformer_xs": {"layers": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 32)},
    "sequencer2d_s": {
        **{"layers": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 16), "hidden_sizes": (4, 8, 8, 8)},
        **{"img_size": 56, "_size": 56},
    },
}


def create(name: str, options: dict[str, Any]) -> nn.Module:
    """Create a model of timm with three classes."""
    return timm.create_model(name, num_classes=CLASSES, **options)


def created_entries(table: dict[str, dict[str, Any]]) -> list[Entry]:
    """Return entries of a table of arguments; ``_size`` is the side of the images, 32 by default."""
    entries = []
    for name, options in table.items():
        size = options.get("_size", 32)
        given = {key: value for key, value in options.items() if key != "_size"}
        entries.append(Entry(name, "timm", partial(create, name, given), normal(3, size, size)))
    return entries


def _metaformer(mixer: Callable[..., nn.Module] | list[Callable[..., nn.Module]], **options: Any) -> nn.Module:
    return metaformer.MetaFormer(
        depths=(1, 1, 1, 1), dims=(8, 16, 32, 32), num_classes=CLASSES, token_mixers=mixer, **options
    )


def _mixer(block: type[nn.Module], **options: Any) -> nn.Module:
    return mlp_mixer.MlpMixer(
        CLASSES, img_size=32, patch_size=8, num_blocks=2, embed_dim=16, block_layer=block, **options
    )


def _regnet(**options: Any) -> nn.Module:
    return regnet.RegNet(regnet.RegNetCfg(depth=8, w0=8, wa=8.0, wm=2.0, group_size=8, **options), num_classes=CLASSES)


def _norm_free(**options: Any) -> nn.Module:
    config = nfnet.NfCfg(depths=(1, 1, 1, 1), channels=(16, 16, 32, 32), stem_chs=8, group_size=8, **options)
    return nfnet.NormFreeNet(config, num_classes=CLASSES)


def _byob(block: str, stem: str = "3x3", **options: Any) -> nn.Module:
    blocks = tuple(byobnet.ByoBlockCfg(type=block, d=1, c=c, s=2, gs=0, br=0.5) for c in (16, 32))
    config = byobnet.ByoModelCfg(blocks=blocks, stem_type=stem, stem_chs=8, **options)
    return byobnet.ByobNet(config, num_classes=CLASSES)


def _csp(stage: str, block_ratio: float) -> nn.Module:
    stages = cspnet.CspStagesCfg(
        depth=(1, 1), out_chs=(16, 32), stride=2, bottle_ratio=1.0, block_ratio=block_ratio, stage_type=stage
    )
    return cspnet.CspNet(cspnet.CspModelCfg(cspnet.CspStemCfg(8), stages), num_classes=CLASSES)


def _efficient(*stages: str, family: Callable[..., nn.Module] = efficientnet.EfficientNet) -> nn.Module:
    blocks = decode_arch_def([[stage] for stage in stages])
    return family(block_args=blocks, num_classes=CLASSES, num_features=32, stem_size=8)


_BUILT: dict[str, Callable[[], nn.Module]] = {
    "poolformer": partial(_metaformer, metaformer.Pooling, norm_layers=metaformer.GroupNorm1),
    "convformer": partial(_metaformer, metaformer.SepConv, norm_layers=metaformer.LayerNorm2dNoBias),
    "caformer": partial(
        _metaformer,
        [metaformer.SepConv, metaformer.SepConv, metaformer.Attention, metaformer.Attention],
        norm_layers=[metaformer.LayerNorm2dNoBias] * 2 + [metaformer.LayerNormNoBias] * 2,
    ),
    "mlp-mixer": partial(_mixer, mlp_mixer.MixerBlock),
    "resmlp": partial(_mixer, mlp_mixer.ResBlock, norm_layer=mlp_mixer.Affine, mlp_ratio=4),
    "gmlp": partial(_mixer, mlp_mixer.SpatialGatingBlock, mlp_layer=mlp_mixer.GatedMlp, mlp_ratio=4),
    "regnetx": _regnet,
    "regnety": partial(_regnet, se_ratio=0.25),
    "regnetz": partial(_regnet, bottle_ratio=2.0, linear_out=True, downsample=None),
    "nf_resnet": _norm_free,
    "nfnet, squeeze and excite": partial(_norm_free, attn_layer="se", attn_kwargs={"rd_ratio": 0.5}, skipinit=True),
    "eca_nfnet": partial(_norm_free, attn_layer="eca", attn_kwargs={}, extra_conv=True, act_layer="gelu"),
    "mobilenetv1": partial(_efficient, "dsa_r1_k3_s1_c8", "dsa_r2_k3_s2_c16"),
    "mobilenetv2": partial(_efficient, "ds_r1_k3_s1_c8", "ir_r2_k3_s2_e4_c16"),
    "mobilenetv3": partial(
        _efficient,
        *("ds_r1_k3_s1_e1_c8_se0.25_nre", "ir_r2_k5_s2_e3_c16_se0.25", "cn_r1_k1_s1_c24"),
        family=mobilenetv3.MobileNetV3,
    ),
    "mobilenetv4": partial(
        _efficient, "uir_r1_a3_k5_s2_e2_c16", "uir_r1_a0_k0_s1_e2_c16", family=mobilenetv3.MobileNetV3
    ),
    "lcnet": partial(_efficient, "dsa_r1_k3_s1_c8", "dsa_r1_k5_s2_c16_se0.25", family=mobilenetv3.MobileNetV3),
    "efficientnet": partial(_efficient, "ds_r1_k3_s1_e1_c8_se0.25", "ir_r2_k5_s2_e4_c16_se0.25"),
    "mixnet": partial(_efficient, "ds_r1_k3_s1_e1_c8", "ir_r2_k3.5_a1.1_p1.1_s2_e4_c16_se0.5_nsw"),
    "condconv": partial(_efficient, "ds_r1_k3_s1_e1_c8_se0.25", "ir_r2_k3_s2_e4_c16_se0.25_cc4"),
    "edge residual": partial(_efficient, "er_r1_k3_s1_e2_c8", "er_r2_k3_s2_e4_c16"),
    "repvgg": partial(_byob, "rep"),
    "mobileone": partial(_byob, "one"),
    "gernet": partial(_byob, "bottle"),
    "cspresnet": partial(_csp, "csp", 0.5),
    "darknet": partial(_csp, "dark", 1.0),
    "cs3darknet": partial(_csp, "cs3", 0.5),
    "convnext, LayerNorm2d": partial(create, "convnext_atto", _STAGES | {"norm_layer": LayerNorm2d}),
}

ENTRIES = [
    *created_entries(CREATED),
    *(Entry(name, "timm", build, normal(3, 32, 32)) for name, build in _BUILT.items()),
]
