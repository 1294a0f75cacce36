"""Vision transformers of timm and hybrids, with few and narrow layers."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models import focalnet, mvitv2, nest, pit, tiny_vit, volo

from experiments.zoo.entry import CLASSES, Entry, each, normal
from experiments.zoo.sources.timm_models import created_entries

_VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
_PYRAMID: dict[str, Any] = {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 32), "num_heads": (1, 2, 2, 2)}
_SWIN: dict[str, Any] = {
    **{"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 8},
    **{"depths": (2, 2), "num_heads": (1, 2)},
}
_LEVIT: dict[str, Any] = {"embed_dim": (16, 24, 32), "key_dim": 8, "num_heads": (2, 2, 2), "depth": (1, 1, 1)}
_64: dict[str, Any] = {"img_size": 64, "_size": 64}
_160: dict[str, Any] = {"img_size": 160, "_size": 160}

CREATED: dict[str, dict[str, Any]] = {
    **each(("test_vit", "test_vit2", "test_vit3"), {"img_size": 32}),
    "test_vit_relpos": {"img_size": 32},
    "test_coatnet": _64 | {},
    **each(
        (
            *("vit_tiny_patch16_224", "vit_base_patch16_clip_224", "vit_small_patch16_rope_224"),
            *("vit_relpos_small_patch16_224", "vit_srelpos_small_patch16_224", "vit_base_patch16_siglip_224"),
            *("vit_base_patch16_rpn_224", "vit_medium_patch16_gap_240", "vit_base_patch16_xp_224"),
            *("beit_base_patch16_224", "beitv2_base_patch16_224", "deit_tiny_patch16_224"),
            *("deit_tiny_distilled_patch16_224", "deit3_small_patch16_224", "cait_xxs24_224"),
        ),
        _VIT,
    ),
    "vit_small_patch14_reg4_dinov2": _VIT | {"img_size": 28, "_size": 28, "patch_size": 14},
    "vit_small_patch16_dinov3": _VIT | {"patch_size": 16},
    "samvit_base_patch16_224": _VIT | {"window_size": 2},
    "naflexvit_base_patch16_gap": {"embed_dim": 24, "depth": 2, "num_heads": 3},
    "eva02_tiny_patch14_224": _VIT | {"img_size": 28, "_size": 28, "patch_size": 14},
    "convit_tiny": _VIT | {"local_up_to_layer": 1, "embed_dim": 8},
    "tnt_s_legacy_patch16_224": {
        **{"img_size": 32, "embed_dim": 24, "inner_dim": 8, "depth": 2},
        **{"num_heads_outer": 2, "num_heads_inner": 2},
    },
    "crossvit_tiny_240": {
        **{"img_size": 48, "_size": 48, "img_scale": (1.0, 1.0), "patch_size": (12, 16), "embed_dim": (12, 24)},
        **{"depth": ((1, 2, 0), (1, 2, 0)), "num_heads": (2, 2)},
    },
    "xcit_nano_12_p16_224": {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 3, "cls_attn_layers": 1},
    **each(("swin_tiny_patch4_window7_224", "swin_s3_tiny_224"), _SWIN),
    **each(("swinv2_tiny_window8_256", "swinv2_cr_tiny_224"), _SWIN),
    "davit_tiny": _PYRAMID | {"num_heads": (1, 2, 2, 4)},
    "pvt_v2_b0": _PYRAMID,
    "twins_pcpvt_small": _PYRAMID | _64,
    "twins_svt_small": _PYRAMID | _64 | {"depths": (1, 1, 1, 2)},
    "visformer_tiny": _64 | {"embed_dim": 24, "init_channels": 8, "depth": (1, 1, 1), "num_heads": 2},
    "levit_128s": _LEVIT | {"_size": 224},
    "levit_conv_128s": _LEVIT | {"_size": 224},
    "efficientvit_m0": {
        **{"embed_dim": (8, 16, 32), "key_dim": (4, 4, 4), "depth": (1, 1, 1), "num_heads": (2, 2, 2)},
        **{"window_size": (2, 2, 2), **_64},
    },
    "efficientformer_l1": {"depths": (1, 1, 1, 2), "embed_dims": (8, 16, 16, 32), "_size": 224},
    "hiera_tiny_224": {"img_size": (64, 64), "_size": 64, "embed_dim": 8, "stages": (1, 1, 1, 1)},
}

_BUILT = {
    "focalnet": (
        partial(focalnet.FocalNet, num_classes=CLASSES, embed_dim=8, depths=(1, 1, 1, 1)),
        32,
    ),
    "mvitv2": (
        partial(
            mvitv2.MultiScaleVit,
            mvitv2.MultiScaleVitCfg(
                depths=(1, 1),
                embed_dim=(8, 16),
                num_heads=(1, 2),
                stride_q=((1, 1), (2, 2)),
                stride_kv=((2, 2), (1, 1)),
            ),
            img_size=32,
            num_classes=CLASSES,
        ),
        32,
    ),
    "nest": (
        partial(
            nest.Nest,
            img_size=32,
            patch_size=2,
            embed_dims=(8, 16, 16),
            num_heads=(1, 2, 2),
            depths=(1, 1, 1),
            num_classes=CLASSES,
        ),
        32,
    ),
    "pit": (
        partial(
            pit.PoolingVisionTransformer,
            img_size=32,
            patch_size=8,
            stride=4,
            stem_type="overlap",
            base_dims=(8, 8, 8),
            depth=(1, 1, 1),
            heads=(1, 2, 4),
            mlp_ratio=2,
            num_classes=CLASSES,
        ),
        32,
    ),
    "tiny_vit": (
        partial(
            tiny_vit.TinyVit,
            embed_dims=(8, 16, 16, 32),
            depths=(1, 1, 1, 1),
            num_heads=(1, 2, 2, 2),
            window_sizes=(2, 2, 2, 2),
            num_classes=CLASSES,
        ),
        64,
    ),
    "volo": (
        partial(
            volo.VOLO,
            layers=(1, 1),
            img_size=32,
            num_classes=CLASSES,
            patch_size=8,
            stem_hidden_dim=8,
            embed_dims=(12, 24),
            num_heads=(2, 2),
            downsamples=(True, False),
            outlook_attention=(True, False),
            mlp_ratio=2.0,
            use_aux_head=False,
            post_layers=("ca",),
        ),
        32,
    ),
}

ENTRIES = [
    *created_entries(CREATED),
    *(Entry(name, "timm", build, normal(3, size, size)) for name, (build, size) in _BUILT.items()),
]
