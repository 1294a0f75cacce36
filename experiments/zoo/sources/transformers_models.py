"""Classifiers of transformers, with two layers of width 32 and a vocabulary of 60 tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers.utils import logging

from experiments.zoo.entry import CLASSES, Entry, Inputs, each, normal, pad_tokens, ragged_tokens

logging.set_verbosity_error()

_COMMON: dict[str, Any] = {
    **{"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    **{"max_position_embeddings": 64, "num_labels": CLASSES, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1},
}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}
_EXPERTS: dict[str, Any] = {
    **{"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"experts_implementation": "eager", "shared_expert_intermediate_size": 16},
}
_SEQ2SEQ: dict[str, Any] = {
    **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 2},
}
_T5: dict[str, Any] = {
    **{"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "num_decoder_layers": 1},
    **{"decoder_start_token_id": 0},
}

#: Arguments of the configuration by the name of the model, beside the common ones.
SEQUENCE: dict[str, dict[str, Any]] = {
    **each(
        (
            *("Bert", "Arcee", "BigBird", "BioGpt", "Bloom", "Camembert", "Data2VecText", "Deberta", "DebertaV2"),
            *("DiffLlama", "Doge", "Ernie", "Esm", "EuroBert", "FNet", "Flaubert", "GPT2", "GPTBigCode", "GPTNeoX"),
            *("IBert", "MPNet", "MegatronBert", "ModernBert", "ModernBertDecoder", "Mpt", "NomicBert"),
            *("Nystromformer", "OpenAIGPT", "Persimmon", "Phi", "RoFormer", "Roberta", "RobertaPreLayerNorm", "XLM"),
            *("Starcoder2", "Falcon", "XLMRobertaXL"),
        ),
        {},
    ),
    **each(
        (
            *("Llama", "Mistral", "Gemma", "Gemma2", "Glm", "Glm4", "Helium", "Olmo", "Olmo2", "Olmo3", "Phi3"),
            *(
                "Qwen2",
                "Qwen3",
                "SeedOss",
                "SmolLM3",
                "StableLm",
                "Exaone4",
                "HunYuanDenseV1",
                "Nemotron",
                "Gemma3Text",
            ),
        ),
        _GROUPED,
    ),
    **each(("Mixtral", "Qwen2Moe", "Qwen3Moe", "Phimoe"), _GROUPED | _EXPERTS),
    "Albert": {"embedding_size": 16},
    "Electra": {"embedding_size": 16},
    "ConvBert": {"embedding_size": 16, "head_ratio": 2, "conv_kernel_size": 3},
    "CTRL": {"n_embd": 32, "dff": 48, "n_layer": 2, "n_head": 4},
    "DistilBert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "Funnel": {
        **{"block_sizes": [1, 1], "num_hidden_layers": None, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48},
    },
    "GPTJ": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "GPTNeo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "LayoutLM": {"max_2d_position_embeddings": 16},
    "Longformer": {"attention_window": [4, 4]},
    "MobileBert": {"embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "RemBert": {"input_embedding_size": 16, "output_embedding_size": 16},
    "SqueezeBert": {"embedding_size": 32},
    "XLNet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "max_position_embeddings": None},
    "Bart": _SEQ2SEQ,
    "MBart": _SEQ2SEQ,
    "Mvp": _SEQ2SEQ,
    "PLBart": _SEQ2SEQ,
    "T5": _T5,
    "MT5": _T5,
    "UMT5": _T5,
    "Xmod": {"languages": ["en"], "default_language": "en"},
}

_VIT: dict[str, Any] = {
    **{"image_size": 32, "patch_size": 8, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3},
    **{"intermediate_size": 48},
}
_PYRAMID: dict[str, Any] = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "embedding_size": 8}
_SWIN: dict[str, Any] = {
    **{"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4},
}
_ATTENTIVE: dict[str, Any] = {
    **{"num_attention_heads": [1, 2, 2, 2], "sequence_reduction_ratios": [4, 2, 1, 1], "image_size": 64},
    **{"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "mlp_ratios": [2, 2, 2, 2]},
}

IMAGE: dict[str, dict[str, Any]] = {
    **each(("ViT", "DeiT", "ViTMSN", "Dinov2", "Dinov2WithRegisters", "IJepa"), _VIT),
    "Beit": _VIT | {"use_relative_position_bias": True, "use_absolute_position_embeddings": True},
    "Data2VecVision": _VIT | {"use_relative_position_bias": True},
    "Bit": _PYRAMID | {"num_groups": 4},
    "ResNet": _PYRAMID,
    "RegNet": _PYRAMID | {"groups_width": 8},
    "ConvNext": _PYRAMID,
    "ConvNextV2": _PYRAMID,
    "PoolFormer": _PYRAMID,
    "Swin": _SWIN,
    "Swinv2": _SWIN,
    "DonutSwin": _SWIN,
    "FocalNet": _SWIN | {"hidden_sizes": [8, 16], "focal_levels": [2, 2], "focal_windows": [3, 3]},
    "Pvt": _ATTENTIVE | {"strides": [4, 2, 2, 2], "patch_sizes": [4, 2, 2, 2]},
    "PvtV2": _ATTENTIVE,
    "Segformer": _ATTENTIVE | {"sr_ratios": [4, 2, 1, 1], "decoder_hidden_size": 16},
    "Levit": {
        **{"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1]},
        **{"key_dim": [8, 8, 8], "mlp_ratio": [2, 2, 2], "attention_ratio": [2, 2, 2]},
    },
    "MobileNetV1": {"depth_multiplier": 0.1, "min_depth": 4},
    "MobileNetV2": {"depth_multiplier": 0.1, "min_depth": 4, "depth_divisible_by": 4},
    "MobileViT": {
        **{"image_size": 32, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32]},
        **{"num_attention_heads": 2},
    },
    "SwiftFormer": {"depths": [1, 1, 1, 1], "embed_dims": [8, 16, 16, 32]},
    "Hiera": {
        **{"image_size": [32, 32], "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "patch_stride": [4, 4]},
        **{
            "query_stride": [2, 2],
            "num_query_pool": 1,
            "masked_unit_size": [4, 4],
            "masked_unit_attention": [True, False],
        },
    },
}


def _sequence(name: str, options: dict[str, Any]) -> nn.Module:
    model = getattr(transformers, f"{name}ForSequenceClassification")
    given = {key: value for key, value in (_COMMON | options).items() if value is not None}
    return model(model.config_class(**given))


def _image(name: str, options: dict[str, Any]) -> nn.Module:
    model = getattr(transformers, f"{name}ForImageClassification")
    return model(model.config_class(num_labels=CLASSES, **options))


def _pixels(size: int) -> Any:
    def batch(count: int, generator: torch.Generator) -> Inputs:
        return {"pixel_values": normal(3, size, size)(count, generator)}  # type: ignore[dict-item]

    return batch


def _side(options: dict[str, Any]) -> int:
    side = options.get("image_size", 32)
    return side if isinstance(side, int) else side[0]


ENTRIES = [
    *(
        Entry(name, "transformers", partial(_sequence, name, options), ragged_tokens(), pad_tokens)
        for name, options in sorted(SEQUENCE.items())
    ),
    *(
        Entry(f"{name}, images", "transformers", partial(_image, name, options), _pixels(_side(options)))
        for name, options in sorted(IMAGE.items())
    ),
]
